# SPDX-License-Identifier: Apache-2.0
"""`quadriga train --ray`: the numbers and the output of a local run, on every placement; what a cluster lacks.

What it does not prove: several nodes, GPUs, several processes to a pool (test_data_parallel.py has those).
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quadriga.config import load_config
from quadriga.errors import WorkerError
from quadriga.trainer.task_runner import TaskRunner
from watching import assert_nothing_left

CRITIC_AND_REFERENCE = (
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "trainer.val_before_train=True",
    "trainer.logger=[console,jsonl]",
)
Lines = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture
def words(teacher: Path) -> list[str]:
    """Of every run here: with each role that there can be but a reward model."""
    distillation = ["enable=True", f"path={teacher}", "fsdp_config.model_dtype=float32"]
    return [*CRITIC_AND_REFERENCE, *(f"distillation.{word}" for word in distillation)]


@pytest.fixture
def local(words: list[str], train: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> tuple[Path, str]:
    """A run in this process, and what it printed."""
    capfd.readouterr()
    return train(*words, run="local"), capfd.readouterr().out


def without_numbers(text: str) -> list[str]:
    """Lines of output without what depends on the clock, the machine's load and where the run is."""
    lines = [line for line in text.splitlines() if not line.startswith("notice: ")]
    lines = [re.sub(r"\s+mfu .*", "", line).replace("together", "local") for line in lines]
    lines = [re.sub("^done: [^,]+,", "done:", line) for line in lines]
    elsewhere = r"start-up +[\d.]+ s|  pool |state copies: |waiting \d"
    return [line for line in lines if " ━" not in line and not re.match(elsewhere, line)]


POOLS = {"together": ["all"], "grouped": ["policy", "scoring"], "apart": ["actor_rollout", "ref", "critic", "teacher"]}


@pytest.mark.parametrize("placement", ["together", pytest.param("grouped", marks=pytest.mark.slow), "apart"])
def test_placements_give_the_numbers_of_one_process(
    placement: str,
    ray_cluster: str,
    words: list[str],
    local: tuple[Path, str],
    train: Callable[..., Path],
    metric_lines: Lines,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Bit for bit, validation too, with reference, critic and teacher in the actor's pool, in one of their own, and in
    one each.

    The command prints what it prints of a local run, line by line, but for times and the lines about the pools.
    """
    alone, local_output = local
    capfd.readouterr()
    run = train(*words, "trainer.backend=ray", f"trainer.placement={placement}")
    output = capfd.readouterr().out
    assert metric_lines(run) == metric_lines(alone)
    pools = [line.split()[1] for line in output.splitlines() if line.startswith("  pool ")]
    assert pools == POOLS[placement]
    if placement == "together":
        assert without_numbers(output) == without_numbers(local_output)
    assert_nothing_left()


def test_pool_that_the_cluster_has_not(ray_cluster: str, arguments: Callable[..., list[str]]) -> None:
    """It is said at once, what is there and what is missing, and nothing was started."""
    config = load_config(arguments("trainer.backend=ray", "trainer.n_gpus_per_node=10")).config
    with pytest.raises(WorkerError, match=r"resource pool all \[10\]: got .* has 9 of 9 CPU free.*: 1 CPU missing"):
        TaskRunner().run(config)
    assert_nothing_left()
