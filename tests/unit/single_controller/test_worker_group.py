# SPDX-License-Identifier: Apache-2.0
"""Meshes of a group: asked of the workers once, and checked."""

import pytest
import torch

from quadriga.errors import WorkerError
from quadriga.protocol import DataProto
from quadriga.single_controller import (
    ClassWithInitArgs,
    LocalWorkerGroup,
    ResourcePool,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)


class Engine(Worker):
    """Two ranks to each data-parallel rank; the second of them is collected."""

    def __init__(self, dp_ranks: list[int], collected: list[int]) -> None:
        self.questions = 0
        self.seen: list[int] = []
        self.register_mesh("train", dp_ranks[self.rank], self.rank in collected)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"))
    def score(self, data: DataProto) -> DataProto | None:
        """Each row tells which data-parallel rank scored it."""
        self.seen = data.batch["x"].tolist()
        dp_rank, is_collect = self._meshes["train"]
        if not is_collect:
            return None
        return DataProto.from_dict(
            {"x": data.batch["x"], "by": torch.full((len(data),), dp_rank)},
            meta_info={"metrics": {"rows": float(len(data))}},
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"), blocking=False)
    def score_later(self, data: DataProto) -> DataProto | None:
        """The same as a future."""
        return self.score(data)

    def mesh_place(self, mesh_name: str) -> tuple[int, bool]:
        """Counts how often it is asked."""
        self.questions += 1
        return super().mesh_place(mesh_name)


def engines(dp_ranks: list[int], collected: list[int]) -> LocalWorkerGroup[Engine]:
    return LocalWorkerGroup(
        ClassWithInitArgs(Engine, dp_ranks, collected), ResourcePool([len(dp_ranks)])
    )


@pytest.mark.parametrize("auto_padding", [False, True])
@pytest.mark.parametrize("method", ["score", "score_later"])
def test_one_chunk_for_each_data_parallel_rank(method: str, auto_padding: bool) -> None:
    group = engines([0, 0, 1, 1], collected=[1, 3])
    data = DataProto.from_dict({"x": torch.arange(5)}, auto_padding=auto_padding)
    result = getattr(group, method)(data)
    result = result if isinstance(result, DataProto) else result.get()
    assert result.batch["x"].tolist() == [0, 1, 2, 3, 4] and result.batch["by"].tolist() == [
        0,
        0,
        0,
        1,
        1,
    ]
    last = [3, 4, 0] if auto_padding else [3, 4]
    assert [worker.seen for worker in group.workers] == [[0, 1, 2], [0, 1, 2], last, last]
    assert result.meta_info["metrics"]["rows"] == [3.0, float(len(last))], (
        "metrics of collected ranks only"
    )


def test_workers_are_asked_once() -> None:
    group = engines([0, 1], collected=[0, 1])
    for _ in range(3):
        group.score(DataProto.from_dict({"x": torch.arange(3)}))
    assert [worker.questions for worker in group.workers] == [1, 1]


@pytest.mark.parametrize(
    ("dp_ranks", "collected"),
    [([0, 0], [0, 1]), ([0, 1], [0]), ([0, 2], [0, 1]), ([-1, 0], [0, 1])],
)
def test_each_chunk_is_collected_exactly_once(dp_ranks: list[int], collected: list[int]) -> None:
    with pytest.raises(WorkerError, match="expected one collected rank for each"):
        engines(dp_ranks, collected).mesh("train")
