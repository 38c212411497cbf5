# SPDX-License-Identifier: Apache-2.0
"""Whole runs whose models live in two of Ray's processes, against the same run in one process.

What they do not prove: anything of speed, nor that sums over NCCL agree as well as those over gloo, nor a reward model
that is spread over processes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from quadriga.cli.main import main
from quadriga.models.weight_files import open_weights
from quadriga.observe.records import RecordFolder

Lines = Callable[[Path], list[dict[str, Any]]]
Train = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("ray_cluster")

NUM_STEPS = 4
# With a small eps AdamW would make a step of the learning rate out of a gradient that is a rounding error.
COMMON = (
    f"trainer.total_training_steps={NUM_STEPS}",
    "trainer.test_freq=2",
    "trainer.save_freq=2",
    "actor_rollout_ref.actor.optim.eps=1e-3",
    "critic.optim.eps=1e-3",
)
# 5 prompts with 3 responses each, mini-batches of 2 prompts, micro-batches of 4 rows: nothing divides anything. Every
# model that there can be: actor, reference, critic, a reward model with a chat template of its own, and a teacher.
RAGGED = (
    "data.train_batch_size=5",
    "actor_rollout_ref.rollout.n=3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.shuffle=True",
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "critic.ppo_mini_batch_size=3",
    "reward_model.enable=True",
    "reward_model.model.fsdp_config.model_dtype=float32",
    "distillation.enable=True",
    "distillation.loss_mode=forward_kl_topk",
    "distillation.topk=5",
    "distillation.fsdp_config.model_dtype=float32",
)
# What a process computes follows from the rows that it has: a prompt once for all its responses there.
OF_THE_LAYOUT = ("balance/", "actor/packed_tokens", "critic/packed_tokens")
TWO = ("trainer.backend=ray", "trainer.n_gpus_per_node=2")
ACTOR = "actor_rollout_ref.actor"
IN_A_GROUP = (
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    f"{ACTOR}.fsdp_config.param_offload=True",
    f"{ACTOR}.fsdp_config.optimizer_offload=True",
)


def dumps(run: Path) -> list[list[dict[str, Any]]]:
    """The responses of each step, in the order in which they were written."""
    files = sorted((run / "rollouts").glob("*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def assert_near(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """To 1e-4, and to what float32 cannot tell from zero."""
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] != []
    for left, right in zip(ours, theirs, strict=True):
        names = {name for name in left if not name.startswith(OF_THE_LAYOUT)}
        assert names == {name for name in right if not name.startswith(OF_THE_LAYOUT)}
        for name in names:
            assert left[name] == pytest.approx(right[name], rel=1e-4, abs=2e-6), (
                name,
                left["step"],
            )


def assert_same_weights(ours: Path, theirs: Path) -> None:
    """The actors of the last checkpoints, to 1e-4."""
    left, right = (
        open_weights(run / f"global_step_{NUM_STEPS}" / "actor") for run in (ours, theirs)
    )
    assert sorted(left.shapes) == sorted(right.shapes)
    for name in right.shapes:
        weight = right.read(name)
        assert float((left.read(name) - weight).norm() / weight.norm()) < 1e-4, name


@pytest.fixture
def keys(judges: Path, teacher: Path) -> tuple[str, ...]:
    """Of every run here."""
    return (
        *COMMON,
        *RAGGED,
        f"reward_model.model.path={judges / 'other'}",
        f"distillation.path={teacher}",
    )


@pytest.mark.parametrize("placement", ["together", pytest.param("grouped", marks=pytest.mark.slow)])
def test_two_processes_learn_what_one_does(
    placement: str,
    keys: tuple[str, ...],
    alone: Train,
    train: Train,
    metric_lines: Lines,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Metrics, validation and weights agree, and what the reward model says; the responses are the same ones, and are
    written in the same order."""
    one = alone(*keys)
    capfd.readouterr()
    dump = f"trainer.rollout_data_dir={tmp_path / 'run' / 'rollouts'}"
    two = train(*TWO, *keys, dump, f"trainer.placement={placement}")
    assert "chats rendered by its own template" in capfd.readouterr().out
    assert_near(metric_lines(two), metric_lines(one))
    assert {
        "balance/imbalance",
        "reward/rm_score/mean",
        "reward/rule_score/mean",
        "critic/vf_loss",
    } <= {*metric_lines(two)[0]}
    for ours, theirs in zip(dumps(two), dumps(one), strict=True):
        assert [row["output"] for row in ours] == [row["output"] for row in theirs]
    assert_same_weights(two, one)

    # The record has the calls of each rank; that of a single process has none.
    calls = RecordFolder(two).read(2, columns=[]).facts["calls"]
    for method in ("update_actor", "compute_log_prob"):
        [calls_of_ranks] = [rows for name, rows in calls.items() if name.endswith(f".{method}")]
        assert [rank for rank, *_ in calls_of_ranks] == [0, 1]
        for _, begin, seconds, waited in calls_of_ranks:
            assert 0.0 <= waited <= seconds and begin >= 0.0
    assert "calls" not in RecordFolder(one).read(2, columns=[]).facts


@pytest.mark.parametrize(
    ("size", "rollout"),
    [
        ("tensor_model_parallel_size", IN_A_GROUP),
        pytest.param("ulysses_sequence_parallel_size", (), marks=pytest.mark.slow),
        pytest.param("pipeline_model_parallel_size", (), marks=pytest.mark.slow),
    ],
)
def test_processes_that_share_rows_go_on_where_one_stopped(
    size: str,
    rollout: tuple[str, ...],
    keys: tuple[str, ...],
    alone: Train,
    train: Train,
    metric_lines: Lines,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Actor, reference and critic over two processes each; the rows go to both for training. A checkpoint knows nothing
    of how many processes wrote it.

    Both generate, or are one rollout group, which shares its weights with the trainer: they do not leave between
    phases.
    """
    one = alone(*keys)
    capfd.readouterr()
    source = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={one / 'global_step_2'}",
    )
    two = train(*TWO, *keys, *source, *rollout, f"{ACTOR}.{size}=2", f"critic.{size}=2")
    output = capfd.readouterr().out
    assert ("in groups of 2 ranks, each with a shard of the weights" in output) == bool(rollout)
    stays = "param_offload moves nothing: the rollout computes with these weights"
    assert (stays in output) == bool(rollout)
    assert_near(metric_lines(two), [line for line in metric_lines(one) if line["step"] > 2])
    assert_same_weights(two, one)


@pytest.mark.slow
def test_replicas_learn_what_one_does(
    keys: tuple[str, ...], alone: Train, train: Train, metric_lines: Lines
) -> None:
    """Each process has replicated weights, and generates with those that it trains."""
    one = alone(*keys)
    two = train(*TWO, *keys, "actor_rollout_ref.actor.fsdp_config.fsdp_size=1")
    assert_near(metric_lines(two), metric_lines(one))
    assert_same_weights(two, one)


def test_two_processes_generate_what_one_does(
    home: Path, write: Callable[[Path, list[dict[str, Any]]], Path], tmp_path: Path
) -> None:
    """`quadriga generate`: the same texts, of rows that no two processes share evenly."""
    rows = [{"prompt": [{"role": "user", "content": f"say a {number}"}]} for number in range(5)]
    words = [
        "generate",
        str(home / "model"),
        "--data",
        str(write(tmp_path / "prompts.parquet", rows)),
        "--n",
        "3",
    ]
    words += ["data.max_response_length=6", "data.max_prompt_length=32"]
    for name, places in (("one", ()), ("two", TWO)):
        assert main([*words, *places, "--output", str(tmp_path / name)]) == 0
    assert pq.read_table(tmp_path / "two") == pq.read_table(tmp_path / "one")
