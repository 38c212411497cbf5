# SPDX-License-Identifier: Apache-2.0
"""DataProto: construction, rows, columns, chunks and mini-batches."""

import copy

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from quadriga.errors import ProtocolError
from quadriga.protocol import DataProto, DataProtoItem


@pytest.fixture
def data() -> DataProto:
    return DataProto.from_dict(
        tensors={
            "ids": torch.arange(12).view(4, 3),
            "score": torch.tensor([0.0, 0.5, 1.0, float("nan")]),
        },
        non_tensors={"uid": ["a", "b", "c", "d"], "rate": np.array([1, 2, 3, 4], dtype=np.float32)},
        meta_info={"step": 7},
    )


def ids(data: DataProto) -> list[int]:
    """Numbers of the rows, as the first entry of `ids` tells them."""
    return (data.batch["ids"][:, 0] // 3).tolist()


def uids(data: DataProto) -> list[str]:
    return data.non_tensor_batch["uid"].tolist()


def test_from_single_dict_sorts_by_type() -> None:
    data = DataProto.from_single_dict(
        {"x": torch.ones(2), "uid": np.array(["a", "b"], dtype=object)}, {"step": 1}
    )
    assert (
        list(data.batch.keys()) == ["x"]
        and list(data.non_tensor_batch) == ["uid"]
        and data.meta_info == {"step": 1}
    )


def test_from_single_dict_refuses_other_types() -> None:
    with pytest.raises(
        ProtocolError, match=r"'texts': got list, expected a tensor or a numpy array"
    ):
        DataProto.from_single_dict({"texts": ["a"]})


def test_lists_become_object_arrays_of_one_dimension() -> None:
    column = DataProto.from_dict(non_tensors={"prompt_ids": [[1, 2], [3, 4]]}).non_tensor_batch[
        "prompt_ids"
    ]
    assert column.dtype == object and column.shape == (2,) and column[1] == [3, 4]


@pytest.mark.parametrize(
    ("tensors", "non_tensors", "parts"),
    [
        ({"a": torch.ones(2, 3), "b": torch.ones(3, 3)}, None, ["'b'", "(3, 3)", "(2,)"]),
        ({"a": torch.ones(2)}, {"uid": ["x"]}, ["'uid'", "(1,)", "2 rows, the batch size"]),
        (None, {"uid": ["x"], "index": [1, 2]}, ["'index'", "(2,)", "1 rows, the length of 'uid'"]),
        ({"a": torch.tensor(1.0)}, None, ["'a'", "shape ()"]),
        (None, {"uid": np.array("x")}, ["'uid'", "shape ()"]),
    ],
)
def test_inconsistent_columns_are_named(tensors, non_tensors, parts: list[str]) -> None:
    with pytest.raises(ProtocolError) as caught:
        DataProto.from_dict(tensors, non_tensors)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_constructor_checks_what_it_is_given() -> None:
    with pytest.raises(ProtocolError, match=r"batch size \(2, 3\)"):
        DataProto(batch=TensorDict({"a": torch.ones(2, 3)}, batch_size=[2, 3]))
    with pytest.raises(ProtocolError, match=r"'uid'.*got list"):
        DataProto(non_tensor_batch={"uid": ["a"]})
    with pytest.raises(ProtocolError, match="dense tensor"):
        DataProto(batch=TensorDict({"a": torch.ones(2, 3).to_sparse()}, batch_size=[2]))


def test_num_batch_dims_are_checked_and_rows_counted_along_the_first() -> None:
    tensors = {"a": torch.ones(2, 3, 5), "b": torch.ones(2, 3)}
    assert len(DataProto.from_dict(tensors, num_batch_dims=2)) == 2
    with pytest.raises(ProtocolError, match=r"'b'.*\(2, 4\).*\(2, 3\)"):
        DataProto.from_dict({"a": torch.ones(2, 3), "b": torch.ones(2, 4)}, num_batch_dims=2)


def test_len_of_every_kind(data: DataProto) -> None:
    assert (len(data), len(DataProto()), len(DataProto.from_dict(non_tensors={"uid": ["a"]}))) == (
        4,
        0,
        1,
    )


def test_one_row(data: DataProto) -> None:
    item = data[-2]
    assert isinstance(item, DataProtoItem)
    assert item.batch["ids"].tolist() == [6, 7, 8] and item.non_tensor_batch["uid"] == "c"
    assert item.meta_info == {"step": 7} and data[np.int64(0)].non_tensor_batch["rate"] == 1
    assert [row.non_tensor_batch["uid"] for row in data] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    "index",
    [
        [2, 0, -1],
        np.array([2, 0, 3]),
        torch.tensor([2, 0, 3]),
        torch.tensor([2, 0, 3], dtype=torch.int32),
    ],
    ids=["list", "array", "tensor", "int32"],
)
def test_rows_by_number(data: DataProto, index) -> None:
    assert ids(data[index]) == [2, 0, 3] and uids(data[index]) == ["c", "a", "d"]


@pytest.mark.parametrize("as_type", [list, np.array, torch.tensor])
def test_rows_by_mask(data: DataProto, as_type) -> None:
    assert uids(data[as_type([True, False, False, True])]) == ["a", "d"]


def test_no_rows(data: DataProto) -> None:
    empty = data[[]]
    assert (
        len(empty) == 0
        and empty.batch["ids"].shape == (0, 3)
        and empty.batch["ids"].dtype == torch.int64
    )


@pytest.mark.parametrize("index", [[4], [-5], [[0]], [0.5], [True]])
def test_impossible_rows(data: DataProto, index) -> None:
    with pytest.raises(ProtocolError, match="row"):
        data[index]


def test_other_indices_are_type_errors(data: DataProto) -> None:
    with pytest.raises(TypeError, match="str"):
        data["ids"]


@pytest.mark.parametrize(
    "rows", [slice(1, 3), slice(None, None, 2), slice(None, None, -1), slice(10, 20)]
)
def test_slices_are_those_of_a_list(data: DataProto, rows: slice) -> None:
    assert uids(data[rows]) == ["a", "b", "c", "d"][rows] and ids(data[rows]) == [0, 1, 2, 3][rows]


def test_slice_chunk_and_split_are_views(data: DataProto) -> None:
    for part in (data[1:3], data.chunk(2)[1], data.split(3)[1], data.select(["ids"])):
        part.batch["ids"] += 100
    assert data.batch["ids"][0, 0] == 100 and data.batch["ids"][2, 0] == 6 + 300


def test_containers_are_the_results_own(data: DataProto) -> None:
    for part in (
        data[1:3],
        data[[0]],
        data.select(),
        data.repeat(2),
        data.chunk(1)[0],
        DataProto.concat([data]),
    ):
        part.meta_info["step"] = 8
        part.batch["new"] = torch.zeros(len(part))
        part.non_tensor_batch["new"] = np.zeros(len(part))
    assert data.meta_info == {"step": 7} and sorted(data.batch.keys()) == ["ids", "score"]
    assert list(data.non_tensor_batch) == ["uid", "rate"]


def test_repeat(data: DataProto) -> None:
    assert uids(data[:2].repeat(3)) == ["a", "a", "a", "b", "b", "b"]
    assert uids(data[:2].repeat(3, interleave=False)) == ["a", "b"] * 3
    assert len(data.repeat(0)) == 0
    with pytest.raises(ProtocolError, match=r"-1 times"):
        data.repeat(-1)


def test_sample_level_repeat(data: DataProto) -> None:
    assert ids(data.sample_level_repeat([2, 0, 1, 3])) == [0, 0, 2, 3, 3, 3]
    for counts in ([1, 2], [1, 1, 1, -1]):
        with pytest.raises(ProtocolError, match=r"sample_level_repeat"):
            data.sample_level_repeat(counts)


def test_reorder_is_in_place_and_takes_only_permutations(data: DataProto) -> None:
    data.reorder(torch.tensor([3, 1, 0, 2]))
    assert uids(data) == ["d", "b", "a", "c"] and ids(data) == [3, 1, 0, 2]
    with pytest.raises(ProtocolError, match="no permutation"):
        data.reorder([0, 0, 1, 2])


@pytest.mark.parametrize(
    ("rows", "chunks", "sizes"),
    [(7, 4, [2, 2, 2, 1]), (3, 4, [1, 1, 1, 0]), (0, 2, [0, 0]), (8, 4, [2] * 4)],
)
def test_chunks_are_ragged(rows: int, chunks: int, sizes: list[int]) -> None:
    data = DataProto.from_dict({"x": torch.arange(rows)}, {"uid": list(range(rows))})
    parts = data.chunk(chunks)
    assert [len(part) for part in parts] == sizes
    assert [uid for part in parts for uid in part.non_tensor_batch["uid"]] == list(range(rows))


def test_bad_numbers_of_parts(data: DataProto) -> None:
    for call in (lambda: data.chunk(0), lambda: data.split(0)):
        with pytest.raises(ProtocolError):
            call()


def test_split_leaves_a_shorter_last_part(data: DataProto) -> None:
    assert [ids(part) for part in data.split(3)] == [[0, 1, 2], [3]]


def test_padding(data: DataProto) -> None:
    first, last = copy.copy(data), copy.copy(data)
    first.padding(2, "first")
    last.padding(1)
    assert uids(first) == ["a", "b", "c", "d", "a", "a"] and uids(last) == ["a", "b", "c", "d", "d"]
    assert len(data) == 4
    for call in (
        lambda: data.padding(1, "middle"),
        lambda: data.padding(-1),
        lambda: data[:0].padding(1),
    ):
        with pytest.raises(ProtocolError, match="padding"):
            call()


def test_padding_is_off_unless_asked_for() -> None:
    tensors = {"x": torch.ones(3)}
    assert not DataProto.from_dict(tensors).is_padding_enabled()
    assert DataProto.from_dict(tensors, auto_padding=True)[:2].is_padding_enabled()
    assert DataProto.from_single_dict(tensors, auto_padding=True).is_padding_enabled()


def test_select(data: DataProto) -> None:
    part = data.select(["ids"], [], ["step"])
    assert (
        list(part.batch.keys()) == ["ids"]
        and not part.non_tensor_batch
        and part.meta_info == {"step": 7}
    )
    everything = data.select(deepcopy=True)
    everything.batch["ids"].zero_()
    assert data.batch["ids"][3, 2] == 11 and everything.meta_info == {"step": 7}
    assert len(data.select(batch_keys=[])) == 4


def test_pop_takes_away_and_returns(data: DataProto) -> None:
    popped = data.pop(["ids"], ["uid"], ["step"])
    assert (
        uids(popped) == ["a", "b", "c", "d"]
        and ids(popped) == [0, 1, 2, 3]
        and popped.meta_info == {"step": 7}
    )
    assert (
        list(data.batch.keys()) == ["score"]
        and list(data.non_tensor_batch) == ["rate"]
        and data.meta_info == {}
    )


def test_pop_of_something_missing_changes_nothing(data: DataProto) -> None:
    with pytest.raises(
        ProtocolError,
        match=r"non_tensor_batch: got no entry 'nope', expected one of \['rate', 'uid'\]",
    ):
        data.pop(["ids"], ["nope"])
    assert list(data.batch.keys()) == ["ids", "score"]


def test_rename_columns_of_both_kinds(data: DataProto) -> None:
    assert data.rename(["ids", "uid"], ["input_ids", "name"]) is data
    assert sorted(data.batch.keys()) == ["input_ids", "score"] and sorted(
        data.non_tensor_batch
    ) == ["name", "rate"]
    data.rename("name", "uid")
    for old, new in (("x", "y"), ("input_ids", "rate"), (["score"], ["a", "b"])):
        with pytest.raises(ProtocolError, match="rename"):
            data.rename(old, new)


def test_union_adds_what_is_new(data: DataProto) -> None:
    same = data.select(["score"], ["uid"], ["step"], deepcopy=True)
    same.batch["values"] = torch.ones(4)
    same.meta_info["temperature"] = 1.0
    assert data.union(same) is data
    assert sorted(data.batch.keys()) == ["ids", "score", "values"] and data.meta_info == {
        "step": 7,
        "temperature": 1.0,
    }


def test_union_names_the_column_and_the_row(data: DataProto) -> None:
    other = data.select(deepcopy=True)
    other.batch["ids"][2, 1] = -1
    with pytest.raises(ProtocolError, match=r"'ids'.*first being row 2"):
        data.union(other)
    other = data.select(deepcopy=True)
    other.non_tensor_batch["uid"][1] = "z"
    other.batch["new"] = torch.ones(4)
    with pytest.raises(ProtocolError, match=r"'uid'.*row 1"):
        data.union(other)
    assert sorted(data.batch.keys()) == ["ids", "score"], "a union that fails changes nothing"
    with pytest.raises(ProtocolError, match=r"'step'"):
        data.union(DataProto(meta_info={"step": 8}))
    with pytest.raises(ProtocolError, match=r"3 rows"):
        data.union(data[:3])


def test_union_with_something_that_has_no_rows_of_its_own(data: DataProto) -> None:
    assert uids(DataProto().union(data)) == ["a", "b", "c", "d"]
    assert len(data.union(DataProto(meta_info={"more": 1}))) == 4


def test_union_has_the_metrics_of_both(data: DataProto) -> None:
    """Those of one name must be equal."""
    data.meta_info["metrics"], new = {"a": [1.0]}, DataProto(meta_info={"metrics": {"b": [2.0]}})
    assert data.union(new).meta_info["metrics"] == {"a": [1.0], "b": [2.0]}
    with pytest.raises(ProtocolError, match=r"meta_info\['a'\]: got \[1.0\] and \[3.0\]"):
        data.union(DataProto(meta_info={"metrics": {"a": [3.0]}}))


def test_concat_lists_metrics_and_keeps_the_rest(data: DataProto) -> None:
    first, second = data.chunk(2)
    first.meta_info["metrics"] = {"loss": 1.0, "lr": [0.1]}
    second.meta_info["metrics"] = {"loss": 2.0, "lr": [0.2, 0.3]}
    joined = DataProto.concat([first, second])
    assert ids(joined) == [0, 1, 2, 3] and uids(joined) == ["a", "b", "c", "d"]
    assert joined.meta_info == {"step": 7, "metrics": {"loss": [1.0, 2.0], "lr": [0.1, 0.2, 0.3]}}
    assert DataProto.concat([first]).meta_info["metrics"] == {"loss": [1.0], "lr": [0.1]}


def test_concat_of_parts_without_rows(data: DataProto) -> None:
    """A rank that had no rows may answer without columns; its metrics count all the same."""
    idle = DataProto(meta_info={"metrics": {"loss": 0.0}})
    data.meta_info["metrics"] = {"loss": 1.0}
    joined = DataProto.concat([data, idle])
    assert len(joined) == 4 and joined.meta_info["metrics"] == {"loss": [1.0, 0.0]}
    assert DataProto.concat([idle, data[:0]]).batch["ids"].shape == (0, 3)
    assert len(DataProto.concat([idle, idle])) == 0


def test_concat_refuses_what_does_not_fit(data: DataProto) -> None:
    wider = data.select(deepcopy=True)
    wider.batch["ids"] = torch.ones(4, 5, dtype=torch.int64)
    other_fact = data.select()
    other_fact.meta_info["step"] = 8
    for parts, words in (
        ([], "no parts"),
        ([data, wider], "'ids'.*part 1"),
        ([data, data.select(["ids"])], "columns"),
        ([data, data.select(non_tensor_batch_keys=[])], "columns"),
        ([data, other_fact], "'step'"),
        (
            [data, DataProto(non_tensor_batch=data.non_tensor_batch, meta_info={})],
            "with and without tensors",
        ),
    ):
        with pytest.raises(ProtocolError, match=words):
            DataProto.concat(parts)


def test_unfold_column_chunks() -> None:
    data = DataProto.from_dict(
        {"wide": torch.arange(8).view(2, 4), "once": torch.tensor([10, 20])},
        {"uid": ["a", "b"], "grid": np.arange(8).reshape(2, 4)},
    )
    rows = data.unfold_column_chunks(2, ["wide", "grid"])
    assert (
        rows.batch["wide"].tolist()
        == [[0, 1], [2, 3], [4, 5], [6, 7]]
        == rows.non_tensor_batch["grid"].tolist()
    )
    assert rows.batch["once"].tolist() == [10, 10, 20, 20] and uids(rows) == ["a", "a", "b", "b"]
    for parts, keys in ((3, ["wide"]), (2, ["once"]), (2, ["nope"])):
        with pytest.raises(ProtocolError, match=r"unfold_column_chunks"):
            data.unfold_column_chunks(parts, keys)


def test_iterator_covers_each_row_once_an_epoch(data: DataProto) -> None:
    batches = list(data.make_iterator(3, epochs=2))
    assert [ids(batch) for batch in batches] == [[0, 1, 2], [3]] * 2 and batches[0].meta_info == {
        "step": 7
    }
    shuffled = list(data.make_iterator(3, epochs=2, seed=5, dataloader_kwargs={"shuffle": True}))
    assert [len(batch) for batch in shuffled] == [3, 1, 3, 1]
    assert (
        sorted(ids(DataProto.concat(shuffled[:2])))
        == sorted(ids(DataProto.concat(shuffled[2:])))
        == [0, 1, 2, 3]
    )
    assert [
        ids(batch) for batch in data.make_iterator(3, 1, dataloader_kwargs={"drop_last": True})
    ] == [[0, 1, 2]]
    assert list(data[:0].make_iterator(3, 1, dataloader_kwargs={"shuffle": True})) == []


def test_iterator_is_reproducible_and_leaves_the_global_generator_alone(data: DataProto) -> None:
    def order(seed: int) -> list[list[int]]:
        return [ids(batch) for batch in data.make_iterator(1, 3, seed, {"shuffle": True})]

    state = torch.get_rng_state()
    assert order(0) == order(0) and order(0) != order(1)
    assert torch.equal(state, torch.get_rng_state())


def test_iterator_has_the_order_of_a_seeded_loader_of_torch(data: DataProto) -> None:
    """As verl has it: one loader for all epochs, which draws more from its generator than the orders."""
    loader = DataLoader(
        range(len(data)), 1, shuffle=True, generator=torch.Generator().manual_seed(5)
    )
    expected = [int(row) for _ in range(3) for row in loader]
    found = data.make_iterator(1, 3, seed=5, dataloader_kwargs={"shuffle": True})
    assert [row for batch in found for row in ids(batch)] == expected


@pytest.mark.parametrize("arguments", [(0, 1), (1, -1), (1, 1, None, {"num_workers": 4})])
def test_iterator_checks_its_arguments_at_once(data: DataProto, arguments) -> None:
    with pytest.raises(ProtocolError, match=r"make_iterator"):
        data.make_iterator(*arguments)


def test_to_moves_in_place(data: DataProto) -> None:
    assert data.to("meta") is data and data.batch["ids"].device.type == "meta"


def test_copies(data: DataProto) -> None:
    shallow, deep = copy.copy(data), copy.deepcopy(data)
    data.batch["ids"].zero_()
    data.non_tensor_batch["rate"][0] = 9
    assert (
        shallow.batch["ids"].sum() == 0
        and ids(deep) == [0, 1, 2, 3]
        and deep.non_tensor_batch["rate"][0] == 1
    )


def test_nested_columns_follow_the_rows() -> None:
    nested = TensorDict({"pixels": torch.arange(6).view(3, 2)}, batch_size=[3])
    data = DataProto(batch=TensorDict({"x": torch.arange(3), "image": nested}, batch_size=[3]))
    assert data[[2, 0]].batch["image", "pixels"].tolist() == [[4, 5], [0, 1]]
    assert DataProto.concat(data.chunk(2)).batch["image", "pixels"].tolist() == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
