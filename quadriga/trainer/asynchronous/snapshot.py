# SPDX-License-Identifier: Apache-2.0
"""State of generation in the checkpoint of an asynchronous run, in numbers, texts and tensors.

schedule      groups and batches: `Schedule.state`
num_steps     steps that the engine has made; 0 for engines in other processes
begun         prompt of each unfinished group, one row
under_way     its responses so far: `GenerationStream.save`
groups        rows of each complete group that no step has learned from
rows          prompts that are taken and belong to no group
counts        metrics that no step has reported
rounds        complete groups of a batch that are not graded
filters       groups of a batch that are graded: `GroupFilter.state_dict`
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
from quadriga.workers.stream import UnderWay

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

    Workers report their unfinished responses at different times, each between two steps of its
    engine. The state is taken when the last of them has. `AsyncBatches` uses it with its lock.

    Attributes:
        resumed: state that the run resumes from, as tensors. Empty: none.
        reports: unfinished responses of each worker that is saved, by its number. None: it has not
            reported them.
        state: state for a checkpoint. None: it is not taken, or is written already.
    """

    def __init__(self) -> None:
        self.resumed: dict[str, Any] = {}
        self.reports: dict[int, Sequence[UnderWay] | None] = {}
        self.state: dict[str, Any] | None = None

    def pop_reports(self) -> list[UnderWay] | None:
        """Unfinished responses of all workers. None: some have not reported."""
        # In the order in which the workers were asked.
        under_way: list[UnderWay] = []
        for report in self.reports.values():
            if report is None:
                return None
            under_way += report
        self.reports.clear()
        return under_way

    def take(
        self,
        schedule: Schedule,
        prefetcher: Prefetcher,
        under_way: Sequence[UnderWay],
        num_steps: int,
    ) -> None:
        """Take the state.

        Args:
            schedule: its groups and batches.
            prefetcher: their prompts and rows.
            under_way: unfinished responses of all workers.
            num_steps: steps that the engine has made.
        """
        # Groups may have ended since their worker reported them.
        unfinished = [response for response in under_way if response[0] in prefetcher.started]
        self.state = prefetcher.state() | {
            "schedule": schedule.state(),
            "num_steps": num_steps,
            "under_way": unfinished,
        }

    def restore(self, schedule: Schedule, prefetcher: Prefetcher) -> None:
        """Restore the schedule and the prefetcher from the resumed state, if there is one."""
        if self.resumed:
            state = read(self.resumed)
            schedule.restore(state["schedule"])
            prefetcher.restore(state, schedule.num_groups)


def written(found: dict[str, Any]) -> dict[str, Any]:
    """State with its rows as tensors, for a checkpoint."""
    return _convert_rows(found, as_tensor)


def read(state: dict[str, Any]) -> dict[str, Any]:
    """State of a checkpoint with its rows as `DataProto`; the inverse of `written`."""
    return _convert_rows(state, from_tensor)


def require_state(state: dict[str, Any]) -> None:
    """Check the entries of a state.

    Raises:
        CheckpointError: it is not from `written`.
    """
    if state.keys() != set(STATE):
        raise CheckpointError(
            "what was generated ahead",
            got=f"entries {', '.join(state)}",
            expected=", ".join(STATE),
            fix="The checkpoint was written by another version of Quadriga: resume it with that "
            "one.",
        )


def _convert_rows(state: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
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
    """Rows as the bytes of their file [N], for a checkpoint.

    Grades of single responses are left out: a resumed run grades again.
    """
    columns = dict(rows.non_tensor_batch)
    columns.pop("reward_outcome", None)
    metrics = {}
    for name, values in rows.meta_info.get("metrics", {}).items():
        # Metrics of several batches that were joined are lists.
        listed = [values] if isinstance(values, Metric) else values
        metrics[name] = [astuple(metric) for metric in listed]
    meta_info = rows.meta_info | {"metrics": metrics}
    content = to_bytes(DataProto(rows.batch, columns, meta_info))
    return torch.frombuffer(content, dtype=torch.uint8)


def from_tensor(content: torch.Tensor) -> DataProto:
    """Rows from the bytes of `as_tensor` [N]."""
    # A file without a name: a killed process leaves nothing behind.
    with TemporaryFile() as file:
        file.write(content.numpy().data)
        file.flush()
        rows = DataProto.load_from_disk(f"/dev/fd/{file.fileno()}")
    columns = rows.non_tensor_batch
    if "responses" in rows.batch.keys() and ROLLOUT_ID not in columns:
        # Version 0.2.0 wrote responses without it.
        columns[ROLLOUT_ID] = object_array(name_rollouts(columns["uid"]))
    forget_times(rows)
    metrics = rows.meta_info["metrics"]
    rows.meta_info["metrics"] = {
        name: [Metric(*fields) for fields in values] for name, values in metrics.items()
    }
    return rows
