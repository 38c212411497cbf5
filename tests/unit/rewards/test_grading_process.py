# SPDX-License-Identifier: Apache-2.0
"""What a grading process says over its pipe; the process is a thread here."""

import threading
from multiprocessing import Pipe

import pytest

from quadriga.errors import RewardError
from quadriga.rewards import process as grading_process
from quadriga.rewards.process import BEGUN, GRADED, LOADING, READY, UNUSABLE
from quadriga.rewards.scoring import ScoreFunction


@pytest.fixture
def connection():
    ours, theirs = Pipe()

    def serve():
        # The end of the pipe ends the loop; the program's `main` treats it the same way.
        with pytest.raises(EOFError):
            grading_process._serve(theirs)

    thread = threading.Thread(target=serve)
    thread.start()
    yield ours
    ours.close()
    thread.join()


def row(data_source="openai/gsm8k", text="#### 5"):
    return {"data_source": data_source, "solution_str": text, "ground_truth": "5", "extra_info": {}}


def test_a_library_is_announced_once_so_that_its_import_costs_no_samples_time(connection):
    connection.send(ScoreFunction())
    assert connection.recv()[0] == READY
    rows = [row(), row(text="#### 6"), row("quadriga/largest")]
    connection.send([(number, 1.0, one) for number, one in enumerate(rows)])
    messages = [connection.recv() for _ in range(8)]
    assert [kind for kind, _ in messages] == [
        BEGUN,
        LOADING,
        READY,
        GRADED,
        GRADED,
        LOADING,
        READY,
        GRADED,
    ]
    graded = [value for kind, value in messages if kind == GRADED]
    assert [(number, outcome.score) for number, outcome in graded] == [(0, 1.0), (1, 0.0), (2, 1.0)]


def test_a_batch_function_answers_a_list(connection, tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "def compute_score(solution_strs, **kwargs):\n    return [len(text) for text in solution_strs]\n"
    )
    connection.send(ScoreFunction(str(path), is_batch=True))
    assert connection.recv()[0] == READY
    lists = {
        "data_sources": ["x"] * 2,
        "solution_strs": ["a", "abc"],
        "ground_truths": [""] * 2,
        "extra_infos": [{}] * 2,
    }
    connection.send([(7, 1.0, lists)])
    assert connection.recv()[0] == BEGUN
    kind, (number, outcomes) = connection.recv()
    assert (kind, number, [outcome.score for outcome in outcomes]) == (GRADED, 7, [1.0, 3.0])


def test_an_unknown_data_source_is_no_outcome(monkeypatch):
    ours, theirs = Pipe()
    ours.send(ScoreFunction())
    ours.send([(0, 1.0, row("nobody/knows"))])
    grading_process._serve(theirs)
    assert ours.recv()[0] == READY
    assert ours.recv()[0] == BEGUN
    kind, error = ours.recv()
    assert kind == UNUSABLE
    assert isinstance(error, RewardError)
    assert "nobody/knows" in str(error)
