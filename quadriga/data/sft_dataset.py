# SPDX-License-Identifier: Apache-2.0
"""Data sets for supervised training: rows of files as tokens, some of which are learned.

    messages   user          assistant      user          assistant
    tokens     prompt        response       delta         response
    learned    0 0 0 0       1 1 1 0        0 0 0 0       1 1 1

Each part is tokenized by itself, as in a rollout: the prompt is tokenized, the model adds its own
tokens, and then only the text that is new in each further turn is tokenized. A response is learned
up to and including its end-of-sequence token. What a template writes after that token, such as a
line break, is not learned: the model never has to generate it. If a template writes no token at the
end of a turn, the marker of the next role is learned, provided that generation stops at it.

All rows are tokenized when the data set is made, so a bad row is found at once and not after an
hour, and each row is tokenized once for all epochs. A token takes 5 bytes of memory. The sizes of
images and videos are read then too, but their pixels only when the row is fetched. Tokens of images
and videos are not learned.

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
from quadriga.data.file_dataset import FileDataset, print_bad_rows
from quadriga.data.files import FileNames, RowTable
from quadriga.data.media import media_of, refuse_media, with_parts
from quadriga.data.tokenizing import (
    ChatEncoder,
    Messages,
    as_messages,
    chat_in_json,
    describe_template_check,
    require_embedded,
    shortened,
)
from quadriga.data.videos import Clip
from quadriga.data.vision import as_vision, read_media
from quadriga.errors import DataError
from quadriga.observe.watchdog import waiting

BATCH_ROWS = 256
"""Rows whose texts are tokenized in one call."""
ASSISTANT = "assistant"
THINKING = "enable_thinking"
"""Column, and argument of chat templates: whether a conversation has reasoning."""
Row = TypeVar("Row", bound=tuple[Any, ...])
"""A tokenized row: a named tuple of arrays, with a `RowMedia` or None as its last field."""


class RowMedia(NamedTuple):
    """The images and videos of a row, whose pixels are read when the row is fetched.

    Attributes:
        table: the file of the row.
        number: number of the row in that file.
        images: number of tokens of each image. If a row has several chats, the numbers come once
            for each chat, because every chat shows all images.
        clips: the videos without their frames; they too come once for each chat.
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
        media: images and videos among the tokens. None: there are none.
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
    """Base class of data sets whose rows are tokenized in advance.

    Subclasses define what a row is: its conversations (`chats_of`), how a conversation is cut into
    pieces (`parts_of`), and the tokenized row (`build_row`, `num_tokens`, `cut`).

    Args:
        data_files: as for `FileDataset`.
        tokenizer: as for `FileDataset`.
        config: the section `data`.
        processor: processor of a vision-language model. None: rows are text.
        is_train: as for `FileDataset`.
        stop_token_ids: tokens that end a response, besides the tokenizer's end of sequence.
        vocabulary_size: rows of the model's embedding, if the tokenizer has ids that are too large
            for it. None: the embedding has a row for each id.

    Raises:
        DataError: a file is missing, empty or damaged; a row cannot be learned from and is not to
            be left out; or no row can be used. The error names the file, and the row if there is
            one.
    """

    columns: tuple[str, ...]
    """Keys of the section `data` that name the columns of a row."""
    may_be_empty = False
    """Whether the data set may be without a usable row. Otherwise that raises an error."""
    num_open_turns = 0
    """Number of turns of the assistant that are learned without a token at their end."""
    num_chats_in_json = 0
    """Number of rows whose chat is text in JSON."""

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
        # The rows of the files are dropped after this constructor: only tokens are held in memory.
        self._tables = []
        # Tokenizing takes long, so the columns of all files are checked first.
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
                rows.extend(islice(self._tokenize_table(table), num_rows - len(rows)))
        if self.bad_rows:
            print_bad_rows(self._key, self.bad_rows)
        if not rows and not self.may_be_empty:
            raise DataError(
                self._key,
                got="bad rows only",
                expected="at least one good row",
                fix="Correct the rows.",
            )

        limit = config.max_length
        # `rows` still has rows over the limit only with `data.filter_overlong_prompts`. Otherwise
        # they have been truncated, or have raised an error.
        lengths = [self.num_tokens(row) for row in rows]
        self.rows = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
        if not self.rows and not self.may_be_empty:
            raise DataError(
                self._key,
                got=f"rows of {min(lengths)} to {max(lengths)} tokens",
                expected=f"at least one of at most data.max_length={limit}",
                fix="Raise that length.",
            )
        self._print_report(len(rows))

    def _check_columns(self, table: RowTable) -> None:
        """Raise a DataError if a file lacks a column that the rows are read from."""
        keys_by_column = {getattr(self.config, key): f"data.{key}" for key in self.columns}
        missing_columns = []
        for column in keys_by_column:
            # `a.b` may be the name of a column, or the field `b` of the column `a`.
            names = {column, column.partition(".")[0]}
            if names.isdisjoint(table.columns):
                missing_columns.append(repr(column))
        if not missing_columns:
            return
        fix = f"Name its columns with {', '.join(keys_by_column.values())}"
        # Preference pairs have a single form, so `data.format` is not for them.
        if "chosen_key" not in self.columns:
            fix += ", or set data.format to the form of its rows"
        raise DataError(
            str(table.path),
            got=f"the columns {', '.join(table.columns)}",
            expected=f"{' and '.join(missing_columns)} among them",
            fix=f"{fix}.",
        )

    def _print_report(self, num_rows: int) -> None:
        """Print how many rows are too long, and how many have a form that may be a mistake.

        Args:
            num_rows: number of rows that were tokenized, including the rows that are too long.
        """
        num_left_out = num_rows - len(self.rows)
        if num_left_out:
            print(
                f"{self._key}: {num_left_out} of {num_rows} rows are over"
                f" {self.config.max_length} tokens and left out.",
                flush=True,
            )
        messages = describe_template_check(self.encoder.num_role_orders)
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
        """Read the conversations of a row. Each of them shows all images and videos of the row.

        Args:
            row: values by column.
            where: file and row, for errors.

        Returns:
            For each conversation its place, for errors, and its messages.
        """

    def parts_of(self, row: dict[str, Any], chat: Messages, where: str) -> list[TextPart]:
        """Render a conversation of a row as pieces of text, each of which is tokenized by itself.

        By default there are two pieces: everything before the last turn of the assistant, and the
        last turn, which alone is learned.

        Args:
            row: values by column.
            chat: the conversation.
            where: place of the conversation, for errors.

        Returns:
            The pieces in order.

        Raises:
            DataError: the conversation cannot be learned from (`text_parts`).
        """
        *earlier_parts, response = text_parts(chat, self.encoder, where=where)
        prompt = "".join(part.text for part in earlier_parts)
        return [TextPart(prompt, False), response]

    @abstractmethod
    def build_row(
        self,
        parts: Sequence[TextPart],
        tokens: Sequence[list[int]],
        media: RowMedia | None,
        where: str,
    ) -> Row:
        """Build a row from its tokens.

        Args:
            parts: the pieces of text of the row's conversations.
            tokens: the token ids of each piece, with a token for each embedding of an image or
                video.
            media: images and videos of the row. None: there are none.
            where: file and row, for errors.

        Returns:
            The tokenized row.

        Raises:
            DataError: nothing can be learned from the row.
        """

    @abstractmethod
    def num_tokens(self, row: Row) -> int:
        """Number of tokens of the longest sequence in a row."""

    @abstractmethod
    def cut(self, row: Row) -> Row | None:
        """Truncate a row to `data.max_length` tokens.

        Returns:
            The truncated row. None: it would have no token that is learned.
        """

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def digest(self) -> str:
        """Hash of all tokens; for a row with images or videos, also of its file and row number."""
        digest = hashlib.sha256()
        for *arrays, media in self.rows:
            for values in arrays:
                digest.update(len(values).to_bytes(4, "little") + values.tobytes())
            if media is not None:
                digest.update(f"{media.table.digest} {media.number}".encode())
        return digest.hexdigest()

    def pad(self, sequences: Sequence[np.ndarray], media: RowMedia | None) -> dict[str, Any]:
        """Make the columns of a row's sequences, padded on the right to `data.max_length`.

        Args:
            sequences: token ids, [L] each.
            media: images and videos of the row, whose pixels are read here.

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
            # The mask makes the positions of padding 0.
            columns["position_ids"] = torch.arange(length) * attention_mask
            return columns

        # A row without images gets an empty dictionary: all rows of a batch need the same columns.
        inputs = {}
        if media is not None:
            inputs = self._load_media_inputs(media)
        positions = []
        for tokens in sequences:
            token_positions = self.processor.positions(tokens.tolist(), inputs)
            positions.append(F.pad(token_positions, (0, length - len(tokens))))
        columns["position_ids"] = torch.stack(positions)
        columns["multi_modal_inputs"] = inputs
        return columns

    def _load_media_inputs(self, media: RowMedia) -> dict[str, torch.Tensor]:
        """Read the images and videos of a row, and make the tensors that the model takes."""
        assert self.processor is not None
        table = media.table
        where = f"{table.path} row {media.number}"
        # Read the row from its file again: only tokens are kept in memory.
        row = self._add_dotted_columns(table[media.number], where)
        chats = self.chats_of(row, where)
        _, first_chat = chats[0]
        _, images, videos = self._with_media_parts(row, first_chat, where)
        # `media` counts each image once per chat, and leaves out images after the last response.
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

    def _with_media_parts(
        self, row: dict[str, Any], chat: Messages, where: str
    ) -> tuple[Messages, list[Any], list[Any]]:
        """Give each image and video of a conversation a content part of its own (`with_parts`).

        Args:
            row: values by column.
            chat: the conversation.
            where: place of the conversation, for errors.

        Returns:
            The messages with these parts, all images, and all videos. For a text-only model, the
            messages as they are and two empty lists.

        Raises:
            DataError: the numbers of images and of their places differ, or a text-only model gets
                images.
        """
        media = media_of(row, self.config)
        if self.processor is not None:
            # `<image>` always stands for an image, but `<video>` is text if `data.video_key` is null.
            return with_parts(chat, media.get("image", ()), media.get("video"), where=where)
        # Texts are not checked for tags: `<image>` may be HTML that the model is to write.
        chat_without_texts = [
            message for message in chat if not isinstance(message.get("content"), str)
        ]
        column = getattr(self.config, self.columns[0])
        refuse_media(chat_without_texts, media, self.config, where=where, column=column)
        return chat, [], []

    def _render_row(
        self, table: RowTable, number: int, row: dict[str, Any]
    ) -> tuple[list[TextPart], RowMedia | None]:
        """Render the conversations of a row.

        Args:
            table: the file of the row.
            number: number of the row in the file.
            row: values by column.

        Returns:
            The pieces of text of all conversations, one after the other; and the images and videos
            among them, or None if there are none.

        Raises:
            DataError: a conversation is wrong, or conversations of the row differ in their images
                or videos.
        """
        where = f"{table.path} row {number}"
        row = self._add_dotted_columns(row, where)
        chat_key = "messages_key" if "messages_key" in self.columns else "prompt_key"
        if chat_in_json(row.get(getattr(self.config, chat_key))):
            self.num_chats_in_json += 1

        parts = []
        media_by_chat = []
        for place, row_chat in self.chats_of(row, where):
            chat, images, videos = self._with_media_parts(row, row_chat, place)
            parts += self.parts_of(row, chat, place)
            # Messages after the last response are not rendered, so their images do not count.
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
        # Only sizes are read now: the pixels of all rows would not fit in memory.
        image_sizes, clips = self.processor.media_sizes(
            media, self.config, folder=table.path.parent, where=where
        )
        # Each chat shows all images, so their tokens come once per chat.
        num_chats = len(media_by_chat)
        return parts, RowMedia(table, number, image_sizes * num_chats, clips * num_chats)

    def _expand_media_tokens(
        self, tokens: list[list[int]], media: RowMedia | None, where: str
    ) -> list[list[int]]:
        """Replace the token of each image and video in a row by one token for each of its embeddings.

        Args:
            tokens: token ids of each of the row's pieces of text.
            media: images and videos of the row. None: there are none.
            where: file and row, for errors.

        Returns:
            The expanded token ids of each piece.

        Raises:
            DataError: there are more or fewer such tokens than images or videos.
        """
        processor = self.processor
        if processor is None:
            return tokens
        image_sizes = [] if media is None else media.images
        clips = [] if media is None else media.clips
        processor.check_places(list(chain.from_iterable(tokens)), image_sizes, clips, where=where)
        # The pieces share these iterators: each piece takes an item for each of its own tokens.
        next_sizes = iter(image_sizes)
        next_clips = iter(clips)
        encode = self.encoder.encode
        return [processor.expand(ids, next_sizes, next_clips, encode) for ids in tokens]

    def _tokenize_table(self, table: RowTable) -> Iterator[Row]:
        """Tokenize the rows of a file, a batch at a time.

        Bad rows are left out, or raise their error (`data.on_bad_row`).
        """
        first = 0
        for batch in table.batches(table.columns, BATCH_ROWS):
            rows = []
            texts = []
            for number, row in enumerate(batch, start=first):
                with self._collect_bad_row():
                    parts, media = self._render_row(table, number, row)
                    rows.append((f"{table.path} row {number}", parts, media))
                    texts += [part.text for part in parts]
            first += len(batch)
            # One call for all texts of a batch, because fast tokenizers work on them in parallel.
            # Below, each row takes the results for its own parts.
            ids_of_texts = iter(self.encoder.encode(texts))
            for where, parts, media in rows:
                part_ids = list(islice(ids_of_texts, len(parts)))
                with self._collect_bad_row():
                    row_ids = list(chain.from_iterable(part_ids))
                    require_embedded(row_ids, self.vocabulary_size, self.tokenizer, where=where)
                    expanded_ids = self._expand_media_tokens(part_ids, media, where)
                    tokenized_row = self.build_row(parts, expanded_ids, media, where)
                    yield self._truncate_to_limit(tokenized_row, where)

    @contextmanager
    def _collect_bad_row(self) -> Iterator[None]:
        """Context manager: collect a DataError in `bad_rows`, unless `data.on_bad_row=error`."""
        try:
            yield
        except DataError as error:
            if self.config.on_bad_row == "error":
                raise
            self.bad_rows.append(error)

    def _add_dotted_columns(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """Add the field `b` of the column `a` to a row, as the column `a.b`, if a key names it so.

        Args:
            row: values by column, changed in place.
            where: file and row, for errors.

        Returns:
            The row.

        Raises:
            DataError: the column has no such field.
        """
        for key in ("prompt_key", *self.columns):
            name = getattr(self.config, key)
            if name in row or "." not in name:
                continue
            # Follow the path through nested dictionaries.
            value: Any = row
            for part in name.split("."):
                if not isinstance(value, dict) or part not in value:
                    raise DataError(
                        where,
                        got=f"no {part!r} in {shortened(value)}",
                        expected=f"the value that data.{key}={name} names",
                    )
                value = value[part]
            row[name] = value
        return row

    def _truncate_to_limit(self, row: Row, where: str) -> Row:
        """Truncate a row that is over `data.max_length`.

        With `data.filter_overlong_prompts` the row is returned as it is, and filtered out later.

        Raises:
            DataError: the row must not be truncated, or would have nothing to learn.
        """
        length = self.num_tokens(row)
        limit = self.config.max_length
        truncation = self.config.truncation
        # The constructor drops the rows that are too long, and counts them. Supervised tasks name
        # this key `data.filter_overlong`.
        if length <= limit or self.config.filter_overlong_prompts:
            return row
        # The last field of a row has its images and videos. Truncation might leave half an image.
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
    """Numbers of images and videos up to the last response of a chat; the rest is not rendered."""
    roles = [message["role"] for message in chat]
    # Number of messages up to and including the last response.
    end = len(roles) - roles[::-1].index(ASSISTANT)
    # Types of all content parts: "text", "image" or "video".
    kinds = []
    for message in chat[:end]:
        content = message.get("content")
        if isinstance(content, list):
            kinds += [part["type"] for part in content]
    return kinds.count("image"), kinds.count("video")


class MultiTurnSFTDataset(TokenizedRows[TokenizedConversation]):
    """Chats in which every turn of the assistant is learned. Arguments as for `TokenizedRows`."""

    columns = ("messages_key",)

    def __getitem__(self, item: int) -> dict[str, Any]:
        """Row `item`, padded on the right to `data.max_length` = L.

        Returns:
            `input_ids`, `attention_mask`, `position_ids` and `loss_mask` (1 on tokens that are
            learned), int64 [L]. With a processor positions are [3, L], and there are
            `multi_modal_inputs`.
        """
        row = self.rows[item]
        columns = self.pad([row.ids], row.media)
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
        """Render a conversation as pieces of text, in which every turn of the assistant is learned.

        Args:
            row: the row, which may bring tools, and the template's option `enable_thinking`.
            chat: its messages.
            where: place of the row, for errors.
        """
        options = {}
        if row.get(THINKING) is not None:
            options[THINKING] = bool(row[THINKING])
        key = self.config.tools_key
        tools = tools_of_row(row.get(key), where=f"{where}, column {key!r}")
        return text_parts(chat, self.encoder, where=where, tools=tools, **options)

    def build_row(
        self,
        parts: Sequence[TextPart],
        tokens: Sequence[list[int]],
        media: RowMedia | None,
        where: str,
    ) -> TokenizedConversation:
        is_response = [part.is_learned for part in parts]
        eos = self.tokenizer.eos_token_id
        joined = join_parts(tokens, is_response, eos, self.stop_token_ids)

        # Each response should have one end token among its learned tokens; missing ones are
        # counted.
        num_ends = 0
        if eos is not None:
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
        """Drop tokens on the side that `data.truncation` names.

        None: no token that remains is learned.
        """
        limit = self.config.max_length
        remaining = slice(limit)
        if self.config.truncation == "left":
            remaining = slice(-limit, None)
        shorter = TokenizedConversation(row.ids[remaining], row.is_learned[remaining])
        # The first token has no token before it that could predict it, so it is never learned.
        return shorter if shorter.is_learned[1:].any() else None


class SFTDataset(MultiTurnSFTDataset):
    """Prompts with one response each, in two columns. Otherwise as `MultiTurnSFTDataset`."""

    columns = ("prompt_key", "response_key")

    def chats_of(self, row: dict[str, Any], where: str) -> list[tuple[str, Messages]]:
        response = row[self.config.response_key]
        if not isinstance(response, str):
            raise DataError(
                where,
                got=f"the response {response!r}",
                expected="text",
                fix="Correct the row, or name the column with data.response_key.",
            )
        messages = as_messages(row[self.config.prompt_key], where=where)
        return [(where, [*messages, {"role": ASSISTANT, "content": response}])]

    # Not the method of the parent class: turns of the assistant in the prompt are not learned.
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
        Pieces of text: alternately a prompt and a response, beginning with a prompt. Messages after
        the last response are left out.

    Raises:
        DataError: no message is by the assistant; the first message is; a turn of the assistant is
            empty; or the template changes earlier turns when later ones follow.
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
        raise DataError(
            where,
            got="a chat that begins with the assistant",
            expected="a prompt before the response",
        )
    render = partial(encoder.render, where=where, tools=tools, **options)
    parts = []
    previous_text = ""
    for turn in turns:
        place = f"{where}, message {turn}"
        _check_turn(messages[turn], place)
        # The prompt as a rollout renders it, and the chat that ends with the response.
        prompt_text = render(messages[:turn], add_generation_prompt=True)
        chat_text = render(messages[: turn + 1], add_generation_prompt=False)
        # Each text must begin with the previous one, so that the pieces add up to the chat.
        _check_prefix(previous_text, prompt_text, place)
        _check_prefix(prompt_text, chat_text, place)
        parts.append(TextPart(prompt_text[len(previous_text) :], False))
        parts.append(TextPart(chat_text[len(prompt_text) :], True))
        previous_text = chat_text
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
    """Raise a DataError unless the longer rendered chat begins with the shorter one."""
    if longer.startswith(shorter):
        return
    # Find the first character that differs, and show a little of both texts from there.
    position = 0
    while position < len(longer) and shorter[position] == longer[position]:
        position += 1
    old = shorter[position : position + 40]
    new = longer[position : position + 40]
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


def join_parts(
    parts: Sequence[Sequence[int]],
    is_response: Sequence[bool],
    eos_token_id: int | None,
    stop_token_ids: Sequence[int] = (),
) -> TokenizedConversation:
    """Join the parts of a conversation, and mark the tokens that are learned.

    Args:
        parts: token ids of each part.
        is_response: whether each part is a turn of the assistant.
        eos_token_id: token that ends a turn; appended to the last turn if that has no end token.
            None: the tokenizer has no such token.
        stop_token_ids: further tokens that end a turn. If a response has no end and the next part
            begins with one of these, that token is learned as the end of the response.

    Returns:
        The token ids, and which of them are learned, [L].
    """
    end_ids = {*stop_token_ids} if eos_token_id is None else {eos_token_id, *stop_token_ids}
    ids = []
    learned = []
    is_open = False  # whether the previous part is a response without an end token
    for number, (part, is_learned) in enumerate(zip(parts, is_response, strict=True)):
        tokens = list(part)
        # The first `num_learned` tokens of the part are learned. In a prompt that is none, or the
        # first token if it is an end token and the response before has none.
        num_learned = int(is_open and bool(tokens) and tokens[0] in end_ids)
        is_open = False
        if is_learned:
            # A response is learned up to and including its last end token; without one, as a whole.
            end_positions = [position for position, token in enumerate(tokens) if token in end_ids]
            is_open = not end_positions
            num_learned = len(tokens) if is_open else end_positions[-1] + 1
            # The whole sequence ends with an end token: add it, or cut what the template wrote
            # after it.
            is_last = number == len(parts) - 1
            if is_last and eos_token_id is not None:
                tokens = [*tokens, eos_token_id] if is_open else tokens[:num_learned]
                num_learned = len(tokens)
        ids += tokens
        learned += [True] * num_learned + [False] * (len(tokens) - num_learned)
    return TokenizedConversation(np.array(ids, dtype=np.int32), np.array(learned, dtype=bool))


def tools_of_row(value: Any, *, where: str) -> list[Any] | None:
    """Parse the tool schemas of a row.

    Args:
        value: a list of schemas, or JSON text of such a list. Each schema may be JSON text too.
            None: no tools.
        where: file, row and column, for errors.

    Returns:
        The schemas as dictionaries; empty without tools.

    Raises:
        DataError: the value has another form.
    """
    tools = []
    try:
        # Many data sets have schemas as JSON, since a column of Parquet cannot hold different structs.
        schemas = json.loads(value) if isinstance(value, str) and value else value
        for schema in schemas or ():
            tools.append(json.loads(schema) if isinstance(schema, str) else schema)
        bad_schemas = [tool for tool in tools if not isinstance(tool, Mapping)]
    except (ValueError, TypeError, RecursionError) as error:
        bad_schemas = [f"{shortened(value)} ({error})"]
    if bad_schemas:
        raise DataError(
            where,
            got=f"the tool schema {bad_schemas[0]}, which is no JSON object",
            expected=(
                'a list such as [{"type": "function", "function": {"name": ..., "parameters":'
                " {...}}}]"
            ),
            fix="Correct the row, or name the column that holds the tools with data.tools_key.",
        )
    return tools
