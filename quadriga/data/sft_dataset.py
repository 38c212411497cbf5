# SPDX-License-Identifier: Apache-2.0
"""Data sets for supervised training: files -> rows -> text -> tokens, some of which are learned.

    messages   user          assistant      user          assistant
    tokens     prompt        response       delta         response
    learned    0 0 0 0       1 1 1 0        0 0 0 0       1 1 1

Each part is tokenized by itself, as in a rollout: the prompt is tokenized, the model adds its own
tokens, and then only the new part of each further turn is tokenized. A response is learned up to
and including its end-of-sequence token. A template may write more behind that token (a line break,
say), which the model never has to generate. If a template ends no turn, the marker of the next role
is learned, provided that generation stops at it.

All rows are tokenized when the data set is made. A bad row is found then and not after an hour, and
no epoch pays for it again. A token takes 5 bytes. The sizes of images and videos are read then too,
and their pixels when the row is fetched. Tokens that stand for an image or video are not learned.

Shapes: L tokens of one sequence.
"""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
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
    written_messages,
)
from quadriga.data.videos import Clip
from quadriga.data.vision import as_vision, read_media
from quadriga.errors import DataError
from quadriga.observe.watchdog import waiting

BATCH_ROWS = 256
ASSISTANT = "assistant"
THINKING = "enable_thinking"
"""Column, and argument of chat templates: whether a conversation is one with reasoning."""
Row = TypeVar("Row", bound=tuple[Any, ...])
"""Arrays, followed by a `RowMedia` or None."""


class RowMedia(NamedTuple):
    """The images and videos of a row, which are read when it is fetched.

    Attributes:
        table: the file of the row.
        number: number of the row in that file.
        images: number of tokens of each image, chat by chat.
        clips: each video without its frames, chat by chat.
    """

    table: RowTable
    number: int
    images: list[int]
    clips: list[Clip]


class TokenizedConversation(NamedTuple):
    """Tokens of a conversation.

    Attributes:
        ids: token ids, int32 [L].
        is_learned: whether each token is learned, bool [L].
        media: images and videos among the tokens.
    """

    ids: np.ndarray
    is_learned: np.ndarray
    media: RowMedia | None = None


@dataclass(frozen=True)
class TextPart:
    """A piece of a rendered conversation.

    Attributes:
        text: the piece.
        is_learned: whether it is a turn of the assistant.
    """

    text: str
    is_learned: bool


class TokenizedRows(FileDataset, Generic[Row]):
    """Rows that are tokenized when the data set is made. A subclass defines their content.

    Args:
        data_files: as for `FileDataset`.
        tokenizer: as for `FileDataset`.
        config: the section `data`.
        processor: of a vision-language model. None: rows are text.
        is_train: as for `FileDataset`.
        stop_token_ids: tokens that end a response, besides the tokenizer's end of sequence.
        vocabulary_size: rows of the model's embedding, if the tokenizer has ids beyond them.

    Raises:
        DataError: a file is missing, empty or damaged, or a row cannot be learned from; it names
            file and row.
    """

    columns: tuple[str, ...]
    """Keys of the section `data` that name the columns of a row."""
    may_be_empty = False
    """Whether it is allowed that no row is good, or short enough."""
    num_open_turns = 0
    """Number of turns of the assistant that are learned without an end."""
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
        tables = self._tables
        self._tables = []  # the tokens are held in memory, the files are not
        # Tokenizing takes long, so files with other columns are refused before it.
        for table in tables:
            self._check_columns(table)

        num_rows = sum(map(len, tables))
        max_samples = config.train_max_samples if is_train else config.val_max_samples
        if max_samples != -1:
            num_rows = min(max_samples, num_rows)
        rows: list[Row] = []
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

        limit = config.max_length
        # Rows over the limit are still here if they are to be left out.
        lengths = [self.num_tokens(row) for row in rows]
        self.rows = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
        if not self.rows and not self.may_be_empty:
            raise DataError(
                self._key,
                got=f"rows of {min(lengths)} to {max(lengths)} tokens",
                expected=f"at least one of at most data.max_length={limit}",
                fix="Raise that length.",
            )
        self._report(len(rows))

    def _check_columns(self, table: RowTable) -> None:
        """Raise a DataError if a file lacks a column of the rows."""
        keys = {getattr(self.config, key): f"data.{key}" for key in self.columns}
        missing_columns = []
        for column in keys:
            # A dotted name may be a column, or a field of one.
            names = {column, column.partition(".")[0]}
            if names.isdisjoint(table.columns):
                missing_columns.append(repr(column))
        if not missing_columns:
            return
        fix = f"Name its columns with {', '.join(keys.values())}"
        if "chosen_key" not in self.columns:
            fix += ", or set data.format to the form of its rows"
        raise DataError(
            str(table.path),
            got=f"the columns {', '.join(table.columns)}",
            expected=f"{' and '.join(missing_columns)} among them",
            fix=f"{fix}.",
        )

    def _report(self, num_rows: int) -> None:
        """Print how many rows are left out, and how many have a form that may be a mistake."""
        num_left_out = num_rows - len(self.rows)
        if num_left_out:
            print(
                f"{self._key}: {num_left_out} of {num_rows} rows are over"
                f" {self.config.max_length} tokens and left out.",
                flush=True,
            )
        messages = written_messages(self.encoder.num_orders)
        print(f"{self._key}: {num_rows} rows measured; {messages}.", flush=True)
        if self.num_chats_in_json:
            print(
                f"{self._key}: {self.num_chats_in_json} chats are texts in JSON, and read as the"
                " messages in them.",
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
        """The conversations of a row, which show the same images and videos.

        Args:
            row: values by column.
            where: file and row, for errors.

        Returns:
            Conversations, each with its place in words.
        """

    def parts_of(self, row: dict[str, Any], chat: Messages, where: str) -> list[TextPart]:
        """Render a conversation of a row: here as two pieces, its last turn and all before it.

        Args:
            row: values by column.
            chat: the conversation.
            where: its place, for errors.

        Returns:
            Pieces of text. Each is tokenized by itself.
        """
        *earlier_parts, response = text_parts(chat, self.encoder, where=where)
        # Only the last response is learned; earlier ones are part of its prompt.
        prompt = "".join(part.text for part in earlier_parts)
        return [TextPart(prompt, False), response]

    @abstractmethod
    def made(
        self,
        parts: Sequence[TextPart],
        tokens: Sequence[list[int]],
        media: RowMedia | None,
        where: str,
    ) -> Row:
        """Make the row.

        Args:
            parts: the pieces of its conversations.
            tokens: the token ids of each piece, expanded for images and videos.
            media: its images and videos.
            where: file and row, for errors.

        Returns:
            The row.

        Raises:
            DataError: nothing can be learned from the row.
        """

    @abstractmethod
    def num_tokens(self, row: Row) -> int:
        """Number of tokens of the longest sequence in a row."""

    @abstractmethod
    def cut(self, row: Row) -> Row | None:
        """The row cut to at most `data.max_length` tokens; None if nothing to learn remains."""

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
        """The columns of a row's sequences, padded on the right to `data.max_length`.

        Args:
            sequences: token ids, [L] each.
            media: images and videos of the row, which are read now.

        Returns:
            `input_ids`, `attention_mask` and `position_ids`, int64 [sequences, `data.max_length`].
            With a processor positions are [sequences, 3, `data.max_length`], and there are
            `multi_modal_inputs`.
        """
        length = self.config.max_length
        pad_token_id = int(self.tokenizer.pad_token_id)
        input_ids = torch.full((len(sequences), length), pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for number, tokens in enumerate(sequences):
            input_ids[number, : len(tokens)] = torch.from_numpy(tokens)
            attention_mask[number, : len(tokens)] = 1
        columns: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.processor is None:
            # Positions of padding are 0.
            columns["position_ids"] = torch.arange(length) * attention_mask
            return columns
        # Batches have the same columns with and without images.
        inputs: dict[str, torch.Tensor] = {}
        if media is not None:
            inputs = self._media_inputs(media)
        positions = []
        for tokens in sequences:
            token_positions = self.processor.positions(tokens.tolist(), inputs)
            positions.append(F.pad(token_positions, (0, length - len(tokens))))
        columns["position_ids"] = torch.stack(positions)
        columns["multi_modal_inputs"] = inputs
        return columns

    def _media_inputs(self, media: RowMedia) -> dict[str, torch.Tensor]:
        """Read the images and videos of a row for the model."""
        assert self.processor is not None
        table = media.table
        where = f"{table.path} row {media.number}"
        # The row is read again as it was when it was tokenized.
        row = self._row(table[media.number], where)
        chats = self.chats_of(row, where)
        _, chat = chats[0]
        _, images, videos = self._shown(row, chat, where)
        # All chats show the same. Media behind the last response were not counted.
        num_images = len(media.images) // len(chats)
        num_videos = len(media.clips) // len(chats)
        pictures, clips = read_media(
            [images[:num_images], videos[:num_videos]],
            self.processor,
            self.config,
            folder=table.path.parent,
            where=where,
        )
        return self.processor.inputs(pictures, clips, where=where)

    def _shown(
        self, row: dict[str, Any], chat: Messages, where: str
    ) -> tuple[Messages, list[Any], list[Any]]:
        """A conversation with its images and videos as parts, and both in order."""
        media = media_of(row, self.config)
        if self.processor is not None:
            return with_parts(chat, media.get("image", ()), media.get("video"), where=where)
        # Texts are not searched for tags: a model may write HTML.
        messages = [message for message in chat if not isinstance(message.get("content"), str)]
        column = getattr(self.config, self.columns[0])
        refuse_media(messages, media, self.config, where=where, column=repr(column))
        return chat, [], []

    def _parts(
        self, table: RowTable, number: int, row: dict[str, Any]
    ) -> tuple[list[TextPart], RowMedia | None]:
        """A row as pieces of text, and the images and videos that stand in them."""
        where = f"{table.path} row {number}"
        row = self._row(row, where)
        key = "messages_key" if "messages_key" in self.columns else "prompt_key"
        if chat_in_json(row.get(getattr(self.config, key))):
            self.num_chats_in_json += 1
        parts: list[TextPart] = []
        media_by_chat = []
        for place, row_chat in self.chats_of(row, where):
            chat, images, videos = self._shown(row, row_chat, place)
            parts += self.parts_of(row, chat, place)
            # Media behind the last response are never seen by the model.
            num_images, num_videos = _count_media(chat)
            media_by_chat.append([images[:num_images], videos[:num_videos]])
        media = media_by_chat[0]
        if any(other != media for other in media_by_chat):
            raise DataError(
                where,
                got="two responses with different images or videos before them",
                expected="responses to one prompt, which shows the same images and videos to both",
                fix="Correct the row.",
            )
        if self.processor is None or not any(media):
            return parts, None
        # Headers of the files are enough for now; pixels would not fit in memory.
        counts, clips = self.processor.media_sizes(
            media, self.config, folder=table.path.parent, where=where
        )
        # Each chat has the tokens of all images again.
        num_chats = len(media_by_chat)
        return parts, RowMedia(table, number, counts * num_chats, clips * num_chats)

    def _expanded(
        self, tokens: list[list[int]], media: RowMedia | None, where: str
    ) -> list[list[int]]:
        """The token ids of a row's pieces, with one for each embedding of an image or video."""
        processor = self.processor
        if processor is None:
            return tokens
        images = [] if media is None else media.images
        clips = [] if media is None else media.clips
        processor.check_places(list(chain.from_iterable(tokens)), images, clips, where=where)
        # The pieces share the iterators: an image belongs to the piece that has its token.
        next_counts = iter(images)
        next_clips = iter(clips)
        encode = self.encoder.encode
        return [processor.expand(ids, next_counts, next_clips, encode) for ids in tokens]

    def _read(self, table: RowTable) -> Iterator[Row]:
        """Tokenize the rows of a file, a batch at a time."""
        first = 0
        for batch in table.batches(table.columns, BATCH_ROWS):
            rows = []
            texts = []
            for number, row in enumerate(batch, start=first):
                with self._skips():
                    parts, media = self._parts(table, number, row)
                    rows.append((f"{table.path} row {number}", parts, media))
                    texts += [part.text for part in parts]
            first += len(batch)
            # One call for many texts: fast tokenizers work on them in parallel.
            tokens = iter(self.encoder.encode(texts))
            for where, parts, media in rows:
                part_ids = list(islice(tokens, len(parts)))
                with self._skips():
                    row_ids = list(chain.from_iterable(part_ids))
                    require_embedded(row_ids, self.vocabulary_size, self.tokenizer, where=where)
                    expanded = self._expanded(part_ids, media, where)
                    yield self._fitted(self.made(parts, expanded, media, where), where)

    @contextmanager
    def _skips(self) -> Iterator[None]:
        """Context manager: keep the error of a row, unless `data.on_bad_row` is "error"."""
        try:
            yield
        except DataError as error:
            if self.config.on_bad_row == "error":
                raise
            self.bad_rows.append(error)

    def _row(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """Add columns for dotted names, which name a field of a column."""
        for key in ("prompt_key", *self.columns):
            name = getattr(self.config, key)
            if name in row or "." not in name:
                continue
            value: Any = row
            for part in name.split("."):
                if not isinstance(value, dict) or part not in value:
                    got = f"no {part!r} in {shortened(value)}"
                    expected = f"the value that data.{key}={name} names"
                    raise DataError(where, got=got, expected=expected)
                value = value[part]
            row[name] = value
        return row

    def _fitted(self, row: Row, where: str) -> Row:
        """Cut a row that is too long; refuse it if rows are not to be cut."""
        length = self.num_tokens(row)
        limit = self.config.max_length
        truncation = self.config.truncation
        # Rows that are left out for their length are counted later.
        if length <= limit or self.config.filter_overlong_prompts:
            return row
        # Half an image has no meaning, so such rows are never cut.
        has_media = row[-1] is not None
        if has_media or truncation == "error":
            expected = f"at most data.max_length={limit}"
            fix = "Raise that length, or leave such rows out with data.filter_overlong=true"
            if has_media:
                expected += ", for a row with images or videos is not cut"
            else:
                fix += ", or cut them with data.truncation=left or right"
            raise DataError(where, got=f"{length} tokens", expected=expected, fix=f"{fix}.")
        shorter = self.cut(row)
        if shorter is None:
            raise DataError(
                where,
                got=(
                    f"{length} tokens, of which data.truncation={truncation} leaves {limit} without"
                    " a response among them"
                ),
                expected="something to learn",
                fix="Raise data.max_length, or leave such rows out with data.filter_overlong=true.",
            )
        return shorter


def _count_media(chat: Messages) -> tuple[int, int]:
    """Number of images and of videos up to the last response. No token behind it is learned."""
    roles = [message["role"] for message in chat]
    # The position behind the last response.
    end = len(roles) - roles[::-1].index(ASSISTANT)
    kinds: list[str] = []
    for message in chat[:end]:
        content = message.get("content")
        if isinstance(content, list):
            kinds += [part["type"] for part in content]
    return kinds.count("image"), kinds.count("video")


class MultiTurnSFTDataset(TokenizedRows[TokenizedConversation]):
    """Chats whose turns of the assistant are all learned. Arguments as for `TokenizedRows`."""

    columns = ("messages_key",)

    def __getitem__(self, item: int) -> dict[str, Any]:
        """Row `item`, padded on the right to `data.max_length` = L.

        Returns:
            `input_ids`, `attention_mask`, `position_ids` and `loss_mask` (1 on tokens that are
            learned), int64 [L]. With a processor positions are [3, L], and there are
            `multi_modal_inputs`.
        """
        row = self.rows[item]
        columns = self.padded([row.ids], row.media)
        # A row has one sequence.
        for name in ("input_ids", "attention_mask", "position_ids"):
            columns[name] = columns[name][0]
        is_learned = torch.from_numpy(row.is_learned).long()
        num_padding = self.config.max_length - len(row.ids)
        columns["loss_mask"] = F.pad(is_learned, (0, num_padding))
        return columns

    def chats_of(self, row: dict[str, Any], where: str) -> list[tuple[str, Messages]]:
        prompt = row[self.config.messages_key]
        return [(where, as_messages(prompt, where=where, key="messages_key"))]

    def parts_of(self, row: dict[str, Any], chat: Messages, where: str) -> list[TextPart]:
        options: dict[str, Any] = {}
        if row.get(THINKING) is not None:
            options[THINKING] = bool(row[THINKING])
        key = self.config.tools_key
        tools = tools_of_row(row.get(key), where=f"{where}, column {key!r}")
        return text_parts(chat, self.encoder, where=where, tools=tools, **options)

    def made(
        self,
        parts: Sequence[TextPart],
        tokens: Sequence[list[int]],
        media: RowMedia | None,
        where: str,
    ) -> TokenizedConversation:
        is_response = [part.is_learned for part in parts]
        eos = self.tokenizer.eos_token_id
        joined = conversation(tokens, is_response, eos, self.stop_token_ids)
        num_ends = 0
        if eos is not None:
            # Each response should have one end among its learned tokens.
            learned_ids = joined.ids[joined.is_learned]
            num_ends = int(np.isin(learned_ids, [eos, *self.stop_token_ids]).sum())
        self.num_open_turns += max(0, sum(is_response) - num_ends)
        if media is None or self.processor is None:
            return joined
        # A model reads images and videos, but never generates them.
        is_medium = np.isin(joined.ids, self.processor.media_ids)
        return TokenizedConversation(joined.ids, joined.is_learned & ~is_medium, media)

    def num_tokens(self, row: TokenizedConversation) -> int:
        return len(row.ids)

    def cut(self, row: TokenizedConversation) -> TokenizedConversation | None:
        """Truncate a conversation at the side that `data.truncation` names.

        None: no token that remains is learned.
        """
        limit = self.config.max_length
        # The mode names the side that loses tokens.
        remaining = slice(limit)
        if self.config.truncation == "left":
            remaining = slice(-limit, None)
        shorter = TokenizedConversation(row.ids[remaining], row.is_learned[remaining])
        # Nothing predicts the first token.
        return shorter if shorter.is_learned[1:].any() else None


class SFTDataset(MultiTurnSFTDataset):
    """Prompts with one response each, in two columns. Otherwise as `MultiTurnSFTDataset`."""

    columns = ("prompt_key", "response_key")

    def chats_of(self, row: dict[str, Any], where: str) -> list[tuple[str, Messages]]:
        response = row[self.config.response_key]
        if not isinstance(response, str):
            fix = "Correct the row, or name the column with data.response_key."
            raise DataError(where, got=f"the response {response!r}", expected="text", fix=fix)
        messages = as_messages(row[self.config.prompt_key], where=where)
        return [(where, [*messages, {"role": ASSISTANT, "content": response}])]

    # Only the response is learned, whatever turns the prompt has.
    parts_of = TokenizedRows.parts_of


def text_parts(
    messages: Messages,
    encoder: ChatEncoder,
    *,
    where: str,
    tools: Sequence[Any] | None = None,
    **options: Any,
) -> list[TextPart]:
    """Render a conversation, cut before and after each turn of the assistant.

    Args:
        messages: the conversation.
        encoder: renders messages.
        where: the row, for errors.
        tools: schemas for the chat template.
        options: further arguments of the chat template.

    Returns:
        Pieces of text: in turn a prompt and a response. Messages behind the last response are left
        out.

    Raises:
        DataError: there is no turn of the assistant, an empty one, or one at the very beginning, or
            the template writes earlier turns in another way once later ones follow.
    """
    turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not turns:
        raise DataError(
            where,
            got=f"a chat of {len(messages)} messages, none of them by the assistant",
            expected="at least one: its tokens are learned",
            fix="Leave the row out, or name the column of the whole chat with data.messages_key.",
        )
    if turns[0] == 0:
        got = "a chat that begins with the assistant"
        raise DataError(where, got=got, expected="a prompt before the response")
    render = partial(encoder.render, where=where, tools=tools, **options)
    parts = []
    written = ""
    for turn in turns:
        place = f"{where}, message {turn}"
        _check_turn(messages[turn], place)
        # The prompt as a rollout renders it, and the same with the response.
        before = render(messages[:turn], add_generation_prompt=True)
        after = render(messages[: turn + 1], add_generation_prompt=False)
        _check_prefix(written, before, place)
        _check_prefix(before, after, place)
        parts.append(TextPart(before[len(written) :], False))
        parts.append(TextPart(after[len(before) :], True))
        written = after
    return parts


def _check_turn(message: Mapping[str, Any], where: str) -> None:
    """Raise a DataError if a turn of the assistant is empty."""
    content = message.get("content")
    # A turn may consist of tool calls alone.
    is_empty = not content.strip() if isinstance(content, str) else not content
    if is_empty and not message.get("tool_calls"):
        raise DataError(
            where,
            got="an empty turn of the assistant",
            expected="something to learn: text, or tool_calls",
            fix="Correct the row or leave it out: the model would learn to respond with nothing.",
        )


def _check_prefix(shorter: str, longer: str, where: str) -> None:
    """Raise a DataError if a chat with one more turn does not begin as it did without."""
    if longer.startswith(shorter):
        return
    # The first character that differs.
    place = 0
    while place < len(longer) and shorter[place] == longer[place]:
        place += 1
    old = shorter[place : place + 40]
    new = longer[place : place + 40]
    raise DataError(
        where,
        got=f"a chat template that changes earlier turns: {old!r} became {new!r} in this turn",
        expected="turns that stay as the model would have generated them",
        fix=(
            "Give each response a row of its own that ends with it, change"
            " data.apply_chat_template_kwargs, or set model.custom_chat_template to a template that"
            " only adds."
        ),
    )


def conversation(
    parts: Sequence[Sequence[int]],
    is_response: Sequence[bool],
    eos_token_id: int | None,
    stop_token_ids: Sequence[int] = (),
) -> TokenizedConversation:
    """Join the parts of a conversation, and mark the tokens that are learned.

    Args:
        parts: token ids of each part.
        is_response: whether a part is a turn of the assistant.
        eos_token_id: ends a turn; put behind the last one if the template writes no end there.
        stop_token_ids: further tokens that end a turn. The first token of the next part is learned
            as the end of a turn without one, if it is among these.

    Returns:
        The tokens, L in all.
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
            # A response reaches up to and including its last end token, or to the end of the part.
            end_places = [place for place, token in enumerate(tokens, 1) if token in end_ids]
            is_open = not end_places
            num_learned = len(tokens) if is_open else end_places[-1]
            if number == len(parts) - 1 and eos_token_id is not None:
                tokens = [*tokens, eos_token_id] if is_open else tokens[:num_learned]
                num_learned = len(tokens)
        ids += tokens
        # The learned tokens of a part stand at its beginning.
        learned += [position < num_learned for position in range(len(tokens))]
    return TokenizedConversation(np.array(ids, dtype=np.int32), np.array(learned, dtype=bool))


def tools_of_row(value: Any, *, where: str) -> list[Any] | None:
    """The tool schemas of a row.

    Args:
        value: a list of schemas, or JSON text in the place of the list or of a schema. None: no
            tools.
        where: file, row and column, for errors.

    Returns:
        The schemas.

    Raises:
        DataError: the value has another form.
    """
    try:
        # Parquet cannot hold schemas of different forms in one column, so many files have them as JSON.
        schemas = json.loads(value) if isinstance(value, str) and value else value
        tools = [
            json.loads(schema) if isinstance(schema, str) else schema for schema in schemas or ()
        ]
        wrong = next((tool for tool in tools if not isinstance(tool, Mapping)), None)
    except (ValueError, TypeError, RecursionError) as error:
        tools = None
        wrong = f"{shortened(value)} ({error})"
    if wrong is not None:
        raise DataError(
            where,
            got=f"the tool schema {wrong}, which is no JSON object",
            expected=(
                'a list such as [{"type": "function", "function": {"name": ..., "parameters":'
                " {...}}}]"
            ),
            fix="Correct the row, or name the column that holds the tools with data.tools_key.",
        )
    return tools
