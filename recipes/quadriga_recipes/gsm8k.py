# SPDX-License-Identifier: Apache-2.0
"""GSM8K: word problems of primary school, from local files or from the Hugging Face hub.

A source has rows with `question` and `answer`, where the answer ends in `#### NUMBER`. A folder is searched for files
with `train` and with `test` (or `val`) in their names; of a single file, a part is held out.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from quadriga.data.files import read_table
from quadriga.errors import DataError
from quadriga_recipes.rows import Problem

DATA_SOURCE = "openai/gsm8k"
ABILITY = "math"
INSTRUCTION = 'Reason step by step. Put the final answer on a last line of its own, after "####".'
_WHERE = "prepare data gsm8k"
_SUFFIXES = {".parquet", ".json", ".jsonl"}
_FINAL_ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")


def problems(
    *, num_train: int | None, num_val: int | None, seed: int, source: str | None
) -> tuple[list[Problem], list[Problem]]:
    """Training and validation problems.

    Args:
        num_train: training rows, drawn with `seed`; None takes all.
        num_val: validation rows, likewise; of a single file None holds out a tenth.
        seed: of the choice of rows.
        source: a file or a folder; None loads from the hub.
    """
    if source is None:
        train, val = _from_hub()
    else:
        train, val = _from_files(Path(source).expanduser(), num_val, seed)
    return _draw(train, num_train, seed), _draw(val, num_val, seed)


def _from_files(source: Path, num_val: int | None, seed: int) -> tuple[list[Problem], list[Problem]]:
    if source.is_file():
        every = _read([source])
        held_out = max(1, len(every) // 10) if num_val is None else min(num_val, len(every))
        order = Random(seed).sample(range(len(every)), len(every))
        return [every[i] for i in sorted(order[held_out:])], [every[i] for i in sorted(order[:held_out])]
    files = sorted(path for path in source.rglob("*") if path.suffix in _SUFFIXES) if source.is_dir() else []
    train = [path for path in files if "train" in path.name]
    val = [path for path in files if "train" not in path.name and ("test" in path.name or "val" in path.name)]
    if not train or not val:
        listed = ", ".join(path.name for path in files[:8])
        raise DataError(
            _WHERE,
            got=f"--source {source} with {listed or 'no such files'}",
            expected="a file, or a folder with a train and a test file in parquet, json or jsonl",
            fix="Name a file with --source to have a part of it held out.",
        )
    return _read(train), _read(val)


def _read(files: list[Path]) -> list[Problem]:
    found = []
    for file in files:
        table = read_table(file)
        for column in ("question", "answer"):
            if column not in table.columns:
                raise DataError(
                    str(file),
                    got=f"the columns {', '.join(table.columns)}",
                    expected=f"a column {column!r}",
                    fix="Name files with the columns question and answer.",
                )
        found += _parse((table[row] for row in range(len(table))), str(file))
    return found


def _from_hub() -> tuple[list[Problem], list[Problem]]:
    # Only this function needs the hub, and importing its library takes longer than the rest of the command.
    import datasets

    try:
        loaded = datasets.load_dataset(DATA_SOURCE, "main")
    except Exception as error:
        # Requests, sockets and caches fail in many ways; the way out is the same.
        raise DataError(
            _WHERE,
            got=f"{DATA_SOURCE} could not be loaded from the hub ({type(error).__name__}: {error})",
            expected="the hub within reach, or local files",
            fix="Download the data where there is a network and name its file or folder with --source.",
        ) from error
    return _parse(loaded["train"], "train"), _parse(loaded["test"], "test")


def _parse(rows: Iterable[Mapping[str, Any]], where: str) -> list[Problem]:
    return [_problem(row, f"{where} row {number}") for number, row in enumerate(rows)]


def _problem(row: Mapping[str, Any], where: str) -> Problem:
    question, answer = row["question"], row["answer"]
    match = _FINAL_ANSWER.search(answer) if isinstance(answer, str) else None
    if match is None or not isinstance(question, str):
        raise DataError(where, got=f"the answer {str(answer)[-60:]!r}", expected="text that ends in `#### NUMBER`")
    truth = match.group(1).replace(",", "")
    return Problem(f"{question}\n\n{INSTRUCTION}", truth, {"question": question, "answer": answer})


def _draw(found: list[Problem], count: int | None, seed: int) -> list[Problem]:
    if count is None or count >= len(found):
        return found
    return [found[i] for i in sorted(Random(seed).sample(range(len(found)), count))]
