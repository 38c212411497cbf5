# SPDX-License-Identifier: Apache-2.0
"""Limits of CPU time and memory on a computation."""

import signal
import subprocess
import sys
import time

import pytest

from quadriga.rewards.cpu_limit import CPULimitError, cpu_limit
from tests.limits import PROGRAM_S

PROGRAM = """
from quadriga.rewards import cpu_limit
cpu_limit.may_end_process = True
cpu_limit.GRACE_S = 0.1
with cpu_limit.cpu_limit(0.1):
    {}
"""


def test_a_computation_is_interrupted_and_a_wait_is_not():
    handler = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(CPULimitError, match=r"more than 0\.1 s of CPU time"), cpu_limit(0.1):
        while True:
            pass
    with cpu_limit(0.1):
        time.sleep(0.3)
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0
    assert signal.getsignal(signal.SIGVTALRM) == handler


@pytest.mark.parametrize(
    ("body", "end"),
    [
        ("sum(range(10**12))", "SIGPROF"),
        ("try: bytearray(1 << 30)\n    except MemoryError: raise SystemExit", ""),
    ],
)
def test_a_grading_process_ends_where_one_instruction_takes_too_long(body, end):
    status = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body)], timeout=PROGRAM_S
    ).returncode
    assert status == (-signal.Signals[end] if end else 0)
