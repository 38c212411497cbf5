# SPDX-License-Identifier: Apache-2.0
"""Rows that a user's generator makes between the steps of training.

    files ──> rows ──┬──> batches ──> step ──> on_batch_end(batch) ──> generator.generate(data set)
                     └───────────────────────────────< rows <──────────────┘

Each checkpoint has all generated rows: a resumed run does not generate them again.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import Dataset

from quadriga.config import DataConfig
from quadriga.data.files import FileNames, write_once
from quadriga.data.rl_dataset import RLHFDataset, as_hf_dataset
from quadriga.data.tokenizing import shortened
from quadriga.errors import DataError
from quadriga.protocol import DataProto
from quadriga.user_file import import_file, member_of

if TYPE_CHECKING:
    import datasets

_WHERE = "data.datagen"


class AbstractDataGenerator(ABC):
    """Base class of generators, which make training rows between steps.

    A generator may have `state_dict()` and `load_state_dict(state)`: each checkpoint then saves its
    state.

    Args:
        config: the section `data.datagen`. `config.options` has the values of
            `data.datagen.options.NAME`.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def generate(self, dataset: "DynamicGenDataset") -> Iterable[Mapping[str, Any]]:
        """Make new rows, possibly none.

        Rows have the columns of the files' rows. Images are given by absolute paths or as bytes.

        Args:
            dataset: has all rows so far (`dataframe`), and the batch of the last step with its
                rewards (`batch`).
        """


class _GeneratedRows(RLHFDataset):
    """Rows of one call of the generator. There may be none, since all may be too long."""

    may_be_empty = True


class DynamicGenDataset(Dataset):
    """Rows of files, followed by rows that the class of `data.datagen` generates after each step.

    Args:
        data_files: as for `RLHFDataset`, which reads the files.
        tokenizer: as for `RLHFDataset`.
        config: the section `data`.
        processor: as for `RLHFDataset`.
        max_samples: as for `RLHFDataset`; limits the rows of the files, not the generated ones.
        options: further arguments of `RLHFDataset`.

    Raises:
        ConfigError: the generator cannot be loaded.
        DataError: the files are wrong.
    """

    def __init__(
        self,
        data_files: FileNames,
        tokenizer: Any,
        config: DataConfig,
        processor: Any = None,
        *,
        max_samples: int = -1,
        **options: Any,
    ) -> None:
        self.config = config
        # Batch of the last step, with rewards and advantages, for the generator.
        self.batch: DataProto | None = None
        datagen = config.datagen
        # The generator is created first, so that its errors come before the files are read.
        module = import_file(str(datagen.path), _WHERE)
        cls = member_of(module, str(datagen.name), _WHERE, base=AbstractDataGenerator)
        self.data_generator = cls(datagen)

        options |= {"tokenizer": tokenizer, "config": config, "processor": processor}
        file_rows = RLHFDataset(data_files, max_samples=max_samples, **options)
        self.processor = file_rows.processor
        self._make_part = partial(_GeneratedRows, **options)
        # One data set for the rows of the files, then one for the rows of each call of the
        # generator.
        self.parts = [file_rows]
        # For each part, the number of rows in it and all parts before it.
        self._ends = [len(file_rows)]
        # Content of the Parquet file of each generated part, for checkpoints.
        self._contents: list[bytes] = []

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, item: int) -> dict[str, Any]:
        """Row `item`, as `RLHFDataset` returns it."""
        part = bisect_right(self._ends, item)
        first = self._ends[part - 1] if part else 0
        return {**self.parts[part][item - first], "item": item}

    @property
    def dataframe(self) -> "datasets.Dataset":
        """All rows as they were read and generated. Each row has the columns of all parts."""
        # Parts may have different columns, and columns of one name with different types.
        tables = [part.dataframe.with_format("arrow")[:] for part in self.parts]
        return as_hf_dataset(pa.concat_tables(tables, promote_options="permissive"))

    def on_batch_end(self, batch: DataProto) -> None:
        """Generate rows after a step.

        Args:
            batch: the batch of the step, with rewards and advantages.

        Raises:
            DataError: the generator returns something else than rows, or bad rows.
        """
        self.batch = batch
        self.append_dataframe(self.data_generator.generate(self))

    def append_dataframe(self, new_dataframe: Iterable[Mapping[str, Any]]) -> None:
        """Add rows at the end. With `data.filter_overlong_prompts` overlong rows are left out.

        Args:
            new_dataframe: the rows, each a dictionary of columns. There may be none.

        Raises:
            DataError: a row is no dictionary or a bad row, or a column has several types.
        """
        where = f"{_WHERE} {type(self.data_generator).__name__}.generate"
        # A value that cannot be iterated over is reported below as a row that is no dictionary.
        rows = list(new_dataframe) if isinstance(new_dataframe, Iterable) else [new_dataframe]
        empty_row = {}  # all columns, each with the value None
        for row in rows:
            if not isinstance(row, Mapping):
                raise DataError(
                    where, got=shortened(row), expected="rows, each a dictionary of columns"
                )
            empty_row |= dict.fromkeys(row)
        if not rows:
            return
        try:
            # Arrow takes the columns of a table from its first row, so each row gets all columns.
            table = pa.Table.from_pylist([empty_row | dict(row) for row in rows])
        except pa.ArrowException as error:
            raise DataError(where, got=str(error), expected="columns of one type each") from error
        content = BytesIO()
        pq.write_table(table, content)
        self._append(content.getvalue())

    def _append(self, content: bytes) -> None:
        """Add the rows of a Parquet file with this content, which is written into the cache."""
        # The name of the file is a hash of the content, so a resumed run finds it there.
        file = write_once(content, Path(self.config.cache_dir).expanduser() / "generated")
        part = self._make_part(str(file))
        # The trainer sets `columns_entry` once, for the parts that exist then.
        part.columns_entry = self.parts[0].columns_entry
        self.parts.append(part)
        self._ends.append(self._ends[-1] + len(part))
        self._contents.append(content)

    def state_dict(self) -> dict[str, Any]:
        """State of the files' rows, all generated rows, and the generator's state or None."""
        generator_state = None
        if hasattr(self.data_generator, "state_dict"):
            generator_state = self.data_generator.state_dict()
        contents = [
            torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in self._contents
        ]
        return {
            "files": self.parts[0].state_dict(),
            "generated": contents,
            "generator": generator_state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generated rows and the generator.

        Raises:
            DataError: the files have other rows than when the state was saved.
        """
        self.parts[0].load_state_dict(state["files"])
        # Only the first part, which has the rows of the files, stays.
        del self.parts[1:]
        del self._ends[1:]
        self._contents.clear()
        for content in state["generated"]:
            self._append(content.numpy().tobytes())
        if state["generator"] is not None:
            self.data_generator.load_state_dict(state["generator"])
