# SPDX-License-Identifier: Apache-2.0
"""Data source -> grader, and score functions from files."""

import pickle
from pathlib import Path

import pytest

import quadriga.rewards.graders as graders
from quadriga.errors import ConfigError, RewardError
from quadriga.rewards import scoring
from quadriga.rewards.by_name import collect_arguments, reward_of
from quadriga.rewards.pool import GradingPool
from quadriga.rewards.scoring import (
    GRADERS,
    GRADERS_BY_PREFIX,
    ScoreFunction,
    default_compute_score,
    grader_name,
    load_grader,
)


def test_every_name_in_the_table_has_a_grader_and_the_other_way_round():
    named = {*GRADERS.values(), *GRADERS_BY_PREFIX.values()}
    files = {path.stem for path in Path(graders.__file__).parent.glob("*.py")} - {
        "__init__",
        "reading",
    }
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
    assert default_compute_score("math_dapo_reasoning", "Answer: .5", "0.5")["score"] == 1.0
    assert default_compute_score("math", "Answer: 7", "204")["score"] == -1.0


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
    assert (
        default_compute_score("reasoning_gym/letter_counting", "3", "3", extra_info)["score"] == 1.0
    )


def test_options_go_to_the_grader():
    assert default_compute_score("openai/gsm8k", "so 5", "5", method="flexible")["score"] == 1.0


def test_an_unknown_data_source_is_named():
    with pytest.raises(
        RewardError, match=r"got 'my/data', expected .*openai/gsm8k.*custom_reward_function\.path"
    ):
        grader_name("my/data")


def test_a_missing_library_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'math_verify'", name="math_verify")

    monkeypatch.setattr(scoring, "import_module", missing)
    with pytest.raises(RewardError, match="pip install math-verify"):
        load_grader.__wrapped__("math")


ROW = {
    "data_source": "mine",
    "solution_str": "four",
    "ground_truth": "four",
    "extra_info": {"weight": 2},
}


@pytest.fixture
def function_file(tmp_path):
    def write(text):
        path = tmp_path / "my_reward.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize(
    "parameters",
    [
        "data_source, solution_str, ground_truth, extra_info=None",
        "data_source, solution_str, ground_truth, extra_info",
        "solution_str, ground_truth, **kwargs",
        "data_source=None, *, solution_str, ground_truth, extra_info, method='strict'",
    ],
)
def test_functions_written_for_verl_run_unchanged(function_file, parameters):
    path = function_file(
        f"def compute_score({parameters}):\n    return float(solution_str == ground_truth)\n"
    )
    assert ScoreFunction(path).load()(**ROW) == 1.0


def test_reward_kwargs_are_passed_and_survive_the_way_to_a_process(function_file):
    path = function_file("def grade(solution_str, bonus, **kwargs):\n    return bonus\n")
    function = pickle.loads(pickle.dumps(ScoreFunction(path, "grade", {"bonus": 0.25})))
    assert function.load()(**ROW) == 0.25


def test_a_reward_kwarg_cannot_replace_a_column():
    with pytest.raises(
        ConfigError,
        match="reward_kwargs: got ground_truth",
    ):
        ScoreFunction(reward_kwargs={"ground_truth": "5", "bonus": 1})


def test_a_function_can_use_dataclasses_and_the_files_beside_it(function_file, tmp_path):
    (tmp_path / "beside_my_reward.py").write_text("VALUE = 3.0\n")
    path = function_file(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom beside_my_reward import VALUE\n"
        "@dataclass\nclass Rule:\n    value: float\n    def __call__(self, **kwargs):\n        return self.value\n"
        "compute_score = Rule(VALUE)\n"
    )
    assert ScoreFunction(path).load()(**ROW) == 3.0


def test_a_missing_file_is_found_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"custom_reward_function\.path: got .*nowhere\.py"):
        ScoreFunction(str(tmp_path / "nowhere.py"))


def test_a_missing_name_is_answered_with_those_there_are(function_file):
    path = function_file(
        "from json import dumps\ndef grade(**kwargs):\n    return 1\ncompute_score = 5\n"
    )
    with pytest.raises(
        ConfigError, match=r"name: got no function 'reward', expected a function in .*\(grade\)"
    ):
        ScoreFunction(path, "reward").load()
    with pytest.raises(ConfigError, match="compute_score, which is a int"):
        ScoreFunction(path).load()


def test_a_function_with_other_parameters_is_shown_what_is_passed(function_file):
    path = function_file("def compute_score(solution_str, ground_truth):\n    return 1\n")
    with pytest.raises(
        ConfigError,
        match=r"got compute_score\(solution_str, ground_truth\).*data_source, solution_str",
    ):
        ScoreFunction(path).load()
    with pytest.raises(ConfigError, match="data_sources, solution_strs"):
        ScoreFunction(path, is_batch=True).load()
    path = function_file(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n    return []\n"
    )
    with pytest.raises(ConfigError, match=r"takes lists.*needs reward_model\.reward_manager=batch"):
        ScoreFunction(path).load()


def test_functions_of_trls_form_are_called_by_name(function_file):
    path = function_file(
        "def one(response, level=0, **kwargs):\n    return len(response) + level\n"
        "def several(completions, **kwargs):\n    return [len(text) for text in completions]\n"
    )
    row = ROW | {"extra_info": {"row": {"level": 2}}}
    grade = ScoreFunction(path, "one").load()
    assert grade(**row) == 6
    assert "row" in ScoreFunction(path, "one").accepted_names(grade)
    with pytest.raises(ConfigError, match=r"takes lists.*needs reward_model\.reward_manager=batch"):
        ScoreFunction(path, "several").load()


def test_a_reward_kwarg_that_the_function_lacks_is_named(function_file):
    path = function_file(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1\n"
    )
    with pytest.raises(ConfigError, match=r"bonus.*and reward_kwargs \(bonus\)"):
        ScoreFunction(path, reward_kwargs={"bonus": 1}).load()


@pytest.mark.parametrize(
    "text", ["def compute_score(:\n", "import no_such_module_at_all\n", "raise SystemExit(3)\n"]
)
def test_a_file_that_fails_is_shown_with_its_own_error(function_file, text):
    path = function_file(text)
    with pytest.raises(
        ConfigError, match=r"(?s)my_reward\.py, which raised \w+ while it was loaded:\n"
    ):
        ScoreFunction(path).load()


FURTHER = """
def item(data_source, solution_str, ground_truth, extra_info, solution_with_special_tokens, solution_messages):
    return {"score": 1, "whole": solution_with_special_tokens, "roles": [one["role"] for one in solution_messages]}

def batch(data_sources, solution_strs, ground_truths, extra_infos, solutions_with_special_tokens):
    return [{"score": 1, "whole": one} for one in solutions_with_special_tokens]

def plain(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return {"score": 1, "names": sorted(kwargs)}
"""


def test_functions_get_special_tokens_and_messages_by_naming_them(tmp_path):
    file = tmp_path / "further.py"
    file.write_text(FURTHER)
    row = ROW | {
        "solution_with_special_tokens": "<t>four",
        "solution_messages": [{"role": "tool", "content": "four"}],
    }
    extras = {}
    for name in ("item", "batch", "plain"):
        function = ScoreFunction(str(file), name, is_batch=name == "batch")
        with GradingPool(function, num_workers=1) as pool:
            (outcome,) = pool.grade([function.arguments_of(row)], timeout_s=60)
        extras[name] = outcome.extra
    assert extras == {
        "item": {"whole": "<t>four", "roles": ["tool"]},
        "batch": {"whole": "<t>four"},
        "plain": {"names": []},
    }


def test_a_function_called_score_does_not_take_the_name_of_the_sum():
    def score(response):
        return 1.0

    def brevity(response):
        return 0.5

    (result,) = reward_of([score, brevity]).score([collect_arguments("d", "7", "7", None)])
    assert result == {"score": 1.5, "reward_1": 1.0, "brevity": 0.5}
