# SPDX-License-Identifier: Apache-2.0
"""Any task of reasoning-gym, a library of generators of problems that its own scorers can grade.

A row carries in `extra_info` what the scorer wants: the question, and the metadata of the entry as JSON text (entries
of one task may differ in the shape of their metadata, which columns of a parquet file may not). What JSON does not
know, such as a fraction, stands as its text. Tuples stand as lists; where the scorer minds that, each stands as
{"__tuple__": [...]}.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from quadriga.errors import DataError
from quadriga.observe.watchdog import waiting
from quadriga_recipes.rows import Problem

PREFIX = "reasoning_gym:"
ABILITY = "reasoning"
INSTRUCTION = "Give your final answer between <answer> and </answer>."
DEFAULT_NUM_TRAIN, DEFAULT_NUM_VAL = 2000, 200
# The same questions are held out whatever the seed, so that runs can be compared.
_VALIDATION_SEED = 1_000_003
# Tasks with few different problems repeat themselves; after so many draws per row asked for, no new one is expected.
_DRAWS_PER_ROW = 4


def problems(
    task: str, *, num_train: int, num_val: int, seed: int
) -> tuple[list[Problem], list[Problem]]:
    """Training and validation problems of a task; no question of the validation set is in the training set.

    Args:
        task: the library's name of the task, such as "gsm_symbolic".
        num_train: training problems, generated with `seed`; they may repeat.
        num_val: different validation problems, which do not depend on `seed`.
        seed: of the training problems.

    Raises:
        DataError: the library is missing, knows no such task, or has too few different problems.
    """
    where = f"prepare data {PREFIX}{task}"
    library = _library()
    _check_task(task, library, where)
    val: dict[str, Problem] = {}
    train: list[Problem] = []
    # Some puzzles take the library a second each.
    with waiting(
        where,
        lambda: f"{len(val)} of {num_val} validation and {len(train)} of {num_train} training rows",
    ):
        for problem in _generate(library, task, _DRAWS_PER_ROW * num_val, _VALIDATION_SEED, where):
            if len(val) == num_val:
                break
            val.setdefault(problem.text, problem)
        for problem in _generate(library, task, _DRAWS_PER_ROW * num_train, seed, where):
            if len(train) == num_train:
                break
            if problem.text not in val:
                train.append(problem)
    for option, asked, got in (
        ("--num-val", num_val, len(val)),
        ("--num-train", num_train, len(train)),
    ):
        if got < asked:
            raise DataError(
                where,
                got=f"{got} rows for {option} {asked}",
                expected="enough different questions, none of them both for training and for validation",
                fix=f"This task has few different ones: lower {option}.",
            )
    return train, list(val.values())


def encode_metadata(entry: Mapping[str, Any], score: Any) -> str:
    """The metadata of an entry as JSON text from which the library's scorer judges as from the metadata itself.

    Args:
        entry: question, answer and metadata, as the library made them.
        score: the library's scorer, called with `answer` and `entry`.
    """
    plain = json.dumps(entry["metadata"], default=str)
    answer = entry["answer"]
    copy = {**entry, "metadata": json.loads(plain)}
    if answer is None or score(answer=answer, entry=copy) == score(answer=answer, entry=entry):
        return plain
    return json.dumps(_tag_tuples(entry["metadata"]), default=str)


def _tag_tuples(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"__tuple__": [_tag_tuples(part) for part in value]}
    if isinstance(value, list):
        return [_tag_tuples(part) for part in value]
    if isinstance(value, dict):
        return {key: _tag_tuples(part) for key, part in value.items()}
    return value


def _library() -> Any:
    # An extra, and one that takes a second to import.
    try:
        import reasoning_gym
        import reasoning_gym.factory
    except ImportError as error:
        raise DataError(
            "prepare data",
            got="no package reasoning-gym",
            expected="it",
            fix="pip install reasoning-gym.",
        ) from error
    return reasoning_gym


def _check_task(task: str, library: Any, where: str) -> None:
    known = sorted(set(library.factory.DATASETS) - {"composite"})
    if task not in known:
        near = difflib.get_close_matches(task, known, n=3)
        raise DataError(
            where,
            got="no such task of reasoning-gym",
            expected=f"one of its {len(known)} tasks",
            fix=f"Did you mean {' or '.join(near)}?" if near else f"There are {', '.join(known)}.",
        )


def _generate(library: Any, task: str, size: int, seed: int, where: str) -> Iterator[Problem]:
    entries = library.create_dataset(task, size=size, seed=seed)
    score = library.get_score_answer_fn(task)
    for number in range(size):
        entry = entries[number]
        try:
            metadata = encode_metadata(entry, score)
        except TypeError as error:
            raise DataError(
                where, got=f"metadata that JSON cannot hold ({error})", expected="plain values"
            ) from error
        extra = {"task": task, "question": entry["question"], "metadata": metadata}
        yield Problem(f"{entry['question']}\n\n{INSTRUCTION}", entry["answer"], extra)
