# SPDX-License-Identifier: Apache-2.0
"""Five defects, each planted into an update of a model on the stand-in, are found; without one nothing is."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from quadriga.config import ActorConfig
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.fsdp import offload
from quadriga.engines.fsdp.engine import ALL_KINDS
from quadriga.engines.objectives import PolicyObjective
from quadriga.engines.step import update
from quadriga.workers.base import choose_device
from tests.gpu.test_cuda import make_batch, make_engine
from tests.rehearsal.stand_in import StandIn

Outputs = Mapping[str, torch.Tensor]


class Planted(PolicyObjective):
    """A loss with a defect: `plant` gets the outputs and gives a number that is added, times zero."""

    def __init__(self, plant: Callable[[Outputs], Any]) -> None:
        super().__init__(ActorConfig())
        self.plant = plant

    def __call__(self, rows: Any, outputs: Outputs, counts: Any) -> Any:
        loss, metrics = super().__call__(rows, outputs, counts)
        return loss + 0 * self.plant(outputs), metrics


def learn(device: str = "cuda", plant: Callable[[Outputs], Any] = lambda outputs: 0.0) -> None:
    """An optimizer step of several micro-batches."""
    engine = make_engine(str(choose_device(device)))
    update(engine, make_batch(), Planted(plant), Passes(6, 1, MicroBatching(None, 20)), lr=1e-3)


def found(stand_in: StandIn) -> list[str]:
    """The findings so far, which are no failure of the test."""
    taken, stand_in.findings[:] = list(stand_in.findings), []
    return taken


def num_reads(stand_in: StandIn, plant: Callable[[Outputs], Any]) -> int:
    stand_in.host_reads.clear()
    learn(plant=plant)
    return len(stand_in.host_reads)


def test_mixed_devices(stand_in: StandIn) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        learn(
            plant=lambda outputs: (
                outputs["log_probs"] * torch.ones(outputs["log_probs"].shape)
            ).sum()
        )
    assert "aten::mul with operands on cpu, cuda:0" in found(stand_in)[0]


def test_a_wrong_dtype(stand_in: StandIn) -> None:
    weight = torch.ones(5, 5, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="same dtype"):
        learn(plant=lambda outputs: (outputs["log_probs"] @ weight).sum())
    with pytest.raises(RuntimeError, match="one dtype"):
        learn(
            plant=lambda outputs: torch.mm(
                outputs["log_probs"], weight, out_dtype=torch.float32
            ).sum()
        )


def test_a_read_in_a_step(stand_in: StandIn) -> None:
    """One more in each micro-batch; without it the host waits as often as a step has reasons to."""
    clean = num_reads(stand_in, lambda outputs: 0.0)
    assert num_reads(stand_in, lambda outputs: outputs["log_probs"].sum().item()) > clean + 1
    place = next(read for read in stand_in.host_reads if "test_defects.py" in read)
    assert place.startswith("_local_scalar_dense at ")


def test_a_missing_set_device(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    learn("cuda:1")
    assert found(stand_in) == []
    stand_in.here.device = 0
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    learn("cuda:1")
    assert "on cuda:1 while the current device is 0" in found(stand_in)[0]


def test_an_asynchronous_copy_from_memory_that_is_not_pinned(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def sleep_and_wake() -> list[str]:
        engine = make_engine("cuda")
        engine.offload_between_phases(ALL_KINDS, tmp_path, frees_gradients=True)
        with engine.awake(*ALL_KINDS):
            pass
        return found(stand_in)

    assert sleep_and_wake() == []
    monkeypatch.setattr(
        offload, "pinned_memory", lambda size, what: torch.empty(size, dtype=torch.uint8)
    )
    pageable = sleep_and_wake()
    assert any(
        "to memory that is not pinned" in one and "fsdp/offload.py" in one for one in pageable
    )
    assert any(
        "from memory that is not pinned" in one and "fsdp/offload.py" in one for one in pageable
    )
