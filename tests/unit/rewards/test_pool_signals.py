# SPDX-License-Identifier: Apache-2.0
"""Grading processes and the end of their driver: Ctrl-C, SIGKILL, and scripts without a main guard."""

import os
import signal
import subprocess
import sys
import time

import pytest

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
        started.append(subprocess.Popen([*command, *texts], stdout=pipe, stderr=pipe, text=True, env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for(condition):
    give_up = time.monotonic() + 20
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.01)
    assert condition()


def grading_pids(folder):
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_script_without_a_main_guard_runs_once(run):
    output, errors = run("1", "2", "3").communicate(timeout=60)
    assert output.splitlines() == ["script runs", "scores [1.0, 1.0, 1.0]"]
    assert errors == ""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_hung_processes_end_with_their_driver(run, tmp_path, end):
    driver = run("hang", "hang")
    wait_for(lambda: len(grading_pids(tmp_path)) == 2)
    pids = grading_pids(tmp_path)
    assert all(map(is_alive, pids))
    driver.send_signal(end)
    output, errors = driver.communicate(timeout=60)
    wait_for(lambda: not any(map(is_alive, pids)))
    assert output.splitlines() == ["script runs"]
    assert errors.rstrip().endswith("KeyboardInterrupt") if end == signal.SIGINT else errors == ""
