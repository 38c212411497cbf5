# SPDX-License-Identifier: Apache-2.0
"""`quadriga data inspect`: show the contents of a data file, and how a run would read it."""

import argparse
import base64
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.filesize import decimal

from quadriga.cli.config import add_config_arguments, load_from
from quadriga.config import Config
from quadriga.data.files import RowTable, read_table, resolve_files
from quadriga.data.media import read_prompt
from quadriga.data.prompt_lengths import (
    BAD,
    BATCH_ROWS,
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
from quadriga.trainer.checkpoint import model_folder
from quadriga.workers.generation import (
    build_processor,
    declared_stop_token_ids,
    embedding_limit,
    prompt_context,
)

_NUM_LISTED = 20  # bad or long rows to list
_NUM_BARS = 12  # bars of a histogram
_BAR_WIDTH = 40  # characters of the longest bar


class _Chats(MultiTurnSFTDataset):
    """Conversations of a file that may have no usable one."""

    may_be_empty = True


def main(argv: Sequence[str]) -> int:
    """Show rows, schema and lengths of data files, one prompt as the model gets it, and the rows
    that would be left out, with the reason."""
    parser = argparse.ArgumentParser(prog="quadriga data inspect", description=main.__doc__)
    parser.add_argument("what", choices=("inspect",), help=argparse.SUPPRESS)
    parser.add_argument(
        "file", metavar="FILE", help="a parquet, json or jsonl file, a glob or a URL"
    )
    parser.add_argument(
        "--model", help="whose tokenizer and chat template count tokens (default: characters)"
    )
    parser.add_argument(
        "--row", type=int, default=0, metavar="N", help="the row that is shown as the model gets it"
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=3,
        metavar="N",
        help="rows that are shown as they are (default: 3)",
    )
    add_config_arguments(parser)
    arguments = parser.parse_intermixed_args(list(argv))
    if arguments.model:
        arguments.overrides.append(f"actor_rollout_ref.model.path={model_folder(arguments.model)}")
    config = load_from(arguments)
    for path in resolve_files(arguments.file, config.data.cache_dir, where="FILE"):
        inspect(config, path, arguments.row, arguments.rows)
    return 0


def inspect(config: Config, path: Path, row: int = 0, num_rows: int = 3) -> None:
    """Print the contents of a data file.

    Args:
        config: a configuration. Tokens are counted if it has a model or a tokenizer.
        path: the data file.
        row: the row to print as a model gets it.
        num_rows: number of rows to print as they are.

    Raises:
        DataError: the file cannot be read, or does not have the row.
    """
    errors: list[DataError] = []
    data = config.data
    table = read_table(path, data.cache_dir, errors, data.chat_columns)
    if not 0 <= row < len(table):
        raise DataError("--row", got=f"{row} of {path}", expected=f"0 to {len(table) - 1}")
    print(f"{path}: {len(table)} rows, {decimal(path.stat().st_size)}")
    print(*_schema_lines(table), sep="\n")
    for number in range(min(num_rows, len(table))):
        print(f"row {number}")
        for name, value in table[number].items():
            text = repr(value)
            print(f"  {name}: {text[:297]}{'...' if len(text) > 297 else ''}")

    is_chat = data.messages_key in table.columns and data.prompt_key not in table.columns
    key = data.messages_key if is_chat else data.prompt_key
    if key not in table.columns:
        print(f"no column {key!r}: data.prompt_key or data.messages_key names the one to measure")
    elif not (config.actor_rollout_ref.model.path or data.tokenizer):
        lengths = []
        for rows in table.batches([key], BATCH_ROWS):
            lengths += [len(json.dumps(values[key], ensure_ascii=False)) for values in rows]
        print(
            *_histogram_lines(np.array(lengths), "characters of JSON (tokens with --model)"),
            sep="\n",
        )
    elif is_chat:
        _print_chats(config, path, row)
    else:
        _print_prompts(config, table, row, errors)


def _print_chats(config: Config, path: Path, row: int) -> None:
    """Print the lengths of conversations, the number of bad rows, and the learned tokens of a row.

    Args:
        config: a configuration with a model or a tokenizer.
        path: the data file.
        row: the conversation to print, among those that can be used.
    """
    data = config.data
    encoder = ChatEncoder(build_tokenizer(config), data.apply_chat_template_kwargs)
    skips = data.model_copy(update={"on_bad_row": "skip", "filter_overlong_prompts": True})
    options: dict[str, Any] = {}
    model_path = config.actor_rollout_ref.model.path
    if model_path:
        options = {
            "processor": build_processor(config),
            "stop_token_ids": declared_stop_token_ids(model_path),
            "vocabulary_size": embedding_limit(config, encoder.tokenizer),
        }
    chats = _Chats([path], encoder.tokenizer, skips, **options)
    lengths = np.array([len(chat.ids) for chat in chats.rows])
    print(*_histogram_lines(lengths, "tokens"), sep="\n")
    print(f"bad: {len(chats.bad_rows)} rows")
    if chats.rows:
        shown = chats.rows[min(row, len(chats) - 1)]
        _print_tokens(encoder, shown.ids.tolist(), shown.is_learned.tolist())


def _print_prompts(config: Config, table: RowTable, row: int, errors: list[DataError]) -> None:
    """Print the lengths of prompts, the rows that are left out, and a row as the model gets it.

    Args:
        config: a configuration with a model or a tokenizer.
        table: the rows of the data file.
        row: the row to print.
        errors: errors of bad lines, which are listed with those of bad rows.
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
    num_with_tools = np.count_nonzero(measured["notes"] & WITH_TOOLS)
    print(f"{describe_prompts(measured)}; {num_with_tools} of them with tools")
    lengths = measured["tokens"]
    print(*_histogram_lines(lengths[lengths != BAD], "tokens"), sep="\n")
    _print_left_out(lengths, data.max_prompt_length, [*errors, *row_errors])
    if lengths[row] == BAD:
        print(f"row {row} is one of the bad rows; --row N shows another")
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
        drawing = _terminal_image(picture)
        if drawing is not None:
            print(drawing)


def _print_left_out(lengths: np.ndarray, limit: int, errors: list[DataError]) -> None:
    """Print the rows that are too long, and those that cannot be used."""
    long_rows = np.flatnonzero(lengths > limit)
    print(f"over data.max_prompt_length={limit}: {len(long_rows)} of {len(lengths)} rows")
    for number in long_rows[:_NUM_LISTED]:
        print(f"  row {number}: {lengths[number]} tokens")
    print(f"bad: {len(errors)} rows", *errors[:_NUM_LISTED], sep="\n  ")
    num_more = max(len(long_rows), len(errors)) - _NUM_LISTED
    if num_more > 0:
        print(f"  (the first {_NUM_LISTED} of each; {num_more} more)")


def _schema_lines(table: RowTable) -> Iterator[str]:
    """Yield a line for each column: its type, or its types in JSON, and its number of nulls."""
    num_nulls = Counter[str]()
    json_types = {name: Counter[str]() for name in table.columns}
    for rows in table.batches(table.columns, BATCH_ROWS):
        for row in rows:
            for name, value in row.items():
                if value is None:
                    num_nulls[name] += 1
                elif table.schema is None:
                    json_types[name][type(value).__name__] += 1
    for name, counts in json_types.items():
        kind = ", ".join(counts) if table.schema is None else table.schema.field(name).type
        nulls = f", null in {num_nulls[name]} rows" if num_nulls[name] else ""
        yield f"  {name}: {kind}{nulls}"


def _histogram_lines(lengths: np.ndarray, unit: str) -> Iterator[str]:
    """Yield lines with the quantiles of lengths, and a histogram of ranges of equal width."""
    if len(lengths) == 0:
        return
    quantiles = np.quantile(lengths, [0, 0.5, 0.9, 0.99, 1], method="inverted_cdf")
    first, median, q90, q99, last = quantiles
    yield f"{unit}: {first} to {last}, median {median}, 90 % up to {q90}, 99 % up to {q99}"

    # Ranges of equal width from the shortest to the longest.
    first = int(first)
    last = int(last)
    range_width = max(1, -(-(last + 1 - first) // _NUM_BARS))
    edges = np.arange(first, last + 1, range_width)
    counts = np.bincount(np.searchsorted(edges, lengths, "right") - 1, minlength=len(edges))
    # The last number in each range.
    ends = [*edges[1:] - 1, last]
    for count, start, end in zip(counts, edges, ends, strict=True):
        bar = "█" * int(np.ceil(_BAR_WIDTH * count / counts.max()))
        yield f"  {start:7} to {end:7}  {count:8}  {bar}"


def _print_tokens(encoder: ChatEncoder, ids: list[int], is_learned: list[bool] | None) -> None:
    """Print tokens separated by bars; a learned token is marked with a star.

    Args:
        encoder: decodes the tokens.
        ids: token ids.
        is_learned: whether each token is learned. None: not known.
    """
    texts = []
    for index, token_id in enumerate(ids):
        mark = "*" if is_learned and is_learned[index] else ""
        texts.append(mark + repr(encoder.tokenizer.decode([token_id]))[1:-1])
    count = f"{len(ids)} tokens"
    if is_learned:
        count += f", of which {sum(is_learned)}, marked *, are learned"
    print(f"{count}:")
    print("|".join(texts))


def _terminal_image(picture: Any) -> str | None:
    """Escape codes that draw an image in the terminal; None if the terminal cannot do so."""
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
