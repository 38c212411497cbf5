# SPDX-License-Identifier: Apache-2.0
"""benchmarks/playground_report.py and its neighbour that ranks: what is read from the files of a run, and the tables.

What it does not prove: that a run leaves such files (tests/e2e/test_training.py has those), and what any run learns.
"""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def _module(name: str) -> ModuleType:
    spec = spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pytest.importorskip("matplotlib")
REPORT, RANKING = _module("playground_report"), _module("playground_ranking")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run of four steps of two seconds each, with validations before it and after steps 2 and 4."""
    lines = [{"step": 0}] + [
        {
            "step": step,
            "timing_s/step": 2.0,
            "actor/reward_kl_penalty": step / 10,
            "actor/reward_kl_penalty_coeff": 0.5,
        }
        for step in range(1, 5)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "answers").mkdir()
    for step, num_right in ((0, 8), (2, 19), (4, 20)):
        # The score is another's, such as a reward model's: it is not what counts.
        rows = [
            {"output": "7" if n < num_right else "1", "ground_truth": "7", "score": -3.0}
            for n in range(20)
        ]
        (tmp_path / "answers" / f"{step}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return tmp_path


def test_a_course_is_read_from_the_files_of_a_run(directory: Path) -> None:
    course = REPORT.read_course("grpo", 1, directory, 0.5)
    assert (course.steps, course.accuracy, course.seconds) == (
        [0, 2, 4],
        [0.4, 0.95, 1.0],
        [0.0, 4.0, 8.0],
    )
    assert (course.num_steps, course.total_s) == (4, 8.0)
    assert course.series == {"kl": [0.1, 0.2, 0.3, 0.4], "coefficient": [0.5] * 4}
    assert course.reached == 1
    assert (
        course.in_words()
        == "0.40 -> 1.00, 0.95 after 4 s; 8 s of training in 4 steps, others 0.50 cores"
    )


def test_a_run_that_never_gets_there_says_so(directory: Path) -> None:
    (directory / "answers" / "2.jsonl").unlink()
    (directory / "answers" / "4.jsonl").unlink()
    course = REPORT.read_course("opo", 0, directory, 0.0)
    assert course.reached is None and "0.95 never" in course.in_words()
    *_, line = REPORT.learning_table({"opo": [course]}).splitlines()
    assert line == "| opo | 4 | 0.40 | never | - | 0.40 | 8 | 0.0 |"


def test_tables_have_the_seeds_beside_each_other(directory: Path) -> None:
    courses = [REPORT.read_course("grpo", seed, directory, 0.25) for seed in (0, 1)]
    *_, line = REPORT.learning_table({"grpo": courses}).splitlines()
    assert line == "| grpo | 4 | 0.40 / 0.40 | 4 / 4 | 2 / 2 | 1.00 / 1.00 | 8 / 8 | 0.2 / 0.2 |"
    assert REPORT.validation_lines({"grpo": courses}).splitlines()[1] == "grpo 0  .40 .95 1.0"


def test_divergence_and_coefficient_are_means_of_twenty_steps(directory: Path) -> None:
    course = REPORT.Course(
        "kl_target",
        2,
        [],
        [],
        [],
        40,
        1.0,
        0.0,
        {"kl": [0.1] * 20 + [0.3] * 20, "coefficient": [1.0] * 40},
    )
    head, _, kl, coefficient = REPORT.kl_table([course]).splitlines()
    assert head == "| run, seed | mean of steps | 1-20 | 21-40 |"
    assert (kl, coefficient) == (
        "| kl_target, 2 | kl | 0.100 | 0.300 |",
        "| kl_target, 2 | coefficient | 1.000 | 1.000 |",
    )


def test_staleness_is_compared_before_any_run_is_done(directory: Path) -> None:
    """At step 10, for at 15 one run has 0.97."""
    values = {
        "stale_0": ([0.2, 0.6, 0.8, 0.9], [0.4, 0.7, 0.9, 0.97]),
        "stale_4": ([0.2, 0.5, 0.7, 0.8],) * 2,
    }
    runs = {
        name: [REPORT.Course(name, 0, [0, 5, 10, 15], own, [0.0] * 4, 15, 1.0, 0.0, {"staleness": [behind] * 15})
               for own in courses]
        for (name, courses), behind in zip(values.items(), (0.0, 3.5), strict=True)
    }  # fmt: skip
    head, _, first, second = REPORT.staleness_table(runs).splitlines()
    assert "accuracy at step 10 | mean | to the first | mean at step 15" in head
    assert first == "| stale_0 | 0.00 | 0.80 / 0.90 | 0.850 | +0.000 | 0.935 |"
    assert second == "| stale_4 | 3.50 | 0.70 / 0.70 | 0.700 | -0.150 | 0.800 |"


def test_the_report_is_written_with_its_picture(directory: Path, tmp_path: Path) -> None:
    courses = [REPORT.read_course(name, 0, directory, 0.0) for name in ("kl_target", "grpo")]
    text = REPORT.report(courses, ("grpo", "opo", "kl_target"), tmp_path)
    assert text == (tmp_path / "playground.md").read_text()
    assert text.index("| grpo |") < text.index("| kl_target |") and "opo" not in text
    assert (tmp_path / "playground.png").read_bytes().startswith(b"\x89PNG")


def test_the_best_of_all_answers_and_of_the_habits() -> None:
    """Scores that fall with the distance from a + b, but for 3+8, where 7 is above 11, and 9+1, where the first is."""
    right = torch.tensor([int(number // 10 + number % 10) for number in range(100)])
    scores = -(torch.arange(19)[None] - right[:, None]).abs().float()
    assert RANKING.shares_of_best(scores) == {"best of 19": 1.0, "best of the habits": 1.0}
    scores[38, 7] = scores[91, 9] = 1.0
    assert RANKING.shares_of_best(scores) == {"best of 19": 0.98, "best of the habits": 0.99}
