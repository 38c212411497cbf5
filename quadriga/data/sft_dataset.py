# SPDX-License-Identifier: Apache-2.0
"""Supervised data sets: files -> rows -> chat template -> tokens, of which those of the assistant are learned.

    messages   user          assistant      user          assistant
    tokens     prompt        response       delta         response
    learned    0 0 0 0       1 1 1 0        0 0 0 0       1 1 1

Each part is tokenized by itself, as in a rollout: there the prompt is tokenized, the model adds its own tokens, and of
a further turn only what is new is tokenized. A response is learned up to and with its end-of-sequence token; what a
template writes behind that one (a line break, say) the model never has to generate. Where a template ends no turn, the
marker of the next role is learned, if generation stops at it.

Everything is tokenized when the data set is made, so that a bad row is found then and not after an hour, and no epoch
pays for it again. It is kept as 5 bytes a token. Of images and videos the sizes are read then, and the pixels when the
row is fetched; no token that stands for one is learned.

Shapes: L tokens of one sequence.
"""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase

from quadriga.config import DataConfig
from quadriga.data.file_dataset import FileDataset, tell_bad_rows
from quadriga.data.files import FileNames, RowTable
from quadriga.data.media import media_of, refuse_media, with_parts
from quadriga.data.tokenizing import (
    ChatEncoder,
    Messages,
    as_messages,
    chat_in_json,
    require_embedded,
    shortened,
    told_orders,
)
from quadriga.data.videos import Clip
from quadriga.data.vision import as_vision, read_media
from quadriga.errors import DataError
from quadriga.observe.watchdog import waiting

BATCH_ROWS = 256
ASSISTANT = "assistant"
THINKING = "enable_thinking"
"""Column, and argument of chat templates: whether this conversation is one with reasoning."""
Row = TypeVar("Row", bound=tuple[Any, ...])
"""Arrays, and behind them a `RowMedia` or None."""


class RowMedia(NamedTuple):
    """Where a row stands that has images or videos, and how long each of them is as tokens, chat by chat."""

    table: RowTable
    number: int
    images: list[int]
    clips: list[Clip]


class Conversation(NamedTuple):
    """Tokens, int32 [L], which of them are learned, bool [L], and the images and videos that stand among them."""

    ids: np.ndarray
    is_learned: np.ndarray
    media: RowMedia | None = None


@dataclass(frozen=True)
class TextPart:
    """A piece of a rendered conversation, and whether it is a turn of the assistant."""

    text: str
    is_learned: bool


class TokenizedRows(FileDataset, Generic[Row]):
    """Rows of files that are tokenized at once; a subclass defines what a row is.

    Arguments as for `FileDataset`, and `processor`, of a vision-language model; None: rows are text.
    `stop_token_ids`: tokens that end a response, beside the tokenizer's end of sequence.
    `vocabulary_size`: rows of the model's embedding, where the tokenizer has ids beyond them.
    Raises DataError: a file that is missing, empty or damaged, or a row that cannot be learned from, by file and
    number."""

    columns: tuple[str, ...]
    """Keys of the section `data` that name the columns of a row."""
    may_be_empty = False
    """Whether it may be that no row is good, or short enough."""
    num_open_turns = 0
    """Turns of the assistant that are learned without an end."""
    num_chats_in_json = 0

    def __init__(
        self,
        data_files: FileNames,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        *,
        processor: Any = None,
        is_train: bool = True,
        stop_token_ids: Sequence[int] = (),
        vocabulary_size: int | None = None,
    ) -> None:
        self.processor = as_vision(processor)
        self.stop_token_ids = stop_token_ids
        self.vocabulary_size = vocabulary_size
        super().__init__(data_files, tokenizer, config, is_train=is_train)
        tables, self._tables = self._tables, []  # the tokens are kept, the files are not
        required = {getattr(config, key): f"data.{key}" for key in self.columns}
        for table in tables:
            if missing := [
                name for name in required if not {name, name.partition(".")[0]} & {*table.columns}
            ]:
                got, expected = (
                    f"the columns {', '.join(table.columns)}",
                    " and ".join(map(repr, missing)),
                )
                form = (
                    ", or set data.format to what its rows are"
                    if "chosen_key" not in self.columns
                    else ""
                )
                fix = f"Name its columns with {', '.join(required.values())}{form}."
                raise DataError(
                    str(table.path), got=got, expected=f"{expected} among them", fix=fix
                )
        rows: list[Row] = []
        num_rows, limit = sum(map(len, tables)), config.max_length
        at_most = config.train_max_samples if is_train else config.val_max_samples
        num_rows = num_rows if at_most == -1 else min(at_most, num_rows)
        with waiting(
            f"the tokens of {self._key}", lambda: f"{len(rows)} of {num_rows} rows are there"
        ):
            for table in tables:
                rows.extend(islice(self._read(table), num_rows - len(rows)))
        if self.bad_rows:
            tell_bad_rows(self._key, self.bad_rows)
        if not rows and not self.may_be_empty:
            raise DataError(
                self._key, got="bad rows only", expected="a good one", fix="Correct them."
            )
        num_rows, lengths = len(rows), [self.num_tokens(row) for row in rows]
        self.rows = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
        if not self.rows and not self.may_be_empty:
            got, expected = (
                f"rows of {min(lengths)} to {max(lengths)} tokens",
                f"at most data.max_length={limit}",
            )
            raise DataError(
                self._key, got=got, expected=f"at least one of {expected}", fix="Raise that length."
            )
        if left_out := num_rows - len(self.rows):
            print(
                f"{self._key}: {left_out} of {num_rows} rows are over {limit} tokens and left out.",
                flush=True,
            )
        print(
            f"{self._key}: {num_rows} rows measured; {told_orders(self.encoder.num_orders)}.",
            flush=True,
        )
        self._tell_forms()

    def _tell_forms(self) -> None:
        """Print how many rows have a form that their author may not have meant."""
        if count := self.num_chats_in_json:
            print(
                f"{self._key}: {count} chats are texts in JSON, and read as the messages in them.",
                flush=True,
            )
        if self.num_open_turns:
            print(
                f"{self._key}: {self.num_open_turns} turns of the assistant before the last are learned without an end:"
                " the chat template ends them with no token at which generation stops.",
                flush=True,
            )

    @abstractmethod
    def chats_of(self, row: dict[str, Any], where: str) -> list[tuple[str, Messages]]:
        """The conversations of a row, which show the same images, each with its place in words."""

    def parts_of(self, row: dict[str, Any], chat: Messages, where: str) -> list[TextPart]:
        """One of them as pieces of text: here the last turn of the assistant, and all before it."""
        *before, response = text_parts(chat, self.encoder, where=where)
        return [TextPart("".join(part.text for part in before), False), response]

    @abstractmethod
    def made(
        self,
        parts: Sequence[TextPart],
        tokens: Sequence[list[int]],
        media: RowMedia | None,
        where: str,
    ) -> Row:
        """The row from the pieces of its conversations, their token ids, and its images and videos."""

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
        for *arrays, media in self.rows:
            for values in arrays:
                digest.update(len(values).to_bytes(4, "little") + values.tobytes())
            if media is not None:
                digest.update(f"{media.table.digest} {media.number}".encode())
        return digest.hexdigest()

    def padded(self, sequences: Sequence[np.ndarray], media: RowMedia | None) -> dict[str, Any]:
        """`input_ids`, `attention_mask`, `position_ids`: int64 [sequences, `data.max_length`], padded on the right.

        With a processor positions are [sequences, 3, `data.max_length`], and `multi_modal_inputs` are what the model
        takes of the images and videos, which are read."""
        length = self.config.max_length
        input_ids = torch.full(
            (len(sequences), length), int(self.tokenizer.pad_token_id), dtype=torch.int64
        )
        attention_mask = torch.zeros_like(input_ids)
        for number, tokens in enumerate(sequences):
            input_ids[number, : len(tokens)] = torch.from_numpy(tokens)
            attention_mask[number, : len(tokens)] = 1
        columns = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.processor is None:
            return columns | {"position_ids": torch.arange(length) * attention_mask}
        inputs: dict[str, torch.Tensor] = {}
        if media is not None:
            table, number, where = (
                media.table,
                media.number,
                f"{media.table.path} row {media.number}",
            )
            row = self._row(table[number], where)
            chats = self.chats_of(row, where)
            _, *given = self._shown(row, chats[0][1], where)
            counts = (len(own) // len(chats) for own in (media.images, media.clips))
            given = [own[:count] for own, count in zip(given, counts, strict=True)]
            read = read_media(
                given, self.processor, self.config, folder=table.path.parent, where=where
            )
            inputs = self.processor.inputs(*read, where=where)
        grids = {name: value for name, value in inputs.items() if not name.startswith("pixel")}
        found = [self.processor.get_rope_index(tokens.tolist(), **grids)[0] for tokens in sequences]
        position_ids = torch.stack([F.pad(one, (0, length - one.shape[1])) for one in found])
        return columns | {"position_ids": position_ids, "multi_modal_inputs": inputs}

    def _shown(
        self, row: dict[str, Any], chat: Messages, where: str
    ) -> tuple[Messages, list[Any], list[Any]]:
        """A conversation with its images and videos as parts, and both in order."""
        media, column = media_of(row, self.config), getattr(self.config, self.columns[0])
        if self.processor is not None:
            return with_parts(chat, media.get("image", ()), media.get("video"), where=where)
        # What a model writes may have the tags of HTML.
        rest = [one for one in chat if not isinstance(one.get("content"), str)]
        refuse_media(rest, media, self.config, where=where, column=repr(column))
        return chat, [], []

    def _parts(
        self, table: RowTable, number: int, row: dict[str, Any]
    ) -> tuple[list[TextPart], RowMedia | None]:
        """A row as pieces of text, and the images and videos that stand in them."""
        where = f"{table.path} row {number}"
        row, parts, shown = self._row(row, where), list[TextPart](), []
        key = "messages_key" if "messages_key" in self.columns else "prompt_key"
        self.num_chats_in_json += bool(chat_in_json(row.get(getattr(self.config, key))))
        for place, chat in self.chats_of(row, where):
            chat, *given = self._shown(row, chat, place)
            parts += self.parts_of(row, chat, place)
            last = max(number for number, one in enumerate(chat) if one["role"] == ASSISTANT)
            contents = [
                one["content"] for one in chat[: last + 1] if isinstance(one.get("content"), list)
            ]
            kinds = [part["type"] for content in contents for part in content]
            shown.append([given[0][: kinds.count("image")], given[1][: kinds.count("video")]])
        if any(one != shown[0] for one in shown):
            expected = "responses to one prompt, which shows the same images and videos to both"
            raise DataError(
                where,
                got="two responses that are shown others",
                expected=expected,
                fix="Correct the row.",
            )
        if self.processor is None or not any(shown[0]):
            return parts, None
        sizes = self.processor.media_sizes(
            shown[0], self.config, folder=table.path.parent, where=where
        )
        return parts, RowMedia(table, number, *(own * len(shown) for own in sizes))

    def _expanded(
        self, tokens: list[list[int]], media: RowMedia | None, where: str
    ) -> list[list[int]]:
        """The token ids of a row's pieces, with as many for each image or video as the model has embeddings of it."""
        if (processor := self.processor) is None:
            return tokens
        own = ([], []) if media is None else (media.images, media.clips)
        processor.check_places(list(chain.from_iterable(tokens)), *own, where=where)
        counts, clips = map(iter, own)
        return [processor.expand(one, counts, clips, self.encoder.encode) for one in tokens]

    def _read(self, table: RowTable) -> Iterator[Row]:
        first = 0
        for batch in table.batches(table.columns, BATCH_ROWS):
            rows: list[tuple[str, list[TextPart], RowMedia | None]] = []
            for number, row in enumerate(batch, start=first):
                with self._skips():
                    rows.append((f"{table.path} row {number}", *self._parts(table, number, row)))
            first += len(batch)
            tokens = iter(
                self.encoder.encode([part.text for _, parts, _ in rows for part in parts])
            )
            for where, parts, media in rows:
                ids = [next(tokens) for _ in parts]
                with self._skips():
                    require_embedded(
                        [*chain(*ids)], self.vocabulary_size, self.tokenizer, where=where
                    )
                    made = self.made(parts, self._expanded(ids, media, where), media, where)
                    yield self._fitted(made, where)

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
        length, limit, truncation = (
            self.num_tokens(row),
            self.config.max_length,
            self.config.truncation,
        )
        if length <= limit or self.config.filter_overlong_prompts:
            return row
        if truncation == "error" or row[-1] is not None:
            how = "leave such rows out with data.filter_overlong=true"
            how += ", or cut them with data.truncation=left or right" if row[-1] is None else ""
            whole = "" if row[-1] is None else ", for a row with images or videos is not cut"
            fix, expected = f"Raise that length, {how}.", f"at most data.max_length={limit}{whole}"
            raise DataError(where, got=f"{length} tokens", expected=expected, fix=fix)
        if (shorter := self.cut(row)) is None:
            left = f"data.truncation={truncation} leaves {limit} without a response among them"
            fix = "Raise data.max_length, or leave such rows out with data.filter_overlong=true."
            raise DataError(
                where,
                got=f"{length} tokens, of which {left}",
                expected="something to learn",
                fix=fix,
            )
        return shorter


class MultiTurnSFTDataset(TokenizedRows[Conversation]):
    """Chats, of which every turn of the assistant is learned. Arguments as for `TokenizedRows`."""

    columns = ("messages_key",)

    def __getitem__(self, item: int) -> dict[str, Any]:
        """Row `item`, padded on the right to `data.max_length` = L.
        Returns `input_ids`, `attention_mask`, `position_ids` and `loss_mask` (1 on tokens that are learned), int64 [L].
        With a processor positions are [3, L], and there are `multi_modal_inputs`."""
        row = self.rows[item]
        columns = self.padded([row.ids], row.media)
        tensors = {
            name: values[0] for name, values in columns.items() if name != "multi_modal_inputs"
        }
        is_learned = torch.from_numpy(row.is_learned).long()
        return {
            **columns,
            **tensors,
            "loss_mask": F.pad(is_learned, (0, self.config.max_length - len(row.ids))),
        }

    def chats_of(self, row: dict[str, Any], where: str) -> list[tuple[str, Messages]]:
        return [
            (where, as_messages(row[self.config.messages_key], where=where, key="messages_key"))
        ]

    def parts_of(self, row: dict[str, Any], chat: Messages, where: str) -> list[TextPart]:
        thinks = row.get(THINKING)
        options = {} if thinks is None else {THINKING: bool(thinks)}
        key = self.config.tools_key
        tools = tools_of_row(row.get(key), where=f"{where}, column {key!r}")
        return text_parts(chat, self.encoder, where=where, tools=tools, **options)

    def made(
        self,
        parts: Sequence[TextPart],
        tokens: Sequence[list[int]],
        media: RowMedia | None,
        where: str,
    ) -> Conversation:
        is_response = [part.is_learned for part in parts]
        eos = self.tokenizer.eos_token_id
        made = conversation(tokens, is_response, eos, self.stop_token_ids)
        num_ends = (
            np.isin(made.ids[made.is_learned], [eos, *self.stop_token_ids]).sum()
            if eos is not None
            else 0
        )
        self.num_open_turns += max(0, sum(is_response) - int(num_ends))
        if media is None or self.processor is None:
            return made
        return Conversation(
            made.ids, made.is_learned & ~np.isin(made.ids, self.processor.media_ids), media
        )

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

    def chats_of(self, row: dict[str, Any], where: str) -> list[tuple[str, Messages]]:
        prompt, response = row[self.config.prompt_key], row[self.config.response_key]
        if not isinstance(response, str):
            fix = "Correct the row, or name the column with data.response_key."
            raise DataError(where, got=f"the response {response!r}", expected="text", fix=fix)
        return [
            (where, [*as_messages(prompt, where=where), {"role": ASSISTANT, "content": response}])
        ]

    parts_of = TokenizedRows.parts_of


def text_parts(
    messages: Messages,
    encoder: ChatEncoder,
    *,
    where: str,
    tools: Sequence[Any] | None = None,
    **options: Any,
) -> list[TextPart]:
    """A conversation as the chat template writes it, cut before and after each turn of the assistant.

    What follows its last turn is left out. `tools` are passed to the template, where the row has some, and so are
    `options`, further arguments.
    Raises DataError: no turn of the assistant, an empty one, one at the very beginning, or a template that writes
    earlier turns in another way once later ones follow."""
    if not (
        turns := [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    ):
        got = f"a chat of {len(messages)} messages, none of them by the assistant"
        fix = "Leave the row out, or name the column of the whole chat with data.messages_key."
        raise DataError(
            where, got=got, expected="at least one: its tokens are what is learned", fix=fix
        )
    if turns[0] == 0:
        raise DataError(
            where,
            got="a chat that begins with the assistant",
            expected="a prompt before the response",
        )
    parts, written = list[TextPart](), ""
    for turn in turns:
        content = messages[turn].get("content")
        is_empty = not content.strip() if isinstance(content, str) else not content
        if is_empty and not messages[turn].get("tool_calls"):
            got, expected = (
                "an empty turn of the assistant",
                "something to learn: text, or tool_calls",
            )
            fix = "Correct the row or leave it out: the model would learn to respond with nothing."
            raise DataError(f"{where}, message {turn}", got=got, expected=expected, fix=fix)
        before, after = (
            encoder.render(
                messages[:end], where=where, tools=tools, add_generation_prompt=is_open, **options
            )
            for end, is_open in ((turn, True), (turn + 1, False))
        )
        for shorter, longer in ((written, before), (before, after)):
            if not longer.startswith(shorter):
                i = next(
                    (i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b),
                    len(longer),
                )
                change = (
                    f"{shorter[i : i + 40]!r} became {longer[i : i + 40]!r} when the turn was added"
                )
                expected = "turns that stay as they were written, each learned as the model would have generated it"
                keys = "data.apply_chat_template_kwargs, or set model.custom_chat_template to a template that only adds"
                fix = f"Give each response a row of its own that ends with it, change {keys}."
                got = f"a chat template that changes earlier turns: {change}"
                raise DataError(f"{where}, message {turn}", got=got, expected=expected, fix=fix)
        parts += [TextPart(before[len(written) :], False), TextPart(after[len(before) :], True)]
        written = after
    return parts


def conversation(
    parts: Sequence[Sequence[int]],
    is_response: Sequence[bool],
    eos_token_id: int | None,
    stop_token_ids: Sequence[int] = (),
) -> Conversation:
    """Join the parts of a conversation, and mark the tokens that are learned.

    Args:
        parts: token ids of each part.
        is_response: whether a part is a turn of the assistant.
        eos_token_id: ends a turn; put behind the last one if the template writes no end there.
        stop_token_ids: further tokens that end a turn. The first token of the next part is learned as the end of a turn
            without one, if it is among these.
    """
    end_ids = {*stop_token_ids} if eos_token_id is None else {eos_token_id, *stop_token_ids}
    ids: list[int] = []
    learned: list[bool] = []
    is_open = False  # whether the part before is a response without an end
    for number, (part, is_learned) in enumerate(zip(parts, is_response, strict=True)):
        tokens = list(part)
        num_learned = int(is_open and bool(tokens) and tokens[0] in end_ids)
        is_open = False
        if is_learned:
            # The response reaches up to and with its last end token, or to the end of the part.
            num_learned = max(
                (place for place, token in enumerate(tokens, 1) if token in end_ids), default=0
            )
            is_open = num_learned == 0
            if is_open:
                num_learned = len(tokens)
            if number == len(parts) - 1 and eos_token_id is not None:
                tokens = [*tokens, eos_token_id] if is_open else tokens[:num_learned]
                num_learned = len(tokens)
        ids += tokens
        learned += [position < num_learned for position in range(len(tokens))]
    return Conversation(np.array(ids, dtype=np.int32), np.array(learned, dtype=bool))


def tools_of_row(value: Any, *, where: str) -> list[Any] | None:
    """The tool schemas of a row: a list, or the JSON text of one, or of each; DataError where they are none."""
    try:
        found = json.loads(value) if isinstance(value, str) and value else value
        tools = [json.loads(one) if isinstance(one, str) else one for one in found or ()]
        wrong = next((one for one in tools if not isinstance(one, Mapping)), None)
    except (ValueError, TypeError, RecursionError) as error:
        tools, wrong = None, f"{shortened(value)} ({error})"
    if wrong is not None:
        expected = (
            'a list such as [{"type": "function", "function": {"name": ..., "parameters": {...}}}]'
        )
        fix = "Correct the row, or name the column that holds the tools with data.tools_key."
        raise DataError(
            where,
            got=f"the tool schema {wrong}, which is no JSON object",
            expected=expected,
            fix=fix,
        )
    return tools
