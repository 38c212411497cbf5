# SPDX-License-Identifier: Apache-2.0
"""Which failed tests continuous integration runs once more."""

import json
import subprocess
import sys
from typing import Any

import pytest

from ci_tests import Outcome, choose_repeats, read_report

TESTS = """
import os, time, pytest

def test_passes():
    pass

def test_fails():
    assert 1 == 2, "the cause"

def test_crashes():
    os._exit(3)

@pytest.mark.timeout(0.2)
def test_is_too_slow():
    time.sleep(60)

@pytest.mark.skip(reason="not here")
def test_is_skipped():
    pass

@pytest.fixture
def broken_end():
    yield
    raise RuntimeError("torn down badly")

def test_ends_badly(broken_end):
    pass
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The report of one real run with a test of each kind, in a folder named as the end-to-end tests are."""
    root = tmp_path_factory.mktemp("root")
    file = root / "tests" / "e2e" / "test_kinds.py"
    file.parent.mkdir(parents=True)
    file.write_text(TESTS)
    report = root / "report.jsonl"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "1",
        f"--report-log={report}",
        "--rootdir",
        str(root),
        str(file),
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    return read_report(report.read_text().splitlines())


def test_report_of_a_real_run(outcome: Outcome) -> None:
    name = "tests/e2e/test_kinds.py::test_"
    assert (outcome.num_passed, outcome.num_skipped) == (1, 1)
    assert outcome.failures.keys() == {
        f"{name}{kind}" for kind in ("fails", "crashes", "is_too_slow", "ends_badly")
    }
    assert "the cause" in outcome.failures[f"{name}fails"]
    assert "torn down badly" in outcome.failures[f"{name}ends_badly"]
    assert outcome.never_repeated == {f"{name}crashes", f"{name}is_too_slow"}


def test_crashes_and_time_limits_are_not_repeated(outcome: Outcome) -> None:
    repeats, reason = choose_repeats(1, outcome)
    assert repeats == []
    assert "test_crashes" in reason
    assert "test_is_too_slow" in reason


@pytest.mark.parametrize(
    ("status", "failed", "reason"),
    [
        (1, ["tests/e2e/a.py::x", "tests/e2e/a.py::y", "tests/e2e/b.py::z"], ""),
        (1, ["tests/e2e/a.py::x", "tests/unit/b.py::y"], "outside tests/e2e/"),
        (1, [f"tests/e2e/a.py::x[{number}]" for number in range(4)], "more than 3"),
        (2, ["tests/e2e/a.py::x"], "status 2"),
        (1, [], "names no failed test"),
        (0, [], ""),
    ],
)
def test_what_is_repeated(status: int, failed: list[str], reason: str) -> None:
    outcome = Outcome(failures=dict.fromkeys(failed, "cause"))
    repeats, told = choose_repeats(status, outcome)
    assert repeats == ([] if reason else failed)
    assert reason in told
    assert bool(reason) == bool(told)


def line_of(**report: Any) -> str:
    return json.dumps({"$report_type": "TestReport", "longrepr": "cause"} | report)


def test_a_test_that_passes_and_fails_in_its_teardown_has_failed() -> None:
    test_id = "tests/e2e/a.py::x"
    lines = [
        line_of(nodeid=test_id, when="call", outcome="passed"),
        line_of(nodeid=test_id, when="teardown", outcome="failed"),
    ]
    outcome = read_report(lines)
    assert outcome.num_passed == 0
    assert outcome.failures == {test_id: "cause"}
