# SPDX-License-Identifier: Apache-2.0
"""Repeating the record of a schedule."""

import json
from pathlib import Path

from quadriga.trainer.asynchronous.record import RecordedSchedule
from quadriga.trainer.asynchronous.rules import Load, Rules, Start

RULES = Rules(num_groups=2, group_size=1, num_steps=4, max_staleness=2, saves_running=True)


def test_a_group_that_waited_at_a_save_begins_once(tmp_path: Path) -> None:
    """It is in the checkpoint, and its start is recorded after the save, when it joined the engine."""
    path = tmp_path / "record.jsonl"
    events = [
        {"at": 5, "start": [[2, 2, 0]]},
        {"at": 9, "load": 1},
        {"at": 9, "save": 1},
        {"at": 9, "start": [[3, 2, 1], [4, 3, 0]]},
        {"at": 12, "load": 2},
    ]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    schedule = RecordedSchedule(RULES, path, step=1)
    schedule.restore(
        {
            "num_groups": 4,
            "groups": [[2, 2, 0, [[0, 0]], [0], False], [3, 2, 1, [[0, 1]], [0], False]],
            "batches": {2: [2, 2]},
        }
    )
    schedule.joined(0, version=1)
    decisions = schedule.decisions_at(9, worker=0)
    assert [decision.group for decision in decisions if isinstance(decision, Start)] == [2, 3, 4]
    assert schedule.decisions_at(11, worker=0) == []
    assert schedule.decisions_at(12, worker=0) == [Load(0, 2)]
    # The batch is complete once both of its groups are.
    for number in (2, 3):
        schedule.ended(0, number, 0)
        schedule.graded(number)
    assert schedule._batches[2].is_generated
