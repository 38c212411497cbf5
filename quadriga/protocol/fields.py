# SPDX-License-Identifier: Apache-2.0
"""Table of the columns of the training loop: name, shape, dtype, unit, and who uses them.

The table is `fields.tsv`. `docs/batch_fields.md` shows it, and a test compares both with the
columns that the code reads and writes.

Legend: B rows (sequences), P prompt positions, T response positions, L = P + T. Prompts are padded
on the left, responses on the right.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Field:
    """A column of the training loop.

    Attributes:
        name: name of the column.
        shape: shape of the column, in the letters of the legend.
        dtype: dtype of a tensor column; for other columns "object", followed by what the array
            holds.
        written_by: packages of quadriga that write the column.
        read_by: packages of quadriga that read the column.
        unit: meaning of a value.
    """

    name: str
    shape: str
    dtype: str
    written_by: tuple[str, ...]
    read_by: tuple[str, ...]
    unit: str

    @property
    def is_tensor(self) -> bool:
        """Whether the column is a tensor in `batch`, and not an array in `non_tensor_batch`."""
        return not self.dtype.startswith("object")


_LINES = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()[1:]
FIELDS = {
    name: Field(name, shape, dtype, tuple(writers.split()), tuple(readers.split()), unit)
    for name, shape, dtype, writers, readers, unit in (line.split("\t") for line in _LINES)
}
"""Fields by name: tensors first, then objects."""

_FROM_DATA_FILES = {
    "data_source",
    "reward_model",
    "extra_info",
    "index",
    "agent_name",
    "tools_kwargs",
    "interaction_kwargs",
}

RESERVED = FIELDS.keys() - _FROM_DATA_FILES
"""Columns that only the training loop and the data set write. No data file may have them."""
