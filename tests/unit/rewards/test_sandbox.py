# SPDX-License-Identifier: Apache-2.0
"""The pool of grading processes: what it survives, what it charges to whom, and what it leaves behind."""

import os
import threading
import time

import pytest

from quadriga.errors import ConfigError, RewardError
from quadriga.rewards.custom import ScoreFunction
from quadriga.rewards.sandbox import GradingPool

FUNCTION = """
import ctypes, os, subprocess, sys, time

def compute_score(solution_str, ground_truth, **kwargs):
    print("graders may print")
    if solution_str == "hang":
        while True:
            pass
    if solution_str == "sleep":
        time.sleep(60)
    if solution_str == "die":
        os._exit(7)
    if solution_str == "crash":
        ctypes.string_at(0)
    if solution_str == "quit":
        sys.exit("enough")
    if solution_str == "raise":
        raise KeyError("no such answer")
    if solution_str == "child":
        return {"score": 1, "pid": subprocess.Popen(["sleep", "60"]).pid}
    if solution_str == "modules":
        return {"score": 1, "modules": sorted(sys.modules), "pid": os.getpid()}
    return {"score": float(solution_str), "pid": os.getpid()}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("function") / "reward.py"
    path.write_text(FUNCTION)
    return str(path)


@pytest.fixture(scope="module")
def pool(file):
    with GradingPool(ScoreFunction(file), num_workers=2) as pool:
        yield pool


def rows(*texts):
    return [{"data_source": "x", "solution_str": str(t), "ground_truth": "", "extra_info": {}} for t in texts]


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_ended(pids):
    give_up = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not [pid for pid in pids if is_alive(pid)]


def test_outcomes_come_in_order_from_kept_processes(pool):
    first = pool.grade(rows(*range(100)), timeout_s=10)
    assert [outcome.score for outcome in first] == list(range(100))
    second = pool.grade(rows(*range(100)), timeout_s=10)
    # On a busy machine one of the two may have done all the work of a round.
    assert len({outcome.extra["pid"] for outcome in first + second}) <= 2
    assert pool.grade([], timeout_s=10) == []


def test_a_hung_or_dead_sample_is_charged_alone(pool):
    pool.grade(rows(*range(200)), timeout_s=10)  # quick samples make the chunks grow
    texts = [str(n) for n in range(60)]
    texts[10], texts[20], texts[30], texts[40] = "hang", "die", "crash", "raise"
    outcomes = pool.grade(rows(*texts), timeout_s=1.0)
    kinds = {row: outcome.kind for row, outcome in enumerate(outcomes) if outcome.kind != "graded"}
    assert kinds == {10: "timeout", 20: "died", 30: "died", 40: "raised"}
    assert [o.score for o in outcomes] == [0 if row in kinds else row for row in range(60)]
    assert "no score within 1 s" in outcomes[10].error
    assert "exit status 7" in outcomes[20].error
    assert "SIGSEGV" in outcomes[30].error
    assert outcomes[40].error.endswith("KeyError: 'no such answer'")
    assert outcomes[40].error.count("File ") == 1
    assert pool.grade(rows(5), timeout_s=10)[0].score == 5


def test_leaving_python_is_an_error_of_the_sample_only(pool):
    outcomes = pool.grade(rows("quit", 1), timeout_s=10)
    assert [outcome.kind for outcome in outcomes] == ["raised", "graded"]
    assert "SystemExit: enough" in outcomes[0].error


def test_too_many_failures_end_the_round_early(pool):
    outcomes = pool.grade(rows(*["sleep"] * 200), timeout_s=0.1, max_failures=3)
    kinds = [outcome.kind for outcome in outcomes]
    assert 4 <= kinds.count("timeout") <= 5
    assert kinds.count("skipped") == 200 - kinds.count("timeout")
    assert pool.grade(rows(5), timeout_s=10)[0].score == 5


def test_a_process_that_was_killed_between_rounds_costs_no_sample(pool):
    (outcome,) = pool.grade(rows(1), timeout_s=10)
    os.kill(outcome.extra["pid"], 9)
    assert_ended([outcome.extra["pid"]])
    assert [o.score for o in pool.grade(rows(1, 2, 3), timeout_s=10)] == [1, 2, 3]


def test_nothing_is_left_after_close(file):
    pool = GradingPool(ScoreFunction(file), num_workers=2)
    outcomes = pool.grade(rows(1, 2, 3, 4, "child"), timeout_s=10)
    pids = {outcome.extra["pid"] for outcome in outcomes}
    assert all(map(is_alive, pids))
    pool.close()
    assert_ended(pids)
    pool.close()
    with pytest.raises(RewardError, match="closed"):
        pool.grade(rows(1), timeout_s=10)


def test_nothing_is_left_of_a_pool_that_was_forgotten(file):
    pool = GradingPool(ScoreFunction(file), num_workers=1)
    pid = pool.grade(rows(1), timeout_s=10)[0].extra["pid"]
    del pool
    assert_ended([pid])


def test_close_ends_a_round_under_way_in_another_thread(file):
    pool = GradingPool(ScoreFunction(file), num_workers=1)
    pool.start()
    errors = []

    def grade():
        try:
            pool.grade(rows("sleep"), timeout_s=60)
        except RewardError as error:
            errors.append(error)

    thread = threading.Thread(target=grade)
    thread.start()
    while "1 in work" not in pool.progress():
        time.sleep(0.01)
    assert pool.progress().startswith("0 of 1 graded, 0 failed, 1 in work, the longest for 0 s (limit 60 s)")
    pool.close()
    thread.join(timeout=20)
    assert len(errors) == 1


def test_a_grading_process_loads_no_torch(pool):
    (outcome,) = pool.grade(rows("modules"), timeout_s=10)
    assert "quadriga.rewards.grading_process" in outcome.extra["modules"]
    heavy = {"torch", "transformers", "numpy", "pydantic", "tensordict", "ray", "math_verify"}
    assert not heavy & set(outcome.extra["modules"])


def test_a_file_that_cannot_be_used_is_an_error_at_start(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def compute_score(text):\n    return 1\n")
    with GradingPool(ScoreFunction(str(path)), num_workers=1) as pool:
        with pytest.raises(ConfigError, match=r"compute_score\(text\)"):
            pool.start()
        with pytest.raises(ConfigError, match=r"compute_score\(text\)"):
            pool.grade(rows(1), timeout_s=10)


def test_a_file_that_kills_its_process_is_an_error_at_start(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("import os\nos._exit(9)\n")
    with (
        GradingPool(ScoreFunction(str(path)), num_workers=1) as pool,
        pytest.raises(RewardError, match="got exit status 9, expected a process that starts"),
    ):
        pool.start()


def test_an_unknown_data_source_stops_at_once():
    with (
        GradingPool(ScoreFunction(), num_workers=1) as pool,
        pytest.raises(RewardError, match="'nobody/knows'"),
    ):
        pool.grade([{**rows(1)[0], "data_source": "nobody/knows"}], timeout_s=10)


def test_a_round_that_was_begun_goes_on_by_itself(file):
    with GradingPool(ScoreFunction(file), num_workers=2) as pool:
        begun = pool.begin(rows(*range(20)), timeout_s=10)
        deadline = time.monotonic() + 20
        while pool.progress() != "nothing is being graded" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [outcome.score for outcome in begun.result()] == list(range(20))


def test_a_round_that_is_cancelled_leaves_nothing_and_the_pool_goes_on(file):
    with GradingPool(ScoreFunction(file), num_workers=2) as pool:
        before = {outcome.extra["pid"] for outcome in pool.grade(rows(1, 2, 3), timeout_s=10)}
        begun = pool.begin(rows("sleep", "hang", "hang"), timeout_s=60)
        while "2 in work" not in pool.progress():
            time.sleep(0.01)
        begun.cancel()
        assert_ended(before)
        assert pool.progress() == "nothing is being graded"
        with pytest.raises(RewardError, match=r"cancel\(\)"):
            begun.result()
        (again,) = pool.grade(rows(5), timeout_s=10)
        assert again.score == 5 and again.extra["pid"] not in before


def test_a_round_may_be_cancelled_before_its_turn(file):
    """It waits for another one that is under way; that one is not touched."""
    with GradingPool(ScoreFunction(file), num_workers=1) as pool:
        pool.start()
        first = pool.begin(rows("sleep"), timeout_s=1.0)
        while "1 in work" not in pool.progress():
            time.sleep(0.01)
        second = pool.begin(rows("hang"), timeout_s=60)
        second.cancel()
        assert [outcome.kind for outcome in first.result()] == ["timeout"]
