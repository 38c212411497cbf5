# SPDX-License-Identifier: Apache-2.0
"""The record of a run is exact, whole after a kill, and free of what a continued run does again."""

import errno
import json
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.errors import DataError, QuadrigaError
from quadriga.observe.tracking.base import RunFacts
from quadriga.observe.tracking.jsonl import JsonlBackend, read_metrics


def record(run, steps) -> None:
    backend = JsonlBackend(run)
    for step in steps:
        backend.log({"x": step + 0.1}, step)
    backend.close()


@settings(deadline=None, max_examples=25)
@given(st.dictionaries(st.text(max_size=8).filter(lambda name: name != "step"), st.floats()))
def test_every_number_comes_back_bit_for_bit(tmp_path_factory, metrics):
    directory = tmp_path_factory.mktemp("run")
    backend = JsonlBackend(RunFacts("p", "e", {}, directory))
    backend.log(metrics, 3)
    back = read_metrics(directory / "metrics.jsonl")[3]
    assert {
        name: np.float64(value).tobytes() for name, value in back.items() if not math.isnan(value)
    } == {
        name: np.float64(value).tobytes()
        for name, value in metrics.items()
        if not math.isnan(value)
    }
    assert {name for name, value in back.items() if math.isnan(value)} == {
        name for name, value in metrics.items() if math.isnan(value)
    }
    backend.close()


def test_every_line_is_strict_json_and_on_disk_before_the_next(make_run):
    run = make_run()
    backend = JsonlBackend(run)
    backend.log({"loss": math.nan, "top": -math.inf}, 1)
    line = (run.directory / "metrics.jsonl").read_text()
    assert line == '{"step": 1, "loss": "NaN", "top": "-Infinity"}\n'


def test_samples_keep_their_whole_text_and_numpy_values(make_run, samples):
    run = make_run()
    backend = JsonlBackend(run)
    samples[0] |= {
        "score": np.float32(0.5),
        "ids": np.array([1, 2]),
        "note": {"x": math.inf},
        "shape": run,
    }
    backend.log_samples(samples, 4)
    first, second = map(json.loads, (run.directory / "samples.jsonl").read_text().splitlines())
    assert first["score"] == 0.5 and first["ids"] == [1, 2] and first["note"] == {"x": "Infinity"}
    assert first["input"] == "Which is | the\nlargest?" and first["step"] == 4
    assert first["shape"] == str(run)
    assert second["output"] == "7"


def test_a_continued_run_drops_what_it_does_again_and_a_half_written_line(make_run):
    run = make_run()
    record(run, range(1, 6))
    path = run.directory / "metrics.jsonl"
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:3])
    with path.open("ab") as file:
        file.write(b'{"step": 6, "x": 6')
    record(make_run(resume_step=3), [])
    assert path.read_bytes() == kept
    record(make_run(resume_step=3), [4, 5])
    assert list(read_metrics(path)) == [1, 2, 3, 4, 5]
    assert [file.name for file in run.directory.iterdir()] == ["metrics.jsonl"]


def test_a_killed_and_continued_run_leaves_the_same_bytes_as_one_left_alone(tmp_path):
    alone, killed = (RunFacts("p", "e", {}, tmp_path / name) for name in ("alone", "killed"))
    for run in (alone, killed):
        run.directory.mkdir()
    record(alone, range(1, 7))
    record(killed, range(1, 6))
    record(RunFacts("p", "e", {}, killed.directory, resume_step=4), range(5, 7))
    assert (alone.directory / "metrics.jsonl").read_bytes() == (
        killed.directory / "metrics.jsonl"
    ).read_bytes()


def test_a_run_that_is_restarted_from_its_beginning_goes_on_in_its_file(make_run):
    """The validation before the first step, which is step 0, stands there once too."""
    run = make_run()
    record(run, range(3))
    record(make_run(is_restart=True), range(4))
    assert [file.name for file in run.directory.iterdir()] == ["metrics.jsonl"]
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]


def test_a_new_run_in_an_old_directory_keeps_the_old_record(make_run):
    for step in (1, 2, 3):
        record(make_run(), [step])
    directory = make_run().directory
    found = {file.name: list(read_metrics(file)) for file in directory.iterdir()}
    assert found == {"metrics.1.jsonl": [1], "metrics.2.jsonl": [2], "metrics.jsonl": [3]}


def test_a_full_disk_is_one_clear_error_and_leaves_whole_lines(make_run, monkeypatch):
    run = make_run()
    backend = JsonlBackend(run)
    backend.log({"x": 1.0}, 1)

    write = os.write

    def half_then_full(descriptor, line):
        if len(line) < len(b'{"step": 2, "x": 2.0}\n'):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, line[:7])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half_then_full)
        with pytest.raises(QuadrigaError, match=r"metrics\.jsonl: got No space left on device"):
            backend.log({"x": 2.0}, 2)
    backend.log({"x": 3.0}, 3)
    assert read_metrics(run.directory / "metrics.jsonl") == {1: {"x": 1.0}, 3: {"x": 3.0}}


def test_lines_of_one_step_are_united_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 2, "a": 1}\n{"step": 1, "a": 2}\n{"step": 2, "b": 3, "a": 4}\n{"step": 3, "a"'
    )
    assert list(read_metrics(path).items()) == [(1, {"a": 2.0}), (2, {"a": 4.0, "b": 3.0})]


@pytest.mark.parametrize("line", ["not json", '{"x": 1}', "[1]"])
def test_a_foreign_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: got"):
        read_metrics(path)
