# SPDX-License-Identifier: Apache-2.0
"""Every column of the training loop: name, shape, dtype, unit, who writes it, who reads it.

This is the one table, `fields.tsv`; `docs/batch_fields.md` shows it, and a test compares both with the columns that the
code touches.

Legend: B rows (sequences), P prompt positions, T response positions, L = P + T. Prompts are padded on
the left, responses on the right.
"""

import csv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Field:
    """A column: key, shape in the letters of the legend, torch dtype or what an object array holds, the packages of
    quadriga that write and read it, and what a value means."""

    name: str
    shape: str
    dtype: str
    written_by: tuple[str, ...]
    read_by: tuple[str, ...]
    unit: str

    @property
    def is_tensor(self) -> bool:
        """Whether the column lives in `batch`."""
        return not self.dtype.startswith("object")


with Path(__file__).with_suffix(".tsv").open(encoding="utf-8", newline="") as _file:
    _, *_rows = csv.reader(_file, delimiter="\t", quoting=csv.QUOTE_NONE)

FIELDS = {
    name: Field(name, shape, dtype, tuple(writers.split()), tuple(readers.split()), unit)
    for name, shape, dtype, writers, readers, unit in _rows
}
"""By name: tensors first, then objects."""

RESERVED = FIELDS.keys() - {
    "data_source",
    "reward_model",
    "extra_info",
    "index",
    "agent_name",
    "tools_kwargs",
    "interaction_kwargs",
}
"""Columns that only the training loop and the data set write; rows of files bring the others."""
