# SPDX-License-Identifier: Apache-2.0
"""Prompts of files that are read as needed, `data.streaming` rows at a time, pass after pass.

    file 0: block, block, block; file 1: block, block; file 0: block ...      one block is in memory

Only the first block of each file is read before its turn. Rows are shuffled within a block.
Therefore the state is the place of a block; the number of its rows that were taken follows from the
loader's state.
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
    """Rows of one block that are neither bad nor too long.

    Before the first `open`, it has no rows, but the columns of the first block of each file.
    """

    may_be_empty = True
    keeps_lengths = False
    _is_open = False

    def read(self, file: Path, bad_lines: list[DataError] | None) -> RowTable:
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
        """Replace the rows by those of another block, whose bad lines are reported with it."""
        # A batch has the columns of all files, which were fixed when the run began.
        new_columns = sorted({*table.columns}.difference(self._columns))
        if new_columns:
            raise DataError(
                str(table.path),
                got=f"the column {new_columns[0]!r} behind row {table.first}",
                expected="columns that its first rows have",
                fix="Give the first row of a file all columns.",
            )
        self._is_open = True
        self.bad_rows = bad_lines
        self._tables = [table]
        self._ends = np.array([len(table)])
        self._rows = self._chosen(-1, is_shuffled=False)

    def _chosen(self, max_samples: int, *, is_shuffled: bool) -> np.ndarray:
        if not self._is_open:
            return np.arange(0)
        return super()._chosen(max_samples, is_shuffled=is_shuffled)


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
        # The rows in memory.
        self.block = _RowBlock(
            data_files, tokenizer, config, processor, is_train=is_train, context=context
        )
        self.processor = self.block.processor
        self._files = [table.path for table in self.block._tables]
        order = "in the order of the files"
        if config.shuffle:
            order = f"shuffled among {config.streaming} at a time"
        print(f"data.streaming: rows are read as they are needed, {order}.", flush=True)
        self._begin(passes=0, file=0, row=0, first=0)

    def __len__(self) -> int:
        """More than a run ever asks for: the stream has no end."""
        return sys.maxsize

    def __getitem__(self, item: int) -> dict[str, Any]:
        """The row with this number among all rows since the run began."""
        while item >= self._first + len(self.block):
            self._first += len(self.block)
            self._open_next()
        # The item numbers of a stream go on over blocks and passes.
        number = self._order[item - self._first]
        return {**self.block[int(number)], "item": item}

    @property
    def parts(self) -> list[RLHFDataset]:
        """Data sets whose columns are known before training."""
        return [self.block]

    def _begin(self, *, passes: int, file: int, row: int, first: int) -> None:
        """Start to read at a row of a file, where a block begins; that row is item `first`."""
        self._bad_lines: list[DataError] = []
        self._blocks = self._read_on(passes, file, row)
        self._first = first
        # The last pass that had a row to use.
        self._used_pass = passes
        self._open_next()

    def _read_on(self, passes: int, file: int, row: int) -> Iterator[tuple[int, int, RowTable]]:
        """All blocks from a row of a file on, each with the numbers of its pass and its file."""
        config = self.config
        bad_lines = self._bad_lines if config.on_bad_row == "skip" else None
        while True:
            for number in range(file, len(self._files)):
                blocks = read_blocks(
                    self._files[number], config.streaming, row, bad_lines, config.chat_columns
                )
                for table in blocks:
                    yield passes, number, table
                # Only the first file begins in the middle.
                row = 0
            passes += 1
            file = 0

    def _open_next(self) -> None:
        """Read the next block.

        Raises:
            DataError: a whole pass had no row that can be used.
        """
        passes, number, table = next(self._blocks)
        # The pass behind the last one with a row is over, and had none.
        if passes > self._used_pass + 1:
            raise DataError(
                "data.train_files",
                got="a pass over the files without a row that can be used",
                expected="at least one",
                fix="Raise data.max_prompt_length.",
            )
        # A copy: the generator of blocks goes on to fill this list.
        self.block.open(table, [*self._bad_lines])
        self._bad_lines.clear()
        self._place = {"passes": passes, "file": number, "row": table.first}
        if len(self.block):
            self._used_pass = passes
        self._order = np.arange(len(self.block))
        if self.config.shuffle:
            # The order depends on the place alone, so the state need not hold a generator.
            rng = np.random.default_rng([self.config.seed, *self._place.values()])
            self._order = rng.permutation(self._order)

    def state_dict(self) -> dict[str, Any]:
        """Place of the block, the number of its first item, and the identity of the files."""
        return {**self._place, "first": self._first, "files": self._facts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the block of a state.

        Raises:
            DataError: the files are others.
        """
        if state["files"] != self._facts():
            raise DataError(
                "data.train_files",
                got="files of other sizes than those of the checkpoint, or other settings",
                expected="the data that the run began with",
                fix="Restore them.",
            )
        self._begin(
            passes=state["passes"], file=state["file"], row=state["row"], first=state["first"]
        )

    def _facts(self) -> list[int]:
        """Rows of a block and the sizes of the files in bytes."""
        # Sizes instead of hashes: files that are streamed are large.
        sizes = [file.stat().st_size for file in self._files]
        return [self.config.streaming or 0, *sizes]
