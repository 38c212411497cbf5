# SPDX-License-Identifier: Apache-2.0
"""Packing for Ray, without Ray: what arrives, and that no lent memory reaches anything else."""

import datetime
import gc
import pickle
import threading
import weakref
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tensordict import TensorDict

from quadriga.protocol import DataProto, deep_equal, object_array
from quadriga.protocol.memory import is_lent
from quadriga.single_controller import Dispatch
from quadriga.single_controller.ray.transport import pack_result

ROWS = 12
DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int32,
    torch.int64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def large(value: float = 1.0, rows: int = ROWS) -> torch.Tensor:
    """A column too large to travel beside the header."""
    return torch.full((rows, 4096), value)


# ---- what arrives ---------------------------------------------------------------------------------


def awkward() -> DataProto:
    """Everything that is not a plain large contiguous column."""
    base = torch.arange(float(ROWS * 4096)).view(ROWS, 4096)
    image = Image.fromarray(np.arange(48 * 64 * 3, dtype=np.uint8).reshape(48, 64, 3))
    shared = {
        "pixels": torch.rand(3, 40, 40),
        "grid": np.arange(2000).reshape(4, 500),
        "image": image,
    }
    return DataProto.from_dict(
        {
            "plain": base,
            "again": base,
            "transposed": torch.rand(2048, ROWS).t(),
            "strided": base[:, ::3],
            "expanded": torch.rand(1, 5000).expand(ROWS, 5000),
            "narrow": torch.empty(ROWS, 0),
            "scalar": torch.arange(ROWS),
            "nan": torch.full((ROWS, 3000), torch.nan),
            "gradient": torch.rand(ROWS, 3000, requires_grad=True) * 2,
            "conjugate": torch.rand(ROWS, 1000, dtype=torch.complex64).conj(),
            "negative": torch.rand(ROWS, 1000, dtype=torch.complex64).conj().imag,
            "bits": torch.rand(ROWS, 1000).view(torch.int32),
            "reward": torch.nn.Parameter(torch.rand(ROWS)),
        },
        {
            "uid": [f"row {row}" for row in range(ROWS)],
            "text": np.array([f"é{row}" for row in range(ROWS)]),
            "number": np.arange(ROWS * 900.0).reshape(ROWS, 900),
            "nothing": [None] * ROWS,
            "ids": [list(range(row, 600)) for row in range(ROWS)],
            "media": object_array(
                [shared if row % 2 else {"pixels": torch.rand(3, 50, 50)} for row in range(ROWS)]
            ),
            "nested": [
                {"a": [torch.tensor(row), (np.float64("nan"), {1, 2})]} for row in range(ROWS)
            ],
        },
        {"metrics": {"loss": torch.tensor(1.0)}, "temperature": 0.7, "weights": [torch.ones(3)]},
    )


@pytest.mark.parametrize("ranks", [1, 3, 4, ROWS + 2])
def test_everything_arrives(post: Any, same: Any, ranks: int) -> None:
    data = awkward()
    parts = data.chunk(ranks)
    for _ in range(2):
        for arrived, sent in zip(post.there(parts), parts, strict=True):
            same(arrived, sent)
            assert not any(column.requires_grad for column in arrived.batch.values())
    outputs = [post.back(part, borrow=True) for part in parts]
    joined = DataProto.concat(outputs)
    joined.meta_info["metrics"] = data.meta_info["metrics"]
    same(joined, data)
    assert not any(map(is_lent, joined.batch.values()))


@pytest.mark.parametrize("rows", [4, 40_000], ids=["inline", "in the store"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(post: Any, same: Any, dtype: torch.dtype, rows: int) -> None:
    data = DataProto.from_dict(
        {"x": torch.tensor([[0.0, 1.0, -0.0], [3.0, 5.0, 2.0]]).repeat(rows // 2, 1).to(dtype)}
    )
    parts = data.chunk(3)
    for arrived, sent in zip(post.there(parts), parts, strict=True):
        same(arrived, sent)
        same(post.back(arrived), sent)
    assert bool(post.shelf.puts()) == (rows > 4)


def test_large_and_small_buffers_of_objects(post: Any, same: Any) -> None:
    """They lie in different objects of the store, and each finds its own again."""
    sizes = [10, 300_000, 2_000, 400_000, 3_000, 1]
    objects = [{"array": np.arange(size), "tensor": torch.arange(size) + 1} for size in sizes]
    data = DataProto.from_dict(non_tensors={"media": object_array(objects)})
    for _ in range(2):
        post.check(data.chunk(2))
    same(DataProto.concat([post.back(part, borrow=True) for part in data.chunk(3)]), data)


@pytest.mark.parametrize("rows", [3, 3000])
def test_nested_columns(post: Any, same: Any, rows: int) -> None:
    nested = TensorDict(
        {"p": torch.rand(rows, 20), "q": {"r": torch.arange(rows)}}, batch_size=[rows]
    )
    data = DataProto(batch=TensorDict({"image": nested, "x": torch.rand(rows)}, batch_size=[rows]))
    parts = data.chunk(2)
    post.check(parts)
    same(DataProto.concat([post.back(part, borrow=True) for part in parts]), data)


def test_without_columns_and_without_rows(post: Any, same: Any) -> None:
    for data in (
        DataProto(meta_info={"a": 1}),
        DataProto(),
        awkward()[:0],
        DataProto(TensorDict({}, [3])),
    ):
        post.check([data])
        same(post.back(data), data)


def test_other_arguments_and_outputs(post: Any, same: Any) -> None:
    data = DataProto.from_dict({"x": torch.arange(3)})
    call = (
        (1, "a", data, torch.ones(2)),
        {"lr": 0.1, "more": {"data": data, "t": [torch.zeros(3)]}, "none": None},
    )
    args, kwargs = post.received(post.outbox.pack([call])[0])
    assert args[:2] == (1, "a") and kwargs["lr"] == 0.1 and kwargs["none"] is None
    same(args[2], data)
    same(kwargs["more"]["data"], data)
    args[3][0] = kwargs["more"]["t"][0][0] = 5.0
    assert (
        post.back({"a": [torch.ones(2), data], "b": None})["a"][0].tolist() == [1, 1]
        and post.back(None) is None
    )  # type: ignore[arg-type]


def test_what_arrives_is_the_ranks_own(post: Any, same: Any) -> None:
    """A worker may write into everything it gets; neither the driver nor another rank sees it."""
    data = awkward()
    first, second = post.there([data, data])
    for key, column in first.batch.items():
        if column.numel():
            column.zero_()
        assert column.untyped_storage().nbytes() == column.nbytes, (
            f"{key} holds on to no more than its rows"
        )
    first.non_tensor_batch["number"][:] = 0
    first.non_tensor_batch["media"][1]["pixels"].zero_()
    first.non_tensor_batch["media"][1]["grid"][:] = 0
    same(second, data)
    post.check([data])


def test_objects_that_rows_share_stay_shared_in_a_rank(post: Any) -> None:
    data = DataProto.from_dict(
        non_tensors={"media": object_array([{"p": torch.rand(90, 90)}, {"p": torch.rand(90, 90)}])}
    ).repeat(3)
    data.non_tensor_batch["also"] = data.non_tensor_batch["media"].copy()
    parts = post.there(data.chunk(2))
    for part in parts:
        media, also = part.non_tensor_batch["media"], part.non_tensor_batch["also"]
        assert media[0] is media[1] and all(
            one is other for one, other in zip(media, also, strict=True)
        )
    assert post.shelf.nbytes() < 2.2 * 90 * 90 * 4, "six rows, two pictures"


def test_what_was_packed_is_freed_without_the_garbage_collector(post: Any) -> None:
    """Large memory in a reference cycle would lie about until the next collection of the oldest generation."""
    data = DataProto.from_dict(
        {"x": large()}, {"media": [{"grid": np.arange(9000)} for _ in range(ROWS)]}
    )
    held = [weakref.ref(data.non_tensor_batch["media"][0]["grid"]), weakref.ref(data.batch["x"])]
    gc.disable()
    try:
        post.check(data.chunk(2))
        same_again = post.back(data, borrow=True)
        held += [weakref.ref(same_again.batch["x"])]
        del data, same_again
        assert [reference() for reference in held] == [None] * 3
    finally:
        gc.enable()


# ---- any value ------------------------------------------------------------------------------------


def by_value() -> type:
    """A class that no other process can import."""

    class Local:
        number = 3

    return Local


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"bytes of a worker's own",
        ("actor", "update", {"lr": 1e-6, "names": ["a", "b"], "when": datetime.date(2026, 1, 2)}),
        (Dispatch.ONE_TO_ALL, PurePosixPath("/tmp/x"), len, torch.bfloat16, np.float32(2.5)),
        np.arange(6).reshape(2, 3),
        np.arange(90_000).reshape(300, 300),
        np.array(["a", None, {"x": 1}], dtype=object),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value(post: Any, value: Any) -> None:
    assert deep_equal(post.back(value), value)
    (args, kwargs) = post.received(post.outbox.pack([((value,), {"also": value})])[0])
    assert deep_equal(args[0], value) and deep_equal(kwargs["also"], value)


def test_classes_and_functions_of_a_script_travel_by_value(post: Any) -> None:
    assert post.back([by_value()])[0].number == 3
    assert post.back({"add": lambda left, right: left + right})["add"](1, 2) == 3


@pytest.mark.parametrize(
    "value",
    [
        ray.ObjectRef.nil(),
        (1, [ray.ObjectRef.nil()]),
        DataProto.from_dict({"x": torch.ones(1)}, {"mine": [[ray.ObjectRef.nil()]]}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_with_references_are_rays_to_pickle(post: Any, value: Any) -> None:
    assert pack_result(value) is value
    assert post.outbox.pack([((value,), {})])[0].body == ((value,), {})


def test_what_cannot_be_pickled() -> None:
    for value in (threading.Lock(), (part for part in "a generator")):
        with pytest.raises(TypeError, match="cannot pickle"):
            pack_result(value)


class Freed:
    """Pickled as an empty list; what the garbage collector follows while it is freed is in `picklers`."""

    picklers: tuple[list[Any], ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ()

    def __del__(self) -> None:
        Freed.picklers += (
            [each for each in gc.get_objects() if issubclass(type(each), pickle.Pickler)],
        )


class Made:
    """Pickled as a list with what nothing but the pickler's memo holds."""

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([Freed()],)


def test_the_garbage_collector_does_not_follow_a_memo_whose_objects_are_freed() -> None:
    # CPython would crash there, and freed memory may give another thread its turn.
    Freed.picklers = ()
    assert pack_result(Made()) is not None
    assert Freed.picklers == ([],)


def test_what_comes_out_may_be_written_to(post: Any) -> None:
    for size in (4, 90_000):
        array = post.back(np.zeros(size))
        array += 1
        assert array.sum() == size


# ---- lent memory ----------------------------------------------------------------------------------


def test_lent_rows_are_copied_by_concat_even_of_a_single_part(post: Any, same: Any) -> None:
    data = DataProto.from_dict({"x": large(), "small": torch.arange(ROWS)})
    lent = post.back(data, borrow=True)
    assert is_lent(lent.batch["x"]) and is_lent(lent[2:5].batch["x"])
    assert not is_lent(lent.batch["small"]), "few bytes are copied into the message"
    for own in (
        DataProto.concat([lent]),
        DataProto.concat([lent[3:], DataProto()]),
        post.back(data),
    ):
        assert not any(map(is_lent, own.batch.values()))
        own.batch["x"].zero_()
        own.batch["small"].zero_()
    same(lent, data)


# ---- anything -------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> DataProto:
    rows = draw(st.integers(0, 9))
    tensors = {}
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = (rows, *draw(st.lists(st.integers(0, 700), max_size=2)))
        column = (torch.rand(shape) * 10).to(dtype)
        form = draw(st.sampled_from(["plain", "transposed", "rows of more", "every other"]))
        if form == "transposed" and len(shape) > 1:
            column = column.transpose(0, 1).contiguous().transpose(0, 1)
        elif form == "rows of more":
            column = torch.cat([column] * draw(st.integers(1, 4)))[:rows]
        elif form == "every other":
            column = column.repeat_interleave(2, dim=0)[::2]
        tensors[f"t{number}"] = column
    longest = draw(st.sampled_from([3000, 200_000]))
    leaf = st.one_of(
        st.none(), st.integers(), st.text(max_size=5), st.floats(), st.binary(max_size=9000)
    )
    leaf = leaf | st.builds(lambda n: torch.arange(n), st.integers(0, longest))
    leaf = leaf | st.builds(lambda n: np.arange(n), st.integers(0, longest))
    entry = st.recursive(
        leaf,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    )
    arrays = {
        f"a{number}": object_array(draw(st.lists(entry, min_size=rows, max_size=rows)))
        for number in range(draw(st.integers(0, 2)))
    }
    if not tensors and not arrays:
        return DataProto(meta_info={"only": "facts"})
    return DataProto.from_dict(tensors, arrays, {"step": draw(st.integers())})


@settings(deadline=None, max_examples=60)
@given(data=batches(), ranks=st.integers(1, 5), choices=st.data())
def test_any_batch_there_and_back_twice(
    make_post: Any, same: Any, data: DataProto, ranks: int, choices: st.DataObject
) -> None:
    """Also after rows were drawn anew and a column was written to."""
    post = make_post()
    for _ in range(2):
        parts = data.chunk(ranks)
        arrived = post.there(parts)
        for one, other in zip(arrived, parts, strict=True):
            same(one, other)
        borrow = choices.draw(st.booleans())
        same(DataProto.concat([post.back(part, borrow) for part in arrived]), data)
        for key in list(() if data.batch is None else data.batch.keys()):
            if choices.draw(st.booleans()):
                data.batch[key].zero_()
