# SPDX-License-Identifier: Apache-2.0
"""The checks before a run call users' code as the run does."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quadriga.config import Config, load_config, show
from quadriga.errors import DataError
from quadriga.rewards.managers.naive import NaiveRewardManager
from quadriga.rewards.outcome import read_outcome
from quadriga.rewards.scoring import ScoreFunction
from quadriga.trainer.preflight import Preflight, preflight, read_recorded_run

LOSS = "actor_rollout_ref.actor.policy_loss"


def test_an_estimator_gets_the_options_that_the_run_passes(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def mine(token_level_rewards, response_mask, *, config):\n    pass\n")
    outcome = preflight(Config(algorithm={"adv_estimator": f"{file}:mine"}))
    assert not [problem for problem in outcome.problems if "adv_estimator" in str(problem)]
    assert outcome.fields == ("token_level_rewards", "response_mask")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((f"{LOSS}.loss_mode=sapo", f"{LOSS}.tau_pos=-1"), "tau_pos: got -1"),
        ((f"{LOSS}.loss_mode=sapo", f"{LOSS}.tau_poss=1"), "Did you mean 'tau_pos'"),
        ((f"{LOSS}.loss_mode=kl_cov", f"{LOSS}.kl_cov_ratio=2"), "kl_cov_ratio: got 2"),
        (("algorithm.adv_estimator=rae", "algorithm.adv_options.decay=2"), "decay: got 2"),
        (
            ("algorithm.adv_estimator=gdpo", "algorithm.adv_options.gdpo_reward_keys=a"),
            "gdpo_reward_keys: got 'a'",
        ),
        (
            ("algorithm.adv_estimator=gpg", "algorithm.adv_options.f_norm=x"),
            r"adv_options \(gpg\): got TypeError",
        ),
    ],
)
def test_a_wrong_option_of_a_built_in_algorithm_is_a_problem(
    overrides: tuple[str, ...], message: str
) -> None:
    checks = Preflight(load_config(list(overrides)).config)
    checks.try_algorithm()
    with pytest.raises(type(checks.problems[-1]), match=message):
        raise checks.problems[-1]


def notices_of(row: dict[str, Any], function: ScoreFunction) -> list[str]:
    """Notices of the check of a first row, graded in this process."""
    config = Config()
    checks = Preflight(config)
    checks.notices = []
    checks._tokenizer = SimpleNamespace(eos_token="<end>")
    reward = NaiveRewardManager(config, checks._tokenizer)
    reward.function = function
    score = function.load()
    accepted = function.accepted_names(score)

    def submit(rows: list[dict[str, Any]]) -> Any:
        facts = [function.arguments_of(row) for row in rows]
        calls = [{name: fact[name] for name in accepted} for fact in facts]
        outcomes = [read_outcome(score(**call)) for call in calls]
        return SimpleNamespace(result=lambda: outcomes)

    reward.submit = submit  # type: ignore[method-assign]
    checks._grade_first_row(reward, [row])
    return checks.notices


@pytest.mark.parametrize(
    ("data_source", "truth"),
    [
        ("openai/gsm8k", "5"),
        ("openai/gsm8k", "2 + 3 = 5\n#### 5"),
        ("math", "34"),
        ("numina_olympiads", r"\frac{1}{2}"),
        ("hiyouga/geometry3k", "3"),
        ("searchR1_nq", "Paris"),
        ("searchR1_nq", {"target": ["Paris"]}),
        ("exact_match", "yes"),
        ("exact_match", ["yes", "no"]),
        ("quadriga/largest", "7"),
        ("codecontests", json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})),
    ],
)
def test_truths_of_built_in_graders_bring_no_notice(data_source: str, truth: Any) -> None:
    row = {"data_source": data_source, "reward_model": {"ground_truth": truth}}
    assert not notices_of(row, ScoreFunction())


@pytest.mark.parametrize(
    ("expression", "truth", "has_notice"),
    [
        ("solution_str == str(extra_info['answer'])", "5", True),
        ("solution_str is ground_truth and solution_str == 'x'", "5", True),
        ("solution_str == f'The answer is {ground_truth}.'", "5", True),
        ("-abs(len(solution_str) - len(ground_truth))", "5", False),
        ("'<answer>' + ground_truth in solution_str", "5", False),
        ("'good' in solution_str", "Says:\n- why\n- how", False),
        ("'good' in solution_str", "[1, 2]", False),
    ],
)
def test_a_truth_that_the_users_grader_finds_wrong_brings_a_notice(
    expression: str, truth: str, has_notice: bool, tmp_path: Path
) -> None:
    """None where the score may be right: a reward below 0, a format that is tried, a rubric."""
    file = tmp_path / "reward.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    return float({expression})\n"
    )
    row = {
        "data_source": "mine",
        "reward_model": {"ground_truth": truth},
        "extra_info": {"answer": "6"},
    }
    notices = notices_of(row, ScoreFunction(str(file)))
    assert len(notices) == has_notice
    for notice in notices:
        assert "its ground truth '5', graded as a response, scores 0" in notice
        assert f"custom_reward_function.path={file}" in notice


@pytest.mark.parametrize(
    "lengths", [[[[3, 4], [5, 6]], [[7, 8]]], [[[3, 4], [5]]]], ids=["prompts", "responses"]
)
def test_steps_of_different_sizes_cannot_be_simulated(
    lengths: list[list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a run that was resumed with a larger batch, or whose rollouts have several rows."""
    run = tmp_path / "run"
    samples = run / "samples"
    samples.mkdir(parents=True)
    overrides = ["trainer.logger=[jsonl]", f"trainer.rollout_data_dir={samples}"]
    (run / "config.yaml").write_text(show(load_config(overrides).config))
    with (run / "metrics.jsonl").open("w") as metrics:
        for step in range(1, len(lengths) + 1):
            times = {"timing_s/gen": 1.0, "timing_s/step": 2.0}
            metrics.write(json.dumps({"step": step, **times}) + "\n")
            (samples / f"{step}.jsonl").touch()
    monkeypatch.setattr(
        "quadriga.trainer.preflight._response_lengths",
        lambda folder, config, step: lengths[step - 1],
    )
    with pytest.raises(DataError, match="of 2 sizes"):
        read_recorded_run(run)
