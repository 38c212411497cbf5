# SPDX-License-Identifier: Apache-2.0
"""Times of the ranks of a run with several processes, from the facts of the rollout record.

The entry `calls` has the calls of each `role.method`, see `call_times.step_calls`.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from quadriga.observe.records import read_facts
from quadriga.view.runs import Answer, ViewedRun

RANK_SECONDS = "rank_s/"
"""Prefix of the numbers `rank_s/ROLE/RANK` of the index: seconds that a rank computed."""
MAX_LANES = 300
"""Largest number of lanes of a step that are shown."""
_COMPUTING = ("compute_", "generate_", "update_")
"""Beginnings of the names of methods in which ranks are compared."""


def rank_lanes(run: ViewedRun, step: int) -> Answer:
    """Lanes of the ranks of a step.

    Args:
        run: the run.
        step: the step.

    Returns:
        `lanes`, one for each rank, with `role`, `rank`, `computed` (see `computed_seconds`; None if the
        rank had no such calls) and `calls`, lists of a method's name, its begin, its seconds and the
        seconds of them in which it waited for other ranks; `note`, which says that some ranks were
        left out, or "". A run with one process has no lanes.
    """
    path = run.record.path(step)
    facts = read_facts(path) if path.is_file() else {}
    calls_by_rank = defaultdict(list)
    for name, calls in facts.get("calls", {}).items():
        role, _, method = name.rpartition(".")
        for rank, begin, seconds, waited in calls:
            calls_by_rank[role, int(rank)].append([method, begin, seconds, waited])
    computed = computed_seconds(facts)
    lanes = []
    for role, rank in sorted(calls_by_rank)[:MAX_LANES]:
        lanes.append(
            {
                "role": role,
                "rank": rank,
                "computed": computed.get(f"{RANK_SECONDS}{role}/{rank}"),
                "calls": calls_by_rank[role, rank],
            }
        )
    note = ""
    if len(calls_by_rank) > MAX_LANES:
        note = f"Only {MAX_LANES} of {len(calls_by_rank)} ranks are shown."
    return {"lanes": lanes, "note": note}


def computed_seconds(facts: Mapping[str, Any]) -> dict[str, float]:
    """Seconds that each rank computed in a step, by `rank_s/ROLE/RANK`.

    Not included are seconds in which a rank waited for others, and calls that move weights or save, in
    which ranks have different work.

    Args:
        facts: facts of the step's file.
    """
    totals = defaultdict(float)
    for name, calls in facts.get("calls", {}).items():
        role, _, method = name.rpartition(".")
        if method.startswith(_COMPUTING):
            for rank, _, seconds, waited in calls:
                totals[f"{RANK_SECONDS}{role}/{int(rank)}"] += seconds - waited
    return dict(totals)
