# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of an asynchronous run has of generation, in numbers, texts and tensors.

schedule      groups and batches: `Schedule.state`
num_steps     of the engine
begun         the prompt of each group that has not ended, one row
under_way     its responses so far: `GenerationStream.save`
groups        rows of each complete group that no step has learned from
rows          prompts that are taken and not started
counts        that no step has reported
rounds        complete groups of a batch that are not graded; filters: those that are (`GroupFilter`)
"""

from dataclasses import astuple
from tempfile import TemporaryFile
from typing import Any

import torch

from quadriga.errors import CheckpointError
from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto
from quadriga.protocol.disk import to_bytes

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


def written(found: dict[str, Any]) -> dict[str, Any]:
    """The state with its rows as tensors."""
    return _with_rows(found, as_tensor)


def read(state: dict[str, Any]) -> dict[str, Any]:
    """What `written` was given."""
    return _with_rows(state, from_tensor)


def require_state(state: dict[str, Any]) -> None:
    """Raises CheckpointError: it is not what `written` gives."""
    if state.keys() != set(STATE):
        where, got = "what was generated ahead", f"entries {', '.join(state)}"
        fix = "The checkpoint was written by another version of Quadriga: resume it with that one."
        raise CheckpointError(where, got=got, expected=", ".join(STATE), fix=fix)


def _with_rows(state: dict[str, Any], change: Any) -> dict[str, Any]:
    filters = {
        batch: own | {"parts": list(map(change, own["parts"]))}
        for batch, own in state["filters"].items()
    }
    begun, groups = (
        {number: change(rows) for number, rows in state[name].items()}
        for name in ("begun", "groups")
    )
    return state | {
        "begun": begun,
        "groups": groups,
        "rows": list(map(change, state["rows"])),
        "filters": filters,
    }


def as_tensor(rows: DataProto) -> torch.Tensor:
    """A file of rows, as bytes [N] for a checkpoint; grades of single responses are made anew."""
    kept = {
        name: column for name, column in rows.non_tensor_batch.items() if name != "reward_outcome"
    }
    measured = rows.meta_info.get("metrics", {}).items()
    metrics = {
        name: list(map(astuple, [one] if isinstance(one, Metric) else one))
        for name, one in measured
    }
    content = to_bytes(DataProto(rows.batch, kept, rows.meta_info | {"metrics": metrics}))
    return torch.frombuffer(content, dtype=torch.uint8)


def from_tensor(content: torch.Tensor) -> DataProto:
    """The rows that `as_tensor` was given."""
    # A file without a name: a killed process leaves nothing.
    with TemporaryFile() as file:
        file.write(content.numpy().data)
        file.flush()
        rows = DataProto.load_from_disk(f"/dev/fd/{file.fileno()}")
    rows.meta_info["metrics"] = {
        name: [Metric(*one) for one in own] for name, own in rows.meta_info["metrics"].items()
    }
    return rows
