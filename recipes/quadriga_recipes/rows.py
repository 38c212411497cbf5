# SPDX-License-Identifier: Apache-2.0
"""Rows of prepared data sets, and the parquet files that they are written to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from quadriga.data.files import written_aside
from quadriga.errors import DataError

Columns: TypeAlias = dict[str, Any]
"""Values of a row by column."""
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
# These columns have explicit types, because pyarrow cannot infer one from Nones.
_TYPES = {
    "data_source": pa.string(),
    "prompt": _MESSAGES,
    "ability": pa.string(),
    "reward_model": pa.struct([("style", pa.string()), ("ground_truth", pa.string())]),
    "images": pa.list_(pa.struct([("bytes", pa.binary())])),
}


@dataclass(frozen=True)
class Problem:
    """A prompt, and how its responses are graded.

    Attributes:
        text: the user's message.
        ground_truth: the right answer; None if only a scorer can tell.
        extra: further entries of `extra_info`.
        system: the system prompt; None: none.
        images: for each `<image>` in the text, the content of the file.
        agent_name: name of the agent loop; None: the run's default.
    """

    text: str
    ground_truth: str | None
    extra: Columns = field(default_factory=dict)
    system: str | None = None
    images: tuple[bytes, ...] = ()
    agent_name: str | None = None

    def columns(self) -> Columns:
        """Columns of the row, without those that `write_rows` adds to all rows of a file."""
        messages = [{"role": "user", "content": self.text}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        columns: Columns = {
            "prompt": messages,
            "reward_model": {"style": "rule", "ground_truth": self.ground_truth},
        }
        if self.images:
            columns["images"] = [{"bytes": image} for image in self.images]
        if self.agent_name is not None:
            columns["agent_name"] = self.agent_name
        return columns


@dataclass(frozen=True)
class ChatPair:
    """A preference pair: a chat that ends with a user's message, and two responses to it.

    Attributes:
        prompt: messages of the chat.
        chosen: the better response.
        rejected: the other response.
        extra: further entries of `extra_info`.
    """

    prompt: list[dict[str, str]]
    chosen: str
    rejected: str
    extra: Columns = field(default_factory=dict)

    def columns(self) -> Columns:
        """Columns of the row, without those that `write_rows` adds to all rows of a file."""
        return {"prompt": self.prompt, "chosen": self.chosen, "rejected": self.rejected}


Row: TypeAlias = Problem | ChatPair


def write_rows(
    entries: Sequence[Row], target: Path, *, data_source: str, ability: str, split: str
) -> Path:
    """Write rows of one kind to a parquet file, all of them or nothing.

    Args:
        entries: the rows.
        target: the file.
        data_source: data source of the rows, which selects the grader.
        ability: kind of the task, in a word.
        split: "train" or "val".

    Returns:
        The file.

    Raises:
        DataError: there are no rows, or the file cannot be written.
    """
    if not entries:
        raise DataError(
            "prepare data",
            got=f"no rows for {target.name}",
            expected="at least one",
            fix="Ask for at least one row.",
        )
    rows = []
    for index, row in enumerate(entries):
        row_columns = {"data_source": data_source, "ability": ability, **row.columns()}
        row_columns["extra_info"] = {"split": split, "index": index, **row.extra}
        rows.append(row_columns)
    columns = {}
    # The names of all rows, since some rows may lack optional columns, such as `images`.
    for name in dict.fromkeys(chain.from_iterable(rows)):
        values = [row_columns.get(name) for row_columns in rows]
        columns[name] = pa.array(values, _TYPES.get(name))
    with written_aside(target, where="prepare data") as draft:
        pq.write_table(pa.table(columns), draft)
    return target
