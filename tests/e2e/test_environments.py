# SPDX-License-Identifier: Apache-2.0
"""Runs in an environment: no data file, scores of the environment, and the same numbers after kills."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quadriga.cli.main import main
from quadriga.rollout.environments.pool import EnvironmentPool

ENVIRONMENTS = """
class Letters:
    def reset(self, seed=None):
        self.num_steps = 0
        self.letter = "abc"[seed // 2 % 3]
        return f"say {self.letter}"

    def step(self, action):
        self.num_steps += 1
        share = action.count(self.letter) / max(1, len(action))
        return "again", share, self.num_steps == 2, False, {"state": self.letter}


class Pair:
    def reset(self, seed=None):
        self.num_steps = 0
        return "a?"

    def step(self, action):
        agent = self.num_steps % 2
        self.num_steps += 1
        rewards = {agent: float("a" in action), 1 - agent: 0.0}
        return "b?", rewards, self.num_steps == 4, False, {"agent": self.num_steps % 2}


def say_a(text, generator):
    return "a"
"""
ACTOR = "actor_rollout_ref.actor"
Train = Callable[..., Path]


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    """Keys of a run of two turns."""
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    return [
        "data.train_files=",
        "data.val_files=",
        "env.num_episodes=16",
        "env.num_val_episodes=4",
        "env.num_processes=1",
        "data.max_prompt_length=16",
        "data.max_response_length=48",
        'actor_rollout_ref.rollout.stop=[" "]',
        "custom_reward_function.path=null",
    ]


def test_kills_change_no_response(
    train: Train, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"env={tmp_path}/envs.py:Letters", *overrides, "trainer.total_training_steps=3"]
    quiet = train(*words, f"trainer.rollout_data_dir={tmp_path / 'quiet'}", run="a")
    num_kills = 0
    opened = EnvironmentPool.open

    def open_and_kill(pool: EnvironmentPool, *arguments: Any) -> Any:
        nonlocal num_kills
        process = pool._hosts[0]._process
        if process is not None and num_kills < 4:
            num_kills += 1
            os.kill(process.pid, signal.SIGKILL)
        return opened(pool, *arguments)

    monkeypatch.setattr(EnvironmentPool, "open", open_and_kill)
    disturbed = train(*words, f"trainer.rollout_data_dir={tmp_path / 'disturbed'}", run="b")
    assert num_kills == 4
    assert sum(restarts(quiet)) == 0
    assert sum(restarts(disturbed)) > 0
    # Texts and scores of all steps, which also depend on the weights of the steps before.
    for step in (1, 2, 3):
        expected = (tmp_path / "quiet" / f"{step}.jsonl").read_text()
        assert (tmp_path / "disturbed" / f"{step}.jsonl").read_text() == expected
    rows = [json.loads(line) for line in expected.splitlines()]
    assert {row["env_turns"] for row in rows} <= {1, 2}
    assert len({row["score"] for row in rows}) > 1


def restarts(run: Path) -> list[float]:
    """Restarts of environments, by step."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line).get("env/restarts", 0.0) for line in lines]


@pytest.mark.parametrize("opponent", ["policy", "envs.py:say_a"])
def test_two_agents(train: Train, overrides: list[str], tmp_path: Path, opponent: str) -> None:
    player = opponent.replace("envs.py", f"{tmp_path}/envs.py")
    words = [f"env.agents=[policy, '{player}']"]
    if opponent == "policy":
        words += ["env.train_together=True", "algorithm.adv_estimator=rae"]
    words += [f"{ACTOR}.echo_coeff=0.1", f"{ACTOR}.loss_agg_mode=rollout-mean-token-mean"]
    run = train(f"env={tmp_path}/envs.py:Pair", *overrides, *words)
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["reward/extra/env_turns"] > 1
    # Each agent plays twice, so it reads an observation after its first reply.
    assert line["actor/echo_loss"] > 0


@pytest.mark.parametrize("preset", ["one_step_off", "bounded"])
def test_an_environment_plays_in_asynchronous_training(
    train: Train, overrides: list[str], tmp_path: Path, preset: str
) -> None:
    words = [f"env={tmp_path}/envs.py:Letters", *overrides, "async_training.enable=True"]
    run = train(*words, f"async_training.preset={preset}")
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["reward/extra/env_turns"] > 1


def test_an_environment_that_fails_ends_the_run_with_its_error(
    arguments: Callable[..., list[str]],
    overrides: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("class Broken:\n    def reset(self):\n        return 1 / 0\n")
    broken.write_text(broken.read_text() + "    def step(self, action):\n        return None\n")
    assert main(["train", *arguments(f"env={broken}:Broken", *overrides)]) == 1
    assert "ZeroDivisionError: division by zero" in capsys.readouterr().err


def test_episodes_are_played_from_the_command_line(
    home: Path, overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{tmp_path}/envs.py:Letters"
    assert main(["env", "try", name, "--episodes", "2"]) == 0
    output = capsys.readouterr().out
    assert output.count("---- episode") == 2
    assert output.count("= reward") == 2
    lengths = [word for word in overrides if word.startswith("data.max_")]
    words = [name, "--episodes", "2", "--model", str(home / "model"), *lengths]
    assert main(["env", "try", *words]) == 0
    output = capsys.readouterr().out
    assert output.count("\n> ") == output.count("\n= reward") == 2
    assert "<user>say " in output
    assert main(["env", "list"]) == 0
    assert "openenv:ws://HOST:PORT" in capsys.readouterr().out
