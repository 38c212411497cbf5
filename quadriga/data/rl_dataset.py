# SPDX-License-Identifier: Apache-2.0
"""Data set for reinforcement learning: prompts, with the columns for grading responses.

    files -> rows -> without overlong ones -> sample -> chat template -> token ids -> cut, padded
                                                images of the row -> patches ┘

A row of a file has the columns data_source, prompt, ability, reward_model {"style", "ground_truth"}
and extra_info; all other columns are passed through. `RLHFDataset.__getitem__` lists the fields of
a row.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from quadriga.config import DataConfig
from quadriga.data.file_dataset import FileDataset, print_bad_rows
from quadriga.data.files import FileNames, RowTable
from quadriga.data.media import read_prompt
from quadriga.data.padding import (
    compute_position_id_with_mask,
    pad_left,
    postprocess_data,
    truncate,
)
from quadriga.data.prompt_lengths import (
    BAD,
    BATCH_ROWS,
    MEASURED,
    NO_CONTEXT,
    NOTES,
    UNNAMED_TOOLS,
    WITH_TOOLS,
    PromptContext,
    PromptMeter,
    describe_prompts,
    prompt_lengths,
)
from quadriga.data.tokenizing import ChatEncoder
from quadriga.data.videos import Clip
from quadriga.data.vision import as_vision, read_media
from quadriga.errors import DataError
from quadriga.observe.watchdog import waiting
from quadriga.protocol.fields import RESERVED

if TYPE_CHECKING:
    import datasets


class RLHFDataset(FileDataset):
    """Prompts from parquet, json and jsonl files, tokenized when they are fetched.

    Args:
        data_files: as for `FileDataset`.
        tokenizer: as for `FileDataset`.
        config: the section `data`.
        processor: processor of a vision-language model, from `load_processor` or from transformers.
            None: prompts are text.
        is_train: as for `FileDataset`; also whether `data.shuffle` or `data.validation_shuffle`
            decides how a sample is drawn.
        max_samples: most rows to use; -1 for all. They are drawn with `data.seed` when shuffled,
            else they are the first ones.
        required_columns: columns that every file must have. None: the columns that training reads.
        context: the tools that are rendered into prompts, and the size of the model's vocabulary.

    Raises:
        DataError: a file is missing, empty, damaged or without a required column; a row is bad and
            not to be left out; or no row can be used.
    """

    may_be_empty = False
    """Whether the data set may be without a usable row. Otherwise that raises an error."""
    keeps_lengths = True
    """Whether measured lengths of prompts are stored in the cache."""
    columns_entry: str | None = None
    """Entry of `extra_info` that gets a copy of the row's columns, for reward functions that read
    whole rows. None: no such entry."""
    longest_prompt: int | None = None
    """Number of tokens of the longest prompt before truncation; None if prompts are not measured."""

    def __init__(
        self,
        data_files: FileNames,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        processor: Any = None,
        *,
        is_train: bool = True,
        max_samples: int = -1,
        required_columns: Sequence[str] | None = None,
        context: PromptContext = NO_CONTEXT,
    ) -> None:
        self.processor = as_vision(processor)
        self.context = context
        super().__init__(data_files, tokenizer, config, is_train=is_train)
        if required_columns is None:
            required_columns = (config.prompt_key, config.reward_fn_key, "reward_model")
        _check_columns(self._tables, required_columns, config)
        # All columns that any file has, in the order in which they first appear.
        self._columns = list(dict.fromkeys(chain(*(table.columns for table in self._tables))))
        # Rows are numbered over all files. For each file, the number of rows in it and all before
        # it.
        self._file_ends = np.cumsum([len(table) for table in self._tables])
        moved_columns = sorted((RESERVED & {*self._columns}) - {config.prompt_key})
        if moved_columns:
            print(
                f"{self._key}: the columns {', '.join(moved_columns)} are moved into extra_info,"
                " because a batch has columns of these names.",
                flush=True,
            )
        is_shuffled = config.shuffle if is_train else config.validation_shuffle
        # Numbers of the rows in use: item `i` is row `_rows[i]`.
        self._rows = self._choose_rows(max_samples, is_shuffled=is_shuffled)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        """Row `item`, ready for `collate_fn`. `P` is `data.max_prompt_length`.

        Returns:
            The columns of the row without the prompt, and:

            - `input_ids`, `attention_mask` and `position_ids`, int64 [P], padded on the left. With
              a processor `position_ids` are [3, P].
            - `raw_prompt_ids`, a list of the same ids without padding, but with only one token for
              each image and video.
            - `index`, `tools_kwargs` and `interaction_kwargs` from `extra_info`. If it has no
              `index`, that is the row's number. The other two may also be columns.
            - `item`, the argument, and `source_row`, the row's file and number as text.
            - with `data.return_raw_chat`, `raw_prompt` (chat messages); with
              `data.return_full_prompt`, `full_prompts` (rendered text).
            - with a processor, `multi_modal_data` and `multi_modal_inputs` in place of the columns
              of images and videos. `data.return_multi_modal_inputs=false` leaves the latter out.

        Raises:
            DataError: the prompt is no chat; it is too long and must not be truncated; or an image
                or video cannot be read. The error names file and row.
        """
        config = self.config
        number = int(self._rows[item])
        table, file_row, where = self._find_row(number)
        # Rows of different files may be in one batch, so each gets the columns of all files.
        row = dict.fromkeys(self._columns) | table[file_row]
        messages, media = read_prompt(
            row, config, is_vision=self.processor is not None, where=where
        )
        tools = self.context.tools_of(row)
        # The copy for `columns_entry` is made before columns are moved or removed.
        file_columns = {
            name: row[name] for name in row if name not in ("extra_info", "reward_model")
        }
        # The prompt and its media come back below as tokens and tensors.
        row.pop(config.prompt_key, None)
        if self.processor is not None:
            row.pop(config.image_key, None)
            row.pop(config.video_key, None)
        row = set_aside(row)
        if self.columns_entry is not None:
            # Rows that were given as Python objects have the entry already. It stays.
            row["extra_info"] = {self.columns_entry: file_columns} | (row.get("extra_info") or {})

        folder = table.path.parent
        pictures, clips = read_media(media, self.processor, config, folder=folder, where=where)
        prompt_place = f"{where}, column {config.prompt_key!r}"
        text = self.encoder.render(messages, where=prompt_place, tools=tools)
        row |= prompt_columns(
            text, pictures, clips, self.encoder, self.processor, config, where=where
        )
        if not config.return_multi_modal_inputs:
            # The loader makes these tensors again (`RowLoader`), so that worker processes need not
            # send them.
            row.pop("multi_modal_inputs", None)
        if config.return_raw_chat:
            row["raw_prompt"] = messages
        if config.return_full_prompt:
            row["full_prompts"] = text
        extra = row.get("extra_info") or {}
        row["index"] = extra.get("index")
        if row["index"] is None:
            # `number` counts over all files, whose tables begin at row 0. Only the block of a
            # stream, which is a single table, begins at a later row.
            row["index"] = table.first + number
        row["item"] = item
        row["source_row"] = where
        for name in ("tools_kwargs", "interaction_kwargs"):
            row[name] = extra.get(name) or row.get(name) or {}
        return row

    @property
    def dataframe(self) -> "datasets.Dataset":
        """The rows in use as the files have them, with the columns of all files."""
        tables = [table.to_arrow() for table in self._tables]
        rows = as_hf_dataset(pa.concat_tables(tables, promote_options="permissive"))
        return cast("datasets.Dataset", rows.select(self._rows))

    def places(self, items: Sequence[int]) -> list[tuple[int, int]]:
        """For each item, the number of its file, and the number of its row in the file's table."""
        numbers = self._rows[np.asarray(items, dtype=np.int64)]
        files = np.searchsorted(self._file_ends, numbers, side="right")
        # The number of the first row of each file among all rows.
        first_rows = np.concatenate([[0], self._file_ends])[files]
        return list(zip(files.tolist(), (numbers - first_rows).tolist(), strict=True))

    def _find_row(self, number: int) -> tuple[RowTable, int, str]:
        """Find a row by its number among the rows of all files.

        Returns:
            The table of the row's file, the row's number in the table, and both as text for errors.
        """
        position = int(np.searchsorted(self._file_ends, number, side="right"))
        table = self._tables[position]
        file_row = number - int(self._file_ends[position - 1]) if position else number
        return table, file_row, f"{table.path} row {table.first + file_row}"

    @property
    def digest(self) -> str:
        """Hash of the files' contents and of the numbers of the rows in use."""
        digest = hashlib.sha256("".join(table.digest for table in self._tables).encode())
        # Other settings choose other rows of the same files.
        digest.update(self._rows.tobytes())
        return digest.hexdigest()

    def items_by_entry(self) -> list[np.ndarray]:
        """For each entry of `data_files`, the items that come from its files, int64 [items]."""
        files = np.searchsorted(self._file_ends, self._rows, side="right")
        entries = np.array(self._entries)[files]
        return [np.flatnonzero(entries == number) for number in range(self._entries[-1] + 1)]

    def column(self, name: str) -> Iterator[tuple[str, Any]]:
        """Read a column of all rows in use.

        Args:
            name: name of the column. A file may lack it.

        Returns:
            Pairs of file and row as text, and the value or None.
        """
        # Read each file once and in order, also rows that are not in use; a mask tells them apart.
        is_used = np.zeros(self._file_ends[-1], dtype=bool)
        is_used[self._rows] = True
        first = 0
        for table in self._tables:
            has_column = name in table.columns
            # Without the column, one batch of empty rows.
            batches = table.batches([name], BATCH_ROWS) if has_column else [[{}] * len(table)]
            for number, row in enumerate(chain.from_iterable(batches)):
                if is_used[first + number]:
                    yield f"{table.path} row {table.first + number}", row.get(name)
            first += len(table)

    def _choose_rows(self, max_samples: int, *, is_shuffled: bool) -> np.ndarray:
        """Choose the rows to use, and print what is left out.

        Bad rows are left out or raise their error (`data.on_bad_row`), overlong ones are left out
        with `data.filter_overlong_prompts`, and a sample of the other rows is taken.

        Args:
            max_samples: most rows; -1 for all.
            is_shuffled: whether the sample is drawn at random; else it is the first rows.

        Returns:
            Ascending numbers of rows, counted over all files.

        Raises:
            DataError: no row is left; a row would raise an error when it is fetched in training; or
                tools are offered that no prompt names.
        """
        filters_long = self.config.filter_overlong_prompts
        # A subclass with its own `__getitem__` may not use the prompt as it is in the file, so its
        # prompts are measured only if the configuration asks for the filter.
        is_plain = type(self).__getitem__ is RLHFDataset.__getitem__
        rows = np.arange(self._file_ends[-1])
        is_sample = 0 <= max_samples < len(rows)
        # Rows that are not measured keep 0 tokens and no notes.
        measured = np.zeros(len(rows), MEASURED)
        # If overlong rows are left out, all rows are measured, because the sample is drawn from the
        # short rows. Otherwise only the rows of the sample are measured.
        measures_all = filters_long or (is_plain and not is_sample)
        if measures_all:
            measured = np.concatenate([self._measure(table) for table in self._tables])
            rows = rows[measured["tokens"] != BAD]
        if filters_long:
            rows = self._drop_long(rows, measured["tokens"])
        rows = self._sample(rows, max_samples, is_shuffled=is_shuffled)
        measures_sample = is_plain and not measures_all and len(rows) > 0
        if measures_sample:
            for number in rows.tolist():
                table, file_row, _ = self._find_row(number)
                measured[number] = self._measure(table, range(file_row, file_row + 1))[0]
            rows = rows[measured["tokens"][rows] != BAD]

        # Printed before the error that no row is left: it lists the errors of the bad rows.
        self._print_summary(measured[rows])
        # With `max_samples=0` no row was asked for.
        if len(rows) == 0 and max_samples != 0 and not self.may_be_empty:
            raise DataError(
                self._key,
                got="bad rows only",
                expected="at least one good row",
                fix="Correct the rows.",
            )
        # Not for the block of a stream and generated rows, which are only some of the run's rows.
        if not self.may_be_empty:
            self._require_named_tools(measured[rows]["notes"])
        if measures_all or measures_sample:
            self._check_long_rows(rows, measured[rows])
            self.longest_prompt = int(measured["tokens"][rows].max(initial=0))
        return rows

    def _require_named_tools(self, notes: np.ndarray) -> None:
        """Raise a DataError if tools are offered, and no row of the data names one.

        Args:
            notes: sums of `NOTES` [rows in use].
        """
        num_with_tools = np.count_nonzero(notes & WITH_TOOLS)
        if num_with_tools and num_with_tools == np.count_nonzero(notes & UNNAMED_TOOLS):
            raise DataError(
                self._key,
                got=f"{num_with_tools} prompts with tools, none of which names a tool",
                expected="a chat template that writes the tools, or messages that name them",
                fix="Take such a template, or describe the tools and how to call them in a system "
                "message of each row.",
            )

    def _sample(self, rows: np.ndarray, max_samples: int, *, is_shuffled: bool) -> np.ndarray:
        """Take at most `max_samples` rows, drawn with `data.seed` if shuffled, else the first."""
        if not 0 <= max_samples < len(rows):
            return rows
        if is_shuffled:
            rng = np.random.default_rng(self.config.seed)
            # The sample stays in the order of the files: it is the sampler that shuffles.
            return np.sort(rng.choice(rows, size=max_samples, replace=False))
        return rows[:max_samples]

    def _drop_long(self, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Leave out rows that are too long.

        Args:
            rows: numbers of good rows.
            lengths: tokens of each row of all files.

        Returns:
            The numbers of the rows that are short enough.

        Raises:
            DataError: all rows are too long, and the data set must not be empty.
        """
        limit = self.config.max_prompt_length
        if not self.may_be_empty:
            require_short_prompt(lengths[rows].tolist(), limit, where=self._key)
        is_long = lengths[rows] > limit
        num_long = np.count_nonzero(is_long)
        if num_long:
            print(
                f"{self._key}: {num_long} of {len(lengths)} prompts are over {limit} tokens and"
                " left out.",
                flush=True,
            )
        return rows[~is_long]

    def _check_long_rows(self, rows: np.ndarray, measured: np.ndarray) -> None:
        """Raise the error of the first overlong row that must not be truncated.

        Args:
            rows: numbers of the rows in use.
            measured: `MEASURED` [rows].

        Raises:
            DataError: an overlong row has tools, images or videos; or there is an overlong row, and
                `data.truncation` is `error`.
        """
        config = self.config
        is_long = measured["tokens"] > config.max_prompt_length
        has_tools = (measured["notes"] & WITH_TOOLS) != 0
        long_rows_with_tools = rows[is_long & has_tools]
        if len(long_rows_with_tools):
            self._refuse_long_tools(int(long_rows_with_tools[0]))
        if config.truncation == "error" or self.processor is not None:
            # Fetching an overlong row raises its error. `__getitem__` reads `_rows`, which the
            # caller sets to all rows in use afterwards.
            self._rows = rows[is_long]
            with waiting(f"{len(self)} rows of {self._key} to be tried"):
                for item in range(len(self)):
                    self[item]

    def _refuse_long_tools(self, number: int) -> None:
        """Raise a DataError for a row whose prompt is too long with its tools."""
        table, file_row, where = self._find_row(number)
        # A meter without a limit, because users need the exact count.
        meter = PromptMeter(self.encoder, self.processor, self.config, context=self.context)
        measured, _ = meter.measure(table, range(file_row, file_row + 1))
        num_tokens = measured["tokens"][0]
        raise DataError(
            where,
            got=f"a prompt of {num_tokens} tokens with its {len(self.context.tools)} tools",
            expected=f"at most data.max_prompt_length={self.config.max_prompt_length}",
            fix=(
                "Raise that length, offer fewer tools, or leave such rows out with"
                " data.filter_overlong_prompts=true: a prompt with tools is not cut."
            ),
        )

    def _print_summary(self, measured: np.ndarray) -> None:
        """Print the bad rows that are left out, and a summary of the rows in use.

        Args:
            measured: `MEASURED` [rows in use].
        """
        if self.bad_rows:
            print_bad_rows(self._key, self.bad_rows)
        # Not for blocks of a stream and generated rows, of which each run has many.
        if not self.may_be_empty and measured["order"].any():
            print(f"{self._key}: {describe_prompts(measured)}.", flush=True)
        for note, description in NOTES.items():
            count = np.count_nonzero(measured["notes"] & note)
            if count:
                print(f"{self._key}: {count} {description}.", flush=True)

    def _measure(self, table: RowTable, rows: range | None = None) -> np.ndarray:
        """Measure the prompts of a file.

        Args:
            table: the rows of the file.
            rows: numbers of rows in the table. None: all rows.

        Returns:
            `MEASURED` [rows].

        Raises:
            DataError: a row is bad, and `data.on_bad_row` is `error`. Otherwise the errors are
                added to `bad_rows`.
        """
        config = self.config
        meter = PromptMeter(
            self.encoder, self.processor, config, config.max_prompt_length, self.context
        )
        if rows is None and self.keeps_lengths:
            measured, errors = prompt_lengths(
                table,
                meter,
                cache_dir=config.cache_dir,
                num_workers=config.filter_overlong_prompts_workers,
            )
        else:
            # The cache has entries for whole files only.
            measured, errors = meter.measure(table, range(len(table)) if rows is None else rows)
        if errors and config.on_bad_row == "error":
            raise errors[0]
        self.bad_rows += errors
        return measured


def require_short_prompt(lengths: Sequence[int], limit: int, *, where: str) -> None:
    """Raise a DataError if there are prompts, and all are over `data.max_prompt_length`.

    Args:
        lengths: tokens of each prompt.
        limit: `data.max_prompt_length`.
        where: key or class of the data set, for the error.
    """
    if lengths and min(lengths) > limit:
        raise DataError(
            where,
            got=f"prompts of at least {min(lengths)} tokens",
            expected=f"at least one of at most data.max_prompt_length={limit}",
            fix="Raise that length.",
        )


def set_aside(row: dict[str, Any]) -> dict[str, Any]:
    """Move the columns with reserved names into `extra_info`, where reward functions find them.

    The training loop makes batch columns of these names, which would overwrite the row's columns.
    An entry of `extra_info` that has such a name already stays as it is.
    """
    columns = {name: row.pop(name) for name in RESERVED & row.keys()}
    if not columns:
        return row
    return row | {"extra_info": columns | (row.get("extra_info") or {})}


def prompt_columns(
    text: str,
    pictures: list[Any],
    clips: Sequence[Clip],
    encoder: ChatEncoder,
    processor: Any,
    config: DataConfig,
    *,
    where: str,
) -> dict[str, Any]:
    """Make the columns of a rendered prompt that the rollout reads.

    Args:
        text: the rendered prompt.
        pictures: the images of the prompt in RGB.
        clips: the videos of the prompt with their frames.
        encoder: tokenizes the text.
        processor: `VisionProcessor` of a vision-language model, or None.
        config: the section `data`.
        where: file and row, for errors.

    Returns:
        `input_ids`, `attention_mask`, `position_ids` and `raw_prompt_ids`, and the columns of
        images and videos, as `RLHFDataset.__getitem__` lists them.

    Raises:
        DataError: the prompt is too long, or its images or videos are wrong.
    """
    limit = config.max_prompt_length
    ids = encoder.encode([text])[0]
    # A prompt with images is never truncated: `processor.prompt` raises if it is too long.
    if not pictures and not clips:
        ids = truncate(ids, limit, config.truncation, where=where)
    prompt_ids = ids
    vision_prompt = None
    if processor is not None:
        vision_prompt = processor.prompt(
            ids, pictures, limit, where=where, clips=clips, encode=encoder.encode
        )
        prompt_ids = vision_prompt.ids
    input_ids = torch.tensor([prompt_ids], dtype=torch.int64)
    # The ids are short enough now, so they are only padded.
    input_ids, mask = postprocess_data(
        input_ids,
        torch.ones_like(input_ids),
        limit,
        encoder.tokenizer.pad_token_id,
        where=where,
    )
    columns: dict[str, Any] = {"input_ids": input_ids[0], "attention_mask": mask[0]}
    if vision_prompt is None:
        columns["position_ids"] = compute_position_id_with_mask(mask)[0]
        columns["raw_prompt_ids"] = ids
        return columns
    # The positions of padding are 0 along each axis.
    columns["position_ids"] = pad_left(vision_prompt.positions, limit, 0)
    return columns | vision_prompt.columns()


def _check_columns(tables: list[RowTable], required: Sequence[str], config: DataConfig) -> None:
    """Raise one DataError that lists the missing columns of all files."""
    fixes = {
        config.prompt_key: "set data.prompt_key to the column that holds the prompts",
        config.reward_fn_key: "set data.reward_fn_key to the column that names the data source",
        "reward_model": 'give each row reward_model={"style": "rule", "ground_truth": "..."}',
    }
    problems = []
    for table in tables:
        got = f"the columns {', '.join(table.columns)}"
        for column in required:
            if column in table.columns:
                continue
            fix = f"Rename or add it, or {fixes[column]}." if column in fixes else "Add it."
            expected = f"a column {column!r}"
            problems.append(DataError(str(table.path), got=got, expected=expected, fix=fix))
    if len(problems) == 1:
        raise problems[0]
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise DataError(
            f"data files, {len(problems)} missing columns{listed}\nTherefore nothing was loaded"
        )


def as_hf_dataset(table: pa.Table) -> "datasets.Dataset":
    """Convert a table to a dataset of Hugging Face's library."""
    # Imported here because it is slow: it imports pandas.
    import datasets

    return datasets.Dataset(table)
