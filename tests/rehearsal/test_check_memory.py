# SPDX-License-Identifier: Apache-2.0
"""The memory of a role at its start: gradient checkpointing by prediction, warnings, refusals."""

from collections.abc import Callable

import pytest
import torch

from quadriga.cli.main import main
from tests.rehearsal.stand_in import StandIn


@pytest.mark.parametrize(
    ("num_bytes", "policy", "state"),
    [(80 << 30, "refuse", "off"), (1 << 20, "warn", "on"), (1 << 20, "refuse", "")],
)
def test_a_device_of_a_size(
    arguments: Callable[..., list[str]],
    stand_in: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    num_bytes: int,
    policy: str,
    state: str,
) -> None:
    """Activations are recomputed where they do not fit; what fits in no way is refused or warned about."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (num_bytes, num_bytes))
    options = (
        "trainer.device=cuda",
        "trainer.total_training_steps=1",
        f"trainer.check_memory={policy}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=auto",
    )
    status = main(["train", *arguments(*options)])
    output = capsys.readouterr()
    if not state:
        assert status == 2
        assert "trainer.check_memory=warn" in output.err
        return
    assert status == 0
    lines = output.out.splitlines()
    memory = next(line for line in lines if "memory of the actor" in line)
    assert f"gradient checkpointing {state}" in memory
    assert all(phase in memory for phase in ("generation", "log-probs", "update"))
    assert ("predicted peak" in caplog.text) == (policy == "warn")
