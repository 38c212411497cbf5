# SPDX-License-Identifier: Apache-2.0
"""Files of the page, and its export as one file with the data of some runs."""

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from quadriga.data.files import written_aside
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
_RESERVED_BYTES = 20_000
"""Bytes that are kept free for the notes on what was left out, and for the markup around the data."""
_MIN_FREE_BYTES = 2_000
"""With fewer free bytes no further answer is tried."""
_NUM_BETWEEN = 20
"""Steps between the first and the last one that are exported by default."""
_NUM_IN_TURN = 16
"""Rollouts of a step that are written before the next step has its turn."""


def read_static(name: str) -> bytes:
    """Content of a file of the page."""
    return (STATIC / name).read_bytes()


def default_steps(steps: Sequence[int]) -> list[int]:
    """Choose the first step, the last one, and at most 20 between at even distances."""
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
        steps: steps whose rollouts are written. None: `default_steps` of each run.

    Returns:
        Sentences on what was left out.

    Raises:
        DataError: the file cannot be written, or no run has one of the steps.
    """
    # Check the path first, since the answers below may take long.
    got = "a folder" if os.path.isdir(path) else ""
    if not os.path.isdir(path.parent):
        got = f"no folder {path.parent}"
    if got:
        raise DataError(f"--export {path}", got=got, expected="a file in a folder that exists")

    # Collect answers, the most important first, until the file is full.
    answers = {}
    notes = []
    overhead = sum(len(read_static(name)) for name in STATIC_FILES)
    num_free_bytes = MAX_EXPORT_BYTES - overhead - _RESERVED_BYTES
    num_left_out = 0
    step_queries = _step_queries(data, steps)
    for name, query in _queries(data, step_queries):
        if num_free_bytes < _MIN_FREE_BYTES:
            num_left_out += 1
            continue
        # The script of the page finds an answer by this text.
        key = json.dumps([name, dict(sorted(query.items()))], separators=(",", ":"))
        try:
            text = data.answer(name, query).decode()
        except (DataError, OSError) as error:
            notes.append(str(error))
            continue
        text = _escape_for_script(text)
        # With room for the quotes, colon and comma around them, and for escaped quotes in the key.
        size = len(text.encode()) + len(key) + 8
        # A smaller answer may still fit.
        if size > num_free_bytes:
            num_left_out += 1
            continue
        num_free_bytes -= size
        answers[key] = text

    if num_left_out:
        notes.append(
            f"{num_left_out:,} answers did not fit into {MAX_EXPORT_BYTES // 10**6} MB and were "
            "left out, most of them tokens of rollouts. Choose fewer steps by --steps."
        )
    num_written = sum(query["kind"] == STEP for query in step_queries)
    num_recorded = sum(len(data.run(name).record.steps()) for name in data.names())
    notes.append(f"Rollouts of {num_written} of {num_recorded} recorded steps are in this file.")
    entries = [f"{_escape_for_script(json.dumps(key))}:{text}" for key, text in answers.items()]
    shown_notes = _escape_for_script(json.dumps(notes[:50]))
    embedded = f'{{"notes":{shown_notes},"answers":{{{",".join(entries)}}}}}'
    with written_aside(path, where="--export") as draft:
        draft.write_text(_embed_page(embedded), encoding="utf-8")
    return notes


def _escape_for_script(text: str) -> str:
    """Escape JSON for a script element. A "</script>" in a text of a model would end the element."""
    return text.replace("<", "\\u003c")


def _queries(
    data: ViewData, step_queries: Sequence[dict[str, str]]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Requests whose answers the exported page holds, the most important first.

    Args:
        data: answers to the page.
        step_queries: queries that name the steps whose rollouts are exported.

    Yields:
        Name and query of each request, see `ViewData.answer`.
    """
    names = data.names()
    for name in names:
        data.index(data.run(name)).wait()
    yield "runs", {}
    for request in ("summary", "configuration", "metrics", "steps", "health", "prompts"):
        for name in names:
            yield request, {"run": name}
    for query in step_queries:
        yield "rollouts", query
        if query["kind"] == STEP:
            for request in ("lanes", "ranks"):
                yield request, {"run": query["run"], "step": query["step"]}
    sized_queries = []  # queries with the number of rollouts of the step
    for query in step_queries:
        record = data.run(query["run"]).record
        try:
            rows = record.read(int(query["step"]), query["kind"], ["uid"]).rows
        except DataError:
            # `export` has noted the same error of the request "rollouts".
            continue
        sized_queries.append((query, len(rows)))
    # The file may not have room for all rollouts. So each step gets `_NUM_IN_TURN` of them before any
    # step gets more.
    most_rows = max((num_rows for _, num_rows in sized_queries), default=0)
    for first in range(0, most_rows, _NUM_IN_TURN):
        for query, num_rows in sized_queries:
            for place in range(first, min(first + _NUM_IN_TURN, num_rows)):
                yield "rollout", {**query, "place": str(place), "start": "0"}


def _step_queries(data: ViewData, steps: Sequence[int] | None) -> list[dict[str, str]]:
    """Queries that name the steps whose rollouts are exported.

    Raises:
        DataError: no run has one of the steps.
    """
    queries = []
    for name in data.names():
        for kind in _KINDS:
            recorded_steps = data.run(name).record.steps(kind)
            exported_steps = default_steps(recorded_steps)
            if steps is not None:
                # A run need not have all of the steps that the user names.
                exported_steps = sorted({*steps} & {*recorded_steps})
            for step in exported_steps:
                queries.append({"run": name, "kind": kind, "step": str(step)})
    if steps and not queries:
        records = [data.run(name).record for name in data.names()]
        recorded = {step for record in records for kind in _KINDS for step in record.steps(kind)}
        expected = "recorded rollouts"
        if recorded:
            expected = f"recorded steps: {_describe_steps(sorted(recorded))}"
        raise DataError("--steps", got=_describe_steps(steps), expected=expected)
    return queries


def _describe_steps(steps: Sequence[int]) -> str:
    """Describe steps as a range, or as a list of some of them if the range has gaps."""
    if len(steps) > 1 and steps[-1] - steps[0] == len(steps) - 1:
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, default_steps(steps)))


def _embed_page(embedded: str) -> str:
    """The page with its scripts, styles and data inside, and a policy that allows nothing else.

    Args:
        embedded: the answers and notes, as JSON that is escaped for a script element.
    """
    page = read_static("index.html").decode()
    # The policy names the scripts and styles by their hashes.
    hashes = {"script": [], "style": []}
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
