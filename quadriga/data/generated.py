# SPDX-License-Identifier: Apache-2.0
"""Rows that a generator of your own makes between the batches of training.

    files ──> rows ──┬──> batches ──> step ──> on_batch_end(batch) ──> generator.generate(data set)
                     └───────────────────────────────< rows <──────────────┘

What was generated is in each checkpoint, so that a resumed run has it without the generator.
"""

import hashlib
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
from quadriga.data.files import FileNames, written_aside
from quadriga.data.rl_dataset import RLHFDataset, as_hf_dataset
from quadriga.data.tokenizing import shortened
from quadriga.errors import DataError
from quadriga.protocol import DataProto
from quadriga.user_file import import_file, member_of

if TYPE_CHECKING:
    import datasets

_WHERE = "data.datagen"


class AbstractDataGenerator(ABC):
    """Makes rows. With `state_dict()` and `load_state_dict(state)` its own state is in each checkpoint too.
    `config`: the section `data.datagen`; `config.options` has what is set as `data.datagen.options.NAME`."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def generate(self, dataset: "DynamicGenDataset") -> Iterable[Mapping[str, Any]]:
        """New rows, with the columns that rows of files have, and images by absolute paths or as bytes; perhaps none.
        `dataset` has the rows so far (`dataframe`), and in `batch` the step that was taken, with its rewards."""


class _Generated(RLHFDataset):
    may_be_empty = True


class DynamicGenDataset(Dataset):
    """The rows of files, and behind them those that the class of `data.datagen` generates after each training step.
    `data_files`, `tokenizer`, `config`, `processor`, `max_samples`, `options`: as of `RLHFDataset`, which reads the
    files.
    Raises ConfigError: the generator cannot be loaded.
    Raises DataError: the files are wrong."""

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
        self.config, datagen, base = config, config.datagen, AbstractDataGenerator
        self.batch: DataProto | None = None  # of the last step, with rewards and advantages
        cls = member_of(
            import_file(str(datagen.path), _WHERE), str(datagen.name), _WHERE, base=base
        )
        self.data_generator = cls(datagen)
        options |= {"tokenizer": tokenizer, "config": config, "processor": processor}
        self.parts = [RLHFDataset(data_files, max_samples=max_samples, **options)]
        self._make_part, self.processor = partial(_Generated, **options), self.parts[0].processor
        self._ends, self._contents = [len(self.parts[0])], list[bytes]()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, item: int) -> dict[str, Any]:
        """Row `item`, as `RLHFDataset` returns it."""
        part = bisect_right(self._ends, item)
        return {**self.parts[part][item - (self._ends[part - 1] if part else 0)], "item": item}

    @property
    def dataframe(self) -> "datasets.Dataset":
        """All rows as they were read and generated."""
        tables = [part.dataframe.with_format("arrow")[:] for part in self.parts]
        return as_hf_dataset(pa.concat_tables(tables, promote_options="permissive"))

    def on_batch_end(self, batch: DataProto) -> None:
        """Has rows generated after a step. Raises DataError: they are no rows, or wrong ones."""
        self.batch = batch
        self.append_dataframe(self.data_generator.generate(self))

    def append_dataframe(self, new_dataframe: Iterable[Mapping[str, Any]]) -> None:
        """Add rows; with `data.filter_overlong_prompts` those that are short enough, and the others are counted.
        Raises DataError: they are no rows, or wrong ones."""
        where = f"{_WHERE} {type(self.data_generator).__name__}.generate"
        rows = list(new_dataframe) if isinstance(new_dataframe, Iterable) else [new_dataframe]
        if wrong := [row for row in rows if not isinstance(row, Mapping)]:
            raise DataError(
                where, got=shortened(wrong[0]), expected="rows, each a dictionary of columns"
            )
        if not rows:
            return
        content, columns = BytesIO(), dict.fromkeys(key for row in rows for key in row)
        try:
            table = pa.Table.from_pylist([dict.fromkeys(columns) | dict(row) for row in rows])
        except pa.ArrowException as error:
            raise DataError(where, got=str(error), expected="columns of one type each") from error
        pq.write_table(table, content)
        self._append(content.getvalue())

    def _append(self, content: bytes) -> None:
        """Add the rows of a Parquet file, which is written to the cache."""
        name = f"{hashlib.sha256(content).hexdigest()[:20]}.parquet"
        file = Path(self.config.cache_dir).expanduser() / "generated" / name
        if not file.is_file():
            with written_aside(file, where="data.cache_dir") as draft:
                draft.write_bytes(content)
        part = self._make_part(str(file))
        self.parts.append(part)
        self._ends.append(self._ends[-1] + len(part))
        self._contents.append(content)

    def state_dict(self) -> dict[str, Any]:
        """Which rows the files have, all rows that were generated, and the state of a generator that has one."""
        generator = self.data_generator
        own = generator.state_dict() if hasattr(generator, "state_dict") else None
        contents = [
            torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in self._contents
        ]
        return {"files": self.parts[0].state_dict(), "generated": contents, "generator": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the rows of a state. Raises DataError: the files have other rows."""
        self.parts[0].load_state_dict(state["files"])
        del self.parts[1:], self._ends[1:], self._contents[:]
        for content in state["generated"]:
            self._append(content.numpy().tobytes())
        if state["generator"] is not None:
            self.data_generator.load_state_dict(state["generator"])
