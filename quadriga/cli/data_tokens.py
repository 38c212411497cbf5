# SPDX-License-Identifier: Apache-2.0
"""`quadriga data inspect` with a model: lengths in tokens, and a row as the model gets it.

This module loads torch and transformers, so `quadriga.cli.data` imports it only if there is a model.
"""

import base64
import io
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from quadriga.cli.data import histogram
from quadriga.config import Config
from quadriga.data.files import RowTable
from quadriga.data.media import read_prompt
from quadriga.data.prompt_lengths import (
    BAD,
    WITH_TOOLS,
    PromptMeter,
    describe_prompts,
    prompt_lengths,
)
from quadriga.data.sft_dataset import MultiTurnSFTDataset
from quadriga.data.tokenizing import ChatEncoder
from quadriga.data.vision import read_media
from quadriga.errors import DataError
from quadriga.trainer.build import build_tokenizer
from quadriga.workers.generation import (
    build_processor,
    declared_stop_token_ids,
    embedding_limit,
    prompt_context,
)

_NUM_LISTED = 20  # bad or long rows to list


class _Chats(MultiTurnSFTDataset):
    """Conversations of a file. Unlike its base class, it accepts a file without usable conversations."""

    may_be_empty = True


def print_chats(config: Config, path: Path, row: int) -> None:
    """Print the lengths of conversations, the number of bad rows, and the learned tokens of a row.

    Args:
        config: a configuration with a model or a tokenizer.
        path: the data file.
        row: number of the conversation to print among those that can be used; the last one if there
            are fewer.
    """
    data = config.data
    encoder = ChatEncoder(build_tokenizer(config), data.apply_chat_template_kwargs)
    # A run may end with an error at a bad row, or at one that is too long. Here these are left out.
    skipping_data = data.model_copy(update={"on_bad_row": "skip", "filter_overlong_prompts": True})
    options = {}
    model_path = config.actor_rollout_ref.model.path
    if model_path:
        options = {
            "processor": build_processor(config),
            "stop_token_ids": declared_stop_token_ids(model_path),
            "vocabulary_size": embedding_limit(config, encoder.tokenizer),
        }
    chats = _Chats([path], encoder.tokenizer, skipping_data, **options)
    print(*histogram(np.array([len(chat.ids) for chat in chats.rows]), "tokens"), sep="\n")
    print(f"bad: {len(chats.bad_rows)} rows")
    if chats.rows:
        shown = chats.rows[min(row, len(chats) - 1)]
        _print_tokens(encoder, shown.ids.tolist(), shown.is_learned.tolist())


def print_prompts(config: Config, table: RowTable, row: int, errors: list[DataError]) -> None:
    """Print the lengths of prompts, the rows that are left out, and a row as the model gets it.

    Args:
        config: a configuration with a model or a tokenizer.
        table: the rows of the data file.
        row: the row to print.
        errors: errors of lines that cannot be read, which are listed with those of bad rows.
    """
    data = config.data
    processor = build_processor(config) if config.actor_rollout_ref.model.path else None
    encoder = ChatEncoder(build_tokenizer(config), data.apply_chat_template_kwargs)
    context = prompt_context(config, encoder.tokenizer)
    measured, row_errors = prompt_lengths(
        table,
        PromptMeter(encoder, processor, data, context=context),
        cache_dir=data.cache_dir,
        num_workers=data.filter_overlong_prompts_workers,
    )
    # `notes` has bits for facts about each prompt.
    num_with_tools = np.count_nonzero(measured["notes"] & WITH_TOOLS)
    print(f"{describe_prompts(measured)}; {num_with_tools} of them with tools")
    lengths = measured["tokens"]
    print(*histogram(lengths[lengths != BAD], "tokens"), sep="\n")
    _print_left_out(lengths, data.max_prompt_length, [*errors, *row_errors])
    if lengths[row] == BAD:
        print(f"row {row} is one of the bad rows; show another by --row N")
        return

    values = table[row]
    where = f"{table.path} row {row}"
    messages, media = read_prompt(values, data, is_vision=processor is not None, where=where)
    pictures, clips = read_media(media, processor, data, folder=table.path.parent, where=where)
    text = encoder.render(messages, where=where, tools=context.tools_of(values))
    print(f"row {row} as the model gets it:\n{text}")
    _print_tokens(encoder, encoder.encode([text])[0], None)
    if pictures or clips:
        print(f"{lengths[row]} tokens with those of all patches of images and videos")
    for number, clip in enumerate(clips):
        frames = f"{len(clip.indices)} of {clip.num_frames} frames"
        print(f"video {number}: {frames}, {clip.size[1]} x {clip.size[0]}")
    for number, picture in enumerate(pictures):
        print(f"image {number}: {picture.width} x {picture.height}")
        drawing = _terminal_drawing(picture)
        if drawing is not None:
            print(drawing)


def _print_left_out(lengths: np.ndarray, limit: int, errors: list[DataError]) -> None:
    """Print the rows that are too long, and those that cannot be used.

    Args:
        lengths: tokens of each row; `BAD` for one that cannot be used.
        limit: largest length.
        errors: why rows cannot be used.
    """
    long_rows = np.flatnonzero(lengths > limit)
    print(f"over data.max_prompt_length={limit}: {len(long_rows)} of {len(lengths)} rows")
    for number in long_rows[:_NUM_LISTED]:
        print(f"  row {number}: {lengths[number]} tokens")
    print(f"bad: {len(errors)} rows", *errors[:_NUM_LISTED], sep="\n  ")
    num_more = max(len(long_rows), len(errors)) - _NUM_LISTED
    if num_more > 0:
        print(f"  (the first {_NUM_LISTED} of each; {num_more} more)")


def _print_tokens(encoder: ChatEncoder, ids: list[int], is_learned: list[bool] | None) -> None:
    """Print tokens separated by bars; a learned token is marked with a star.

    Args:
        encoder: decodes the tokens.
        ids: token ids.
        is_learned: whether the loss counts each token. None: not known, and none is marked.
    """
    texts = []
    for index, token_id in enumerate(ids):
        mark = "*" if is_learned and is_learned[index] else ""
        # `repr` makes line breaks visible. Its quotes are cut off.
        texts.append(mark + repr(encoder.tokenizer.decode([token_id]))[1:-1])
    count = f"{len(ids)} tokens"
    if is_learned:
        count += f", of which {sum(is_learned)}, marked *, are learned"
    print(f"{count}:")
    print("|".join(texts))


def _terminal_drawing(picture: Any) -> str | None:
    """Text that draws an image when it is printed, in the escape codes of iTerm or Kitty.

    Returns:
        The text. None: standard output is no terminal, or one that cannot draw images.
    """
    kind = os.environ.get("TERM_PROGRAM", "") + os.environ.get("TERM", "")
    is_iterm = "iTerm" in kind or "WezTerm" in kind
    is_kitty = "kitty" in kind or "ghostty" in kind
    if not sys.stdout.isatty() or not (is_iterm or is_kitty):
        return None
    content = io.BytesIO()
    small = picture.copy()
    small.thumbnail((640, 640))
    small.save(content, "PNG")
    data = base64.b64encode(content.getvalue()).decode()
    if is_iterm:
        return f"\x1b]1337;File=inline=1:{data}\a"
    # Kitty's protocol takes chunks of 4096 bytes; m=1 announces another chunk.
    chunks = []
    for start in range(0, len(data), 4096):
        head = "a=T,f=100," if start == 0 else ""
        has_more = int(start + 4096 < len(data))
        chunks.append(f"\x1b_G{head}m={has_more};{data[start : start + 4096]}\x1b\\")
    return "".join(chunks)
