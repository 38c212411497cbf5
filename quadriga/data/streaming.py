# SPDX-License-Identifier: Apache-2.0
"""Prompts of files that are read as they are needed: `data.streaming` rows at a time, file after file, pass after pass.

    file 0: block, block, block; file 1: block, block; file 0: block ...      one block is in memory

Nothing is read before its turn but the first block of each file. Rows are shuffled within a block, so that the state is
the place of a block, and how many rows of it were taken follows from the loader's.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from quadriga.config import DataConfig
from quadriga.data.files import FileNames, RowTable, read_blocks
from quadriga.data.prompt_lengths import NO_CONTEXT, PromptContext
from quadriga.data.rl_dataset import RLHFDataset
from quadriga.errors import DataError


class _Block(RLHFDataset):
    """The rows of a block that are right and short enough; before one is opened, what the first block of each file
    has of columns."""

    may_be_empty, keeps_lengths = True, False
    _is_open = False

    def read(self, file: Path, bad_lines: list[DataError] | None) -> RowTable:
        config = self.config
        blocks = read_blocks(
            file, config.streaming, bad_lines=bad_lines, chat_columns=config.chat_columns
        )
        if (table := next(blocks, None)) is None:
            raise DataError(
                str(file), got="no rows", expected="at least one", fix="Leave the file out."
            )
        return table

    def open(self, table: RowTable, bad_lines: list[DataError]) -> None:
        """Have the rows of another block."""
        if new := sorted({*table.columns}.difference(self._columns)):
            got, fix = (
                f"the column {new[0]!r} behind row {table.first}",
                "Give the first row of a file all columns.",
            )
            raise DataError(
                str(table.path), got=got, expected="columns that its first rows have", fix=fix
            )
        self._is_open, self.bad_rows = True, bad_lines
        self._tables, self._ends = [table], np.array([len(table)])
        self._rows = self._chosen(-1, is_shuffled=False)

    def _chosen(self, max_samples: int, *, is_shuffled: bool) -> np.ndarray:
        return (
            super()._chosen(max_samples, is_shuffled=is_shuffled) if self._is_open else np.arange(0)
        )


class StreamedDataset(Dataset):
    """Rows as `RLHFDataset` returns them, without end; they are asked for in order.
    `data_files`, `tokenizer`, `config`, `processor`, `is_train`, `context`: as of `RLHFDataset`.
    Raises DataError: a file is wrong, or one of its rows, when its block is read."""

    def __init__(
        self,
        data_files: FileNames,
        tokenizer: Any,
        config: DataConfig,
        processor: Any = None,
        *,
        is_train: bool = True,
        context: PromptContext = NO_CONTEXT,
    ) -> None:
        options: dict[str, Any] = {"is_train": is_train, "context": context}
        self.block = _Block(
            data_files, tokenizer, config, processor, **options
        )  # the rows in memory
        self.config, self.tokenizer, self.processor = config, tokenizer, self.block.processor
        self._files = [table.path for table in self.block._tables]
        order = (
            f"shuffled among {config.streaming} at a time"
            if config.shuffle
            else "in the order of the files"
        )
        print(f"data.streaming: rows are read as they are needed, {order}.", flush=True)
        self._begin(0, 0, 0, 0)

    def __len__(self) -> int:
        """More than are ever asked for."""
        return sys.maxsize

    def __getitem__(self, item: int) -> dict[str, Any]:
        """The row with this number of all that were taken since the run began."""
        while item >= self._first + len(self.block):
            self._advance()
        return {**self.block[int(self._order[item - self._first])], "item": item}

    @property
    def parts(self) -> list[RLHFDataset]:
        """What is known of the rows before training."""
        return [self.block]

    def _begin(self, passes: int, file: int, row: int, first: int) -> None:
        """Read on from a row of a file; the first that is read is item `first`."""
        self._bad_lines = list[DataError]()
        self._blocks = self._read_on(passes, file, row)
        self._first, self._order, self._used = first, np.arange(0), passes
        self._advance(is_next=False)

    def _read_on(self, passes: int, file: int, row: int) -> Iterator[tuple[int, int, RowTable]]:
        config = self.config
        bad = self._bad_lines if config.on_bad_row == "skip" else None
        while True:
            for number in range(file, len(self._files)):
                for table in read_blocks(
                    self._files[number], config.streaming, row, bad, config.chat_columns
                ):
                    yield passes, number, table
                row = 0
            passes, file = passes + 1, 0

    def _advance(self, *, is_next: bool = True) -> None:
        """Open the next block. Raises DataError: a whole pass had no row that can be used."""
        self._first += len(self.block) if is_next else 0
        passes, number, table = next(self._blocks)
        if passes > self._used + 1:
            got, fix = (
                "a pass over the files without a row that can be used",
                "Raise data.max_prompt_length.",
            )
            raise DataError("data.train_files", got=got, expected="at least one", fix=fix)
        self.block.open(table, [*self._bad_lines])
        self._bad_lines.clear()
        self._place = {"passes": passes, "file": number, "row": table.first}
        self._used = passes if len(self.block) else self._used
        self._order = np.arange(len(self.block))
        if self.config.shuffle:
            self._order = np.random.default_rng(
                [self.config.seed, *self._place.values()]
            ).permutation(self._order)

    def state_dict(self) -> dict[str, Any]:
        """The block, the number of its first row, and which files these are."""
        return {**self._place, "first": self._first, "files": self._facts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Read on from there. Raises DataError: the files are others."""
        if state["files"] != self._facts():
            got, fix = (
                "files of other sizes than those of the checkpoint, or other settings",
                "Restore them.",
            )
            raise DataError(
                "data.train_files", got=got, expected="the data that the run began with", fix=fix
            )
        self._begin(state["passes"], state["file"], state["row"], state["first"])

    def _facts(self) -> list[int]:
        return [self.config.streaming or 0, *(file.stat().st_size for file in self._files)]
