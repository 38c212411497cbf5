# SPDX-License-Identifier: Apache-2.0
"""State of generation in the checkpoint of an asynchronous run, as plain values and tensors.

schedule      groups and batches: `Schedule.state`
num_steps     number of steps that the engine has made; 0 for engines in other processes
begun         prompt of each unfinished group, one row
under_way     responses of unfinished groups: `GenerationStream.save`
groups        rows of each complete group that no step has learned from
rows          prompts that have been taken, but belong to no group
counts        metrics that no step has reported
rounds        for each batch, the complete groups that are not graded
filters       for each batch, the groups that are graded: `GroupFilter.state_dict`
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple
from tempfile import TemporaryFile
from typing import Any

import torch

from quadriga.algorithms.registry import ROLLOUT_ID
from quadriga.errors import CheckpointError
from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.protocol.disk import to_bytes
from quadriga.trainer.asynchronous.prefetcher import Prefetcher
from quadriga.trainer.asynchronous.schedule import Schedule
from quadriga.trainer.rollout_rows import forget_times, name_rollouts
from quadriga.workers.stream import SavedResponse

STATE = (
    "schedule",
    "num_steps",
    "begun",
    "under_way",
    "groups",
    "rows",
    "counts",
    "rounds",
    "filters",
)


class Snapshot:
    """Collects the state of generation from the schedule, the prefetcher and the workers.

    Each worker reports its unfinished responses at a time of its own, between two steps of its
    engine. The state is taken when the last one has reported. `AsyncBatches` holds its lock when it
    uses this class.

    Attributes:
        resumed: state from which the run resumes, with rows as tensors. Empty: none.
        reports: unfinished responses of each worker that is being saved, by its number. None: it
            has not reported them yet.
        state: state for a checkpoint. None: it has not been taken, or has already been passed on.
    """

    def __init__(self) -> None:
        self.resumed: dict[str, Any] = {}
        self.reports: dict[int, Sequence[SavedResponse] | None] = {}
        self.state: dict[str, Any] | None = None

    def pop_reports(self) -> list[SavedResponse] | None:
        """Take the saved responses of all workers. None: some have not reported yet."""
        # The dictionary is in the order in which the workers were asked to save.
        saved_responses = []
        for report in self.reports.values():
            if report is None:
                return None
            saved_responses += report
        self.reports.clear()
        return saved_responses

    def take(
        self,
        schedule: Schedule,
        prefetcher: Prefetcher,
        saved_responses: Sequence[SavedResponse],
        num_steps: int,
    ) -> None:
        """Collect the state of generation in `state`.

        Args:
            schedule: has the groups and batches.
            prefetcher: has the prompts and rows of the groups.
            saved_responses: responses of the unfinished groups of all workers.
            num_steps: number of steps that the engine has made.
        """
        # Groups may have ended since their worker reported them. The first entry of a saved response
        # is the number of its group.
        still_open = [response for response in saved_responses if response[0] in prefetcher.started]
        self.state = prefetcher.state() | {
            "schedule": schedule.state(),
            "num_steps": num_steps,
            "under_way": still_open,
        }

    def restore(self, schedule: Schedule, prefetcher: Prefetcher) -> None:
        """Restore the schedule and the prefetcher from the resumed state, if there is one."""
        if self.resumed:
            state = convert_rows(self.resumed, from_tensor)
            schedule.restore(state["schedule"])
            prefetcher.restore(state, schedule.num_groups)


def require_state(state: dict[str, Any]) -> None:
    """Check the entries of a state.

    Raises:
        CheckpointError: the state has other entries than `STATE`.
    """
    if state.keys() != set(STATE):
        raise CheckpointError(
            "what was generated ahead",
            got=f"entries {', '.join(state)}",
            expected=", ".join(STATE),
            fix="The checkpoint was written by another version of Quadriga: resume it with that "
            "one.",
        )


def convert_rows(state: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Copy a state with all of its rows converted, by `as_tensor` or `from_tensor`."""
    filters = {}
    for batch, filter_state in state["filters"].items():
        parts = [convert(part) for part in filter_state["parts"]]
        filters[batch] = filter_state | {"parts": parts}
    return state | {
        "begun": {number: convert(rows) for number, rows in state["begun"].items()},
        "groups": {number: convert(rows) for number, rows in state["groups"].items()},
        "rows": [convert(rows) for rows in state["rows"]],
        "filters": filters,
    }


def as_tensor(rows: DataProto) -> torch.Tensor:
    """Convert rows to the bytes of a file, uint8 [N], for a checkpoint.

    Outcomes of early grading are left out: a resumed run grades the responses again.
    """
    columns = dict(rows.non_tensor_batch)
    columns.pop("reward_outcome", None)
    metrics = {}
    for name, values in rows.meta_info.get("metrics", {}).items():
        # `values` is a list of metrics if several batches were concatenated, else one metric.
        values_of_batches = [values] if isinstance(values, Metric) else values
        metrics[name] = [astuple(metric) for metric in values_of_batches]
    meta_info = rows.meta_info | {"metrics": metrics}
    content = to_bytes(DataProto(rows.batch, columns, meta_info))
    return torch.frombuffer(content, dtype=torch.uint8)


def from_tensor(content: torch.Tensor) -> DataProto:
    """Convert the bytes of `as_tensor`, [N], to rows."""
    # A file without a name, of which a killed process leaves nothing behind.
    with TemporaryFile() as file:
        file.write(content.numpy().data)
        file.flush()
        rows = DataProto.load_from_disk(f"/dev/fd/{file.fileno()}")
    columns = rows.non_tensor_batch
    if "responses" in rows.batch.keys() and ROLLOUT_ID not in columns:
        # Checkpoints of version 0.2.0 do not have this column.
        columns[ROLLOUT_ID] = object_array(name_rollouts(columns["uid"]))
    forget_times(rows)
    metrics = rows.meta_info["metrics"]
    rows.meta_info["metrics"] = {
        name: [Metric(*fields) for fields in values] for name, values in metrics.items()
    }
    return rows
