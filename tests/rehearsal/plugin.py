# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: the whole run has the stand-in for CUDA; the coverage of the lines for accelerators is printed.

    python -m pytest -p tests.rehearsal.plugin tests/rehearsal tests/gpu       # scripts/test --rehearse

With QUADRIGA_REHEARSAL=whole, as that script sets it, the run fails where less than 95 % of the lines were executed, or
where one that was not has no reason in `REASONS`.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rehearsal.lines import LINES, LineCoverage

COVERAGE = LineCoverage()
COVERAGE.start()  # before the package is imported

from tests.rehearsal.stand_in import StandIn  # noqa: E402

LEAST = 0.95
_APART = "SGLang has an environment of its own"
REASONS = {
    ("engines/megatron/cpu.py", ""): "what a CPU answers for a GPU (tests/megatron)",
    ("rollout/sglang/engine.py", ""): _APART,
}
"""By file and a part of the line: why the rehearsal does not execute it."""


NOT_HERE = {
    r"test_memory_grows_with_the_tokens": "measures the memory of a GPU",
    r"test_the_device_computes_what_the_cpu_does\[cut": "5,000 tokens take plain operators minutes",
    r"test_no_logits_are_written": "measures the memory of a GPU",
}
"""Tests of tests/gpu that the stand-in cannot take part in."""
os.environ.setdefault("QUADRIGA_REHEARSAL", "part")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for reason in (reason for name, reason in NOT_HERE.items() if re.match(name, item.name)):
            item.add_marker(pytest.mark.skip(reason=f"on the stand-in: {reason}"))


def pytest_configure(config: pytest.Config) -> None:
    """The stand-in, for the whole run; programs that tests start write what they covered into a folder."""
    os.environ.setdefault(LINES, tempfile.mkdtemp(prefix="qlines-"))
    config.stand_in = StandIn(num_devices=2)
    config.stand_in_entered = config.stand_in.installed()
    config.stand_in_entered.__enter__()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stand_in_entered.__exit__(None, None, None)


@pytest.fixture(autouse=True)
def stand_in(request: pytest.FixtureRequest) -> Iterator[StandIn]:
    """The devices, without counts and findings; a finding that a test leaves behind fails it."""
    owner = request.config.stand_in
    owner.counts.clear()
    owner.findings.clear()
    owner.host_reads.clear()
    owner.here.device = 0
    yield owner
    left = list(owner.findings)
    owner.findings.clear()
    assert not left, f"the stand-in found {len(left)}: {left[:5]}"


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    """The coverage, in lines of the package."""
    COVERAGE.stop()
    COVERAGE.read(Path(os.environ[LINES]))
    terminalreporter.section("lines for accelerators")
    for line in COVERAGE.report(REASONS):
        terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    COVERAGE.stop()
    COVERAGE.read(Path(os.environ[LINES]))
    is_short = COVERAGE.share() < LEAST or COVERAGE.unexplained(REASONS)
    if os.environ.get("QUADRIGA_REHEARSAL") == "whole" and exitstatus == 0 and is_short:
        session.exitstatus = 1
