# SPDX-License-Identifier: Apache-2.0
"""The example of a run of one's own does what its page says: data, reward, estimator, and the keys of its run."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from quadriga.algorithms import bind_options, estimate_advantages, get_adv_estimator_fn
from quadriga.config import load_config
from quadriga.engines.objectives import policy_loss_of
from quadriga.errors import ConfigError
from quadriga.trainer.roles import configured_estimator
from quadriga.user_file import import_file

SECTION = "actor_rollout_ref.actor.policy_loss"
FOLDER = Path(__file__).resolve().parents[3] / "examples" / "custom"


def test_it_is_short() -> None:
    """A task of one's own takes fewer than 60 lines of Python; the other files are not part of it."""
    files = [FOLDER / name for name in ("data.py", "reward.py", "advantage.py")]
    assert sum(len(file.read_text().splitlines()) for file in files) < 60


def test_tournament() -> None:
    """Of 0.2, 0.9 and 0.2 one beats both others, which tie; a lone answer plays nobody."""
    fields = {
        "token_level_rewards": torch.tensor([[0.0, 0.2], [0.9, 0.0], [0.5, 0.5], [0.0, 0.2]]),
        "response_mask": torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]]),
        "uid": np.array(["a", "a", "b", "a"], dtype=object),
    }
    estimator = bind_options(
        get_adv_estimator_fn(f"{FOLDER / 'advantage.py'}:tournament"), shared={"gamma": 1.0}
    )
    advantages, _ = estimate_advantages(estimator, fields)
    assert advantages.tolist() == [[-0.5, -0.5], [1.0, 0.0], [0.0, 0.0], [-0.5, -0.5]]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Big brown bears bring blueberry biscuits.", 1.0),
        ("Bears.", 1 / 6),
        ("bear bear bear bear bear bear bear bear", 1 / 8),
        ("", 0.0),
    ],
)
def test_reward(answer: str, score: float) -> None:
    """Neither one word nor the same word again and again is a way to full marks."""
    grade = import_file(FOLDER / "reward.py", "test").compute_score
    assert grade("alliteration", answer, "b")["score"] == pytest.approx(score)


def test_data(tmp_path: Path) -> None:
    """Rows as the data set reads them, the letter being that of the animal, and no prompt in both files."""
    subprocess.run([sys.executable, FOLDER / "data.py", tmp_path / "new"], check=True)
    train, val = (
        [json.loads(line) for line in (tmp_path / "new" / name).read_text().splitlines()]
        for name in ("train.jsonl", "val.jsonl")
    )
    assert len(train) == 54 and len(val) == 42
    for row in train + val:
        animal = row["prompt"][0]["content"].partition(" in words")[0].split()[-1]
        assert animal[0] == row["reward_model"]["ground_truth"]
    assert not {row["prompt"][0]["content"] for row in train} & {
        row["prompt"][0]["content"] for row in val
    }


LOSS = """
import torch

def mean(log_prob, advantages, response_mask):
    return -(log_prob * advantages * response_mask).mean(), {}

def typo(log_prob, advantagess):
    return -log_prob * advantagess, {}

def raising(log_prob):
    raise ValueError("no")
"""


def test_the_loss_is_taken_and_mistakes_are_refused_before_a_run(tmp_path: Path) -> None:
    def start(loss: str) -> None:
        policy_loss_of(load_config([f"{SECTION}.loss_mode={loss}"]).config.actor_rollout_ref.actor)

    start(f"{FOLDER / 'loss.py'}:soft_clip")
    (tmp_path / "losses.py").write_text(LOSS)
    mistakes = {"mean": "one value per token", "typo": "Did you mean 'advantages'", "raising": "no"}
    for name, message in mistakes.items():
        with pytest.raises(ConfigError, match=message):
            start(f"{tmp_path / 'losses.py'}:{name}")


def test_a_misspelled_field_of_an_estimator_is_refused_before_a_run(tmp_path: Path) -> None:
    file = tmp_path / "estimators.py"
    file.write_text("def typo(token_level_reward, response_mask):\n    return response_mask\n")
    config = load_config([f"algorithm.adv_estimator={file}:typo"]).config
    with pytest.raises(ConfigError, match="Did you mean 'token_level_rewards'"):
        configured_estimator(config)


def test_keys_of_the_run() -> None:
    """Every key that the script sets exists and takes its value; the files it names are there."""
    command = (FOLDER / "run").read_text().partition('quadriga" train')[2].replace('"$@"', "")
    loaded = load_config([word for word in shlex.split(command) if "=" in word])
    assert loaded.config.algorithm.adv_estimator == "examples/custom/advantage.py:tournament"
    assert (FOLDER.parents[1] / loaded.config.custom_reward_function.path).is_file()
