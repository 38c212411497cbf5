# SPDX-License-Identifier: Apache-2.0
"""Data source -> grader."""

from pathlib import Path

import pytest

import quadriga.rewards.graders as graders
from quadriga.errors import RewardError
from quadriga.rewards import scoring
from quadriga.rewards.scoring import GRADERS, GRADERS_BY_PREFIX, default_compute_score, grader_name, load_grader


def test_every_name_in_the_table_has_a_grader_and_the_other_way_round():
    named = {*GRADERS.values(), *GRADERS_BY_PREFIX.values()}
    files = {path.stem for path in Path(graders.__file__).parent.glob("*.py")} - {"__init__", "reading"}
    assert named == files
    assert all(callable(load_grader(name)) for name in named)


@pytest.mark.parametrize(
    ("data_source", "response", "truth"),
    [
        ("openai/gsm8k", "#### 5", "5"),
        ("HuggingFaceH4/MATH-500", r"\boxed{\frac12}", "0.5"),
        ("hiyouga/geometry3k", r"<think>so</think> \boxed{5}", "5"),
        ("searchR1_nq", "<answer>Paris</answer>", {"target": ["Paris"]}),
        ("quadriga/largest", "it is 5", "5"),
        ("exact_match/capitals", "Paris", "Paris"),
    ],
)
def test_the_data_source_chooses_the_rule(data_source, response, truth):
    assert default_compute_score(data_source, response, truth)["score"] == 1.0
    assert default_compute_score(data_source, "7", truth)["score"] == 0.0


def test_a_wrong_answer_to_dapos_mathematics_costs():
    assert default_compute_score("aime2024", r"\boxed{204}", "204")["score"] == 1.0
    assert default_compute_score("math_dapo", "Answer: 7", "204")["score"] == -1.0


@pytest.mark.parametrize("data_source", ["codecontests", "apps", "codeforces", "taco"])
def test_programs_are_run(data_source):
    tests = '{"inputs": ["2"], "outputs": ["4"]}'
    assert default_compute_score(data_source, "print(int(input()) ** 2)", tests)["score"] == 1.0


def test_options_under_a_graders_name_are_for_it_alone():
    options = {"gsm8k": {"method": "flexible"}, "code": {"total_s": 5}}
    assert default_compute_score("openai/gsm8k", "so 5", "5", **options)["score"] == 1.0
    assert default_compute_score("quadriga/largest", "5", "5", **options)["score"] == 1.0
    with pytest.raises(RewardError, match=r"reward_kwargs\.code"):
        default_compute_score("apps", "x", "{}", code=5)


def test_the_task_of_reasoning_gym_stands_in_the_data_source():
    extra_info = {"metadata": {"source_dataset": "elsewhere"}}
    assert default_compute_score("reasoning_gym/letter_counting", "3", "3", extra_info)["score"] == 1.0


def test_options_go_to_the_grader():
    assert default_compute_score("openai/gsm8k", "so 5", "5", method="flexible")["score"] == 1.0


def test_an_unknown_data_source_is_named():
    with pytest.raises(RewardError, match=r"got 'my/data', expected .*openai/gsm8k.*custom_reward_function\.path"):
        grader_name("my/data")


def test_a_missing_library_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'math_verify'", name="math_verify")

    monkeypatch.setattr(scoring, "import_module", missing)
    with pytest.raises(RewardError, match="pip install math-verify"):
        load_grader.__wrapped__("math")
