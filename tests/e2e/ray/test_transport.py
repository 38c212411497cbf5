# SPDX-License-Identifier: Apache-2.0
"""The transport over Ray's own store: what it holds, what it lets go, and whose memory a tensor lies in."""

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ray = pytest.importorskip("ray")

from ray._private.internal_api import get_memory_info_reply, get_state_from_address  # noqa: E402

from quadriga.protocol import DataProto, DataProtoFuture, deep_equal, object_array  # noqa: E402
from quadriga.protocol.memory import is_lent  # noqa: E402
from quadriga.single_controller.ray.transport import (  # noqa: E402
    OUTBOX,
    Outbox,
    pack_result,
    release_pages,
    unpack,
    unpack_result,
)
from tests.limits import COMMAND_S  # noqa: E402

RANKS = 2
# The cluster frees at once what is let go; on a busy machine the message takes a moment.
SETTLED_AFTER_S = 1.0


class Scaler:
    """A worker of one method."""

    def scale(self, body: Any, *values: Any) -> Any:
        """The rows times a factor, written in place; with a future in place of rows, those of the future."""
        (data, factor), _ = unpack(body, values)
        data = data.get() if isinstance(data, DataProtoFuture) else data
        data.batch["x"].mul_(factor)
        return pack_result(data)


@pytest.fixture(scope="module")
def workers(ray_cluster: str) -> Iterator[list[Any]]:
    actor = ray.remote(num_cpus=0.5)(Scaler)
    started = [actor.remote() for _ in range(RANKS)]
    yield started
    for worker in started:
        ray.kill(worker)


def make_batch(rows: int = 40, value: float = 1.0) -> DataProto:
    """Columns of a few megabytes and pictures that rows share."""
    picture = {"pixels": torch.rand(3, 100, 100), "grid": np.arange(30_000)}
    return DataProto.from_dict(
        {
            "x": torch.full((rows, 20_000), value),
            "y": torch.rand(rows, 20_000),
            "score": torch.rand(rows),
        },
        {"uid": list(map(str, range(rows))), "media": object_array([picture] * rows)},
        {"step": 1},
    )


def call(workers: list[Any], data: Any, factor: float, outbox: Outbox = OUTBOX) -> list[Any]:
    """Start `scale` on every worker; gives Ray's references."""
    messages = outbox.pack([((part, factor), {}) for part in data.chunk(len(workers))])
    return [
        worker.scale.remote(each.body, *each.refs)
        for worker, each in zip(workers, messages, strict=True)
    ]


def lent_outputs(refs: list[Any]) -> list[DataProto]:
    """The outputs of `scale`, in the store's own memory."""
    return [unpack_result(value, borrow=True) for value in ray.get(refs)]


def bytes_in_store(address: str) -> int:
    """What Ray says that its store holds."""
    return get_memory_info_reply(
        get_state_from_address(address)
    ).store_stats.object_store_bytes_used


def settled_bytes_in_store(address: str) -> int:
    """The same when it has not changed for as long as Ray takes to let go of what nobody refers to."""
    gc.collect()
    used, since = bytes_in_store(address), time.monotonic()
    while time.monotonic() - since < SETTLED_AFTER_S:
        time.sleep(0.1)
        if (now := bytes_in_store(address)) != used:
            used, since = now, time.monotonic()
    return used


def wait_for_bytes_in_store(address: str, expected: int) -> None:
    """Until the store holds so much; fails after a long time."""
    gc.collect()
    deadline = time.monotonic() + COMMAND_S
    while (used := bytes_in_store(address)) != expected:
        assert time.monotonic() < deadline, f"{used} bytes in the store, expected {expected}"
        time.sleep(0.1)


def shared_resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssShmem")
    )


def test_there_and_back(workers: list[Any]) -> None:
    data = make_batch(rows=7)
    for factor in (2.0, 3.0):
        result = DataProto.concat(lent_outputs(call(workers, data, factor)))
        assert torch.equal(result.batch["x"], data.batch["x"] * factor), (
            "ranks wrote into their own memory"
        )
        assert torch.equal(result.batch["y"], data.batch["y"]) and torch.equal(
            data.batch["x"], make_batch(7).batch["x"]
        )
        assert deep_equal(result.non_tensor_batch, data.non_tensor_batch) and result.meta_info == {
            "step": 1
        }
        assert not any(map(is_lent, result.batch.values()))
        result.batch["x"].zero_()
        result.non_tensor_batch["media"][0]["pixels"].zero_()
        result.non_tensor_batch["media"][0]["grid"][:] = 0


def test_outputs_that_are_not_lent_outlive_the_store(workers: list[Any], ray_cluster: str) -> None:
    before = settled_bytes_in_store(ray_cluster)
    refs = call(workers, make_batch(), 5.0)
    outputs = [unpack_result(value) for value in ray.get(refs)]
    del refs
    wait_for_bytes_in_store(ray_cluster, before)
    assert all(torch.equal(output.batch["x"], torch.full((20, 20_000), 5.0)) for output in outputs)


def test_the_store_holds_after_six_steps_what_it_held_after_three(
    workers: list[Any], ray_cluster: str
) -> None:
    """Batches are made, written to, sent to two roles one after the other, and their results collected."""
    before = settled_bytes_in_store(ray_cluster)
    kept, results, used = make_batch(), [], 0
    for step in range(1, 7):
        data = make_batch(value=float(step))
        for factor in (1.0, 2.0):
            results = [
                DataProto.concat(lent_outputs(call(workers, part, factor))) for part in (data, kept)
            ]
            data.batch["x"].add_(1)
            kept.batch["y"].add_(1)
        if step == 3:
            used = settled_bytes_in_store(ray_cluster)
    # The two batches that live are in the store, and nothing else.
    assert used > before
    wait_for_bytes_in_store(ray_cluster, used)
    del data, kept, results
    wait_for_bytes_in_store(ray_cluster, before)


def test_a_batch_for_several_roles_is_in_the_store_once(
    workers: list[Any], ray_cluster: str
) -> None:
    data = make_batch()
    before = settled_bytes_in_store(ray_cluster)
    columns = sum(column.nbytes for column in data.batch.values())
    for _ in range(4):
        DataProto.concat(lent_outputs(call(workers, data, 1.0)))
    added = settled_bytes_in_store(ray_cluster) - before
    assert columns <= added < 1.3 * columns


def test_the_driver_keeps_no_pages_of_the_store(workers: list[Any]) -> None:
    data = make_batch(rows=400)
    size = data.batch["x"].nbytes
    refs = call(workers, data, 1.0)
    parts = lent_outputs(refs)
    assert all(part.batch["x"].data_ptr() for part in parts)
    result = DataProto.concat(parts)
    assert shared_resident_bytes() < size, "three columns went out and three came back"
    assert torch.equal(result.batch["y"], data.batch["y"])
    assert torch.equal(parts[0].batch["y"], data.batch["y"][:200]), "the bytes are still there"


def test_letting_go_of_pages_leaves_memory_alone(workers: list[Any]) -> None:
    private = torch.rand(3_000_000)
    copy, stored = private.clone(), ray.get(ray.put(private.numpy()))
    release_pages()
    assert torch.equal(private, copy) and np.array_equal(stored, copy.numpy())


def test_a_future_is_resolved_by_the_rank_that_wants_its_rows(workers: list[Any]) -> None:
    data = make_batch(rows=7)
    first = DataProtoFuture.concat(call(workers, data, 2.0), resolve=lent_outputs)
    result = DataProto.concat(lent_outputs(call(workers, first, 10.0)))
    assert torch.equal(result.batch["x"], data.batch["x"] * 20) and torch.equal(
        result.batch["y"], data.batch["y"]
    )
    assert len(result.non_tensor_batch["media"]) == 7


def test_references_inside_objects_are_counted_by_ray(workers: list[Any]) -> None:
    """Objects that hold Ray's references take Ray's own road, or their objects would be freed or leak."""
    data = DataProto.from_dict(
        {"x": torch.ones(2, 9000)}, {"ref": object_array([ray.put("one"), ray.put("two")])}
    )
    result = DataProto.concat(lent_outputs(call(workers, data, 1.0)))
    del data
    gc.collect()
    assert ray.get(list(result.non_tensor_batch["ref"])) == ["one", "two"]
