# SPDX-License-Identifier: Apache-2.0
"""The pool of grading processes: what it survives, what it charges to whom, and what it leaves behind."""

import asyncio
import os
import re
import signal
import threading
import time

import pytest

from quadriga.descendants import start_time_of
from quadriga.errors import ConfigError, RewardError
from quadriga.rewards import pool as pool_module
from quadriga.rewards.pool import MAX_CHUNK, GradingPool
from quadriga.rewards.scoring import ScoreFunction
from tests.limits import GRADED_S, SOON_S

FUNCTION = """
import ctypes, gc, os, subprocess, sys, time

COLLECTS_WHILE_LOADED = gc.isenabled()

def compute_score(solution_str, ground_truth, **kwargs):
    print("graders may print: é")
    if solution_str == "collector":
        return {"score": 1, "collects": COLLECTS_WHILE_LOADED and gc.isenabled()}
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
    path.write_text(FUNCTION, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def pool(file):
    """Graders of a command whose standard output takes ASCII alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONIOENCODING", "ascii")
        with GradingPool(ScoreFunction(file), num_workers=2) as pool:
            yield pool


GYM = """
import signal

def get_score_answer_fn(task):
    def score(answer, entry):
        if answer == "stuck":
            signal.raise_signal(signal.SIGPROF)
        return 0.25
    return score
"""


def test_a_process_that_was_frozen_between_batches_takes_no_sample_with_it(file):
    with GradingPool(ScoreFunction(file), num_workers=1) as alone:
        (first,) = alone.grade(rows("1"), timeout_s=60)
        os.kill(first.extra["pid"], signal.SIGSTOP)
        large = rows("2")[0] | {"ground_truth": "x" * (4 << 20)}
        (outcome,) = alone.grade([large], timeout_s=2)
    assert (outcome.score, outcome.error) == (2.0, "")
    assert outcome.extra["pid"] != first.extra["pid"]


def test_a_built_in_grader_that_is_ended_at_its_cpu_limit_grades_an_empty_response(
    tmp_path, monkeypatch
):
    (tmp_path / "reasoning_gym.py").write_text(GYM)
    monkeypatch.syspath_prepend(tmp_path)
    facts = {
        "data_source": "reasoning_gym/any",
        "ground_truth": "1",
        "extra_info": {"entry": {"answer": "1"}},
    }
    with GradingPool(ScoreFunction(), num_workers=1) as built_in:
        outcomes = built_in.grade(
            [facts | {"solution_str": text} for text in ("1", "stuck", "2")], timeout_s=60
        )
    assert [outcome.score for outcome in outcomes] == [0.25, 0.25, 0.25]
    assert [outcome.error for outcome in outcomes] == ["", "", ""]
    assert "limit of CPU time" in outcomes[1].extra["ungradable"]
    assert "ungradable" not in outcomes[0].extra | outcomes[2].extra


def rows(*texts):
    return [
        {"data_source": "x", "solution_str": str(t), "ground_truth": "", "extra_info": {}}
        for t in texts
    ]


def is_alive(pid):
    return start_time_of(pid) != b""


def assert_ended(pids):
    give_up = time.monotonic() + SOON_S
    while any(is_alive(pid) for pid in pids) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not [pid for pid in pids if is_alive(pid)]


def test_outcomes_come_in_order_from_kept_processes(pool):
    first = pool.grade(rows(*range(100)), timeout_s=GRADED_S)
    assert [outcome.score for outcome in first] == list(range(100))
    second = pool.grade(rows(*range(100)), timeout_s=GRADED_S)
    # On a busy machine one of the two may have done all the work of a round.
    assert len({outcome.extra["pid"] for outcome in first + second}) <= 2
    assert pool.grade([], timeout_s=GRADED_S) == []


def test_the_garbage_collector_is_on_for_users_code(pool):
    (outcome,) = pool.grade(rows("collector"), timeout_s=GRADED_S)
    assert outcome.extra["collects"]


def test_a_hung_or_dead_sample_is_charged_alone(pool):
    pool.grade(rows(*range(200)), timeout_s=GRADED_S)  # quick samples make the chunks grow
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
    assert pool.grade(rows(5), timeout_s=GRADED_S)[0].score == 5


def test_leaving_python_is_an_error_of_the_sample_only(pool):
    outcomes = pool.grade(rows("quit", 1), timeout_s=GRADED_S)
    assert [outcome.kind for outcome in outcomes] == ["raised", "graded"]
    assert "SystemExit: enough" in outcomes[0].error


def test_too_many_failures_end_the_round_early(pool):
    outcomes = pool.grade(rows(*["sleep"] * 200), timeout_s=0.1, max_failures=3)
    kinds = [outcome.kind for outcome in outcomes]
    assert 4 <= kinds.count("timeout") <= 5
    assert kinds.count("skipped") == 200 - kinds.count("timeout")
    assert pool.grade(rows(5), timeout_s=GRADED_S)[0].score == 5


def test_a_process_that_was_killed_between_rounds_costs_no_sample(pool):
    (outcome,) = pool.grade(rows(1), timeout_s=GRADED_S)
    os.kill(outcome.extra["pid"], 9)
    assert_ended([outcome.extra["pid"]])
    assert [o.score for o in pool.grade(rows(1, 2, 3), timeout_s=GRADED_S)] == [1, 2, 3]


@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_process_that_dies_before_it_has_a_sample_costs_none(tmp_path, prefix):
    """It was stopped before, as one is that is being killed and still looks alive."""
    (tmp_path / "reward.py").write_text(
        FUNCTION.replace("def compute_score", f"{prefix}def compute_score")
    )
    with GradingPool(ScoreFunction(str(tmp_path / "reward.py")), num_workers=1) as pool:
        (outcome,) = pool.grade(rows(1), timeout_s=GRADED_S)
        os.kill(outcome.extra["pid"], signal.SIGSTOP)
        begun = pool.begin(rows(1), timeout_s=GRADED_S)
        time.sleep(0.2)
        os.kill(outcome.extra["pid"], signal.SIGKILL)
        (again,) = begun.result()
        assert (again.score, again.error) == (1, "") and again.extra["pid"] != outcome.extra["pid"]


def test_nothing_is_left_after_close(file):
    pool = GradingPool(ScoreFunction(file), num_workers=2)
    outcomes = pool.grade(rows(1, 2, 3, 4, "child"), timeout_s=GRADED_S)
    pids = {outcome.extra["pid"] for outcome in outcomes}
    assert all(map(is_alive, pids))
    pool.close()
    assert_ended(pids)
    pool.close()
    with pytest.raises(RewardError, match="closed"):
        pool.grade(rows(1), timeout_s=GRADED_S)


def test_nothing_is_left_of_a_pool_that_was_forgotten(file):
    pool = GradingPool(ScoreFunction(file), num_workers=1)
    pid = pool.grade(rows(1), timeout_s=GRADED_S)[0].extra["pid"]
    del pool
    assert_ended([pid])


def test_close_ends_a_round_under_way_in_another_thread(file):
    pool = GradingPool(ScoreFunction(file), num_workers=1)
    pool.start()
    errors = []
    grading = pool.begin(rows("sleep"), timeout_s=GRADED_S)

    def grade():
        try:
            grading.result()
        except RewardError as error:
            errors.append(error)

    thread = threading.Thread(target=grade)
    thread.start()
    while "1 in progress" not in grading.progress():
        time.sleep(0.01)
    # However busy the machine is: the seconds are not compared.
    assert re.fullmatch(
        r"0 of 1 graded, 0 failed, 1 in progress, the longest for \d+ s \(limit 60 s\)",
        grading.progress(),
    )
    pool.close()
    thread.join(timeout=SOON_S)
    assert [str(error) for error in errors] == [
        "grading pool: got close(), expected samples to be graded first."
    ]


def test_a_grading_process_loads_no_torch(pool):
    (outcome,) = pool.grade(rows("modules"), timeout_s=GRADED_S)
    assert "quadriga.rewards.process" in outcome.extra["modules"]
    heavy = {"torch", "transformers", "numpy", "pydantic", "tensordict", "ray", "math_verify"}
    assert not heavy & set(outcome.extra["modules"])


def test_a_file_that_cannot_be_used_is_an_error_at_start(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def compute_score(text):\n    return 1\n")
    with GradingPool(ScoreFunction(str(path)), num_workers=1) as pool:
        with pytest.raises(ConfigError, match=r"compute_score\(text\)"):
            pool.start()
        with pytest.raises(ConfigError, match=r"compute_score\(text\)"):
            pool.grade(rows(1), timeout_s=GRADED_S)


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
        pool.grade([{**rows(1)[0], "data_source": "nobody/knows"}], timeout_s=GRADED_S)


def test_a_round_that_was_begun_goes_on_by_itself(file):
    with GradingPool(ScoreFunction(file), num_workers=2) as pool:
        begun = pool.begin(rows(*range(20)), timeout_s=GRADED_S)
        deadline = time.monotonic() + SOON_S
        while (
            begun.progress() != "20 of 20 graded, 0 failed, 0 in progress"
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        assert begun.progress() == "20 of 20 graded, 0 failed, 0 in progress"
        assert [outcome.score for outcome in begun.result()] == list(range(20))


def test_a_round_that_is_cancelled_leaves_nothing_and_the_pool_goes_on(file):
    with GradingPool(ScoreFunction(file), num_workers=2) as pool:
        before = {outcome.extra["pid"] for outcome in pool.grade(rows(1, 2, 3), timeout_s=GRADED_S)}
        begun = pool.begin(rows("sleep", "hang", "hang"), timeout_s=GRADED_S)
        while "2 in progress" not in begun.progress():
            time.sleep(0.01)
        begun.cancel()
        assert_ended(before)
        assert begun.progress() == "0 of 3 graded, 0 failed, 0 in progress"
        with pytest.raises(RewardError, match=r"cancel\(\)"):
            begun.result()
        (again,) = pool.grade(rows(5), timeout_s=GRADED_S)
        assert again.score == 5 and again.extra["pid"] not in before


def test_a_round_may_be_cancelled_before_its_turn(file):
    """It waits for another one that is under way; that one is not touched."""
    with GradingPool(ScoreFunction(file), num_workers=1) as pool:
        pool.start()
        first = pool.begin(rows("sleep"), timeout_s=1.0)
        while "1 in progress" not in first.progress():
            time.sleep(0.01)
        second = pool.begin(rows("hang"), timeout_s=GRADED_S)
        second.cancel()
        assert [outcome.kind for outcome in first.result()] == ["timeout"]


def test_what_a_grader_started_ends_with_its_process(tmp_path):
    """Where the sample is too late, where its process dies, and where the round is cancelled."""
    path = tmp_path / "reward.py"
    path.write_text(
        "import os, pathlib, subprocess, time\n"
        "def compute_score(solution_str, **kwargs):\n"
        "    child = subprocess.Popen(['sleep', '60'])\n"
        "    (pathlib.Path(__file__).parent / solution_str).write_text(str(child.pid))\n"
        "    os._exit(3) if solution_str == 'die' else time.sleep(60)\n"
    )
    with GradingPool(ScoreFunction(str(path)), num_workers=2) as pool:
        outcomes = pool.grade(rows("die", "late"), timeout_s=1.0)
        assert [outcome.kind for outcome in outcomes] == ["died", "timeout"]
        begun = pool.begin(rows("cancelled"), timeout_s=GRADED_S)
        deadline = time.monotonic() + SOON_S
        while not (tmp_path / "cancelled").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        begun.cancel()
        assert_ended([int((tmp_path / name).read_text()) for name in ("die", "late", "cancelled")])


def test_one_call_grades_all_samples_of_a_batch_function(tmp_path):
    """One that hangs is charged to every sample, after the time limit of all of them together."""
    path = tmp_path / "reward.py"
    path.write_text(
        "import time\n"
        "def compute_score(solution_strs, **kwargs):\n"
        "    time.sleep(60 * ('hang' in solution_strs))\n"
        "    return [len(text) for text in solution_strs]\n"
    )
    with GradingPool(ScoreFunction(str(path), is_batch=True), num_workers=1) as pool:
        for texts in (["ab"], ["ab", "abc"], []):
            assert [outcome.score for outcome in pool.grade(rows(*texts), timeout_s=GRADED_S)] == [
                *map(len, texts)
            ]
        outcomes = pool.grade(rows("a", "hang"), timeout_s=0.2)
        assert [outcome.kind for outcome in outcomes] == ["timeout"] * 2
        assert "no score within 0.4 s" in outcomes[0].error


def test_rounds_of_an_event_loop_are_graded_side_by_side(file):
    async def grade(pool):
        rounds = [pool.begin(rows(text), timeout_s=1.0) for text in ("hang", 1, "raise", 2)]
        await asyncio.gather(*(asyncio.wrap_future(round_.done) for round_ in rounds))
        return [round_.result()[0] for round_ in rounds]

    with GradingPool(ScoreFunction(file), num_workers=2) as pool:
        outcomes = asyncio.run(grade(pool))
    assert [outcome.kind for outcome in outcomes] == ["timeout", "graded", "raised", "graded"]


def test_a_result_that_is_waited_for_ends_when_the_round_is_cancelled(file):
    """Other rounds in the queue are graded all the same."""
    with GradingPool(ScoreFunction(file), num_workers=1) as pool:
        cancelled = pool.begin(rows(*["sleep"] * 50), timeout_s=GRADED_S)
        after = pool.begin(rows(*range(50)), timeout_s=GRADED_S)
        threading.Timer(0.3, cancelled.cancel).start()
        with pytest.raises(RewardError, match=r"grading: got cancel\(\)"):
            cancelled.result()
        assert [outcome.score for outcome in after.result()] == list(range(50))


COROUTINE = """
import asyncio, os, time

most = now = 0

async def compute_score(solution_str, **kwargs):
    global most, now
    now += 1
    most = max(most, now)
    try:
        if solution_str == "block":
            time.sleep(60)
        if solution_str == "die":
            os._exit(7)
        if solution_str == "raise":
            raise KeyError("no such answer")
        await asyncio.sleep({"late": 60, "meet": 0.5}.get(solution_str, 0))
        return {"score": float(solution_str.replace("meet", "1")), "most": most, "pid": os.getpid()}
    finally:
        now -= 1
"""


@pytest.fixture(scope="module")
def coroutines(tmp_path_factory):
    path = tmp_path_factory.mktemp("coroutine") / "reward.py"
    path.write_text(COROUTINE)
    with GradingPool(ScoreFunction(str(path)), num_workers=1) as pool:
        yield pool


def test_a_coroutine_function_is_awaited_for_many_samples_at_a_time(coroutines):
    """Of one round and of several, and never for more than the limit."""
    outcomes = coroutines.grade(rows(*["meet"] * 100), timeout_s=GRADED_S)
    assert [outcome.score for outcome in outcomes] == [1] * 100
    assert 32 < max(outcome.extra["most"] for outcome in outcomes) <= MAX_CHUNK
    rounds = [coroutines.begin(rows("meet"), timeout_s=GRADED_S) for _ in range(20)]
    assert [round_.result()[0].score for round_ in rounds] == [1] * 20
    assert len({round_.result()[0].extra["pid"] for round_ in rounds}) == 1


def test_each_sample_of_a_coroutine_function_has_its_own_limit(coroutines):
    """One that is late or raises ends alone, in a process that goes on."""
    before = coroutines.grade(rows(1), timeout_s=GRADED_S)[0].extra["pid"]
    outcomes = coroutines.grade(rows("late", 1, "raise", 2), timeout_s=1.0)
    assert [outcome.kind for outcome in outcomes] == ["timeout", "graded", "raised", "graded"]
    assert outcomes[0].error == "no score within 1 s (reward_model.timeout_s)"
    assert outcomes[2].error.count("File ") == 1
    assert {outcomes[1].extra["pid"], outcomes[3].extra["pid"]} == {before}


def test_the_sample_that_ends_or_blocks_its_process_is_found_among_many(coroutines, monkeypatch):
    """The others are graded again, though their process died under them."""
    monkeypatch.setattr(pool_module, "_BLOCKED_S", 0.5)
    texts = [str(number) for number in range(20)]
    texts[7], texts[12] = "die", "block"
    outcomes = coroutines.grade(rows(*texts), timeout_s=2.0)
    kinds = {row: outcome.kind for row, outcome in enumerate(outcomes) if outcome.kind != "graded"}
    assert kinds == {7: "died", 12: "timeout"}
    assert "it blocks its event loop" in outcomes[12].error
    assert [outcome.score for outcome in outcomes] == [
        0 if row in kinds else row for row in range(20)
    ]


def test_a_round_of_a_coroutine_function_that_is_cancelled_costs_no_other(coroutines):
    slow, other = (
        coroutines.begin(rows("late"), timeout_s=GRADED_S),
        coroutines.begin(rows("meet"), timeout_s=GRADED_S),
    )
    while not slow.processes:
        time.sleep(0.01)
    slow.cancel()
    assert not slow.processes
    assert other.result()[0].score == 1


def test_a_coroutine_of_another_function_is_awaited(tmp_path):
    """A lambda around a coroutine function is none itself."""
    path = tmp_path / "reward.py"
    body = "async def own(text):\n    return len(text)\n\n\n"
    path.write_text(f"{body}compute_score = lambda solution_str, **_: own(solution_str)\n")
    with GradingPool(ScoreFunction(str(path)), num_workers=1) as pool:
        assert pool.grade(rows("four"), timeout_s=GRADED_S)[0].score == 4
