# SPDX-License-Identifier: Apache-2.0
"""Endless stream of prompts: files are read `data.streaming` rows at a time, pass after pass.

    file 0: block, block, block; file 1: block, block; file 0: block ...      one block is in memory

At the start the first block of each file is read too, to check the columns. Rows are shuffled
within a block only, so the state of the stream is the place of a block. Which rows of the block
come next follows from the position in the loader's state.
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


class _RowBlock(RLHFDataset):
    """The rows of the block that is in memory, without bad and overlong ones.

    Before the first `open` it has no rows, and `_tables` has the first block of each file, whose
    columns are checked.
    """

    may_be_empty = True
    keeps_lengths = False
    _is_open = False

    def read(self, file: Path, bad_lines: list[DataError] | None) -> RowTable:
        """Read the first block of a file, to check its columns."""
        config = self.config
        blocks = read_blocks(
            file, config.streaming, bad_lines=bad_lines, chat_columns=config.chat_columns
        )
        table = next(blocks, None)
        if table is None:
            raise DataError(
                str(file), got="no rows", expected="at least one", fix="Leave the file out."
            )
        return table

    def open(self, table: RowTable, bad_lines: list[DataError]) -> None:
        """Replace the rows in memory by the rows of another block.

        Args:
            table: the rows of the block.
            bad_lines: errors of the bad lines of JSON in the block, which are printed.

        Raises:
            DataError: the block has a column that no file has in its first block, or a row is bad
                and `data.on_bad_row` is `error`.
        """
        # All rows of a batch need the same columns, which are those of the first blocks.
        new_columns = sorted({*table.columns}.difference(self._columns))
        if new_columns:
            raise DataError(
                str(table.path),
                got=f"the new column {new_columns[0]!r} at or after row {table.first}",
                expected="columns that the first rows of the files have",
                fix="Give the first row of the file all columns, with null where it has no value.",
            )
        self._is_open = True
        self.bad_rows = bad_lines
        self._tables = [table]
        self._file_ends = np.array([len(table)])
        self._rows = self._choose_rows(-1, is_shuffled=False)

    def _choose_rows(self, max_samples: int, *, is_shuffled: bool) -> np.ndarray:
        # The constructor of the base class calls this before any block is open: there are no rows.
        if not self._is_open:
            return np.arange(0)
        return super()._choose_rows(max_samples, is_shuffled=is_shuffled)


class StreamedDataset(Dataset):
    """Endless stream of rows as `RLHFDataset` returns them. Items are requested in order.

    Args:
        data_files: as for `RLHFDataset`.
        tokenizer: as for `RLHFDataset`.
        config: the section `data`.
        processor: as for `RLHFDataset`.
        is_train: as for `RLHFDataset`.
        context: as for `RLHFDataset`.

    Raises:
        DataError: a file is wrong. Errors of its rows are raised when their block is read.
    """

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
        self.config = config
        self.tokenizer = tokenizer
        # The rows in memory. The constructor reads the first block of each file.
        self.block = _RowBlock(
            data_files, tokenizer, config, processor, is_train=is_train, context=context
        )
        self.processor = self.block.processor
        self._files = [table.path for table in self.block._tables]
        order = "in the order of the files"
        if config.shuffle:
            order = f"shuffled among {config.streaming} at a time"
        print(f"data.streaming: rows are read as they are needed, {order}.", flush=True)
        self._start_reading(pass_number=0, file=0, row=0, first_item=0)

    def __len__(self) -> int:
        """A number larger than any run asks for, because the stream has no end."""
        return sys.maxsize

    def __getitem__(self, item: int) -> dict[str, Any]:
        """Row `item` of the stream, counted since the run began.

        Args:
            item: number of the row. It must not be smaller than in the previous call.
        """
        while item >= self._first_item + len(self.block):
            self._first_item += len(self.block)
            self._open_next()
        # The block numbers its own rows from 0; the stream counts over all blocks and passes.
        number = self._order[item - self._first_item]
        return {**self.block[int(number)], "item": item}

    @property
    def parts(self) -> list[RLHFDataset]:
        """Data sets whose rows and columns can be checked before training: the block in memory."""
        return [self.block]

    def _start_reading(self, *, pass_number: int, file: int, row: int, first_item: int) -> None:
        """Begin to read at a given place, and open the block that begins there.

        Args:
            pass_number: number of the pass over the files.
            file: number of the file.
            row: number in the file of the block's first row.
            first_item: item number of the block's first usable row.
        """
        # The iterator over the blocks adds to this list while it reads.
        self._bad_lines: list[DataError] = []
        self._blocks = self._read_blocks_from(pass_number, file, row)
        self._first_item = first_item
        # The latest pass that had a row that is neither bad nor too long.
        self._latest_usable_pass = pass_number
        self._open_next()

    def _read_blocks_from(
        self, pass_number: int, file: int, row: int
    ) -> Iterator[tuple[int, int, RowTable]]:
        """Read blocks without end, pass after pass.

        Args:
            pass_number: number of the first pass.
            file: number of the file in which the first pass begins.
            row: number of the row in this file where the first block begins.

        Yields:
            The number of the pass, the number of the file, and the block.
        """
        config = self.config
        bad_lines = self._bad_lines if config.on_bad_row == "skip" else None
        while True:
            for number in range(file, len(self._files)):
                blocks = read_blocks(
                    self._files[number], config.streaming, row, bad_lines, config.chat_columns
                )
                for table in blocks:
                    yield pass_number, number, table
                # All further files are read from their first row.
                row = 0
            pass_number += 1
            file = 0

    def _open_next(self) -> None:
        """Read the next block, which may have no usable row, and shuffle its rows.

        Raises:
            DataError: a whole pass had no row that can be used.
        """
        pass_number, file, table = next(self._blocks)
        # This block is of the second pass after the latest usable one: the pass between had no row.
        if pass_number > self._latest_usable_pass + 1:
            raise DataError(
                "data.train_files",
                got="a pass over the files without a row that can be used",
                expected="at least one row that is neither bad nor too long",
                fix="Raise data.max_prompt_length, or correct the rows.",
            )
        # The block gets a copy: the list is emptied here, and filled again by later blocks.
        self.block.open(table, [*self._bad_lines])
        self._bad_lines.clear()
        self._place = {"passes": pass_number, "file": file, "row": table.first}
        if len(self.block):
            self._latest_usable_pass = pass_number
        self._order = np.arange(len(self.block))
        if self.config.shuffle:
            # Seeded by the place of the block, so a state need not have a random generator's state.
            rng = np.random.default_rng([self.config.seed, *self._place.values()])
            self._order = rng.permutation(self._order)

    def state_dict(self) -> dict[str, Any]:
        """Place of the block in memory, number of its first item, and what identifies the files."""
        return {**self._place, "first": self._first_item, "files": self._file_facts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the block whose place was saved.

        Raises:
            DataError: the size of a file or of blocks has changed since the state was saved.
        """
        if state["files"] != self._file_facts():
            raise DataError(
                "data.train_files",
                got="files of other sizes than those of the checkpoint, or another data.streaming",
                expected="the data that the run began with",
                fix="Restore the files and data.streaming.",
            )
        self._start_reading(
            pass_number=state["passes"],
            file=state["file"],
            row=state["row"],
            first_item=state["first"],
        )

    def _file_facts(self) -> list[int]:
        """Rows of a block, then the size of each file in bytes, which identify the files in a state."""
        # Sizes instead of hashes: hashing would read the large files at each start.
        sizes = [file.stat().st_size for file in self._files]
        return [self.config.streaming or 0, *sizes]
