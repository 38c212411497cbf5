# SPDX-License-Identifier: Apache-2.0
"""A command line of verl's kind is a run: dynamic sampling in `main_dapo`, with more prompts generated than learned."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quadriga.cli.main import main

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(any(letter in solution_str for letter in "abcd"))
"""


def test_a_line_of_verls_trains(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "early.py").write_text(REWARD)
    words = [
        f"custom_reward_function.path={tmp_path / 'early.py'}",
        "++custom_reward_function.name=null",
        "trainer.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.name=native",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=seq_reward",
        "data.gen_batch_size=6",
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "trainer.total_training_steps=2",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
    ]
    assert main(["verl", "recipe.dapo.main_dapo", *arguments(*words)]) == 0
    told = capsys.readouterr().err
    assert "wrap_policy" in told and "param_offload" not in told
    (file,) = tmp_path.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines if "filter_groups/num_groups" in line] == [1, 2]
    assert all(
        line["filter_groups/num_groups"] % 6 == 0
        for line in lines
        if "filter_groups/num_groups" in line
    )
