# SPDX-License-Identifier: Apache-2.0
"""What is shown of a run that has ended, of one that goes on or wrote little, and of no run."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from quadriga.config import load_config
from quadriga.errors import DataError
from quadriga.trainer.run_folder import RunFolder
from quadriga.trainer.run_lock import run_lock
from quadriga.trainer.run_report import MAX_SUMMARY_LINES, report, summary
from quadriga.trainer.settings import RunSettings, keep_settings

WRITTEN = ("trainer.logger=[console,jsonl]", "trainer.rollout_data_dir={run}/rollouts")


def metrics_of(step: int) -> dict[str, Any]:
    seconds = {"step": 10.0, "gen": 6.0, "prepare": 3.0, "reward": 2.5, "data": 0.001}
    metrics: dict[str, Any] = {f"timing_s/{phase}": value for phase, value in seconds.items()}
    return {
        "step": step,
        "critic/rewards/mean": step / 20,
        "val-core/sums/acc/mean@1": 0.5,
        **metrics,
    }


SAMPLES = [
    {"input": "1+1", "output": "2", "score": 1.0, "format": 0.25, "ground_truth": "2", "step": 20},
    {
        "input": "2+2",
        "output": "call 4",
        "output_with_special_tokens": "call<|im_end|>\x1b[31m4",
        "score": 0.5,
        "num_turns": 4,
        "finish_reason": "stop",
        "ground_truth": None,
        "row": {"answer": "four"},
        "step": 20,
    },
    {
        "input": "1+1",
        "output": "7" * 5000,
        "score": 0.0,
        "num_turns": 1,
        "finish_reason": "length",
        "answer_left_out": True,
        "ground_truth": "2",
        "step": 20,
    },
    {"input": "3+3", "output": "6", "score": None, "ground_truth": "6", "step": 20},
]
Make = Callable[..., RunFolder]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(*overrides)`: a run of 20 steps as it stands after its last one."""

    def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def build(*overrides: str) -> RunFolder:
        run = tmp_path / "run"
        words = [f"trainer.default_local_dir={run}", *(word.format(run=run) for word in overrides)]
        config = load_config(words).config
        keep_settings(config, RunSettings.of(config), 0, 20)
        write_lines(run / "metrics.jsonl", [metrics_of(step) for step in range(1, 21)])
        if config.trainer.rollout_data_dir:
            write_lines(run / "rollouts" / "20.jsonl", SAMPLES)
        return RunFolder(run)

    return build


def test_a_report_has_rewards_time_and_responses(make: Make) -> None:
    text = "\n".join(report(make(*WRITTEN)))
    assert "finished, step 20 of 20" in text
    assert "1-2     0.075" in text and "19-20     0.975" in text
    assert "sums acc mean@1: 0.500 at step 1" in text
    rows = [line.split()[:4] for line in text.splitlines() if " s " in line and "%" in line]
    assert rows == [
        ["gen", "120.0", "s", "60%"],
        ["prepare", "60.0", "s", "30%"],
        ["reward", "50.0", "s", "25%"],
    ]
    assert "Responses of step 20: 4, mean score 0.500\n  grader errors: 0, truncated" in text
    best, second, worst = (
        text.split("\n  best: ")[1],
        text.split("\n  best: ")[2],
        text.split("worst: ")[1],
    )
    assert best.startswith("score 1.000, format 0.250\n    prompt: 1+1\n    response: 2\n")
    assert "ground truth: 2" in best
    assert second.startswith("score 0.500, 4 turns, ended by stop")
    assert "row.answer: four" in second and "call<|im_end|>\N{REPLACEMENT CHARACTER}[31m4" in second
    assert worst.startswith(
        "score 0.000, 1 turn, ended by length, the tool's answer did not fit in data.max_response"
    )
    assert "[3800 characters]" in worst


TOOLS = ("multi_turn.enable=True", "multi_turn.function_tool_path=tools.py", "mode=async")


@pytest.mark.parametrize(
    ("overrides", "count", "expected"),
    [
        (TOOLS, 12.0, "tool calls: 12"),
        (TOOLS, 0.0, "tool calls: 0"),
        ((), 12.0, "tool calls: 12"),
        ((), 0.0, ""),
        (TOOLS, None, ""),
    ],
)
def test_a_report_counts_tool_calls_where_there_are_tools(
    make: Make, overrides: Sequence[str], count: float | None, expected: str
) -> None:
    run = make(*WRITTEN, *(f"actor_rollout_ref.rollout.{override}" for override in overrides))
    metrics = metrics_of(20) | ({} if count is None else {"rollout/num_tool_calls": count})
    (run.directory / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    lines = list(report(run, 20))
    (counts,) = [line for line in lines if "grader errors" in line]
    assert counts.endswith(expected or "truncated at the length limit: 1")
    (numbers,) = [line for line in lines if "Step 20:" in line]
    assert ("calls 12" in numbers) == (count == 12.0)
    assert "calls 0" not in numbers


def test_a_report_counts_failed_graders_and_shows_one(make: Make) -> None:
    """A response without a score, or whose grader failed, is neither the best nor the worst."""
    run = make(*WRITTEN)
    failed = {"input": "3+3", "output": "6", "score": 0.0, "reward_error": "Traceback\n  KeyError"}
    unscored = {"input": "4+4", "output": "8", "score": None, "finish_reason": "length"}
    samples = [{"input": "5+5", "output": "9", "score": 0.0}] * 2 + [failed, failed, unscored]
    path = run.directory / "rollouts" / "20.jsonl"
    path.write_text("".join(json.dumps({**sample, "step": 20}) + "\n" for sample in samples))
    text = "\n".join(report(run, 20))
    assert "Responses of step 20: 5, mean score 0.000" in text
    assert "grader errors: 2, truncated at the length limit: 1" in text
    assert "all scored alike: score 0.000" in text and "best:" not in text
    assert text.count("grader failed: ") == 1
    assert "    error: Traceback\n        KeyError\n    prompt: 3+3" in text
    assert summary(run)[-1] == "all scored alike in step 20, score 0.000: '5+5' -> '9'"


def test_the_summary_is_short_and_one_line_each(make: Make) -> None:
    lines = summary(make(*WRITTEN))
    assert lines[0] == "reward: 0.050 at step 1, 1.000 at step 20"
    assert lines[2] == "time in steps: 3:20, of which gen 60%, prepare 30%"
    assert lines[3] == "best of step 20, score 1.000: '1+1' -> '2', truth '2'"
    assert lines[4].startswith("worst of step 20, score 0.000: '1+1' -> '777")
    assert len(lines) == 5 <= MAX_SUMMARY_LINES and not any("\n" in line for line in lines)


def test_a_run_that_wrote_little_says_how_to_have_the_rest(make: Make) -> None:
    """A file of metrics beside another logger is an earlier run's."""
    run = make()
    assert [line.split(":")[1].split("=")[0] for line in summary(run)] == [
        " trainer.logger",
        " trainer.rollout_record",
    ]
    assert next(report(run)).endswith("not finished, step 0 of 20")


def test_a_run_that_goes_on(make: Make) -> None:
    run = make(*WRITTEN)
    with (run.directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "critic/rew')
    with run_lock(run.directory):
        assert "going on, step 20 of 20" in next(report(run))
    assert "finished" in next(report(run))


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    with run_lock(tmp_path / "run"):
        assert list(report(RunFolder(tmp_path / "run"))) == [f"{tmp_path}/run: going on, step 0"]


def test_no_run_and_no_such_step(make: Make, tmp_path: Path) -> None:
    run = make(*WRITTEN)
    with pytest.raises(DataError, match="got 21, expected one of 20 steps, 1 to 20"):
        list(report(run, 21))
    for path, got in ((tmp_path, "without config.yaml"), (tmp_path / "none", "no such folder")):
        with pytest.raises(DataError, match=f"{got}.*the directory of a run.*default_local_dir"):
            RunFolder(path)
    with pytest.raises(DataError, match=f"Give the run's directory, {run.directory}"):
        RunFolder(run.directory / "rollouts")
