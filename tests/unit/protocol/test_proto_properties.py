# SPDX-License-Identifier: Apache-2.0
"""What holds for any DataProto: round trips and the laws between operations."""

import pickle

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.protocol import (
    DataProto,
    deep_equal,
    fold_batch_dim,
    object_array,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)

quick = settings(deadline=None, max_examples=25)
dtypes = st.sampled_from([torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.uint8])
values = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=6,
)
counts = st.integers(1, 5)


@st.composite
def protos(draw: st.DrawFn, min_rows: int = 0, max_rows: int = 7) -> DataProto:
    """Any mixture of tensor columns, arrays, objects and facts, with rows that can be told apart."""
    rows = draw(st.integers(min_rows, max_rows))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensors = {"row": torch.arange(rows)}
    for name in draw(st.lists(st.sampled_from("abc"), unique=True)):
        shape = (rows, *draw(st.lists(st.integers(0, 3), max_size=2)))
        tensor = torch.randint(0, 9, shape, generator=generator).to(draw(dtypes))
        if tensor.is_floating_point():
            tensor[tensor == 0] = float("nan")
        tensors[name] = tensor
    arrays = {"uid": np.arange(rows) * 2}
    if draw(st.booleans()):
        arrays["object"] = object_array(draw(st.lists(values, min_size=rows, max_size=rows)))
    return DataProto.from_dict(
        tensors, arrays, draw(st.dictionaries(st.text(min_size=1, max_size=3), values, max_size=2))
    )


def stores(data: DataProto) -> list:
    columns = {} if data.batch is None else dict(data.batch.items())
    arrays = {key: (str(array.dtype), array) for key, array in data.non_tensor_batch.items()}
    return [columns, arrays, data.meta_info, len(data)]


def same(left: DataProto, right: DataProto) -> bool:
    return deep_equal(stores(left), stores(right))


@quick
@given(protos())
def test_tensordict_round_trip(data: DataProto) -> None:
    data.meta_info = {f"fact {key}": value for key, value in data.meta_info.items()}
    assert same(DataProto.from_tensordict(data.to_tensordict()), data)


@quick
@given(protos(), st.booleans())
def test_pickle_round_trip(data: DataProto, is_out_of_band: bool) -> None:
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(
        data, protocol=5, buffer_callback=buffers.append if is_out_of_band else None
    )
    assert same(pickle.loads(stream, buffers=[bytearray(buffer) for buffer in buffers]), data)


@quick
@given(protos(), counts)
def test_chunk_then_concat_is_the_identity(data: DataProto, chunks: int) -> None:
    data.meta_info.pop("metrics", None)
    parts = data.chunk(chunks)
    sizes = [len(part) for part in parts]
    assert len(parts) == chunks and sum(sizes) == len(data)
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert same(DataProto.concat(parts), data)


@quick
@given(protos(min_rows=1), counts)
def test_split_then_concat_is_the_identity(data: DataProto, size: int) -> None:
    assert same(DataProto.concat(data.split(size)), data)


@quick
@given(protos(), st.integers(0, 3))
def test_repeat(data: DataProto, times: int) -> None:
    rows = list(range(len(data)))
    interleaved, tiled = data.repeat(times), data.repeat(times, interleave=False)
    assert same(interleaved, data.select_idxs([row for row in rows for _ in range(times)]))
    assert same(tiled, data.select_idxs(rows * times))
    assert same(interleaved, data.sample_level_repeat([times] * len(data)))
    for copy in range(times):
        assert same(interleaved[copy::times], data)


@quick
@given(protos(), st.randoms(use_true_random=False))
def test_reorder_and_its_inverse(data: DataProto, random) -> None:
    order = list(range(len(data)))
    random.shuffle(order)
    shuffled = data.select()
    shuffled.reorder(order)
    assert shuffled.batch["row"].tolist() == order
    shuffled.reorder(np.argsort(order))
    assert same(shuffled, data)


@quick
@given(protos(), counts)
def test_pad_then_unpad_is_the_identity(data: DataProto, divisor: int) -> None:
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0 and 0 <= pad_size < divisor
    assert same(unpad_dataproto(padded, pad_size), data)


@quick
@given(protos(min_rows=1), counts)
def test_fold_then_unfold_is_the_identity(data: DataProto, group: int) -> None:
    data = data.repeat(group)
    folded = fold_batch_dim(data, len(data) // group)
    assert len(folded) == len(data) // group and same(unfold_batch_dim(folded), data)


@quick
@given(protos())
def test_union_is_idempotent(data: DataProto) -> None:
    assert same(data.select().union(data.select(deepcopy=True)), data)


@quick
@given(protos(), st.sets(st.sampled_from(["row", "a", "b", "c", "uid", "object"])))
def test_pop_and_the_rest_are_a_partition(data: DataProto, names: set[str]) -> None:
    tensors = [key for key in data.batch.keys() if key in names]  # it iterates over rows
    arrays = [key for key in data.non_tensor_batch if key in names]
    rest = data.select()
    popped = rest.pop(tensors, arrays, list(data.meta_info))
    assert rest.meta_info == {} and popped.meta_info.keys() == data.meta_info.keys()
    assert names.isdisjoint(rest.batch.keys()) and names.isdisjoint(rest.non_tensor_batch)
    assert set(popped.non_tensor_batch) == set(arrays) and (popped.batch is None) == (not tensors)
    assert same(rest.union(popped), data)


@quick
@given(protos(), counts, st.integers(0, 2), st.integers(0, 9))
def test_an_epoch_has_every_row_once(data: DataProto, size: int, epochs: int, seed: int) -> None:
    batches = list(data.make_iterator(size, epochs, seed, {"shuffle": True}))
    rows = [row for batch in batches for row in batch.batch["row"].tolist()]
    assert sorted(rows) == sorted(list(range(len(data))) * epochs)
    assert all(1 <= len(batch) <= size for batch in batches)
