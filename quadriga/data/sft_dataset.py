# SPDX-License-Identifier: Apache-2.0
"""Conversations to learn from: files -> rows -> chat template -> tokens, all of it before the first step.

Everything is tokenized when the data set is made, so that a bad row is found then and not after an hour, and no epoch
pays for it again. It is kept as 5 bytes a token.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from quadriga.config.sft import SFTDataConfig
from quadriga.data.conversation import Conversation, TextPart, chat_of_row, conversation, text_parts
from quadriga.data.files import resolve_files
from quadriga.data.same_rows import require_same_rows
from quadriga.data.tables import RowTable, read_table
from quadriga.data.tokenizing import ChatEncoder, as_messages, check_tokenizer
from quadriga.errors import DataError
from quadriga.observe.watchdog import waiting

BATCH_ROWS = 256
Row = TypeVar("Row")


class TokenizedRows(Dataset, ABC, Generic[Row]):
    """Rows of files that are tokenized at once; a subclass says what a row is.

    Args:
        data_files: a path, a glob, a URL, or a list of these.
        tokenizer: renders and tokenizes.
        config: the section `data`.
        is_train: decides whether errors name `data.train_files` or `data.val_files`.

    Raises:
        DataError: a file that is missing, empty or damaged, or a row that cannot be learned from, by file and number.
    """

    columns: tuple[str, ...]

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: SFTDataConfig,
        *,
        is_train: bool = True,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self._key = "data.train_files" if is_train else "data.val_files"
        self.encoder = ChatEncoder(tokenizer, config.apply_chat_template_kwargs)
        has_template = "chat_template" in self.encoder.template_kwargs
        check_tokenizer(tokenizer, tokenizer.name_or_path, has_template=has_template)
        tables = [read_table(file) for file in resolve_files(data_files, config.cache_dir, where=self._key)]
        for table in tables:
            self._require_columns(table)
        self.rows: list[Row] = []
        num_rows = sum(map(len, tables))
        with waiting(f"the tokens of {self._key}", lambda: f"{len(self.rows)} of {num_rows} rows are there"):
            for table in tables:
                self._read(table)
        self._leave_out_overlong(num_rows)

    @abstractmethod
    def parts_of(self, row: dict[str, Any], where: str) -> list[TextPart]:
        """The row as pieces of text."""

    @abstractmethod
    def made(self, parts: Sequence[TextPart], tokens: Sequence[list[int]], where: str) -> Row:
        """The row from its pieces and their token ids."""

    @abstractmethod
    def num_tokens(self, row: Row) -> int:
        """Of the longest sequence in it."""

    @abstractmethod
    def cut(self, row: Row) -> Row | None:
        """The row with sequences of at most `data.max_length` tokens; None: nothing to learn is left."""

    @abstractmethod
    def contents(self, row: Row) -> Iterator[np.ndarray]:
        """What makes it this row and no other."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def digest(self) -> str:
        """Hash of all tokens."""
        digest = hashlib.sha256()
        for row in self.rows:
            for values in self.contents(row):
                digest.update(len(values).to_bytes(4, "little") + values.tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Which rows this data set stands for; a loader keeps it with its position."""
        return {"num_rows": len(self), "rows": self.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse to go on from a position in other rows than these."""
        require_same_rows(self.state_dict(), state, self._key)

    def _require_columns(self, table: RowTable) -> None:
        missing = [name for name in (getattr(self.config, key) for key in self.columns) if name not in table.columns]
        if missing:
            keys = ", ".join(f"data.{key}" for key in self.columns)
            raise DataError(
                str(table.path),
                got=f"the columns {', '.join(table.columns)}",
                expected=f"{' and '.join(map(repr, missing))} among them",
                fix=f"Name its columns with {keys}"
                + (", or set data.format to what its rows are." if "chosen_key" not in self.columns else "."),
            )

    def _read(self, table: RowTable) -> None:
        for start in range(0, len(table), BATCH_ROWS):
            numbers = range(start, min(start + BATCH_ROWS, len(table)))
            places = [table.where(number) for number in numbers]
            parts = [self.parts_of(table[number], where) for number, where in zip(numbers, places, strict=True)]
            tokens = iter(self.encoder.encode([part.text for row in parts for part in row]))
            for row, where in zip(parts, places, strict=True):
                self._take(self.made(row, [next(tokens) for _ in row], where), where)

    def _take(self, row: Row, where: str) -> None:
        length, limit = self.num_tokens(row), self.config.max_length
        if length > limit and not self.config.filter_overlong:
            if self.config.truncation == "error":
                raise DataError(
                    where,
                    got=f"{length} tokens",
                    expected=f"at most data.max_length={limit}",
                    fix="Raise that length, leave such rows out with data.filter_overlong=true, or cut them with "
                    "data.truncation=left or right.",
                )
            shorter = self.cut(row)
            if shorter is None:
                raise DataError(
                    where,
                    got=f"{length} tokens, of which data.truncation={self.config.truncation} leaves {limit} without "
                    "an answer among them",
                    expected="something to learn",
                    fix="Raise data.max_length, or leave such rows out with data.filter_overlong=true.",
                )
            row = shorter
        self.rows.append(row)

    def _leave_out_overlong(self, num_rows: int) -> None:
        limit = self.config.max_length
        lengths = [self.num_tokens(row) for row in self.rows]
        self.rows = [row for row, length in zip(self.rows, lengths, strict=True) if length <= limit]
        if not self.rows:
            raise DataError(
                self._key,
                got=f"rows of {min(lengths)} to {max(lengths)} tokens",
                expected=f"at least one of at most data.max_length={limit}",
                fix="Raise that length.",
            )
        if left_out := num_rows - len(self.rows):
            print(f"{self._key}: {left_out} of {num_rows} rows are over {limit} tokens and left out.", flush=True)


class MultiTurnSFTDataset(TokenizedRows[Conversation]):
    """Chats, of which every turn of the assistant is learned. Arguments: see `TokenizedRows`."""

    columns = ("messages_key",)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        """Row `item`, padded on the right to `data.max_length` = L.

        Returns:
            `input_ids`, `attention_mask`, `position_ids` and `loss_mask` (1 on tokens that are learned), int64 [L].
        """
        row = self.rows[item]
        input_ids = torch.full((self.config.max_length,), int(self.tokenizer.pad_token_id), dtype=torch.int64)
        attention_mask, loss_mask = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
        input_ids[: len(row)] = torch.from_numpy(row.ids)
        attention_mask[: len(row)] = 1
        loss_mask[: len(row)] = torch.from_numpy(row.is_learned)
        position_ids = torch.arange(self.config.max_length) * attention_mask
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "loss_mask": loss_mask,
        }

    def parts_of(self, row: dict[str, Any], where: str) -> list[TextPart]:
        """See `TokenizedRows.parts_of`."""
        messages = chat_of_row(row[self.config.messages_key], where=where)
        return text_parts(messages, self.encoder, where=where, tools=row.get(self.config.tools_key))

    def made(self, parts: Sequence[TextPart], tokens: Sequence[list[int]], where: str) -> Conversation:
        """See `TokenizedRows.made`."""
        return conversation(tokens, [part.is_learned for part in parts], self.tokenizer.eos_token_id)

    def num_tokens(self, row: Conversation) -> int:
        """See `TokenizedRows.num_tokens`."""
        return len(row)

    def cut(self, row: Conversation) -> Conversation | None:
        """See `TokenizedRows.cut`."""
        limit = self.config.max_length
        kept = slice(-limit, None) if self.config.truncation == "left" else slice(limit)
        shorter = Conversation(row.ids[kept], row.is_learned[kept])
        # Nothing predicts the first token.
        return shorter if shorter.is_learned[1:].any() else None

    def contents(self, row: Conversation) -> Iterator[np.ndarray]:
        """See `TokenizedRows.contents`."""
        yield row.ids
        yield row.is_learned


class SFTDataset(MultiTurnSFTDataset):
    """Prompts with one answer each, in two columns. Arguments and rows: see `MultiTurnSFTDataset`."""

    columns = ("prompt_key", "response_key")

    def parts_of(self, row: dict[str, Any], where: str) -> list[TextPart]:
        """See `TokenizedRows.parts_of`."""
        prompt, response = row[self.config.prompt_key], row[self.config.response_key]
        if not isinstance(response, str):
            raise DataError(
                where,
                got=f"the answer {response!r}",
                expected="text",
                fix="Correct the row, or name the column with data.response_key.",
            )
        messages = [*as_messages(prompt, where=where), {"role": "assistant", "content": response}]
        *before, answer = text_parts(messages, self.encoder, where=where)
        # Earlier turns of the assistant are part of the question.
        return [TextPart("".join(part.text for part in before), False), answer]
