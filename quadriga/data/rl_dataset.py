# SPDX-License-Identifier: Apache-2.0
"""The data set of reinforcement learning: prompts with what is needed to grade the responses.

    files -> rows -> (left out if too long) -> (a sample of them) -> chat template -> token ids -> cut, left-padded
                                                          images of the row -> patches ┘ with a processor

A row is data_source, prompt, ability, reward_model {"style", "ground_truth"} and extra_info; columns beyond these
travel along. What a row yields is listed at `RLHFDataset.__getitem__`.
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
from quadriga.data.file_dataset import FileDataset, tell_bad_rows
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
    WITH_TOOLS,
    PromptContext,
    PromptMeter,
    prompt_lengths,
    told_prompts,
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
    """Prompts from parquet, json and jsonl files, tokenized when they are fetched. Arguments as for `FileDataset`, and
    `processor`: of a vision-language model, by `load_processor` or of transformers. None: prompts are text.
    `is_train`: also whether `data.shuffle` or `data.validation_shuffle` decides how a sample is drawn.
    `max_samples`: use at most so many rows, -1 for all: drawn with `data.seed` when shuffled, else the first.
    `required_columns`: columns every file must have; None stands for those that training reads.
    `context`: the tools that prompts are measured with, and how many ids the model knows.
    Raises DataError: a file that is missing, empty, damaged or without a required column, or no row that is short
    enough."""

    may_be_empty, keeps_lengths = False, True
    """Whether it may be that no row is short enough, or good; whether what was measured is kept in the cache."""

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
        self._columns = list(
            dict.fromkeys(column for table in self._tables for column in table.columns)
        )
        self._ends = np.cumsum([len(table) for table in self._tables])
        if aside := sorted((RESERVED & {*self._columns}) - {config.prompt_key}):
            told = f"{', '.join(aside)}: columns with names of the batch, which are moved into extra_info"
            print(f"{self._key}: {told}.", flush=True)

        self._rows = self._chosen(
            max_samples, is_shuffled=config.shuffle if is_train else config.validation_shuffle
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        """Row `item`, ready for `collate_fn`. `P` is `data.max_prompt_length`.
        Returns `input_ids`, `attention_mask` and `position_ids`, int64 [P], padded on the left; `raw_prompt_ids`, the
        same ids as a list without padding; the row's columns but the prompt; `index`, `tools_kwargs` and
        `interaction_kwargs` out of `extra_info` (`index`, a number or a text, is the row's number where it has none;
        the others may be columns of their own); `item`; `source_row`; and, with `data.return_raw_chat`, `raw_prompt`
        (chat messages), with `data.return_full_prompt`, `full_prompts` (rendered text). With a processor `position_ids`
        are [3, P], `raw_prompt_ids` have one token for each image and video, and `multi_modal_data` and
        `multi_modal_inputs` take the place of the columns of both.
        Raises DataError: the prompt is no chat, or too long under `data.truncation=error`, or its images or videos are
        wrong; it names file and row."""
        number = int(self._rows[item])
        table, own_number, where = self._place(number)
        row = dict.fromkeys(self._columns) | table[own_number]
        messages, media = read_prompt(
            row, self.config, is_vision=self.processor is not None, where=where
        )
        used = [self.config.prompt_key]
        if self.processor is not None:
            used += [self.config.image_key, self.config.video_key]
        tools = self.context.tools_of(row)
        row = set_aside({name: value for name, value in row.items() if name not in used})
        pictures, clips = read_media(
            media, self.processor, self.config, folder=table.path.parent, where=where
        )
        options: dict[str, Any] = {"tools": tools} if tools else {}
        text = self.encoder.render(
            messages, where=f"{where}, column {self.config.prompt_key!r}", **options
        )
        row |= prompt_columns(
            text, pictures, clips, self.encoder, self.processor, self.config, where=where
        )
        if not self.config.return_multi_modal_inputs:
            row.pop("multi_modal_inputs", None)
        if self.config.return_raw_chat:
            row["raw_prompt"] = messages
        if self.config.return_full_prompt:
            row["full_prompts"] = text
        extra = row.get("extra_info") or {}
        row["index"] = table.first + number if extra.get("index") is None else extra["index"]
        row["item"], row["source_row"] = item, where
        for name in ("tools_kwargs", "interaction_kwargs"):
            row[name] = extra.get(name) or row.get(name) or {}
        return row

    @property
    def dataframe(self) -> "datasets.Dataset":
        """The rows in use as they stand in the files."""
        tables = [table.to_arrow() for table in self._tables]
        rows = as_hf_dataset(pa.concat_tables(tables, promote_options="permissive"))
        return cast("datasets.Dataset", rows.select(self._rows))

    def places(self, items: Sequence[int]) -> list[tuple[int, int]]:
        """The number of the file of each item, and of its row in that file."""
        numbers = self._rows[np.asarray(items, dtype=np.int64)]
        files = np.searchsorted(self._ends, numbers, side="right")
        first_rows = np.concatenate([[0], self._ends])[files]
        return list(zip(files.tolist(), (numbers - first_rows).tolist(), strict=True))

    def _place(self, number: int) -> tuple[RowTable, int, str]:
        """Of a row of all files: its file, its number there, and both in words."""
        position = int(np.searchsorted(self._ends, number, side="right"))
        table, own_number = (
            self._tables[position],
            number - int(self._ends[position - 1]) if position else number,
        )
        return table, own_number, f"{table.path} row {table.first + own_number}"

    @property
    def digest(self) -> str:
        """Hash of the files' contents and of the numbers of the rows in use."""
        digest = hashlib.sha256("".join(table.digest for table in self._tables).encode())
        digest.update(self._rows.tobytes())
        return digest.hexdigest()

    def items_by_entry(self) -> list[np.ndarray]:
        """The items out of the files of each entry of `data_files`."""
        entries = np.array(self._entries)[np.searchsorted(self._ends, self._rows, side="right")]
        return [np.flatnonzero(entries == number) for number in range(self._entries[-1] + 1)]

    def column(self, name: str) -> Iterator[tuple[str, Any]]:
        """Of each row in use its file and number, and the value of a column; None where it has none."""
        is_used, first = np.zeros(self._ends[-1], dtype=bool), 0
        is_used[self._rows] = True
        for table in self._tables:
            batches = (
                table.batches([name], BATCH_ROWS) if name in table.columns else [[{}] * len(table)]
            )
            for number, row in enumerate(chain.from_iterable(batches)):
                if is_used[first + number]:
                    yield f"{table.path} row {table.first + number}", row.get(name)
            first += len(table)

    def _chosen(self, max_samples: int, *, is_shuffled: bool) -> np.ndarray:
        """The rows to use: those that are right and not too long, and a sample of them. What is left out is printed.
        Raises DataError: none is left, or a row that would end a run in the middle of it."""
        config, rows, limit = self.config, np.arange(self._ends[-1]), self.config.max_prompt_length
        # A subclass may make its rows of other columns.
        is_own, filters = (
            type(self).__getitem__ is RLHFDataset.__getitem__,
            config.filter_overlong_prompts,
        )
        is_sample, lengths = 0 <= max_samples < len(rows), None
        measured = np.zeros(len(rows), MEASURED)
        if filters or (is_own and not is_sample):
            measured = np.concatenate([self._measured(table) for table in self._tables])
            lengths = measured["tokens"]
            rows = rows[lengths != BAD]
            is_long = lengths[rows] > limit
            if filters and len(rows) and is_long.all() and not self.may_be_empty:
                got = f"prompts of at least {lengths[rows].min()} tokens"
                expected = f"at least one of at most data.max_prompt_length={limit}"
                raise DataError(self._key, got=got, expected=expected, fix="Raise that length.")
            if filters and (left_out := np.count_nonzero(is_long)):
                told = f"{left_out} of {len(lengths)} prompts are over {limit} tokens and left out"
                print(f"{self._key}: {told}.", flush=True)
            rows = rows[~is_long] if filters else rows
        if 0 <= max_samples < len(rows):
            if is_shuffled:
                rows = np.sort(
                    np.random.default_rng(config.seed).choice(rows, size=max_samples, replace=False)
                )
            rows = rows[:max_samples]
        if is_own and lengths is None and len(rows):  # what is not in use need not be measured
            lengths = measured["tokens"]
            for number in rows.tolist():
                table, row, _ = self._place(number)
                measured[number] = self._measured(table, range(row, row + 1))[0]
            rows = rows[lengths[rows] != BAD]
        self._tell(measured[rows])
        if len(rows) == 0 and max_samples != 0 and not self.may_be_empty:
            raise DataError(
                self._key, got="bad rows only", expected="a good one", fix="Correct them."
            )
        if lengths is not None:
            has_tools = (measured["notes"][rows] & WITH_TOOLS) != 0
            self._refuse_long_tools(rows[has_tools & (lengths[rows] > limit)])
        if lengths is not None and (config.truncation == "error" or self.processor is not None):
            self._rows = rows[lengths[rows] > limit]
            with waiting(f"{len(self)} rows of {self._key} to be tried"):
                for item in range(len(self)):
                    self[item]
        return rows

    def _refuse_long_tools(self, rows: np.ndarray) -> None:
        """Raise a DataError for the first of these rows, whose tools make their prompts too long."""
        for number in rows.tolist():
            table, row, where = self._place(number)
            meter = PromptMeter(self.encoder, self.processor, self.config, context=self.context)
            measured, _ = meter.measure(table, range(row, row + 1))
            got = f"a prompt of {measured['tokens'][0]} tokens with its {len(self.context.tools)} tools"
            expected = f"at most data.max_prompt_length={self.config.max_prompt_length}"
            left_out = "leave such rows out with data.filter_overlong_prompts=true"
            fix = f"Raise that length, offer fewer tools, or {left_out}: a prompt with tools is not cut."
            raise DataError(where, got=got, expected=expected, fix=fix)

    def _tell(self, measured: np.ndarray) -> None:
        """Print which rows are left out, what was looked at in the others, and their `NOTES`.

        `measured`: those of the rows in use.
        """
        if self.bad_rows:
            tell_bad_rows(self._key, self.bad_rows)
        # Blocks of a stream and rows of a generator come while the run trains.
        if not self.may_be_empty and measured["order"].any():
            print(f"{self._key}: {told_prompts(measured)}.", flush=True)
        for note, told in NOTES.items():
            if count := np.count_nonzero(measured["notes"] & note):
                print(f"{self._key}: {count} {told}.", flush=True)

    def _measured(self, table: RowTable, rows: range | None = None) -> np.ndarray:
        """Every prompt of a file, or those of some rows, as `PromptMeter` measures them."""
        config = self.config
        meter = PromptMeter(
            self.encoder, self.processor, config, config.max_prompt_length, self.context
        )
        if rows is None and self.keeps_lengths:
            workers = config.filter_overlong_prompts_workers
            lengths, errors = prompt_lengths(
                table, meter, cache_dir=config.cache_dir, num_workers=workers
            )
        else:
            lengths, errors = meter.measure(table, range(len(table)) if rows is None else rows)
        if errors and config.on_bad_row == "error":
            raise errors[0]
        self.bad_rows += errors
        return lengths


def set_aside(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its columns of reserved names in `extra_info`, where reward functions find them; in a batch the
    training loop would write over them."""
    columns = {name: row.pop(name) for name in RESERVED & row.keys()}
    return row | {"extra_info": columns | (row.get("extra_info") or {})} if columns else row


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
    """What the rollout reads of a rendered prompt, its images and videos, [P] each, as `RLHFDataset` returns it.
    Raises DataError: the prompt is too long, or its images or videos are wrong."""
    limit, ids = config.max_prompt_length, encoder.encode([text])[0]
    if not pictures and not clips:
        ids = truncate(ids, limit, config.truncation, where=where)
    seen = None
    if processor is not None:
        seen = processor.prompt(
            ids, pictures, limit, where=where, clips=clips, encode=encoder.encode
        )
    input_ids = torch.tensor([ids if seen is None else seen.ids], dtype=torch.int64)
    pad = encoder.tokenizer.pad_token_id
    input_ids, mask = postprocess_data(
        input_ids, torch.ones_like(input_ids), limit, pad, where=where
    )
    tensors = {"input_ids": input_ids[0], "attention_mask": mask[0]}
    if seen is None:
        return {
            **tensors,
            "position_ids": compute_position_id_with_mask(mask)[0],
            "raw_prompt_ids": ids,
        }
    return {**tensors, "position_ids": pad_left(seen.positions, limit, 0), **seen.columns()}


def _check_columns(tables: list[RowTable], required: Sequence[str], config: DataConfig) -> None:
    """One error for everything that is missing, so that a file is corrected once."""
    fixes = {
        config.prompt_key: "set data.prompt_key to the column that holds the prompts",
        config.reward_fn_key: "set data.reward_fn_key to the column that names the data source",
        "reward_model": 'give each row reward_model={"style": "rule", "ground_truth": "..."}',
    }
    problems = []
    for table in tables:
        got = f"the columns {', '.join(table.columns)}"
        for column in (one for one in required if one not in table.columns):
            fix = f"Rename or add it, or {fixes[column]}." if column in fixes else "Add it."
            problems.append(
                DataError(str(table.path), got=got, expected=f"a column {column!r}", fix=fix)
            )
    if len(problems) == 1:
        raise problems[0]
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise DataError(
            f"data files, {len(problems)} missing columns{listed}\nTherefore nothing was loaded"
        )


def as_hf_dataset(table: pa.Table) -> "datasets.Dataset":
    """Return a table as a dataset of Hugging Face's library, which is imported here: it brings pandas along."""
    import datasets

    return datasets.Dataset(table)
