# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING's recipes, followed to the letter in a copy of the package: one new file each, and one line elsewhere.

Recipe 1 adds an estimator and a loss, recipe 2 a grader and a reward manager, recipe 4 a configuration key. A rollout
engine (recipe 3) has its own contract in test_rollout_engines.py. Nothing else in the copy is touched: where a recipe
needs a further place, its test fails here.

What it does not prove: that what was added trains well. Each is called once, the estimator and the loss by every
contract test there is.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

NEW_FILES = {
    "quadriga/algorithms/advantages/halved.py": '''
"""Half of the distance from the group's mean."""

from quadriga.algorithms.groups import Groups
from quadriga.algorithms.masked import spread
from quadriga.algorithms.registry import register_adv_est


@register_adv_est("halved")
def halved(token_level_rewards, response_mask, uid, *, factor=0.5):
    """The same advantage on every token of a response, [B, T] twice."""
    scores = token_level_rewards.sum(-1)
    advantages = spread(factor * Groups.of(uid, scores).centered(scores), response_mask)
    return advantages, advantages
''',
    "quadriga/algorithms/losses/cubic.py": '''
"""Plain policy gradient with a cubic penalty on the log-ratio."""

from quadriga.algorithms.masked import diagnostics, log_ratios
from quadriga.algorithms.registry import register_policy_loss


@register_policy_loss("cubic")
def cubic(old_log_prob, log_prob, advantages, response_mask, *, cubic_coef=0.01):
    """The loss of each token, [B, T], and diagnostics of the same shape."""
    log_ratio = log_ratios(log_prob, old_log_prob, response_mask)
    gain = advantages.masked_fill(~response_mask.bool(), 0)
    return -gain * log_ratio.exp() + cubic_coef * log_ratio.abs() ** 3, diagnostics(log_ratio)
''',
    "quadriga/rewards/graders/vowels.py": '''
"""The number of vowels in the response."""


def compute_score(solution_str, ground_truth, extra_info=None):
    """1 if it is that of the ground truth."""
    count = sum(letter in "aeiou" for letter in solution_str)
    return {"score": float(count == int(ground_truth)), "pred": str(count)}
''',
    "quadriga/rewards/managers/brief.py": '''
"""Rewards the share of a response that is left empty."""

import torch

from quadriga.rewards.registry import RewardManager, RewardOutput, register


@register("brief", is_built_in=True)
class BriefRewardManager(RewardManager):
    """Reads neither text nor ground truth."""

    def __init__(self, config, tokenizer):
        self.length = config.data.max_response_length

    def __call__(self, data):
        valid = data.batch["attention_mask"][:, -self.length :].sum(-1)
        scores = torch.zeros(len(data), self.length)
        scores[torch.arange(len(data)), valid - 1] = 1 - valid / self.length
        return RewardOutput(scores)

    def close(self):
        pass
''',
}
# File, what stands there, what it becomes: the one line of each recipe.
REGISTRY_LINES = [
    (
        "quadriga/algorithms/advantages/__init__.py",
        r"(?=from quadriga\.algorithms\.advantages\.opo)",
        "from quadriga.algorithms.advantages.halved import halved\n",
    ),
    (
        "quadriga/algorithms/losses/__init__.py",
        r"(?=from quadriga\.algorithms\.losses\.dro)",
        "from quadriga.algorithms.losses.cubic import cubic\n",
    ),
    (
        "quadriga/rewards/scoring.py",
        r"(?<=GRADERS: dict\[str, str\] = \{\n)",
        '    "letters/vowels": "vowels",\n',
    ),
    ("quadriga/rewards/registry.py", r'(?<="naive", )', '"brief", '),
    (
        "quadriga/config/data.py",
        r"(?=    shuffle: bool)",
        '    shuffle_window: Count = 7\n    """Rows among which prompts are shuffled."""\n',
    ),
]
# The contract tests come last: what they print has no end of its own.
PROGRAM = """
import json, pytest, sys, torch
from quadriga.config import Config
from quadriga.algorithms import choose_estimator, estimate_advantages
from quadriga.protocol import DataProto
from quadriga.rewards import default_compute_score, get_reward_manager_cls

scores = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
fields = {"token_level_rewards": scores, "response_mask": torch.ones(2, 2), "uid": [7, 7]}
estimator = choose_estimator("halved", {"factor": 0.25}, {}).function
config = Config(data={"max_response_length": 4, "shuffle_window": 9})
manager = get_reward_manager_cls("brief")(config, None)
batch = DataProto.from_single_dict({"attention_mask": torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]])})
print(json.dumps({
    "advantages": estimate_advantages(estimator, fields)[0].tolist(),
    "grade": default_compute_score("letters/vowels", "a tree", "3"),
    "rewards": manager(batch).scores.tolist(),
    "key": config.data.shuffle_window,
}), flush=True)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "halved or cubic", "test_algorithms.py"]))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with everything added, and the contract tests of algorithms beside it."""
    folder = tmp_path_factory.mktemp("recipes")
    shutil.copytree(
        REPOSITORY / "quadriga", folder / "quadriga", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(REPOSITORY / "tests/contract/test_algorithms.py", folder)
    for name, text in NEW_FILES.items():
        (folder / name).write_text(f"# SPDX-License-Identifier: Apache-2.0{text}", encoding="utf-8")
    for name, place, line in REGISTRY_LINES:
        text, count = re.subn(place, line, (folder / name).read_text(encoding="utf-8"), count=1)
        assert count == 1, f"{name} has no place for {line!r}"
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def run(copy: Path, *words: str) -> str:
    """What Python prints in the copy, which goes before every other installation."""
    environment = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join([str(copy), *filter(None, sys.path)])
    }
    done = subprocess.run(
        [sys.executable, *words],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def printed(copy: Path) -> str:
    """What the program prints that calls what was added, and then the contract tests of algorithms."""
    return run(copy, "-c", PROGRAM)


def test_contract_tests_find_an_estimator_and_a_loss(printed: str) -> None:
    """Recipe 1: nothing else must be told of them, and they pass what all others pass."""
    assert int(re.findall(r"(\d+) passed", printed)[-1]) > 25


def test_each_is_used_by_its_name(printed: str) -> None:
    """Recipes 1, 2 and 4: chosen as a configuration chooses, and called."""
    found: dict[str, Any] = json.loads(re.findall(r"^{.*}$", printed, re.MULTILINE)[0])
    assert found["advantages"] == [[0.125, 0.125], [-0.125, -0.125]]
    assert found["grade"] == {"score": 1.0, "pred": "3"}
    assert found["rewards"] == [[0.75, 0, 0, 0], [0, 0, 0.25, 0]]
    assert found["key"] == 9


def test_a_new_key_is_listed_and_explained(copy: Path) -> None:
    """Recipe 4: the field is the only place; `config keys` shows it with its type, default and docstring."""
    main = "import sys; from quadriga.cli.main import main; sys.exit(main())"
    listed = run(copy, "-c", main, "config", "keys", "shuffle_window")
    assert (
        "data.shuffle_window" in listed
        and "7" in listed
        and "Rows among which prompts are shuffled." in listed
    )
