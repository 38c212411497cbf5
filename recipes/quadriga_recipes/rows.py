# SPDX-License-Identifier: Apache-2.0
"""The rows that prepared data sets are made of, and the parquet file that holds such rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from quadriga.data.files import written_aside
from quadriga.errors import DataError

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
# The types of these columns are written down: a column of Nones has none of its own.
_TYPES = {
    "data_source": pa.string(),
    "prompt": _MESSAGES,
    "ability": pa.string(),
    "reward_model": pa.struct([("style", pa.string()), ("ground_truth", pa.string())]),
    "images": pa.list_(pa.struct([("bytes", pa.binary())])),
}


@dataclass(frozen=True)
class Problem:
    """One prompt and what its answers are measured by.

    Attributes:
        text: the user's message.
        ground_truth: the right answer; None where only a scorer knows it.
        extra: further entries of `extra_info`.
        system: the system prompt.
        images: the file of each `<image>` in the text.
        agent_name: of the agent loop that leads the conversation; None is the run's own choice.
    """

    text: str
    ground_truth: str | None
    extra: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    images: tuple[bytes, ...] = ()
    agent_name: str | None = None

    def columns(self) -> dict[str, Any]:
        """Those that are this row's own."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        found: dict[str, Any] = {
            "prompt": [*system, {"role": "user", "content": self.text}],
            "reward_model": {"style": "rule", "ground_truth": self.ground_truth},
        }
        if self.images:
            found["images"] = [{"bytes": image} for image in self.images]
        return found if self.agent_name is None else found | {"agent_name": self.agent_name}


@dataclass(frozen=True)
class Pair:
    """A chat up to a user's message, and a better and a worse response to it."""

    prompt: list[dict[str, str]]
    chosen: str
    rejected: str
    extra: dict[str, Any] = field(default_factory=dict)

    def columns(self) -> dict[str, Any]:
        """Those that are this row's own."""
        return {"prompt": self.prompt, "chosen": self.chosen, "rejected": self.rejected}


Row: TypeAlias = Problem | Pair


def write_rows(
    found: Sequence[Row], target: Path, *, data_source: str, ability: str, split: str
) -> Path:
    """Write rows of one kind to the parquet file `target`, all of them or nothing, and return it.

    Raises:
        DataError: there are none, or the file cannot be written.
    """
    if not found:
        raise DataError(
            "prepare data",
            got=f"no rows for {target.name}",
            expected="at least one",
            fix="Ask for at least one row.",
        )
    rows = [
        {"data_source": data_source, "ability": ability, **row.columns()}
        | {"extra_info": {"split": split, "index": index, **row.extra}}
        for index, row in enumerate(found)
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: pa.array([row.get(name) for row in rows], _TYPES.get(name)) for name in names}
    with written_aside(target, where="prepare data") as draft:
        pq.write_table(pa.table(columns), draft)
    return target


def write_splits(
    train: Sequence[Row], val: Sequence[Row], output_dir: Path, *, data_source: str, ability: str
) -> dict[str, Path]:
    """Write train.parquet and val.parquet into `output_dir` and return their paths by split."""
    return {
        split: write_rows(
            found,
            output_dir / f"{split}.parquet",
            data_source=data_source,
            ability=ability,
            split=split,
        )
        for split, found in (("train", train), ("val", val))
    }
