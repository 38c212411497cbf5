# SPDX-License-Identifier: Apache-2.0
"""Tensors that rest outside of a process's memory between phases, and come back as they were."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from quadriga.engines.fsdp import offload
from quadriga.engines.fsdp.engine import ALL_KINDS, FSDPEngine
from quadriga.engines.fsdp.offload import ActivationsOnHost, MappedFile
from quadriga.engines.fsdp.replicated import ReplicatedWeights
from quadriga.engines.process_group import ALONE
from quadriga.errors import ConfigError, EngineError
from quadriga.observe.machine import resident_bytes

ALL = frozenset({"model", "optimizer"})


def give_gradient(engine: FSDPEngine, value: float) -> None:
    sum((parameter * value).sum() for parameter in engine.scorer.model.parameters()).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_that_rests_learns_the_same_bit_for_bit(
    make_engine: Callable[..., FSDPEngine], tmp_path: Path, dtype: torch.dtype
) -> None:
    engines = [make_engine(dtype), make_engine(dtype)]
    told = engines[1].offload_between_phases(ALL_KINDS, tmp_path, frees_gradients=True)
    assert all(
        (kind in told) == (kind != "masters" or dtype == torch.bfloat16) for kind in ALL_KINDS
    )
    states: list[dict[str, torch.Tensor]] = []
    for engine in engines:
        for value in (1.0, -0.5, 2.0):
            with engine.awake(*ALL_KINDS):
                give_gradient(engine, value)
                engine.optimizer_step(lr=0.01)
        with engine.awake(*ALL_KINDS):
            states.append({**engine.state(ALL), **dict(engine.weights())})
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert not list(tmp_path.iterdir()), "nothing is left of a process that is killed"


def test_an_engine_that_rests_refuses_to_work(
    make_engine: Callable[..., FSDPEngine], tmp_path: Path
) -> None:
    engine = make_engine(torch.bfloat16)
    engine.offload_between_phases(["weights", "optimizer"], tmp_path)
    assert engine.offloaded.asleep == {"weights", "optimizer"}
    for call in (engine.weights, lambda: engine.state(ALL), lambda: engine.optimizer_step(0.1)):
        with pytest.raises(EngineError, match=r"the actor: .*weights.*offloaded.*`awake`"):
            call()
    with engine.awake("weights"):
        assert engine.offloaded.asleep == {"optimizer"}
        assert dict(engine.weights())
        with pytest.raises(EngineError, match="with optimizer offloaded"):
            engine.optimizer_step(0.1)
    assert engine.offloaded.asleep == {"weights", "optimizer"}


def test_gradient_sums_are_freed(make_engine: Callable[..., FSDPEngine], tmp_path: Path) -> None:
    engine = make_engine(torch.bfloat16)
    for frees in (False, True):
        engine.offload_between_phases([], tmp_path, frees_gradients=frees)
        with engine.awake(*ALL_KINDS):
            give_gradient(engine, 1.0)
            engine.optimizer_step(lr=0.01)
        assert bool(engine.parameters.sums) == (not frees)


def test_pages_go_and_come(tmp_path: Path) -> None:
    """Of 64 MB in memory at most a twentieth stays resident, and nothing is lost."""
    tensors = [torch.arange(8 << 20, dtype=torch.float32), torch.ones(4 << 20, dtype=torch.float64)]
    file = MappedFile(tensors, tmp_path, "test")
    for window in file.windows:
        window.add_(1)
    before = resident_bytes()[0]
    file.sleep(is_changed=True)
    assert before - resident_bytes()[0] > 0.95 * file.num_bytes
    file.wake()
    assert all(
        torch.equal(window, tensor + 1)
        for window, tensor in zip(file.windows, tensors, strict=True)
    )


@pytest.mark.parametrize(
    ("kind", "reason"), [("file", "File exists"), ("full", "No space left on device")]
)
def test_no_room(tmp_path: Path, kind: str, reason: str) -> None:
    folder, tensor = tmp_path / "folder", torch.zeros(3)
    if kind == "file":
        folder.write_text("in the way")
    else:
        tensor = torch.empty(1 << 50, device="meta")
    expected = rf"trainer\.offload_dir: got .*folder \(({reason})\), for .* GiB: the moments"
    with pytest.raises(ConfigError, match=expected):
        MappedFile([tensor], folder, "moments")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_on_the_host_is_the_same(dtype: torch.dtype) -> None:
    """Masters apart from the weights that compute, in both dtypes. Does not show that they are on another device."""
    layers = [nn.Linear(3, 2), nn.Linear(3, 2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer, on_host in zip(layers, (False, True), strict=True):
        weights = ReplicatedWeights(layer, layer, dtype, ALONE, steps_on_host=on_host)
        masters = list(weights.masters.values())
        assert (masters[0] is layer.weight) == (dtype == torch.float32 and not on_host)
        optimizer = torch.optim.AdamW(masters, fused=True)
        for scale in (1.0, -3.0):
            (layer(torch.ones(1, 3, dtype=dtype)).sum() * scale).backward()
            weights.attach_gradients()
            optimizer.step()
            weights.refresh_compute()
            weights.clear_gradients()
    assert torch.equal(layers[0].weight, layers[1].weight)


def test_activations_go_to_the_host_and_weights_stay() -> None:
    torch.manual_seed(0)
    root = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))
    root(torch.ones(5, 8)).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in root.parameters()]
    root.zero_grad()
    activations, kept = ActivationsOnHost(root), []

    def note(tensor: torch.Tensor) -> Any:
        kept.append((tensor.shape, activations._to_host(tensor)))
        return kept[-1][1]

    with torch.autograd.graph.saved_tensors_hooks(note, activations._to_device):
        root(torch.ones(5, 8)).square().sum().backward()
    assert all(
        torch.equal(parameter.grad, one)
        for parameter, one in zip(root.parameters(), expected, strict=True)
    )
    on_host = {shape for shape, one in kept if isinstance(one, tuple)}
    assert (5, 16) in on_host
    assert {shape for shape, one in kept if not isinstance(one, tuple)} == {(16, 4)}


def test_host_memory_is_counted_for_the_ranks_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three ranks of 400 bytes: the third is on another host, and the second saw less free memory."""
    monkeypatch.setattr(offload, "kernel_identity", lambda: "here")
    monkeypatch.setattr(offload, "available_bytes", lambda: 1000)
    facts: list[tuple[str, int, int]] = [("there", 400, 0)]
    world: Any = SimpleNamespace(gather=lambda fact: [fact, ("here", 400, 800), *facts])
    tensor = torch.zeros(100)
    views = [tensor, tensor[:50]]
    offload.require_host_memory(world, views, "moments")
    facts.append(("here", 4, 900))
    with pytest.raises(ConfigError, match=r"\(the moments, 3 ranks\)"):
        offload.require_host_memory(world, views, "moments")
