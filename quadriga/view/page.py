# SPDX-License-Identifier: Apache-2.0
"""Files of the page, the page as one file, and the export with the data of some runs."""

import base64
import errno
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from quadriga.errors import DataError
from quadriga.observe.records import STEP, VALIDATION
from quadriga.view.data import ViewData

STATIC = Path(__file__).with_name("static")
SCRIPTS = (
    "uPlot.iife.min.js",
    "base.js",
    "runs.js",
    "curves.js",
    "rollouts.js",
    "tokens.js",
    "reports.js",
    "main.js",
)
STYLES = ("uPlot.min.css", "style.css")
STATIC_FILES = frozenset({*SCRIPTS, *STYLES, "index.html"})
MAX_EXPORT_BYTES = 50_000_000
"""Largest exported file."""
_KINDS = (STEP, VALIDATION)
_ROOM = 20_000
"""Bytes for the list of what was left out, and for the markup around the data."""
_LEAST_ROOM = 2_000
"""Bytes below which no further answer is tried."""
_NUM_BETWEEN = 20
_NUM_IN_TURN = 16
"""Rollouts of a step that are written before those of the next one."""


def read_static(name: str) -> bytes:
    """Content of a file of the page."""
    return (STATIC / name).read_bytes()


def default_steps(steps: Sequence[int]) -> list[int]:
    """The first step, the last one, and at most 20 between."""
    if len(steps) <= _NUM_BETWEEN + 2:
        return list(steps)
    last = len(steps) - 1
    places = {round(number * last / (_NUM_BETWEEN + 1)) for number in range(_NUM_BETWEEN + 2)}
    return [steps[place] for place in sorted(places)]


def export(data: ViewData, path: Path, steps: Sequence[int] | None) -> list[str]:
    """Write the page with the data of all runs into one file that needs no server.

    Args:
        data: answers to the page.
        path: the file.
        steps: steps whose rollouts are written. None: the first, the last and 20 between of each run.

    Returns:
        Sentences on what was left out.

    Raises:
        DataError: the file cannot be written, or no run has one of the steps.
    """
    got = "a folder" if os.path.isdir(path) else ""
    if not os.path.isdir(path.parent):
        got = f"no folder {path.parent}"
    if got:
        raise DataError(f"--export {path}", got=got, expected="a file in a folder that exists")
    answers: dict[str, str] = {}
    notes = []
    overhead = sum(len(read_static(name)) for name in STATIC_FILES)
    room = MAX_EXPORT_BYTES - overhead - _ROOM
    num_left_out = 0
    for name, query in _queries(data, steps):
        if room < _LEAST_ROOM:
            num_left_out += 1
            continue
        key = json.dumps([name, dict(sorted(query.items()))], separators=(",", ":"))
        try:
            text = data.answer(name, query).decode()
        except (DataError, OSError) as error:
            notes.append(str(error))
            continue
        # The entry stands in a script element, which a text of a model must not end.
        text = text.replace("<", "\\u003c")
        size = len(text.encode()) + len(key) + 8
        if size > room:
            num_left_out += 1
            continue
        room -= size
        answers[key] = text
    if num_left_out:
        notes.append(
            f"{num_left_out:,} answers did not fit into {MAX_EXPORT_BYTES // 10**6} MB and were "
            "left out, most of them tokens of rollouts; --steps chooses fewer steps."
        )
    notes.append(_steps_note(data, steps))
    entries = [
        f"{json.dumps(key).replace('<', chr(92) + 'u003c')}:{text}" for key, text in answers.items()
    ]
    shown_notes = json.dumps(notes[:50]).replace("<", "\\u003c")
    embedded = f'{{"notes":{shown_notes},"answers":{{{",".join(entries)}}}}}'
    draft = path.with_name(f".{path.name}.tmp")
    try:
        draft.write_text(_one_file(embedded), encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        if draft.exists():
            draft.unlink()
        raise DataError(
            str(path),
            got=error.strerror or str(error),
            expected="a file that can be written",
            fix="Free space." if error.errno == errno.ENOSPC else "Name another file.",
        ) from error
    return notes


def _steps_note(data: ViewData, steps: Sequence[int] | None) -> str:
    num_recorded = sum(len(data.run(name).record.steps()) for name in data.names())
    num_written = 0
    for name in data.names():
        recorded = data.run(name).record.steps()
        num_written += len(default_steps(recorded) if steps is None else {*steps} & {*recorded})
    return f"Rollouts of {num_written} of {num_recorded} recorded steps are in this file."


def _queries(data: ViewData, steps: Sequence[int] | None) -> Iterator[tuple[str, dict[str, str]]]:
    """Questions whose answers the exported page has, the most important first.

    Raises:
        DataError: no run has one of the steps.
    """
    names = data.names()
    for name in names:
        data.index(data.run(name)).wait()
    yield "runs", {}
    for question in ("summary", "configuration", "metrics", "steps", "health", "prompts"):
        for name in names:
            yield question, {"run": name}
    chosen = _chosen_steps(data, steps)
    for query in chosen:
        yield "rollouts", query
        if query["kind"] == STEP:
            for question in ("lanes", "ranks"):
                yield question, {"run": query["run"], "step": query["step"]}
    sizes = []
    for query in chosen:
        record = data.run(query["run"]).record
        try:
            rows = record.read(int(query["step"]), query["kind"], ["uid"]).rows
        except DataError:
            # The answer before has said why.
            continue
        sizes.append((query, len(rows)))
    # The first rollouts of each step, then the next ones: all may be more than the file holds.
    for first in range(0, max((num_rows for _, num_rows in sizes), default=0), _NUM_IN_TURN):
        for query, num_rows in sizes:
            for place in range(first, min(first + _NUM_IN_TURN, num_rows)):
                yield "rollout", {**query, "place": str(place), "start": "0"}


def _chosen_steps(data: ViewData, steps: Sequence[int] | None) -> list[dict[str, str]]:
    """Queries of the steps whose rollouts are exported.

    Raises:
        DataError: no run has one of the steps.
    """
    queries = []
    for name in data.names():
        for kind in _KINDS:
            recorded = data.run(name).record.steps(kind)
            chosen = default_steps(recorded) if steps is None else sorted({*steps} & {*recorded})
            queries += [{"run": name, "kind": kind, "step": str(step)} for step in chosen]
    if steps and not queries:
        records = [data.run(name).record for name in data.names()]
        recorded = {step for record in records for kind in _KINDS for step in record.steps(kind)}
        expected = (
            f"recorded steps: {_named(sorted(recorded))}" if recorded else "recorded rollouts"
        )
        raise DataError("--steps", got=_named(steps), expected=expected)
    return queries


def _named(steps: Sequence[int]) -> str:
    """Steps as a range, or if some between are missing as a list of a few."""
    if len(steps) > 1 and steps[-1] - steps[0] == len(steps) - 1:
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, default_steps(steps)))


def _one_file(embedded: str) -> str:
    """The page with its files and data inside, and a policy that allows nothing else."""
    page = read_static("index.html").decode()
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, names in (("style", STYLES), ("script", SCRIPTS)):
        for name in names:
            text = read_static(name).decode()
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            hashes[kind].append(f"'sha256-{digest}'")
            mark = f'<link rel="stylesheet" href="static/{name}">'
            if kind == "script":
                mark = f'<script src="static/{name}"></script>'
            page = page.replace(mark, f"<{kind}>{text}</{kind}>")
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; "
        f"style-src {' '.join(hashes['style'])}; img-src data:"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace("<!-- policy -->", head)
    data = f'<script type="application/json" id="embedded">{embedded}</script>'
    return page.replace("<!-- data -->", data)
