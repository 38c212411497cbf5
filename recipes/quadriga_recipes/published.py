# SPDX-License-Identifier: Apache-2.0
"""Published data sets, from local files or from the Hugging Face hub: `SOURCES` has where each is, its columns, which
of its splits is held out, and how a row of ours is made.

A folder is searched for files with `train` and with the name of the held-out split at the beginning of a word of their
paths; of a single file, a part is held out.
"""

import gzip
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from quadriga.data.files import TABLE_SUFFIXES, read_table
from quadriga.errors import DataError
from quadriga.rewards.graders.reading import last_box
from quadriga_recipes.rows import Pair, Problem, Row

BY_FOUR_HASHES = (
    'Reason step by step. Put the final answer on a last line of its own, after "####".'
)
IN_A_BOX = "Reason step by step. Put the final answer in \\boxed{}."
THINK_FIRST = "First think, between <think> and </think>. Then put the final answer in \\boxed{}."
BY_LETTER = "How does it go on? Answer with the letter alone."
MAY_CHECK = "Before you give an answer you may ask the tool check_answer whether it is right."
_FINAL_ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")
_MARK = re.compile(r"\[[a-z_]+\]\s*")
_TURN = re.compile(r"\n\n(Human|Assistant):")


@dataclass(frozen=True)
class Source:
    """A published data set.

    Attributes:
        hub: its name on the hub, and of the configuration there; None where it has one alone.
        columns: those that `make` reads.
        make: a row of ours, from a row, its place in words, and the folder of its file. None: it is of no use.
        useless: what rows of no use are.
        data_source: chooses the grader.
        ability: a word for what it asks.
        held_out: names of the split that is kept for validation; the first that there is.
    """

    hub: tuple[str, str | None]
    columns: tuple[str, ...]
    make: Callable[[Mapping[str, Any], str, Path], Row | None]
    data_source: str
    ability: str
    useless: str = ""
    held_out: tuple[str, ...] = ("test", "val")


def published_rows(
    name: str, *, num_train: int | None, num_val: int | None, seed: int, source: str | None
) -> tuple[list[Row], list[Row]]:
    """Training and validation rows.

    Args:
        name: a key of `SOURCES`.
        num_train: training rows, drawn with `seed`; None takes all.
        num_val: validation rows, likewise; of a single file None holds out a tenth.
        seed: of the choice of rows.
        source: a file or a folder; None loads from the hub.

    Raises:
        DataError: the data cannot be read, or are not those of this name.
    """
    of = SOURCES[name]
    if source is None:
        train, val = _from_hub(name, of)
    else:
        train, val = _from_files(name, of, Path(source).expanduser(), num_val, seed)
    return _draw(train, num_train, seed), _draw(val, num_val, seed)


def _from_files(
    name: str, of: Source, source: Path, num_val: int | None, seed: int
) -> tuple[list[Row], list[Row]]:
    if source.is_file():
        every = _read([source], of)
        held_out = max(1, len(every) // 10) if num_val is None else min(num_val, len(every))
        order = Random(seed).sample(range(len(every)), len(every))
        return [every[i] for i in sorted(order[held_out:])], [
            every[i] for i in sorted(order[:held_out])
        ]
    files = sorted(
        path
        for path in source.rglob("*")
        if Path(path.name.removesuffix(".gz")).suffix in TABLE_SUFFIXES
    )
    split = {
        word: [
            path
            for path in files
            if re.search(f"(?<![a-z]){word}", path.relative_to(source).as_posix().lower())
        ]
        for word in ("train", *of.held_out)
    }
    train, *others = split.values()
    val = next(
        filter(None, ([path for path in found if path not in train] for found in others)), []
    )
    if not train or not val:
        listed = ", ".join(path.name for path in files[:8])
        raise DataError(
            f"prepare data {name}",
            got=f"--source {source} with {listed or 'no such files'}",
            expected=f"a file, or a folder with a train and a {of.held_out[0]} file in parquet, json or jsonl",
            fix="Name a file with --source to have a part of it held out.",
        )
    return _read(train, of), _read(val, of)


def _read(files: list[Path], of: Source) -> list[Row]:
    found: list[Row] = []
    for file in files:
        with TemporaryDirectory() as folder:
            plain = file
            if file.suffix == ".gz":
                plain = Path(folder) / file.stem
                try:
                    with gzip.open(file) as packed, plain.open("wb") as target:
                        shutil.copyfileobj(packed, target)
                except (OSError, EOFError) as error:
                    raise DataError(
                        str(file), got=f"no whole gzip file ({error})", expected="one"
                    ) from error
            table = read_table(plain)
            for column in of.columns:
                if column not in table.columns:
                    raise DataError(
                        str(file),
                        got=f"the columns {', '.join(table.columns)}",
                        expected=f"a column {column!r}",
                        fix=f"Name files with the columns {', '.join(of.columns)}.",
                    )
            found += _converted(
                chain.from_iterable(table.batches(of.columns, 256)), of, str(file), file.parent
            )
    return found


def _from_hub(name: str, of: Source) -> tuple[list[Row], list[Row]]:
    # Only this function needs the hub, and importing its library takes longer than the rest of the command.
    import datasets

    repository, configuration = of.hub
    try:
        loaded = datasets.load_dataset(repository, configuration)
    except Exception as error:
        # Requests, sockets and caches fail in many ways; the way out is the same.
        raise DataError(
            f"prepare data {name}",
            got=f"{repository} could not be loaded from the hub ({type(error).__name__}: {error})",
            expected="the hub within reach, or local files",
            fix="Download the data where there is a network and name its file or folder with --source.",
        ) from error
    held_out = next(split for word in of.held_out for split in loaded if split.startswith(word))
    train, val = (
        # As they are stored: images are bytes then.
        _converted(
            chain.from_iterable(batch.to_pylist() for batch in loaded[split].data.to_batches()),
            of,
            split,
            Path(),
        )
        for split in ("train", held_out)
    )
    return train, val


def _converted(
    rows: Iterable[Mapping[str, Any]], of: Source, where: str, folder: Path
) -> list[Row]:
    every = [of.make(row, f"{where} row {number}", folder) for number, row in enumerate(rows)]
    useful = [row for row in every if row is not None]
    if num_useless := len(every) - len(useful):
        print(
            f"{where}: {num_useless} of {len(every)} rows are left out: {of.useless}.", flush=True
        )
    return useful


def _draw(found: list[Row], count: int | None, seed: int) -> list[Row]:
    if count is None or count >= len(found):
        return found
    return [found[i] for i in sorted(Random(seed).sample(range(len(found)), count))]


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    if not isinstance(value := row[column], str) or not value.strip():
        raise DataError(f"{where}, column {column!r}", got=str(value)[-60:], expected="text")
    return value


def _gsm8k(row: Mapping[str, Any], where: str, folder: Path) -> Problem:
    question, answer = _text(row, "question", where), _text(row, "answer", where)
    match = _FINAL_ANSWER.search(answer)
    if match is None:
        raise DataError(
            where, got=f"the answer {answer[-60:]!r}", expected="text that ends in `#### NUMBER`"
        )
    extra = {"question": question, "answer": answer}
    return Problem(f"{question}\n\n{BY_FOUR_HASHES}", match.group(1).replace(",", ""), extra)


def _gsm8k_tools(row: Mapping[str, Any], where: str, folder: Path) -> Problem:
    plain = _gsm8k(row, where, folder)
    tools = {"check_answer": {"create_kwargs": {"ground_truth": plain.ground_truth}}}
    extra = {**plain.extra, "tools_kwargs": tools}
    return Problem(plain.text, plain.ground_truth, extra, system=MAY_CHECK, agent_name="tool_agent")


def _math(row: Mapping[str, Any], where: str, folder: Path) -> Problem | None:
    problem, solution = _text(row, "problem", where), _text(row, "solution", where)
    if not (truth := last_box(solution)):
        return None
    return Problem(f"{problem}\n\n{IN_A_BOX}", truth, {"question": problem, "answer": solution})


def _geometry3k(row: Mapping[str, Any], where: str, folder: Path) -> Problem:
    problem, answer = _text(row, "problem", where), _text(row, "answer", where)
    images = tuple(
        _bytes_of(image, f"{where}, column 'images'", folder) for image in row["images"] or ()
    )
    if (num_tags := problem.count("<image>")) != len(images):
        raise DataError(
            where, got=f"{num_tags} times <image> and {len(images)} images", expected="one for each"
        )
    return Problem(
        f"{problem}\n\n{THINK_FIRST}",
        answer,
        {"question": problem, "answer": answer},
        images=images,
    )


def _bytes_of(image: Any, where: str, folder: Path) -> bytes:
    """The file of an image that is given as {"bytes", "path"}, or as a path below the folder of the data file."""
    given = image if isinstance(image, Mapping) else {"path": image}
    if given.get("bytes") is not None:
        return given["bytes"]
    path = Path(str(given.get("path") or ""))
    if path.is_absolute() or ".." in path.parts or not (folder / path).is_file():
        raise DataError(
            where, got=repr(str(path)), expected=f"the bytes of an image, or a file below {folder}"
        )
    return (folder / path).read_bytes()


def _hellaswag(row: Mapping[str, Any], where: str, folder: Path) -> Problem | None:
    context, endings, label = _text(row, "ctx", where), row["endings"], str(row["label"]).strip()
    if not label:
        return None
    if (
        not isinstance(endings, list)
        or not label.isdecimal()
        or not int(label) < len(endings) <= 26
    ):
        raise DataError(
            where,
            got=f"the label {label!r} of {endings!r}"[:200],
            expected="the number of an ending",
        )
    letters = [chr(ord("A") + number) for number in range(len(endings))]
    # Marks such as [title] are left over from the pages that the texts were taken from.
    texts = [
        _MARK.sub("", str(text)).strip()
        for text in (f"{row['activity_label']}: {context}", *endings)
    ]
    options = "\n".join(
        f"{letter}. {text}" for letter, text in zip(letters, texts[1:], strict=True)
    )
    return Problem(
        f"{texts[0]}\n\n{options}\n\n{BY_LETTER}",
        letters[int(label)],
        {"answer": texts[1 + int(label)]},
    )


def _hh_rlhf(row: Mapping[str, Any], where: str, folder: Path) -> Pair | None:
    chats = []
    for column in ("chosen", "rejected"):
        start, *parts = _TURN.split(_text(row, column, where))
        roles = ["user" if name == "Human" else "assistant" for name in parts[::2]]
        contents = [text.strip() for text in parts[1::2]]
        if start.strip() or not roles:
            raise DataError(
                f"{where}, column {column!r}",
                got=repr(str(row[column])[:60]),
                expected="\\n\\nHuman: ...",
            )
        if not all(contents) or roles != ["user", "assistant"] * (len(roles) // 2):
            return None
        chats.append(
            [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
        )
    (*prompt, chosen), (*other, rejected) = chats
    is_pair = prompt == other and chosen != rejected
    return Pair(prompt, chosen["content"], rejected["content"]) if is_pair else None


_GSM8K = ("openai/gsm8k", "main"), ("question", "answer")
SOURCES: dict[str, Source] = {
    "gsm8k": Source(*_GSM8K, _gsm8k, "openai/gsm8k", "math"),
    "gsm8k_tools": Source(*_GSM8K, _gsm8k_tools, "openai/gsm8k", "math"),
    "math": Source(
        ("DigitalLearningGmbH/MATH-lighteval", None),
        ("problem", "solution"),
        _math,
        "DigitalLearningGmbH/MATH-lighteval",
        "math",
        "no \\boxed{} in the solution",
    ),
    "geometry3k": Source(
        ("hiyouga/geometry3k", None),
        ("images", "problem", "answer"),
        _geometry3k,
        "hiyouga/geometry3k",
        "geometry",
    ),
    "hellaswag": Source(
        ("Rowan/hellaswag", None),
        ("activity_label", "ctx", "endings", "label"),
        _hellaswag,
        "exact_match/hellaswag",
        "commonsense",
        "they have no label",
        held_out=("val",),
    ),
    "hh_rlhf": Source(
        ("Anthropic/hh-rlhf", None),
        ("chosen", "rejected"),
        _hh_rlhf,
        "Anthropic/hh-rlhf",
        "preference",
        "no two different responses to one prompt, in turns that take turns and are not empty",
    ),
}
