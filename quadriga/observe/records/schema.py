# SPDX-License-Identifier: Apache-2.0
"""Columns of a recorded rollout, as listed in `columns.tsv`.

Groups of columns: `id` and `reward` (one value of a row), `token` (a list with a value for each
token of the response; `prompt_ids` for each token of the prompt), `text` (removed first when the
record is thinned), `replay` (needed to train a step again), `time` (differs in every run).

A column that a run does not have is null in every row.
"""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

VERSION = 1
"""Version of the format. A reader refuses a newer one."""
_TYPES = {
    "string": pa.string(),
    "binary": pa.binary(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "float": pa.float32(),
    "double": pa.float64(),
    "list<int32>": pa.list_(pa.int32()),
    "list<bool>": pa.list_(pa.bool_()),
    "list<float>": pa.list_(pa.float32()),
}


@dataclass(frozen=True)
class Column:
    """A column of the record."""

    name: str
    type: pa.DataType
    group: str  # id, reward, token, text, replay or time
    meaning: str


_LINES = Path(__file__).with_name("columns.tsv").read_text(encoding="utf-8").splitlines()[1:]
COLUMNS = {
    name: Column(name, _TYPES[type_name], group, meaning)
    for name, type_name, group, meaning in (line.split("\t") for line in _LINES)
}
"""Columns by name, in the order of the files."""
SCHEMA = pa.schema([(column.name, column.type) for column in COLUMNS.values()])
TEXT_COLUMNS = [column.name for column in COLUMNS.values() if column.group == "text"]
"""Columns that thinning removes before it removes whole steps."""
