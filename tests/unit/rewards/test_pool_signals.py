# SPDX-License-Identifier: Apache-2.0
"""Grading processes and the end of their driver: Ctrl-C, SIGKILL, and scripts without a main guard."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from quadriga.descendants import _control_group_of, start_time_of
from quadriga.rewards.pool import GradingPool
from quadriga.rewards.process import MINUTE_BYTES
from quadriga.rewards.scoring import ScoreFunction
from tests.limits import GRADED_S, PROGRAM_S, SOON_S

REWARD = """
import os, re, sys

def compute_score(solution_str, **kwargs):
    with open(os.path.join(os.path.dirname(__file__), f"pid-{os.getpid()}"), "w"):
        pass
    if solution_str == "hang":
        re.match(r"(a+)+$", "a" * 60 + "b")  # holds the interpreter in C for ages
    return 1.0
"""

# No main guard: a start method that runs the script again in each process would never come to an end.
SCRIPT = """
import signal, sys
from quadriga.rewards.scoring import ScoreFunction
from quadriga.rewards.pool import GradingPool

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with Ctrl-C ignored
print("script runs", flush=True)
pool = GradingPool(ScoreFunction(sys.argv[1]), num_workers=2)
row = {"data_source": "x", "ground_truth": "", "extra_info": {}}
outcomes = pool.grade([row | {"solution_str": text} for text in sys.argv[2:]], timeout_s=100)
print("scores", [outcome.score for outcome in outcomes], flush=True)
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "reward.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    started = []

    def start(*texts):
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(
                [*command, *texts], stdout=pipe, stderr=pipe, text=True, env=environment
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for(condition):
    give_up = time.monotonic() + SOON_S
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.01)
    assert condition()


def grading_pids(folder):
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def is_alive(pid):
    return start_time_of(pid) != b""


def test_a_script_without_a_main_guard_runs_once(run):
    output, errors = run("1", "2", "3").communicate(timeout=PROGRAM_S)
    assert output.splitlines() == ["script runs", "scores [1.0, 1.0, 1.0]"]
    assert errors == ""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_hung_processes_end_with_their_driver(run, tmp_path, end):
    driver = run("hang", "hang")
    wait_for(lambda: len(grading_pids(tmp_path)) == 2)
    pids = grading_pids(tmp_path)
    assert all(map(is_alive, pids))
    driver.send_signal(end)
    output, errors = driver.communicate(timeout=PROGRAM_S)
    wait_for(lambda: not any(map(is_alive, pids)))
    assert output.splitlines() == ["script runs"]
    assert errors.rstrip().endswith("KeyboardInterrupt") if end == signal.SIGINT else errors == ""


MARK = f"300.{os.getpid()}"  # seconds to sleep, by which the processes of this test run are known
HOSTILE = f"""
import os, signal, subprocess, sys, time

def compute_score(solution_str, ground_truth, **kwargs):
    subprocess.Popen(["sleep", "{MARK}"], start_new_session=True, env={{}}, close_fds=False)
    if os.fork() == 0:
        os.setsid()
        subprocess.run(["sleep", "{MARK}"], env={{}})
        os._exit(0)
    if solution_str == "fork":
        os.fork()  # both come back
    if solution_str == "stop":
        os.kill(os.getppid(), signal.SIGSTOP)
    if solution_str == "orphan":
        os.kill(os.getppid(), signal.SIGKILL)
    if solution_str in ("hang", "stop", "orphan"):
        time.sleep(300)
    return 1.0
"""


def sleepers():
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry.name}/cmdline", "rb") as file:
                found += [int(entry.name)] if MARK.encode() in file.read().split(b"\0") else []
    return found


def assert_no_sleepers():
    wait_for(lambda: not sleepers())
    assert not sleepers()


def has_writable_groups():
    own = _control_group_of(0)
    return own is not None and os.access(own.parent, os.W_OK)


@pytest.mark.parametrize("text", ["fork", "hang", "stop", "orphan"])
def test_sessions_of_their_own_end_with_the_grading_process(tmp_path, text):
    """Also where the score function has stopped or killed the supervisor, as far as there are control groups."""
    if text == "orphan" and not has_writable_groups():
        pytest.skip("no cgroup v2 that can be written here")
    (tmp_path / "reward.py").write_text(HOSTILE)
    rows = [
        {"data_source": "x", "ground_truth": "", "extra_info": {}, "solution_str": one}
        for one in (text, "1")
    ]
    with GradingPool(ScoreFunction(str(tmp_path / "reward.py")), num_workers=1) as pool:
        outcomes = pool.grade(rows, timeout_s=2.0)
    # Without its supervisor, what it has started keeps its pipe open: the time limit finds it.
    kinds = {"fork": "graded", "orphan": "timeout"}
    assert [outcome.kind for outcome in outcomes] == [kinds.get(text, "timeout"), "graded"]
    assert_no_sleepers()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_sessions_of_their_own_end_with_the_driver(run, tmp_path, end):
    (tmp_path / "reward.py").write_text(HOSTILE)
    driver = run("hang", "hang")
    wait_for(lambda: len(sleepers()) == 4)
    driver.send_signal(end)
    driver.communicate(timeout=PROGRAM_S)
    assert_no_sleepers()


def test_what_score_functions_print_is_bounded_and_counted(tmp_path, capsys):
    (tmp_path / "reward.py").write_text(
        "import os, subprocess\n"
        "def compute_score(solution_str, **kwargs):\n"
        "    print('x' * 5_000_000)\n"
        "    os.write(2, b'y' * 1_000_000)\n"
        "    subprocess.run(['head', '-c', '1000000', '/dev/zero'])\n"
        "    return 1.0\n"
    )
    rows = [{"data_source": "x", "ground_truth": "", "extra_info": {}, "solution_str": "1"}] * 24
    with GradingPool(ScoreFunction(str(tmp_path / "reward.py")), num_workers=2) as pool:
        outcomes = pool.grade(rows, timeout_s=GRADED_S)
    assert [outcome.score for outcome in outcomes] == [1.0] * 24
    shown = capsys.readouterr().out
    assert len(shown) <= MINUTE_BYTES + 200
    left_out = int(re.search(r"printed ([\d,]+) more bytes", shown)[1].replace(",", ""))
    assert left_out == 24 * 7_000_001 - shown.count("x" * 4096) * 4096
