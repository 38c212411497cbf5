# SPDX-License-Identifier: Apache-2.0
"""Published data sets, from local files or from the Hugging Face hub.

`SOURCES` describes them. In a local folder, the files of a split are those whose path has a word that
begins with the name of the split ("train", "test", ...). Of a single file, a part is held out for
validation.
"""

import gzip
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from quadriga.data.files import TABLE_SUFFIXES, read_table
from quadriga.errors import DataError
from quadriga.rewards.graders.reading import last_box
from quadriga_recipes.rows import ChatPair, Problem, Row

BY_FOUR_HASHES = (
    'Reason step by step. Put the final answer on a last line of its own, after "####".'
)
IN_A_BOX = "Reason step by step. Put the final answer in \\boxed{}."
THINK_FIRST = "First think, between <think> and </think>. Then put the final answer in \\boxed{}."
BY_LETTER = "How does it go on? Answer with the letter alone."
MAY_CHECK = "Before you give an answer you may ask the tool check_answer whether it is right."
_FINAL_ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")  # of GSM8K
_MARK = re.compile(r"\[[a-z_]+\]\s*")  # such as "[title] ", in HellaSwag
_TURN = re.compile(r"\n\n(Human|Assistant):")  # begin of a turn, in HH-RLHF
Splits: TypeAlias = tuple[list[Row], list[Row]]
"""Training and validation rows."""
SourceRow: TypeAlias = Mapping[str, Any]
"""A row of a published data set, before its conversion."""


@dataclass(frozen=True)
class Source:
    """A published data set.

    Attributes:
        hub: name on the hub, and name of the configuration there; None if there is only one.
        columns: columns that `make` reads.
        make: converts a row, or returns None for one to leave out. Arguments: the row of the data set,
            a description of it for errors, and the folder of the file.
        data_source: data source of the rows, which selects the grader.
        ability: kind of the task, in a word.
        left_out_reason: why `make` leaves rows out, for a message.
        validation_splits: possible names of the split for validation, or the begin of its name. The
            first that exists is used.
    """

    hub: tuple[str, str | None]
    columns: tuple[str, ...]
    make: Callable[[SourceRow, str, Path], Row | None]
    data_source: str
    ability: str
    left_out_reason: str = ""
    validation_splits: tuple[str, ...] = ("test", "val")


def published_rows(
    name: str, *, num_train: int | None, num_val: int | None, seed: int, source: str | None
) -> Splits:
    """Read training and validation rows of a published data set.

    Args:
        name: a key of `SOURCES`.
        num_train: number of training rows; all if there are fewer, or for None.
        num_val: number of validation rows; all if there are fewer, or for None. Of a single file, None
            means a tenth of its rows.
        seed: seed by which rows are chosen.
        source: a file or folder; None: the hub.

    Returns:
        The training and the validation rows.

    Raises:
        DataError: the data cannot be read, or are not this data set.
    """
    if source is None:
        train, val = _from_hub(name)
    else:
        train, val = _from_files(name, Path(source).expanduser(), num_val, seed)
    return _draw_rows(train, num_train, seed), _draw_rows(val, num_val, seed)


def _from_files(name: str, path: Path, num_val: int | None, seed: int) -> Splits:
    """Read the training and validation rows of a local file or folder.

    Args:
        name: a key of `SOURCES`.
        path: the file or folder.
        num_val: number of rows of a single file to hold out for validation. None: a tenth.
        seed: seed by which these are chosen.

    Raises:
        DataError: a split has no file, or a file cannot be read.
    """
    source = SOURCES[name]
    if path.is_file():
        rows = _read_files([path], source)
        # A single file has no splits: hold out a part of its rows.
        num_held_out = max(1, len(rows) // 10) if num_val is None else min(num_val, len(rows))
        shuffled = Random(seed).sample(range(len(rows)), len(rows))
        # The rows of both parts stay in the order of the file.
        train = [rows[number] for number in sorted(shuffled[num_held_out:])]
        val = [rows[number] for number in sorted(shuffled[:num_held_out])]
        return train, val

    files = []
    for file in sorted(path.rglob("*")):
        if Path(file.name.removesuffix(".gz")).suffix in TABLE_SUFFIXES:
            files.append(file)

    def files_of(split: str) -> list[Path]:
        # Files or folders are named after the split. A word that only contains the name, such as
        # "retrain", does not count.
        pattern = re.compile(f"(?<![a-z]){split}")
        return [file for file in files if pattern.search(file.relative_to(path).as_posix().lower())]

    train_files = files_of("train")
    val_files = []
    for split in source.validation_splits:
        val_files = val_files or [file for file in files_of(split) if file not in train_files]
    if not train_files or not val_files:
        listed = ", ".join(file.name for file in files[:8])
        raise DataError(
            f"prepare data {name}",
            got=f"--source {path} with {listed or 'no such files'}",
            expected=f"a file, or a folder with a train and a {source.validation_splits[0]} file"
            " in parquet, json or jsonl",
            fix="Name a file with --source to have a part of it held out.",
        )
    return _read_files(train_files, source), _read_files(val_files, source)


def _read_files(files: list[Path], source: Source) -> list[Row]:
    """Read and convert files of a data set.

    Raises:
        DataError: a file cannot be read, lacks a column, or has a row that `source.make` refuses.
    """
    rows = []
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
                        str(file), got=f"{error}", expected="a complete gzip file"
                    ) from error
            table = read_table(plain)
            for column in source.columns:
                if column not in table.columns:
                    raise DataError(
                        str(file),
                        got=f"the columns {', '.join(table.columns)}",
                        expected=f"a column {column!r}",
                        fix=f"Name files with the columns {', '.join(source.columns)}.",
                    )
            # Rows are read in batches, because as Python objects they need much more memory.
            table_rows = chain.from_iterable(table.batches(source.columns, 256))
            rows += _convert_rows(table_rows, source, str(file), file.parent)
    return rows


def _from_hub(name: str) -> Splits:
    """Read the training and validation rows of a data set from the hub, or from its local cache.

    Raises:
        DataError: the data set cannot be loaded, or has a row that `Source.make` refuses.
    """
    # The import takes longer than the rest of the command, and only this function needs it.
    import datasets

    source = SOURCES[name]
    repository, configuration = source.hub
    try:
        loaded = datasets.load_dataset(repository, configuration)
    except Exception as error:
        # Requests, sockets and caches fail in many ways. The advice is the same for all.
        raise DataError(
            f"prepare data {name}",
            got=f"{repository} could not be loaded from the hub ({type(error).__name__}: {error})",
            expected="the hub within reach, or local files",
            fix="Download the data where there is a network"
            " and name its file or folder with --source.",
        ) from error

    def read(split: str) -> list[Row]:
        # The library would decode images. In its Arrow batches they are still bytes.
        batches = loaded[split].data.to_batches()
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        return _convert_rows(rows, source, split, Path())

    val_splits = []
    for name_start in source.validation_splits:
        val_splits += [split for split in loaded if split.startswith(name_start)]
    return read("train"), read(val_splits[0])


def _convert_rows(rows: Iterable[SourceRow], source: Source, where: str, folder: Path) -> list[Row]:
    """Convert the rows of a data set, and print how many of them are left out.

    Args:
        rows: the rows.
        source: the data set.
        where: name of the file or split, for messages.
        folder: folder of the file.
    """
    converted = []
    num_rows = 0
    for row in rows:
        new_row = source.make(row, f"{where} row {num_rows}", folder)
        num_rows += 1
        if new_row is not None:
            converted.append(new_row)
    num_left_out = num_rows - len(converted)
    if num_left_out:
        print(
            f"{where}: {num_left_out} of {num_rows} rows are left out: {source.left_out_reason}.",
            flush=True,
        )
    return converted


def _draw_rows(rows: list[Row], count: int | None, seed: int) -> list[Row]:
    """Draw `count` rows at random, and return them in their order. None: return all rows."""
    if count is None or count >= len(rows):
        return rows
    numbers = Random(seed).sample(range(len(rows)), count)
    return [rows[number] for number in sorted(numbers)]


def _require_text(row: SourceRow, column: str, where: str) -> str:
    """Return the text of a column.

    Raises:
        DataError: the value is no text, or is blank.
    """
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}, column {column!r}", got=str(value)[-60:], expected="text")
    return value


def _convert_gsm8k(row: SourceRow, where: str, folder: Path) -> Problem:
    """Convert a row of GSM8K, whose column `answer` has a solution that ends in `#### NUMBER`."""
    question = _require_text(row, "question", where)
    answer = _require_text(row, "answer", where)
    match = _FINAL_ANSWER.search(answer)
    if match is None:
        raise DataError(
            where, got=f"the answer {answer[-60:]!r}", expected="text that ends in `#### NUMBER`"
        )
    extra = {"question": question, "answer": answer}
    return Problem(f"{question}\n\n{BY_FOUR_HASHES}", match.group(1).replace(",", ""), extra)


def _convert_gsm8k_tools(row: SourceRow, where: str, folder: Path) -> Problem:
    """Convert a row of GSM8K for a model that may check its answer with a tool."""
    plain = _convert_gsm8k(row, where, folder)
    tools = {"check_answer": {"create_kwargs": {"ground_truth": plain.ground_truth}}}
    extra = {**plain.extra, "tools_kwargs": tools}
    return Problem(plain.text, plain.ground_truth, extra, system=MAY_CHECK, agent_name="tool_agent")


def _convert_math(row: SourceRow, where: str, folder: Path) -> Problem | None:
    """Convert a row of MATH. None: the solution has no boxed answer."""
    problem = _require_text(row, "problem", where)
    solution = _require_text(row, "solution", where)
    truth = last_box(solution)
    if not truth:
        return None
    return Problem(f"{problem}\n\n{IN_A_BOX}", truth, {"question": problem, "answer": solution})


def _convert_geometry3k(row: SourceRow, where: str, folder: Path) -> Problem:
    """Convert a row of Geometry3K, whose problem has a tag `<image>` for each image."""
    problem = _require_text(row, "problem", where)
    answer = _require_text(row, "answer", where)
    place = f"{where}, column 'images'"
    images = [_read_image(image, place, folder) for image in row["images"] or ()]
    num_tags = problem.count("<image>")
    if num_tags != len(images):
        raise DataError(
            where, got=f"{num_tags} times <image> and {len(images)} images", expected="one for each"
        )
    return Problem(
        f"{problem}\n\n{THINK_FIRST}",
        answer,
        {"question": problem, "answer": answer},
        images=tuple(images),
    )


def _read_image(image: Any, where: str, folder: Path) -> bytes:
    """Return the content of an image file.

    Args:
        image: a mapping with "bytes" or "path", or a path. Paths are relative to `folder`.
        where: description of the image for errors.
        folder: folder of the data file.

    Raises:
        DataError: there is no such file below the folder.
    """
    if not isinstance(image, Mapping):
        image = {"path": image}
    if image.get("bytes") is not None:
        return image["bytes"]
    path = Path(str(image.get("path") or ""))
    if path.is_absolute() or ".." in path.parts or not (folder / path).is_file():
        raise DataError(
            where, got=repr(str(path)), expected=f"the bytes of an image, or a file below {folder}"
        )
    return (folder / path).read_bytes()


def _convert_hellaswag(row: SourceRow, where: str, folder: Path) -> Problem | None:
    """Convert a row of HellaSwag to a question with lettered options. None: it has no label."""
    context = _require_text(row, "ctx", where)
    endings = row["endings"]
    label = str(row["label"]).strip()
    if not label:
        return None
    # The label is the number of the right ending, counted from 0. There are letters for 26 endings.
    has_ending = isinstance(endings, list) and label.isdecimal()
    if not has_ending or not int(label) < len(endings) <= 26:
        raise DataError(
            where,
            got=f"the label {label!r} of {endings!r}"[:200],
            expected="the number of an ending",
        )
    letters = [chr(ord("A") + number) for number in range(len(endings))]
    # Texts that were taken from web pages contain marks such as [title].
    beginning = _MARK.sub("", f"{row['activity_label']}: {context}").strip()
    endings = [_MARK.sub("", str(ending)).strip() for ending in endings]
    options = [f"{letter}. {ending}" for letter, ending in zip(letters, endings, strict=True)]
    lines = "\n".join(options)
    return Problem(
        f"{beginning}\n\n{lines}\n\n{BY_LETTER}",
        letters[int(label)],
        {"answer": endings[int(label)]},
    )


def _convert_hh_rlhf(row: SourceRow, where: str, folder: Path) -> ChatPair | None:
    """Convert a row of HH-RLHF: two chats in plain text that differ in the last turn.

    None: the chats differ elsewhere or nowhere, or their turns are empty or do not alternate.
    """
    chats = []
    for column in ("chosen", "rejected"):
        # `split` also returns the group of the pattern: the text before the first turn, then the name of
        # a speaker and a text for each turn.
        text_before, *names_and_texts = _TURN.split(_require_text(row, column, where))
        speakers = names_and_texts[::2]
        roles = ["user" if speaker == "Human" else "assistant" for speaker in speakers]
        contents = [text.strip() for text in names_and_texts[1::2]]
        if text_before.strip() or not roles:
            raise DataError(
                f"{where}, column {column!r}",
                got=repr(str(row[column])[:60]),
                expected="\\n\\nHuman: ...",
            )
        if not all(contents) or roles != ["user", "assistant"] * (len(roles) // 2):
            return None
        turns = zip(roles, contents, strict=True)
        chats.append([{"role": role, "content": content} for role, content in turns])
    # The last message of each chat is the response. Those before it are the prompt.
    (*prompt, chosen), (*other_prompt, rejected) = chats
    if prompt != other_prompt or chosen == rejected:
        return None
    return ChatPair(prompt, chosen["content"], rejected["content"])


_GSM8K = Source(
    hub=("openai/gsm8k", "main"),
    columns=("question", "answer"),
    make=_convert_gsm8k,
    data_source="openai/gsm8k",
    ability="math",
)
SOURCES: dict[str, Source] = {
    "gsm8k": _GSM8K,
    "gsm8k_tools": replace(_GSM8K, make=_convert_gsm8k_tools),
    "math": Source(
        hub=("DigitalLearningGmbH/MATH-lighteval", None),
        columns=("problem", "solution"),
        make=_convert_math,
        data_source="DigitalLearningGmbH/MATH-lighteval",
        ability="math",
        left_out_reason="no \\boxed{} in the solution",
    ),
    "geometry3k": Source(
        hub=("hiyouga/geometry3k", None),
        columns=("images", "problem", "answer"),
        make=_convert_geometry3k,
        data_source="hiyouga/geometry3k",
        ability="geometry",
    ),
    "hellaswag": Source(
        hub=("Rowan/hellaswag", None),
        columns=("activity_label", "ctx", "endings", "label"),
        make=_convert_hellaswag,
        data_source="exact_match/hellaswag",
        ability="commonsense",
        left_out_reason="they have no label",
        validation_splits=("val",),
    ),
    "hh_rlhf": Source(
        hub=("Anthropic/hh-rlhf", None),
        columns=("chosen", "rejected"),
        make=_convert_hh_rlhf,
        data_source="Anthropic/hh-rlhf",
        ability="preference",
        left_out_reason="the two chats do not differ in the last response alone, or have turns that are"
        " empty or do not alternate",
    ),
}
