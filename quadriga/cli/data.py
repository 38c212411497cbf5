# SPDX-License-Identifier: Apache-2.0
"""`quadriga data inspect`: what a data file holds, and what a run would make of it."""

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
    prompt_lengths,
    told_prompts,
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

_LISTED, _BARS, _WIDTH = 20, 12, 40
"""Bad rows that are listed; bars of a histogram, and characters of its longest."""


class _Chats(MultiTurnSFTDataset):
    may_be_empty = True


def main(argv: Sequence[str]) -> int:
    """Show rows, schema and lengths of data files, one prompt as the model gets it, and what would be left out and
    why."""
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
    """Print what a file holds; where the configuration has a model or a tokenizer also `row` as a model gets it.
    Raises DataError: the file cannot be read."""
    errors: list[DataError] = []
    table = read_table(path, config.data.cache_dir, errors, config.data.chat_columns)
    if not 0 <= row < len(table):
        raise DataError("--row", got=f"{row} of {path}", expected=f"0 to {len(table) - 1}")
    print(f"{path}: {len(table)} rows, {decimal(path.stat().st_size)}")
    print(*_schema(table), sep="\n")
    for number in range(min(num_rows, len(table))):
        print(f"row {number}")
        texts = ((name, repr(value)) for name, value in table[number].items())
        print(
            *(f"  {name}: {text[:297]}{'...' if len(text) > 297 else ''}" for name, text in texts),
            sep="\n",
        )
    data = config.data
    is_chat = data.messages_key in table.columns and data.prompt_key not in table.columns
    key = data.messages_key if is_chat else data.prompt_key
    if key not in table.columns:
        print(f"no column {key!r}: data.prompt_key or data.messages_key names the one to measure")
    elif not (config.actor_rollout_ref.model.path or data.tokenizer):
        texts = (
            json.dumps(one[key], ensure_ascii=False)
            for some in table.batches([key], BATCH_ROWS)
            for one in some
        )
        lengths = np.array([len(text) for text in texts])
        print(*_histogram(lengths, "characters of JSON (tokens with --model)"), sep="\n")
    elif is_chat:
        _print_chats(config, path, row)
    else:
        _print_prompts(config, table, row, errors)


def _print_chats(config: Config, path: Path, row: int) -> None:
    """How long conversations are, which would be left out, and one with its learned tokens."""
    data = config.data
    encoder = ChatEncoder(build_tokenizer(config), data.apply_chat_template_kwargs)
    skips = data.model_copy(update={"on_bad_row": "skip", "filter_overlong_prompts": True})
    options: dict[str, Any] = {}
    if model_path := config.actor_rollout_ref.model.path:
        options = {
            "processor": build_processor(config),
            "stop_token_ids": declared_stop_token_ids(model_path),
        }
        options["vocabulary_size"] = embedding_limit(config, encoder.tokenizer)
    chats = _Chats([path], encoder.tokenizer, skips, **options)
    print(*_histogram(np.array([len(one.ids) for one in chats.rows]), "tokens"), sep="\n")
    print(f"bad: {len(chats.bad_rows)} rows")
    if chats.rows:
        shown = chats.rows[min(row, len(chats) - 1)]
        _print_tokens(encoder, shown.ids.tolist(), shown.is_learned.tolist())


def _print_prompts(config: Config, table: RowTable, row: int, errors: list[DataError]) -> None:
    """How long prompts are, which would be left out, and one as the model gets it."""
    data, processor = (
        config.data,
        build_processor(config) if config.actor_rollout_ref.model.path else None,
    )
    encoder = ChatEncoder(build_tokenizer(config), data.apply_chat_template_kwargs)
    context = prompt_context(config, encoder.tokenizer)
    meter, workers = (
        PromptMeter(encoder, processor, data, context=context),
        data.filter_overlong_prompts_workers,
    )
    measured, found = prompt_lengths(table, meter, cache_dir=data.cache_dir, num_workers=workers)
    print(
        f"{told_prompts(measured)}; {np.count_nonzero(measured['notes'] & WITH_TOOLS)} of them with tools"
    )
    lengths = measured["tokens"]
    print(*_histogram(lengths[lengths != BAD], "tokens"), sep="\n")
    errors, long = [*errors, *found], np.flatnonzero(lengths > data.max_prompt_length)
    print(
        f"over data.max_prompt_length={data.max_prompt_length}: {len(long)} of {len(lengths)} rows"
    )
    print(
        *(f"  row {number}: {lengths[number]} tokens\n" for number in long[:_LISTED]),
        sep="",
        end="",
    )
    print(f"bad: {len(errors)} rows", *errors[:_LISTED], sep="\n  ")
    if (rest := max(len(long), len(errors)) - _LISTED) > 0:
        print(f"  (the first {_LISTED} of each; {rest} more)")
    if lengths[row] == BAD:
        print(f"row {row} is one of the bad rows; --row N shows another")
        return
    values, where = table[row], f"{table.path} row {row}"
    messages, media = read_prompt(values, data, is_vision=processor is not None, where=where)
    pictures, clips = read_media(media, processor, data, folder=table.path.parent, where=where)
    text = encoder.render(messages, where=where, tools=context.tools_of(values))
    print(f"row {row} as the model gets it:\n{text}")
    _print_tokens(encoder, encoder.encode([text])[0], None)
    if pictures or clips:
        print(f"{lengths[row]} tokens with those of all patches of images and videos")
    for number, clip in enumerate(clips):
        print(
            f"video {number}: {len(clip.indices)} of {clip.num_frames} frames, {clip.size[1]} x {clip.size[0]}"
        )
    for number, picture in enumerate(pictures):
        print(f"image {number}: {picture.width} x {picture.height}")
        if (drawn := _drawn(picture)) is not None:
            print(drawn)


def _schema(table: RowTable) -> Iterator[str]:
    """A line for each column: its type, or its types in JSON, and in how many rows it has no value."""
    num_nulls, types = Counter[str](), {name: Counter[str]() for name in table.columns}
    for rows in table.batches(table.columns, BATCH_ROWS):
        for row in rows:
            num_nulls.update(name for name, value in row.items() if value is None)
            if table.schema is None:
                for name, value in row.items():
                    types[name][type(value).__name__] += value is not None
    for name, found in types.items():
        in_json = ", ".join(one for one, count in found.items() if count)
        kind = in_json if table.schema is None else table.schema.field(name).type
        yield f"  {name}: {kind}{f', null in {num_nulls[name]} rows' if num_nulls[name] else ''}"


def _histogram(lengths: np.ndarray, unit: str) -> Iterator[str]:
    """Lengths in bars of equal width, and their quantiles."""
    if len(lengths) == 0:
        return
    marks = np.quantile(lengths, [0, 0.5, 0.9, 0.99, 1], method="inverted_cdf")
    yield "{}: {} to {}, median {}, 90 % up to {}, 99 % up to {}".format(
        unit, *marks[[0, 4, 1, 2, 3]]
    )
    first, last = int(marks[0]), int(marks[4])
    edges = np.arange(first, last + 1, max(1, -(-(last + 1 - first) // _BARS)))
    counts = np.bincount(np.searchsorted(edges, lengths, "right") - 1, minlength=len(edges))
    for count, left, right in zip(counts, edges, [*edges[1:] - 1, last], strict=True):
        yield f"  {left:7} to {right:7}  {count:8}  {'█' * int(np.ceil(_WIDTH * count / counts.max()))}"


def _print_tokens(encoder: ChatEncoder, ids: list[int], is_learned: list[bool] | None) -> None:
    """Each token between bars; a learned one is marked with a star."""
    learned = is_learned or [False] * len(ids)
    texts = (
        (encoder.tokenizer.decode([one]), mark) for one, mark in zip(ids, learned, strict=True)
    )
    told = f", of which {sum(learned)}, marked *, are learned" if is_learned else ""
    print(f"{len(ids)} tokens{told}:")
    print("|".join(f"{'*' if mark else ''}{repr(text)[1:-1]}" for text, mark in texts))


def _drawn(picture: Any) -> str | None:
    """An image as the terminal draws it; None where it cannot, or standard output is none."""
    kind = os.environ.get("TERM_PROGRAM", "") + os.environ.get("TERM", "")
    if not sys.stdout.isatty() or not any(
        name in kind for name in ("iTerm", "WezTerm", "kitty", "ghostty")
    ):
        return None
    content = io.BytesIO()
    small = picture.copy()
    small.thumbnail((640, 640))
    small.save(content, "PNG")
    data = base64.b64encode(content.getvalue()).decode()
    if "iTerm" in kind or "WezTerm" in kind:
        return f"\x1b]1337;File=inline=1:{data}\a"
    chunks = [data[start : start + 4096] for start in range(0, len(data), 4096)]
    heads = ("a=T,f=100," if number == 0 else "" for number in range(len(chunks)))
    return "".join(
        f"\x1b_G{head}m={int(number < len(chunks) - 1)};{chunk}\x1b\\"
        for number, (head, chunk) in enumerate(zip(heads, chunks, strict=True))
    )
