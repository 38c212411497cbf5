# SPDX-License-Identifier: Apache-2.0
"""What rests in pinned memory of the host comes back as it was, and the device's memory is free meanwhile."""

from pathlib import Path

import pytest
import torch

from quadriga.config import ActorConfig, OptimConfig
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.fsdp.engine import ALL_KINDS, FSDPEngine, Memory, Training
from quadriga.engines.objectives import PolicyObjective
from quadriga.engines.step import infer, update
from quadriga.errors import EngineError
from quadriga.models.scorers import PolicyScorer
from tests.gpu.test_cuda import make_batch, make_model

pytestmark = pytest.mark.gpu


def make_engine(dtype: torch.dtype, **memory: bool) -> FSDPEngine:
    training = Training(OptimConfig(), grad_clip=1.0, max_nonfinite_steps=3)
    scorer, device = PolicyScorer(make_model().to("cuda")), torch.device("cuda")
    return FSDPEngine(
        scorer, dtype=dtype, device=device, training=training, memory=Memory(**memory)
    )


def learn(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    for _ in range(3):
        passes = Passes(6, 1, MicroBatching(None, 20))
        update(engine, make_batch(), PolicyObjective(ActorConfig()), passes, lr=1e-3)
    return infer(engine, make_batch(), MicroBatching(4, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_learns_the_same_and_frees_the_device(dtype: torch.dtype, tmp_path: Path) -> None:
    plain, resting = make_engine(dtype), make_engine(dtype)
    before = torch.cuda.memory_allocated()
    assert "pinned" in resting.offload_between_phases(ALL_KINDS, tmp_path, frees_gradients=True)
    # AdamW's count of steps, one number for each weight, is made then: a block of the allocator's.
    counts = 512 * len(resting.parameters.masters)
    assert (
        before - torch.cuda.memory_allocated() + counts
        >= 0.99 * resting.host_memory["weights"].num_bytes
    )
    with pytest.raises(EngineError, match="offloaded to the host"):
        resting.weights()
    expected, got = learn(plain), learn(resting)
    torch.testing.assert_close(got["log_probs"], expected["log_probs"], atol=1e-4, rtol=0)
    asleep = torch.cuda.memory_allocated()
    with resting.awake(*ALL_KINDS):
        held = torch.cuda.memory_allocated() - asleep
        state = {
            name: tensor.clone()
            for name, tensor in resting.state(frozenset({"model", "optimizer"})).items()
        }
    assert held >= 0.99 * sum(memory.num_bytes for memory in resting.host_memory.values())
    with resting.awake(*ALL_KINDS):
        again = resting.state(frozenset({"model", "optimizer"}))
        assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("memory", ["offload_weights", "activation_offload"])
def test_steps_and_activations_on_the_host(memory: str) -> None:
    plain, other = make_engine(torch.bfloat16), make_engine(torch.bfloat16, **{memory: True})
    masters = next(iter(other.parameters.masters.values()))
    assert masters.is_cuda == (memory != "offload_weights")
    expected, got = learn(plain), learn(other)
    torch.testing.assert_close(got["log_probs"], expected["log_probs"], atol=2e-2, rtol=0)
