# SPDX-License-Identifier: Apache-2.0
"""Timelines of rollouts: conversations from their traces, single responses from the record."""

import json
from pathlib import Path

from quadriga.protocol.times import TIME_COLUMNS
from quadriga.view.runs import Answer, ViewedRun

MAX_LANES = 600
"""Largest number of conversations or responses of a step that are read."""
_LIFE_COLUMNS = (*TIME_COLUMNS, "uid", "score", "token_versions")
TRACE_KEY = "actor_rollout_ref.rollout.trace_dir"
"""Key of the configuration that names the folder of traces."""


def response_lanes(run: ViewedRun, step: int) -> Answer:
    """Lanes of the responses of a step, from the times in its record.

    Args:
        run: the run.
        step: the step.

    Returns:
        `lanes`, one for each response, with `uid`, `score`, `versions` (the first and the last version
        of the weights that generated it) and `life`: when it was queued, admitted, generated and
        graded, in seconds since the first response was queued (None: not known); `note`, which says
        that some responses were left out, or "".
    """
    if not run.record.path(step).is_file():
        return {"lanes": [], "note": ""}
    rows = run.record.read(step, columns=_LIFE_COLUMNS).rows
    # Left out are responses without times: those of conversations, and of engines that measure none.
    rows = rows.filter(rows["generated_at"].is_valid())
    note = ""
    if len(rows) > MAX_LANES:
        note = f"Only the first {MAX_LANES} of {len(rows)} responses are shown."
    entries = rows.slice(0, MAX_LANES).to_pylist()
    first = min((entry["queued_at"] for entry in entries), default=0.0)
    lanes = []
    for entry in entries:
        times = [entry[name] for name in TIME_COLUMNS]
        versions = sorted({version for version in entry["token_versions"] or () if version >= 0})
        lanes.append(
            {
                "uid": entry["uid"],
                "score": entry["score"],
                "versions": [*versions[:1], *versions[-1:]],
                "life": [time and round(time - first, 4) for time in times],
            }
        )
    return {"lanes": lanes, "note": note}


def conversation_lanes(run: ViewedRun, step: int) -> Answer:
    """Lanes of the conversations of a step.

    Args:
        run: the run.
        step: the step.

    Returns:
        `lanes`, one for each conversation, with `process`, `uid`, `score` and `turns` (`role`,
        `seconds` and `tools`); `note`, which says why there are no lanes, or that some were left out,
        or "".
    """
    folder = _trace_folder(run)
    if folder is None:
        # The page shows this note only if `response_lanes` has none either.
        note = f"No lives of rollouts are recorded. {TRACE_KEY} does that for agent loops."
        return {"lanes": [], "note": note}
    lanes = []
    note = ""
    # Files of traces are named STEP.PROCESS.jsonl, those of validation STEP.validate.PROCESS.jsonl.
    for path in sorted(folder.glob(f"{step:06d}.*.jsonl")):
        if ".validate." in path.name:
            continue
        process = path.name.split(".", 1)[1].removesuffix(".jsonl")
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.endswith("\n"):
                    # The run has not finished this line.
                    break
                if len(lanes) == MAX_LANES:
                    note = f"Only the first {MAX_LANES} conversations are shown."
                    break
                try:
                    lanes.append(_lane(json.loads(line), process))
                except (ValueError, KeyError, TypeError):
                    note = f"{path.name} has lines that are no traces."
    if not lanes and not note:
        note = f"{folder.name} has no conversations of step {step}."
    return {"lanes": lanes, "note": note}


def _trace_folder(run: ViewedRun) -> Path | None:
    """Folder of the run's traces; None if it has none."""
    value = run.configuration()[0].get(TRACE_KEY)
    if not value:
        return None
    # The configuration of a run that was moved names the old place: look in its directory, too.
    for folder in (Path(str(value)).expanduser(), run.directory / Path(str(value)).name):
        if folder.is_dir():
            return folder
    return None


def _lane(trace: Answer, process: str) -> Answer:
    """Lane of a conversation, from its line in a trace file."""
    turns = []
    for turn in trace["turns"]:
        calls = [call.get("name", "tool") for call in turn.get("calls", ())]
        turns.append({"role": turn["role"], "seconds": turn["seconds"], "tools": calls})
    return {
        "process": process,
        "uid": trace["uid"],
        "score": trace["score"],
        "turns": turns,
    }
