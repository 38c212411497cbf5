# SPDX-License-Identifier: Apache-2.0
"""`quadriga data inspect`: show the contents of a data file, and how a run would read it."""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.filesize import decimal

from quadriga.cli.config import add_config_arguments, load_from
from quadriga.cli.loading import LazyModule
from quadriga.config import Config
from quadriga.data.files import RowTable, read_table, resolve_files
from quadriga.errors import DataError
from quadriga.trainer.checkpoint import model_folder

if TYPE_CHECKING:
    from quadriga.cli import data_tokens
else:
    # It loads torch and transformers, which only a tokenizer needs.
    data_tokens = LazyModule("quadriga.cli.data_tokens")

_BATCH_ROWS = 256  # rows that are read at once
_NUM_BARS = 12  # bars of a histogram
_BAR_WIDTH = 40  # characters of the longest bar


def main(argv: Sequence[str]) -> int:
    """Show rows, schema and lengths of data files, one prompt as the model gets it, and the rows
    that would be left out, with the reason."""
    parser = argparse.ArgumentParser(prog="quadriga data inspect", description=main.__doc__)
    # The only action of `quadriga data`.
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
    model = model_folder(arguments.model) if arguments.model else None
    config = load_from(arguments, {"actor_rollout_ref.model.path": model})
    for path in resolve_files(arguments.file, config.data.cache_dir, where="FILE"):
        inspect(config, path, arguments.row, arguments.rows)
    return 0


def inspect(config: Config, path: Path, row: int, num_rows: int) -> None:
    """Print the contents of a data file.

    Args:
        config: a configuration. If it has a model or a tokenizer, lengths are numbers of tokens, and
            a row is printed as the model gets it; else lengths are characters.
        path: the data file.
        row: number of the row to print as the model gets it.
        num_rows: number of rows to print as they are.

    Raises:
        DataError: the file cannot be read, or does not have the row.
    """
    errors = []  # of lines that cannot be read
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
        print(
            f"no column {key!r}: set data.prompt_key or data.messages_key to the column to measure"
        )
    elif not (config.actor_rollout_ref.model.path or data.tokenizer):
        lengths = []
        for rows in table.batches([key], _BATCH_ROWS):
            lengths += [len(json.dumps(values[key], ensure_ascii=False)) for values in rows]
        print(*histogram(np.array(lengths), "characters of JSON (tokens with --model)"), sep="\n")
    elif is_chat:
        data_tokens.print_chats(config, path, row)
    else:
        data_tokens.print_prompts(config, table, row, errors)


def _schema_lines(table: RowTable) -> Iterator[str]:
    """Yield a line for each column: its type and its number of nulls.

    Columns of JSON have no declared type: the types of their values are listed.
    """
    num_nulls = Counter[str]()
    json_types = {name: Counter[str]() for name in table.columns}
    for rows in table.batches(table.columns, _BATCH_ROWS):
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


def histogram(lengths: np.ndarray, unit: str) -> Iterator[str]:
    """Yield lines with the quantiles of lengths, and a histogram of ranges of equal width.

    Args:
        lengths: the lengths. Without any, no line is yielded.
        unit: name of the unit, for the first line.
    """
    if len(lengths) == 0:
        return
    quantiles = np.quantile(lengths, [0, 0.5, 0.9, 0.99, 1], method="inverted_cdf")
    first, median, q90, q99, last = quantiles
    yield f"{unit}: {first} to {last}, median {median}, 90 % up to {q90}, 99 % up to {q99}"

    # Ranges of equal width from the shortest to the longest.
    first = int(first)
    last = int(last)
    # Rounded up, so that there are at most `_NUM_BARS` ranges.
    range_width = max(1, -(-(last + 1 - first) // _NUM_BARS))
    edges = np.arange(first, last + 1, range_width)
    counts = np.bincount(np.searchsorted(edges, lengths, "right") - 1, minlength=len(edges))
    # The last number in each range.
    ends = [*edges[1:] - 1, last]
    for count, start, end in zip(counts, edges, ends, strict=True):
        bar = "█" * int(np.ceil(_BAR_WIDTH * count / counts.max()))
        yield f"  {start:7} to {end:7}  {count:8}  {bar}"
