# SPDX-License-Identifier: Apache-2.0
"""Runs `scripts/test` for continuous integration; `.ci/run` calls it.

Tests of tests/e2e start whole runs in several processes, and a busy machine can make one of them fail. When at most
three of them failed and nothing else did, each is run once more, alone. One that passes then is reported as flaky,
with the cause of its first failure: a fault to be found. Nothing else is repeated: not a failed test elsewhere, a time
limit, a process that crashed, nor a run that pytest ended with another status than 1.

The last line counts the tests of the whole. The exit status is 0 if every test passed, at the latest alone.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
REPEATED_FOLDER = "tests/e2e/"
MAX_REPEATED = 3
TESTS_FAILED = 1  # pytest's exit status
TIME_LIMIT = "from pytest-timeout"


@dataclass
class Outcome:
    """What a report of pytest-reportlog says about a run.

    Attributes:
        num_passed: tests that passed.
        num_skipped: tests that were skipped, expected failures among them.
        failures: cause of the first failure of each failed test, by its id.
        never_repeated: the ids in `failures` that a crash or a time limit ended, and files that cannot be collected.
    """

    num_passed: int = 0
    num_skipped: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    never_repeated: set[str] = field(default_factory=set)


def read_report(lines: Iterable[str]) -> Outcome:
    """Read the lines that `pytest --report-log` wrote."""
    outcome = Outcome()
    passed: set[str] = set()
    for line in lines:
        report = json.loads(line)
        if report.get("$report_type") not in ("TestReport", "CollectReport"):
            continue
        test_id = report["nodeid"]
        phase = report.get("when", "collect")
        if report["outcome"] == "failed":
            outcome.failures.setdefault(test_id, find_cause(report["longrepr"]))
            # pytest-xdist reports the test that its process crashed in under a phase of its own.
            is_ordinary = phase in ("setup", "call", "teardown")
            if not is_ordinary or TIME_LIMIT in json.dumps(report["longrepr"]):
                outcome.never_repeated.add(test_id)
        elif report["outcome"] == "skipped":
            outcome.num_skipped += 1
        elif phase == "call":
            passed.add(test_id)
    # A test can pass and fail in its teardown.
    outcome.num_passed = len(passed - outcome.failures.keys())
    return outcome


def find_cause(failure: Any) -> str:
    """The first line of the message of a failed report's `longrepr`."""
    if isinstance(failure, dict):
        crash = failure.get("reprcrash") or {}
        message = str(crash.get("message", failure))
    else:
        message = str(failure)
    return message.strip().partition("\n")[0]


def choose_repeats(status: int, outcome: Outcome) -> tuple[list[str], str]:
    """Choose the tests to run once more.

    Args:
        status: exit status of the whole run.
        outcome: its report.

    Returns:
        Their ids, and why there are none, "" if there are some or the run was green.
    """
    failed = sorted(outcome.failures)
    elsewhere = [test_id for test_id in failed if not test_id.startswith(REPEATED_FOLDER)]
    if status == 0:
        return [], ""
    if status != TESTS_FAILED:
        return [], f"pytest ended with status {status}"
    if not failed:
        return [], "the report names no failed test"
    if outcome.never_repeated:
        return (
            [],
            f"a crash, a time limit or a file that cannot be read: {', '.join(sorted(outcome.never_repeated))}",
        )
    if elsewhere:
        return [], f"{len(elsewhere)} tests outside {REPEATED_FOLDER} failed"
    if len(failed) > MAX_REPEATED:
        return [], f"{len(failed)} tests failed, more than {MAX_REPEATED}"
    return failed, ""


def run(command: list[str], report: Path) -> tuple[int, Outcome]:
    """Run `scripts/test` with some arguments; returns its exit status and its report."""
    # Not PYTEST_ADDOPTS: tests that run pytest themselves would write over the report.
    environment = os.environ | {"QUADRIGA_TEST_REPORT": str(report)}
    status = subprocess.run(command, cwd=REPOSITORY, env=environment).returncode
    if not report.exists():
        return status, Outcome()
    with report.open(encoding="utf-8") as lines:
        return status, read_report(lines)


def main() -> int:
    """Run the tests, repeat what may be repeated, print the summary; returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        status, outcome = run(["scripts/test"], Path(folder, "all.jsonl"))
        repeats, reason = choose_repeats(status, outcome)
        if reason:
            print(f"no failed test is repeated: {reason}")
        num_flaky = 0
        for number, test_id in enumerate(repeats):
            print(f"repeated alone: {test_id}", flush=True)
            again, _ = run(["scripts/test", "-q", test_id], Path(folder, f"{number}.jsonl"))
            if again == 0:
                num_flaky += 1
                print(f"FLAKY {test_id}: failed first, passed alone; {outcome.failures[test_id]}")
            else:
                print(
                    f"FAILED {test_id}: failed twice, alone with status {again}; {outcome.failures[test_id]}"
                )
    num_failed = len(outcome.failures) - num_flaky
    if num_failed == 0 and repeats:
        status = 0
    counts = [
        f"{outcome.num_passed} passed",
        f"{outcome.num_skipped} skipped",
        f"{num_flaky} flaky",
    ]
    if num_failed or status:
        counts.insert(1, f"{num_failed} failed")
    print(", ".join(counts))
    return status


if __name__ == "__main__":
    sys.exit(main())
