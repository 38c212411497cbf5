# SPDX-License-Identifier: Apache-2.0
"""Packing for Ray, without Ray: what is put into the store, and that nothing stale is ever sent."""

import gc
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quadriga.protocol import DataProto, object_array
from quadriga.protocol.memory import HUGE_PAGES_FROM_BYTES, allocate, bytes_of
from quadriga.single_controller.ray.transport import stamp_of

ROWS = 12


def large(value: float = 1.0, rows: int = ROWS) -> torch.Tensor:
    """A column too large to travel beside the header."""
    return torch.full((rows, 4096), value)


# ---- what is put ----------------------------------------------------------------------------------


def test_a_column_is_put_once_for_all_ranks_and_not_again(post: Any) -> None:
    data = DataProto.from_dict(
        {"x": large(), "y": large(2.0)}, {"ids": [list(range(3000)) for _ in range(ROWS)]}
    )
    expected = sum(column.nbytes for column in data.batch.values())
    for ranks in (1, 4, 12):
        post.there(data.chunk(ranks))
        post.there(data.chunk(ranks))
        post.there(data.select(["x"]).chunk(ranks))
    objects = post.shelf.nbytes() - expected
    once = len(pickle.dumps(data.non_tensor_batch["ids"], protocol=5))
    assert objects < 6.5 * once, "the lists are sent with each of the six calls, once for all ranks"
    data.batch["x"] = large(3.0)
    before = post.shelf.nbytes()
    post.check([data])
    assert post.shelf.nbytes() - before < large().nbytes + 2 * once, (
        "the column that was replaced, and not the other"
    )


def test_a_small_call_uses_no_store(post: Any) -> None:
    data = DataProto.from_dict({"x": torch.rand(100, 10)}, {"uid": list(map(str, range(100)))})
    messages = post.outbox.pack([((part,), {}) for part in data.chunk(4)])
    assert not post.shelf.puts() and not any(message.refs for message in messages)


def test_few_rows_of_a_column_do_not_take_the_whole_along(post: Any) -> None:
    data = DataProto.from_dict({"x": torch.rand(1000, 1000)})
    parts = data[:100].chunk(2)
    post.check(parts)
    assert post.shelf.nbytes() == 100 * 1000 * 4


def test_a_rank_gets_references_only_to_what_it_reads(post: Any) -> None:
    parts = [DataProto.from_dict({"x": torch.rand(400, 1000) + rank}) for rank in range(3)]
    messages = post.outbox.pack([((part,), {}) for part in parts])
    assert [len(message.refs) for message in messages] == [1, 1, 1]
    assert len({message.refs for message in messages}) == 3


def test_small_columns_share_an_object(post: Any) -> None:
    data = DataProto.from_dict({f"c{number}": torch.rand(100, 100) for number in range(8)})
    post.there(data.chunk(4))
    assert post.shelf.puts() == 1


def test_columns_cut_from_one_tensor_are_put_once(post: Any) -> None:
    stacked = torch.rand(3, 100, 400)
    data = DataProto.from_dict(dict(zip("abc", stacked.unbind(), strict=True)))
    post.check(data.chunk(2))
    assert post.shelf.nbytes() == stacked.nbytes


# ---- nothing stale --------------------------------------------------------------------------------


def writes() -> Iterator[tuple[str, Any]]:
    yield "add", lambda column: column.add_(1)
    yield "row", lambda column: column[3].fill_(7)
    yield "item", lambda column: column.__setitem__((0, 0), -1)
    yield "view", lambda column: column.view(-1)[5:9].zero_()
    yield "detached", lambda column: column.detach().mul_(2)
    yield "no grad", torch.no_grad()(lambda column: column.neg_())
    yield "other dtype", lambda column: column.view(torch.int32).bitwise_not_()
    yield "numpy", lambda column: column.numpy().__setitem__(2, 9)
    yield "numpy of a view", lambda column: np.asarray(column[4:]).fill(9)
    yield "set", lambda column: column.set_(large(8.0))
    yield "data", lambda column: setattr(column, "data", large(8.0))


@pytest.mark.parametrize("write", [pytest.param(write, id=name) for name, write in writes()])
def test_what_is_written_in_place_is_sent(post: Any, write: Any) -> None:
    column = large()
    data = DataProto.from_dict({"x": column})
    for _ in range(3):
        post.check(data.chunk(3))
        write(column)


def test_numpy_may_write_at_any_time(post: Any) -> None:
    """An array taken before the first call, or from which the column was made, leaves no trace when it is written."""
    column = large()
    early, late = column.numpy(), np.ones((ROWS, 4096))
    data = DataProto.from_dict(
        {"x": column, "y": torch.from_numpy(late), "z": large().share_memory_()}
    )
    for value in range(3):
        early[1], late[2] = value, value
        post.check([data])


def test_looking_at_the_bytes_leaves_the_state_of_a_column_known() -> None:
    for tensor in (torch.rand(5), allocate((HUGE_PAGES_FROM_BYTES // 4 + 7,), torch.float32)):
        before = stamp_of(tensor)
        bytes_of(tensor)
        assert stamp_of(tensor) == before is not None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.from_numpy(np.ones(3)),
        torch.rand(3).share_memory_(),
        torch.frombuffer(bytearray(8), dtype=torch.uint8),
    ],
    ids=["from numpy", "shared", "buffer"],
)
def test_memory_of_others_may_change_without_a_trace(tensor: torch.Tensor) -> None:
    assert stamp_of(tensor) is None and stamp_of(tensor[1:]) is None


def test_memory_shown_to_numpy_and_inference_tensors_may_change_without_a_trace() -> None:
    tensor = torch.rand(4, 2)
    tensor[1:].numpy()
    with torch.inference_mode():
        inference = torch.rand(3)
    assert stamp_of(tensor) is None and stamp_of(inference) is None


def test_writes_through_data_need_forget(post: Any) -> None:
    """The one way to write that torch does not count."""
    data = DataProto.from_dict({"x": large()})
    post.there([data])
    data.batch["x"].data.zero_()
    post.outbox.forget()
    post.check([data])


def test_columns_that_die_are_let_go_and_their_ids_may_come_back(post: Any) -> None:
    seen = set()
    for value in range(30):
        data = DataProto.from_dict(
            {"x": large(value)}, {"ids": [list(range(value, 2000)) for _ in range(ROWS)]}
        )
        seen.add(id(data.batch["x"]))
        post.check([data])
        assert len(post.outbox._stored) == 1
        del data
    gc.collect()
    assert len(post.outbox._stored) == 0
    assert len(seen) < 30, "no id came back, so that the test has shown nothing"


def test_a_view_keeps_its_column_in_the_store(post: Any) -> None:
    data = DataProto.from_dict({"x": large()})
    parts = data.chunk(2)
    post.there(parts)
    del data
    post.there(parts)
    assert post.shelf.nbytes() == large().nbytes
    del parts
    assert len(post.outbox._stored) == 0


def test_objects_that_change_are_sent(post: Any) -> None:
    media = [
        {"pixels": torch.rand(50, 50), "grid": np.arange(9000), "tokens": list(range(9000))}
        for _ in range(4)
    ]
    data = DataProto.from_dict(non_tensors={"media": object_array(media)})
    for change in (
        lambda: media[0]["pixels"].zero_(),
        lambda: media[1]["grid"].__setitem__(8000, -1),
        lambda: media[2]["tokens"].append(3),
        lambda: media[3].update(more="text"),
        lambda: data.non_tensor_batch["media"].__setitem__(0, None),
    ):
        for _ in range(2):
            post.check(data.chunk(2))
        change()
    post.check([data])


def test_another_cluster_has_none_of_it(post: Any) -> None:
    data = DataProto.from_dict({"x": large()})
    post.there([data])
    post.shelf.name = "second"
    post.there([data])
    assert post.shelf.puts() == 2
