# SPDX-License-Identifier: Apache-2.0
"""Supervised data sets: files -> rows -> chat template -> tokens, of which those of the assistant are learned.

    messages   user          assistant      user          assistant
    tokens     prompt        response       delta         response
    learned    0 0 0 0       1 1 1 0        0 0 0 0       1 1 1

Each part is tokenized by itself, as in a rollout: there the prompt is tokenized, the model adds its own tokens, and of
a further turn only what is new is tokenized. A response is learned up to and with its end-of-sequence token; what a
template writes behind that one (a line break, say) the model never has to generate.

Everything is tokenized when the data set is made, so that a bad row is found then and not after an hour, and no epoch
pays for it again. It is kept as 5 bytes a token.

Shapes: L tokens of one sequence.
"""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase

from quadriga.config import DataConfig
from quadriga.data.file_dataset import FileDataset, tell_bad_rows
from quadriga.data.files import FileNames, RowTable
from quadriga.data.tokenizing import ChatEncoder, Messages, as_messages, shortened
from quadriga.errors import DataError
from quadriga.observe.watchdog import waiting

BATCH_ROWS = 256
ASSISTANT = "assistant"
THINKING = "enable_thinking"
"""Column, and argument of chat templates: whether this conversation is one with reasoning."""
Row = TypeVar("Row", bound=tuple[np.ndarray, ...])


class Conversation(NamedTuple):
    """Tokens, int32 [L], and which of them are learned, bool [L]."""

    ids: np.ndarray
    is_learned: np.ndarray


@dataclass(frozen=True)
class TextPart:
    """A piece of a rendered conversation, and whether it is a turn of the assistant."""

    text: str
    is_learned: bool


class TokenizedRows(FileDataset, Generic[Row]):
    """Rows of files that are tokenized at once; a row is a tuple of arrays, which a subclass defines.

    Arguments as for `FileDataset`.

    Raises:
        DataError: a file that is missing, empty or damaged, or a row that cannot be learned from, by file and number.
    """

    columns: tuple[str, ...]
    """Keys of the section `data` that name the columns of a row."""

    def __init__(
        self, data_files: FileNames, tokenizer: PreTrainedTokenizerBase, config: DataConfig, *, is_train: bool = True
    ) -> None:
        super().__init__(data_files, tokenizer, config, is_train=is_train)
        tables, self._tables = self._tables, []  # the tokens are kept, the files are not
        required = {getattr(config, key): f"data.{key}" for key in self.columns}
        for table in tables:
            if missing := [name for name in required if not {name, name.partition(".")[0]} & {*table.columns}]:
                got, expected = f"the columns {', '.join(table.columns)}", " and ".join(map(repr, missing))
                form = ", or set data.format to what its rows are" if "chosen_key" not in self.columns else ""
                fix = f"Name its columns with {', '.join(required.values())}{form}."
                raise DataError(str(table.path), got=got, expected=f"{expected} among them", fix=fix)
        rows: list[Row] = []
        num_rows, limit = sum(map(len, tables)), config.max_length
        at_most = config.train_max_samples if is_train else config.val_max_samples
        num_rows = num_rows if at_most == -1 else min(at_most, num_rows)
        with waiting(f"the tokens of {self._key}", lambda: f"{len(rows)} of {num_rows} rows are there"):
            for table in tables:
                rows.extend(islice(self._read(table), num_rows - len(rows)))
        if self.bad_rows:
            tell_bad_rows(self._key, self.bad_rows)
        if not rows:
            raise DataError(self._key, got="bad rows only", expected="a good one", fix="Correct them.")
        num_rows, lengths = len(rows), [self.num_tokens(row) for row in rows]
        self.rows = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
        if not self.rows:
            got, expected = f"rows of {min(lengths)} to {max(lengths)} tokens", f"at most data.max_length={limit}"
            raise DataError(self._key, got=got, expected=f"at least one of {expected}", fix="Raise that length.")
        if left_out := num_rows - len(self.rows):
            print(f"{self._key}: {left_out} of {num_rows} rows are over {limit} tokens and left out.", flush=True)

    @abstractmethod
    def parts_of(self, row: dict[str, Any], where: str) -> list[TextPart]:
        """The row as pieces of text."""

    @abstractmethod
    def made(self, parts: Sequence[TextPart], tokens: Sequence[list[int]], where: str) -> Row:
        """The row from its pieces and their token ids."""

    @abstractmethod
    def num_tokens(self, row: Row) -> int:
        """Tokens of the longest sequence in a row."""

    @abstractmethod
    def cut(self, row: Row) -> Row | None:
        """The row with sequences of at most `data.max_length` tokens; None: nothing to learn is left."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def digest(self) -> str:
        """Hash of all tokens."""
        digest = hashlib.sha256()
        for row in self.rows:
            for values in row:
                digest.update(len(values).to_bytes(4, "little") + values.tobytes())
        return digest.hexdigest()

    def padded(self, sequences: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """`input_ids`, `attention_mask`, `position_ids`: int64 [sequences, `data.max_length`], padded on the right."""
        length = self.config.max_length
        input_ids = torch.full((len(sequences), length), int(self.tokenizer.pad_token_id), dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for number, tokens in enumerate(sequences):
            input_ids[number, : len(tokens)] = torch.from_numpy(tokens)
            attention_mask[number, : len(tokens)] = 1
        position_ids = torch.arange(length) * attention_mask
        return {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}

    def _read(self, table: RowTable) -> Iterator[Row]:
        first = 0
        for batch in table.batches(table.columns, BATCH_ROWS):
            rows: list[tuple[str, list[TextPart]]] = []
            for number, row in enumerate(batch, start=first):
                where = f"{table.path} row {number}"
                with self._skips():
                    rows.append((where, self.parts_of(self._row(row, where), where)))
            first += len(batch)
            tokens = iter(self.encoder.encode([part.text for _, parts in rows for part in parts]))
            for where, parts in rows:
                ids = [next(tokens) for _ in parts]
                with self._skips():
                    yield self._fitted(self.made(parts, ids, where), where)

    @contextmanager
    def _skips(self) -> Iterator[None]:
        try:
            yield
        except DataError as error:
            if self.config.on_bad_row == "error":
                raise
            self.bad_rows.append(error)

    def _row(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """The row, with what a dotted name of a column means in it."""
        for key in ("prompt_key", *self.columns):
            name = getattr(self.config, key)
            if name in row or "." not in name:
                continue
            value: Any = row
            for part in name.split("."):
                if not isinstance(value, dict) or part not in value:
                    got = f"no {part!r} in {shortened(value)}"
                    raise DataError(where, got=got, expected=f"what data.{key}={name} names")
                value = value[part]
            row[name] = value
        return row

    def _fitted(self, row: Row, where: str) -> Row:
        """The row, cut where it is too long and is to be cut."""
        length, limit, truncation = self.num_tokens(row), self.config.max_length, self.config.truncation
        if length <= limit or self.config.filter_overlong_prompts:
            return row
        if truncation == "error":
            how = "leave such rows out with data.filter_overlong=true, or cut them with data.truncation=left or right"
            fix, expected = f"Raise that length, {how}.", f"at most data.max_length={limit}"
            raise DataError(where, got=f"{length} tokens", expected=expected, fix=fix)
        if (shorter := self.cut(row)) is None:
            left = f"data.truncation={truncation} leaves {limit} without a response among them"
            fix = "Raise data.max_length, or leave such rows out with data.filter_overlong=true."
            raise DataError(where, got=f"{length} tokens, of which {left}", expected="something to learn", fix=fix)
        return shorter


class MultiTurnSFTDataset(TokenizedRows[Conversation]):
    """Chats, of which every turn of the assistant is learned. Arguments as for `TokenizedRows`."""

    columns = ("messages_key",)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        """Row `item`, padded on the right to `data.max_length` = L.

        Returns:
            `input_ids`, `attention_mask`, `position_ids` and `loss_mask` (1 on tokens that are learned), int64 [L].
        """
        row = self.rows[item]
        columns = {name: values[0] for name, values in self.padded([row.ids]).items()}
        is_learned = torch.from_numpy(row.is_learned).long()
        return {**columns, "loss_mask": F.pad(is_learned, (0, self.config.max_length - len(row.ids)))}

    def parts_of(self, row: dict[str, Any], where: str) -> list[TextPart]:
        messages = as_messages(row[self.config.messages_key], where=where, key="messages_key")
        thinks = row.get(THINKING)
        options = {} if thinks is None else {THINKING: bool(thinks)}
        key = self.config.tools_key
        tools = tools_of_row(row.get(key), where=f"{where}, column {key!r}")
        return text_parts(messages, self.encoder, where=where, tools=tools, **options)

    def made(self, parts: Sequence[TextPart], tokens: Sequence[list[int]], where: str) -> Conversation:
        return conversation(tokens, [part.is_learned for part in parts], self.tokenizer.eos_token_id)

    def num_tokens(self, row: Conversation) -> int:
        return len(row.ids)

    def cut(self, row: Conversation) -> Conversation | None:
        limit = self.config.max_length
        kept = slice(-limit, None) if self.config.truncation == "left" else slice(limit)
        shorter = Conversation(row.ids[kept], row.is_learned[kept])
        # Nothing predicts the first token.
        return shorter if shorter.is_learned[1:].any() else None


class SFTDataset(MultiTurnSFTDataset):
    """Prompts with one response each, in two columns. Arguments and rows as for `MultiTurnSFTDataset`."""

    columns = ("prompt_key", "response_key")

    def parts_of(self, row: dict[str, Any], where: str) -> list[TextPart]:
        prompt, response = row[self.config.prompt_key], row[self.config.response_key]
        if not isinstance(response, str):
            fix = "Correct the row, or name the column with data.response_key."
            raise DataError(where, got=f"the response {response!r}", expected="text", fix=fix)
        messages = [*as_messages(prompt, where=where), {"role": ASSISTANT, "content": response}]
        return prompt_and_response(messages, self.encoder, where=where)


def text_parts(
    messages: Messages, encoder: ChatEncoder, *, where: str, tools: Sequence[Any] | None = None, **options: Any
) -> list[TextPart]:
    """A conversation as the chat template writes it, cut before and after each turn of the assistant.

    What follows its last turn is left out. `tools` are passed to the template, where the row has some, and so are
    `options`, further arguments.

    Raises:
        DataError: no turn of the assistant, an empty one, one at the very beginning, or a template that writes earlier
            turns in another way once later ones follow.
    """
    if not (turns := [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]):
        got = f"a chat of {len(messages)} messages, none of them by the assistant"
        fix = "Leave the row out, or name the column of the whole chat with data.messages_key."
        raise DataError(where, got=got, expected="at least one: its tokens are what is learned", fix=fix)
    if turns[0] == 0:
        raise DataError(where, got="a chat that begins with the assistant", expected="a prompt before the response")
    own = encoder.template_kwargs | options | ({"tools": list(tools)} if tools else {})
    prompting = ChatEncoder(encoder.tokenizer, own | {"add_generation_prompt": True})
    complete = ChatEncoder(encoder.tokenizer, own | {"add_generation_prompt": False})
    parts, written = list[TextPart](), ""
    for turn in turns:
        content = messages[turn].get("content")
        is_empty = not content.strip() if isinstance(content, str) else not content
        if is_empty and not messages[turn].get("tool_calls"):
            got, expected = "an empty turn of the assistant", "something to learn: text, or tool_calls"
            fix = "Correct the row or leave it out: the model would learn to respond with nothing."
            raise DataError(f"{where}, message {turn}", got=got, expected=expected, fix=fix)
        before = prompting.render(messages[:turn], where=where)
        after = complete.render(messages[: turn + 1], where=where)
        for shorter, longer in ((written, before), (before, after)):
            if not longer.startswith(shorter):
                i = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(longer))
                change = f"{shorter[i : i + 40]!r} became {longer[i : i + 40]!r} when the turn was added"
                expected = "turns that stay as they were written, each learned as the model would have generated it"
                keys = "data.apply_chat_template_kwargs, or set model.custom_chat_template to a template that only adds"
                fix = f"Give each response a row of its own that ends with it, change {keys}."
                got = f"a chat template that changes earlier turns: {change}"
                raise DataError(f"{where}, message {turn}", got=got, expected=expected, fix=fix)
        parts += [TextPart(before[len(written) :], False), TextPart(after[len(before) :], True)]
        written = after
    return parts


def prompt_and_response(messages: Messages, encoder: ChatEncoder, *, where: str) -> list[TextPart]:
    """A conversation as two parts, the last turn of the assistant and all before it; as `text_parts` otherwise."""
    *before, response = text_parts(messages, encoder, where=where)
    return [TextPart("".join(part.text for part in before), False), response]


def conversation(parts: Sequence[Sequence[int]], is_response: Sequence[bool], eos_token_id: int | None) -> Conversation:
    """The token ids of the parts of a conversation put together; `is_response` tells the assistant's turns.

    `eos_token_id` ends a turn: it is put behind the last one if the template does not write it there.
    """
    ids: list[int] = []
    learned: list[bool] = []
    for number, (part, is_learned) in enumerate(zip(parts, is_response, strict=True)):
        tokens = list(part)
        has_end = is_learned and eos_token_id in tokens
        # The response reaches up to and with its last end-of-sequence token, or to the end of the part.
        end = len(tokens) - tokens[::-1].index(eos_token_id) if has_end else len(tokens)
        if is_learned and number == len(parts) - 1 and eos_token_id is not None:
            tokens = tokens[:end] if has_end else [*tokens, eos_token_id]
            end = len(tokens)
        ids += tokens
        learned += [is_learned and position < end for position in range(len(tokens))]
    return Conversation(np.array(ids, dtype=np.int32), np.array(learned, dtype=bool))


def tools_of_row(value: Any, *, where: str) -> list[Any] | None:
    """The tool schemas of a row: a list, or the JSON text of one, or of each; DataError where they are none."""
    try:
        found = json.loads(value) if isinstance(value, str) and value else value
        tools = [json.loads(one) if isinstance(one, str) else one for one in found or ()]
        wrong = next((one for one in tools if not isinstance(one, Mapping)), None)
    except (ValueError, TypeError) as error:
        tools, wrong = None, f"{shortened(value)} ({error})"
    if wrong is not None:
        expected = 'a list such as [{"type": "function", "function": {"name": ..., "parameters": {...}}}]'
        fix = "Correct the row, or name the column that holds the tools with data.tools_key."
        raise DataError(where, got=f"the tool schema {wrong}, which is no JSON object", expected=expected, fix=fix)
    return tools


class Pair(NamedTuple):
    """Token ids, int32 [L]: of the prompt, of the better response and of the worse one."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray


class RMDataset(TokenizedRows[Pair]):
    """Preference pairs: two responses to one prompt, the better one and the worse one.

        prompt     text or chat messages; may be missing where the responses are whole chats
        chosen     the better response: text, a list with the assistant's message, or a whole chat
        rejected   the worse one, in the same form

    Read in the tokens that a rollout would have: the rendered prompt, then the response up to its end of sequence.
    Arguments as for `TokenizedRows`.

    Raises:
        DataError: also for a pair of equal responses, from which nothing can be learned.
    """

    columns = ("chosen_key", "rejected_key")

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        """Pair `item`, padded on the right to `data.max_length` = L.

        Returns:
            `input_ids`, `attention_mask` and `position_ids`, int64 [2, L], the better response first; and
            `num_prompt_tokens`, int64 [], with which both begin.
        """
        pair = self.rows[item]
        sequences = [np.concatenate([pair.prompt, response]) for response in (pair.chosen, pair.rejected)]
        return {**self.padded(sequences), "num_prompt_tokens": torch.tensor(len(pair.prompt))}

    def parts_of(self, row: dict[str, Any], where: str) -> list[TextPart]:
        parts: list[TextPart] = []
        for key in self.columns:
            column = getattr(self.config, key)
            place, prompt, response = f"{where}, {column}", row.get(self.config.prompt_key), row[column]
            before = [] if prompt is None else as_messages(prompt, where=place)
            if isinstance(response, str):
                if not before:
                    got = "a response in text, without a prompt"
                    fix = "Name the column of the prompts with data.prompt_key."
                    raise DataError(place, got=got, expected="a prompt in the same row, or a whole chat", fix=fix)
                messages = [*before, {"role": ASSISTANT, "content": response}]
            else:
                chat = as_messages(response, where=place, key=key)
                # Some data sets repeat the prompt in front of each response.
                messages = chat if chat[: len(before)] == before else [*before, *chat]
            parts += prompt_and_response(messages, self.encoder, where=place)
        if parts[0].text != parts[2].text:
            expected = "responses to one prompt: chats that differ in the last turn only"
            raise DataError(where, got="two responses to different prompts", expected=expected, fix="Correct the row.")
        return parts

    def made(self, parts: Sequence[TextPart], tokens: Sequence[list[int]], where: str) -> Pair:
        eos = self.tokenizer.eos_token_id
        chosen, rejected = (conversation(tokens[i : i + 2], [False, True], eos).ids[len(tokens[i]) :] for i in (0, 2))
        if np.array_equal(chosen, rejected):
            got, expected = f"two equal responses, {parts[1].text[:60]!r}", "a better one and a worse one"
            raise DataError(where, got=got, expected=expected, fix="Leave the row out: nothing can be learned from it.")
        return Pair(np.array(tokens[0], dtype=np.int32), chosen, rejected)

    def num_tokens(self, row: Pair) -> int:
        return len(row.prompt) + max(len(row.chosen), len(row.rejected))

    def cut(self, row: Pair) -> Pair | None:
        # The prompt loses its beginning; one token of it must be left.
        kept = len(row.prompt) - (self.num_tokens(row) - self.config.max_length)
        return Pair(row.prompt[-kept:], row.chosen, row.rejected) if kept > 0 else None
