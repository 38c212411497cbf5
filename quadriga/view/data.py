# SPDX-License-Identifier: Apache-2.0
"""Answers to the requests of the page, as JSON."""

import json
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from quadriga.errors import DataError
from quadriga.observe.records import STEP, VALIDATION
from quadriga.trainer.settings import earlier_configurations
from quadriga.view.health import judge_run
from quadriga.view.images import row_images
from quadriga.view.index import SCHEMA, RunIndex
from quadriga.view.lanes import conversation_lanes, response_lanes
from quadriga.view.ranks import rank_lanes
from quadriga.view.rollouts import matching_rows, rollout_details, rollout_rows, round_values
from quadriga.view.runs import Answer, Runs, ViewedRun

ANSWERS = (
    *("runs", "summary", "configuration", "metrics", "steps", "progress", "prompts", "health"),
    *("rollouts", "search", "rollout", "images", "lanes", "ranks"),
)
"""Methods of `ViewData` that the page may call. The address of one is `/api/NAME`."""
MAX_PROMPTS = 1000
"""Largest number of prompts in the list of prompts."""

Query = Mapping[str, str]
"""Parameters of a request, such as `run` (a name), `step`, `kind` and `place` (a row of the step)."""


class ViewData:
    """Answers to the requests of a page that shows some runs.

    The methods in `ANSWERS` take the query of a request and return a value for JSON. They may be
    called from several threads.

    Args:
        roots: directories of runs, or folders that hold such directories.
        cache: folder of the indexes. None: `index.cache_folder()`.

    Raises:
        DataError: there are no runs.
    """

    def __init__(self, roots: Sequence[Path], cache: Path | None = None) -> None:
        self._runs = Runs(roots)
        self._cache = cache
        self._indexes: dict[Path, RunIndex] = {}
        self._lock = threading.Lock()
        # Indexes are built while no request is in progress, which `_is_quiet` tells them.
        self._num_requests = 0  # in progress
        self._is_quiet = threading.Event()
        self._is_quiet.set()

    def answer(self, name: str, query: Query) -> bytes:
        """Answer a request.

        Args:
            name: one of `ANSWERS`.
            query: parameters of the request.

        Returns:
            JSON, in UTF-8.

        Raises:
            DataError: the query names a run, a step or a row that does not exist.
        """
        if name not in ANSWERS:
            raise DataError("address", got=name, expected=f"one of {', '.join(ANSWERS)}")
        with self._lock:
            self._num_requests += 1
            self._is_quiet.clear()
        try:
            answer = getattr(self, name)(query)
        finally:
            with self._lock:
                self._num_requests -= 1
                if not self._num_requests:
                    self._is_quiet.set()
        text = json.dumps(_to_json(answer), ensure_ascii=False, allow_nan=False)
        # Texts of models may have lone surrogates, which UTF-8 cannot express.
        return text.encode(errors="replace")

    def names(self) -> list[str]:
        """Names of the runs."""
        return list(self._runs.find())

    def runs(self, query: Query) -> Answer:
        """Names of the runs."""
        return {"runs": self.names()}

    def summary(self, query: Query) -> Answer:
        """Summary of a run."""
        return self._run(query).summary()

    def configuration(self, query: Query) -> Answer:
        """A run's configuration by key, and earlier ones by their first step."""
        run = self._run(query)
        values, _ = run.configuration()
        earlier = {}
        for step, path in earlier_configurations(run.directory).items():
            earlier[str(step)] = run.configuration(path)[0]
        return {"values": values, "earlier": earlier}

    def metrics(self, query: Query) -> Answer:
        """Metrics of a run as columns; a value is None in a step without it."""
        metrics = self._run(query).metrics()
        names = sorted({name for values in metrics.values() for name in values})
        columns = {}
        for name in names:
            values = [numbers.get(name, math.nan) for numbers in metrics.values()]
            columns[name] = round_values(np.array(values))
        return {"steps": list(metrics), "columns": columns}

    def steps(self, query: Query) -> Answer:
        """Numbers of the index as columns, for each kind of steps.

        A value is None in a step that is not indexed yet.
        """
        run = self._run(query)
        index = self.index(run)
        # The progress is read before the numbers. If more steps are indexed in between, it is too low,
        # and the page asks again.
        answer = self.progress(query)
        for kind in (STEP, VALIDATION):
            steps = run.record.steps(kind)
            entries = [index.steps.get((kind, step)) for step in steps]
            names = sorted({name for entry in entries if entry for name in entry.numbers})
            columns = {}
            for name in names:
                columns[name] = [entry and entry.numbers.get(name) for entry in entries]
            answer[kind] = {
                "steps": steps,
                "columns": columns,
                "reasons": [entry.reasons if entry else {} for entry in entries],
                "problems": [entry.problem if entry else "" for entry in entries],
            }
        return answer

    def progress(self, query: Query) -> Answer:
        """Number of indexed steps and of all steps of a run."""
        index = self.index(self._run(query))
        return {"indexed": len(index.steps), "total": index.total}

    def rollouts(self, query: Query) -> Answer:
        """Rollouts of a step without their tokens."""
        step, kind = _parse_step(query)
        return {"rows": rollout_rows(self._run(query), step, kind)}

    def search(self, query: Query) -> Answer:
        """Rows of a step that contain a text."""
        step, kind = _parse_step(query)
        places = matching_rows(self._run(query), step, kind, query.get("text", ""))
        return {"places": places}

    def rollout(self, query: Query) -> Answer:
        """A rollout with its tokens."""
        step, kind = _parse_step(query)
        place = _parse_integer(query, "place")
        start = max(0, _parse_integer(query, "start"))
        return rollout_details(self._run(query), step, kind, place, start)

    def images(self, query: Query) -> Answer:
        """Images in the data row of a rollout."""
        step, kind = _parse_step(query)
        return row_images(self._run(query), step, kind, _parse_integer(query, "place"))

    def prompts(self, query: Query) -> Answer:
        """Prompts with their mean scores over the steps; first those that never improve."""
        # The progress is read before the rows. If more steps are indexed in between, it is too low, and
        # the page asks again.
        answer = {**self.progress(query), "prompts": []}
        index = self.index(self._run(query))
        tables = [entry.rows for (kind, _), entry in index.steps.items() if kind == STEP]
        frame = pa.concat_tables([SCHEMA.empty_table(), *tables]).to_pandas()
        if frame.empty:
            return answer

        # Mean over the responses to a prompt in a step.
        by_step = frame.groupby(["prompt", "step"])["score"].mean().reset_index()
        table = by_step.groupby("prompt").agg(
            seen=("step", "size"),
            first_step=("step", "first"),
            last_step=("step", "last"),
            first=("score", "first"),
            last=("score", "last"),
            best=("score", "max"),
            mean=("score", "mean"),
        )
        table["text"] = frame.dropna(subset=["text"]).groupby("prompt")["text"].first()

        # The largest possible score is not known: the best mean score of a prompt stands in for it. A
        # prompt that had it in its first step cannot improve, and is no problem.
        best_of_all = table["best"].max()
        is_repeated = table["seen"] > 1
        is_solved = table["first"] >= best_of_all
        table["is_repeated"] = is_repeated
        table["never_improves"] = is_repeated & (table["best"] <= table["first"]) & ~is_solved
        keys = ["never_improves", "best", "mean"]
        table = table.sort_values(keys, ascending=[False, True, True])
        # The curves of the shown prompts.
        shown = table.head(MAX_PROMPTS)
        points = by_step[by_step["prompt"].isin(shown.index)]
        curves = points.groupby("prompt").agg(curve=("score", list), steps=("step", list))
        records = shown.join(curves).reset_index().to_json(orient="records")
        return answer | {
            "num_prompts": len(table),
            "num_never_improving": int(table["never_improves"].sum()),
            "prompts": json.loads(records),
        }

    def health(self, query: Query) -> Answer:
        """Findings on a run's health, and problems of its files."""
        answer = self.progress(query)
        run = self._run(query)
        steps = self.index(run).steps
        numbers = {step: entry.numbers for (kind, step), entry in steps.items() if kind == STEP}
        findings = judge_run(run.metrics(), numbers)
        return {**answer, "findings": findings, "problems": run.problems()}

    def lanes(self, query: Query) -> Answer:
        """Timelines of the conversations of a step, or, without traces, of the responses."""
        run = self._run(query)
        step, _ = _parse_step(query)
        conversations = conversation_lanes(run, step)
        if conversations["lanes"]:
            return conversations
        responses = response_lanes(run, step)
        # The note of `conversations` says why there are no lanes.
        return responses if responses["lanes"] else conversations

    def ranks(self, query: Query) -> Answer:
        """Timelines of the ranks in a step."""
        return rank_lanes(self._run(query), _parse_step(query)[0])

    def _run(self, query: Query) -> ViewedRun:
        """The run that a query names."""
        return self._runs.run(query.get("run", ""))

    def index(self, run: ViewedRun) -> RunIndex:
        """The index of a run, which may be incomplete: a thread reads files that are new or have changed."""
        with self._lock:
            index = self._indexes.get(run.directory)
            if index is None:
                index = RunIndex(run, self._cache, self._is_quiet)
                self._indexes[run.directory] = index
            index.refresh()
        return index

    def run(self, name: str) -> ViewedRun:
        """A run by its name."""
        return self._runs.run(name)


def _parse_step(query: Query) -> tuple[int, str]:
    """Step and kind of the rollouts that a query names."""
    kind = VALIDATION if query.get("kind") == VALIDATION else STEP
    return _parse_integer(query, "step"), kind


def _parse_integer(query: Query, name: str) -> int:
    """A parameter of a query as a whole number; 0 if it is missing."""
    text = query.get(name, "0")
    try:
        return int(text)
    except ValueError as error:
        raise DataError(name, got=text[:80], expected="a whole number") from error


def _to_json(value: Any) -> Any:
    """Convert a value for JSON: NaN and the infinities to None, other objects to text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(entry) for entry in value]
    if value is None or isinstance(value, str | int):
        return value
    return str(value)
