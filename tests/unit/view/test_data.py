# SPDX-License-Identifier: Apache-2.0
"""What the page shows of a run: steps, rollouts, tokens, health; and of a run whose files are damaged."""

import base64
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quadriga.errors import DataError
from quadriga.observe.records import RecordFolder
from quadriga.view import rollouts
from quadriga.view.data import ViewData
from quadriga.view.health import BAD, WARNING, judge_run
from tests.unit.view.recorded import rollout, write_run, write_step

RUN = {"run": "run"}


def _view(directory: Path) -> ViewData:
    """Data of a run whose index is complete."""
    data = ViewData([directory], cache=directory.parent / "cache")
    data.index(data.run(directory.name)).wait()
    return data


def _ask(data: ViewData, name: str, **query: Any) -> dict[str, Any]:
    texts = {key: str(value) for key, value in query.items()}
    return json.loads(data.answer(name, {**RUN, **texts}))


def test_numbers_of_steps_and_prompts(tmp_path: Path) -> None:
    """Means and counts of each step come from its rollouts; the index lies outside of the run and is used again."""
    directory = write_run(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    data = _view(directory)
    steps = _ask(data, "steps")["step"]
    assert steps["steps"] == [1, 2, 3]
    expected = {
        "score": [0.0, 0.25, 0.5],
        "score/sums": [0.0, 0.25, 0.5],
        "rollouts": [4, 4, 4],
        "groups_without_spread": [2, 1, 1],
        "not_computed": [2, 2, 2],
        "truncated": [4, 4, 4],
        "generated_tokens": [16, 16, 16],
        "part/format": [0.5] * 3,
        "row/level": [3.0] * 3,
    }
    assert {name: steps["columns"][name] for name in expected} == expected
    assert steps["reasons"] == [{"its advantages are 0": 2}] * 3
    stuck, improving = _ask(data, "prompts")["prompts"]
    assert (stuck["prompt"], stuck["never_improves"]) == ("train.parquet row 1", True)
    assert (improving["curve"], improving["never_improves"]) == ([0.0, 0.5, 1.0], False)
    assert (stuck["text"], stuck["steps"]) == ("1+2=", [1, 2, 3])

    again = _view(directory)
    entries = again.index(again.run("run")).steps
    assert {key: entry.numbers for key, entry in entries.items()} == {
        key: entry.numbers for key, entry in data.index(data.run("run")).steps.items()
    }
    # A step that was written again, as after a resume, is read again.
    write_step(directory, 3, [rollout(3, 0, 0, score=9.0)])
    (directory / "rollouts" / "step_000002.parquet").unlink()
    assert _ask(_view(directory), "steps")["step"]["columns"]["score"] == [0.0, 9.0]
    after = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    assert before.keys() - after.keys() == {directory / "rollouts" / "step_000002.parquet"}
    assert after.keys() == after.keys() & before.keys()


def test_rollouts_and_their_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have means of the model's tokens; a token has its text, and half a character none of its own."""
    data = _view(write_run(tmp_path / "run"))
    rows = _ask(data, "rollouts", step=3)["rows"]
    first = rows[0]
    assert first["mismatch"] == 0.125 and first["entropy"] == 0.5 and first["advantage"] == 0.5
    assert (first["truth"], first["text"], first["trained"]) == ("3", "1€<eos>", 4)
    assert (rows[2]["mismatch"], rows[2]["not_computed"]) == (None, "its advantages are 0")
    details = _ask(data, "rollout", step=3, place=0)
    assert details["response"] == {
        "ids": [2, 6, 7, 1],
        "texts": ["1", "", "€", "<eos>"],
        "special": [3],
    }
    assert details["columns"]["log_probs"] == [-1.0, -0.5, -0.25, -0.625]
    assert _ask(data, "search", step=3, text="1€")["places"] == [0, 1, 2, 3]
    assert _ask(data, "search", step=3, text="absent")["places"] == []

    # A response of any length is sent in parts.
    monkeypatch.setattr(rollouts, "MAX_TOKENS", 3)
    part = _ask(data, "rollout", step=3, place=0, start=3)
    assert (part["start"], part["length"], part["response"]["ids"]) == (3, 4, [1])
    assert part["columns"]["advantages"] == [0.5]


def test_turns_say_what_they_earned(tmp_path: Path) -> None:
    """A turn has the scores of its tokens and their mean advantage."""
    columns = {"turn_spans": "[[0, 2], [3, 4]]", "token_scores": [0.0, 0.25, 0.0, 1.0]}
    data = _view(write_run(tmp_path / "run", 1, **columns, advantages=[1.0, 2.0, 0.0, 3.0]))
    turns = _ask(data, "rollout", step=1, place=0)["turns"]
    assert [(turn["score"], turn["advantage"]) for turn in turns] == [(0.25, 1.5), (1.0, 3.0)]


def test_images_of_a_data_row(tmp_path: Path) -> None:
    """An image comes from the data file that the record names, as bytes or beside it; another file never does."""
    png = b"\x89PNG of one pixel"
    (tmp_path / "beside.png").write_bytes(png)
    (tmp_path / "secret.txt").write_text("secret")
    names = [
        {"bytes": png},
        {"path": "beside.png"},
        {"path": "secret.txt"},
        {"path": "missing.png"},
    ]
    pq.write_table(pa.table({"images": [[], names]}), tmp_path / "train.parquet")
    columns = {"source_row": f"{tmp_path / 'train.parquet'} row 1", "image_hash": "abc"}
    data = _view(write_run(tmp_path / "run", 1, **columns))
    answer = _ask(data, "images", step=1, place=0)
    assert answer["images"] == [f"data:image/png;base64,{base64.b64encode(png).decode()}"] * 2
    assert answer["note"].startswith("2 images are not shown")
    (tmp_path / "train.parquet").unlink()
    with pytest.raises(DataError, match="no images of row 1"):
        _ask(data, "images", step=1, place=0)


def test_health_in_words(tmp_path: Path) -> None:
    """The collapse of the entropy and groups without a gradient come first, with the metric and the step."""
    findings = _ask(_view(write_run(tmp_path / "run", 12)), "health")["findings"]
    by_title = {finding["title"]: finding for finding in findings}
    assert findings[0]["state"] == BAD and by_title["Entropy"]["state"] == BAD
    assert by_title["Entropy"]["step"] == 12
    assert (by_title["Reward"]["state"], by_title["Reward"]["step"]) == ("good", 1)
    assert by_title["Work of the ranks"]["sentence"] == "The run has no perf/imbalance/actor."
    assert by_title["Length at its limit"]["state"] not in (BAD, WARNING)


@pytest.mark.parametrize(
    ("norms", "state"),
    [
        ([0.0] * 8, BAD),
        ([1.0] * 4 + [0.0] * 5, BAD),
        ([0.0, 0.0, 1.0], WARNING),
        ([1.0] * 8, "good"),
    ],
)
def test_a_gradient_of_zero_is_no_sign_of_health(norms: list[float], state: str) -> None:
    metrics = {step: {"actor/grad_norm": norm} for step, norm in enumerate(norms)}
    [finding] = [entry for entry in judge_run(metrics, {}) if entry["title"] == "Gradient"]
    assert finding["state"] == state


def test_a_constant_score_is_no_sign_of_health() -> None:
    metrics = {step: {"critic/score/mean": 0.5} for step in range(8)}
    [finding] = [entry for entry in judge_run(metrics, {}) if entry["title"] == "Reward"]
    assert finding["state"] == WARNING


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    """Waiting is not computing, and moving weights is no work of a rank; a run of one process has no lanes."""
    calls = {
        "actor.update_actor": [[0, 1.0, 2.0, 1.0], [1, 1.0, 2.0, 0.0], [2, 1.0, 2.0, 0.5]],
        "actor.generate_sequences": [[rank, 0.0, 1.0, 0.0] for rank in range(3)],
        "actor.send_weights": [[0, 3.0, 9.0, 0.0]],
    }
    data = _view(write_run(tmp_path / "run", 5, calls=calls))
    lanes = _ask(data, "ranks", step=2)["lanes"]
    assert [(lane["rank"], lane["computed"]) for lane in lanes] == [(0, 2.0), (1, 3.0), (2, 2.5)]
    assert ["send_weights", 3.0, 9.0, 0.0] in lanes[0]["calls"]
    [finding] = [
        entry for entry in _ask(data, "health")["findings"] if entry["title"] == "Slow rank"
    ]
    assert finding["state"] == WARNING
    assert "Rank 1 of actor takes 1.3 times as long" in finding["sentence"]
    assert finding["metric"] == "rows/rank_s/actor/1"

    data = _view(write_run(tmp_path / "alone" / "run", 5))
    assert _ask(data, "ranks", step=2) == {"lanes": [], "note": ""}
    assert all(entry["title"] != "Slow rank" for entry in _ask(data, "health")["findings"])


def test_lives_of_responses(tmp_path: Path) -> None:
    """Times are those since the first prompt was queued; responses without times are left out."""
    times = {"queued_at": 100.0, "admitted_at": None, "generated_at": 103.0, "graded_at": 104.5}
    directory = write_run(tmp_path / "run", 1, **times, token_versions=[3, 3, 4, -1])
    lanes = _ask(_view(directory), "lanes", step=1)["lanes"]
    assert len(lanes) == 4
    assert (lanes[0]["life"], lanes[0]["versions"]) == ([0.0, None, 3.0, 4.5], [3, 4])
    write_step(directory, 1, [rollout(1, 0, 0), rollout(1, 0, 1, **times)])
    data = _view(directory)
    assert [lane["uid"] for lane in _ask(data, "lanes", step=1)["lanes"]] == ["1-0"]
    assert "trace_dir" in _ask(data, "lanes", step=2)["note"]


def test_damaged_and_incomplete_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thing that is wrong with a run is one sentence; everything else of the run is shown."""
    directory = write_run(tmp_path / "run")
    step_file = directory / "rollouts" / "step_000002.parquet"
    step_file.write_bytes(step_file.read_bytes()[:200])
    (directory / "rollouts" / "tokens.parquet").unlink()
    (directory / "rollouts" / "superseded_1").mkdir()
    (directory / "config_from_step_1.yaml").write_text("data: {max_response_length: 2}\n")
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "actor')
    data = _view(directory)
    steps = _ask(data, "steps")["step"]
    assert steps["columns"]["score"] == [0.0, None, 0.5]
    assert "a damaged file" in steps["problems"][1]
    with pytest.raises(DataError, match="a damaged file"):
        _ask(data, "rollouts", step=2)
    with pytest.raises(DataError, match="no record of step 7"):
        _ask(data, "rollouts", step=7)
    with pytest.raises(DataError, match="row 4 of 4"):
        _ask(data, "rollout", step=1, place=4)
    assert _ask(data, "rollout", step=1, place=0)["response"]["texts"][0] == "⟨2⟩"
    summary = _ask(data, "summary")
    assert (summary["state"], summary["step"]) == ("finished", 3)
    # A command that is refused leaves its lock in the folder.
    os.utime(directory, (4e9, 4e9))
    assert _ask(data, "summary")["changed"] == summary["changed"] < 4e9
    for word in ("tokens.parquet", "superseded_1", "resumed"):
        assert any(word in problem for problem in summary["problems"])
    assert _ask(data, "configuration")["earlier"] == {"1": {"data.max_response_length": 2}}

    # A record of an older version has fewer columns.
    path = directory / "rollouts" / "step_000003.parquet"
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["token_staleness", "turn_scores"]), path)
    assert _ask(data, "rollout", step=3, place=0)["turn_scores"] is None
    assert "staleness" not in _ask(data, "rollouts", step=3)["rows"][0]

    shutil.rmtree(directory / "rollouts")
    [problem] = [text for text in _ask(_view(directory), "summary")["problems"] if "older" in text]
    assert "No rollouts are recorded" in problem

    def refuse(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    [problem] = _ask(data, "summary")["problems"]
    assert "Permission denied" in problem and "another user" in problem


def test_folders_without_runs(tmp_path: Path) -> None:
    """A folder that holds no run is refused; runs of one name in two folders are told apart."""
    with pytest.raises(DataError, match="a folder without a run"):
        ViewData([tmp_path])
    with pytest.raises(DataError, match="no such folder"):
        ViewData([tmp_path / "missing"])
    write_run(tmp_path / "one" / "run", 1)
    write_run(tmp_path / "two" / "run", 1)
    names = ViewData([tmp_path / "one", tmp_path / "two"]).names()
    assert names == ["run", str(tmp_path / "two" / "run")]
    assert ViewData([tmp_path]).names() == ["one/run", "two/run"]
    assert not RecordFolder(tmp_path).folder.exists()
