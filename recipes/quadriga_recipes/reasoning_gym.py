# SPDX-License-Identifier: Apache-2.0
"""Tasks of reasoning-gym, a library that generates problems and scores responses.

`extra_info` of a row has what the scorer needs: the question, and the metadata of the entry. The
metadata are JSON text, because they may differ in shape from row to row, which columns of a parquet
file may not. Values that JSON cannot represent, such as fractions, are written as text. Tuples are
written as lists, or as {"__tuple__": [...]} if the scorer needs tuples.
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
DEFAULT_NUM_TRAIN = 2000
DEFAULT_NUM_VAL = 200
# The validation problems do not depend on the seed, so that runs can be compared.
_VALIDATION_SEED = 1_000_003
# Problems that are generated per row, at most. A task with few different problems repeats them, and
# repeated ones are not used for validation.
_DRAWS_PER_ROW = 4


def generate_problems(
    task: str, *, num_train: int, num_val: int, seed: int
) -> tuple[list[Problem], list[Problem]]:
    """Generate training and validation problems of a task. They have no question in common.

    Args:
        task: the library's name of the task, such as "gsm_symbolic".
        num_train: number of training problems, which may repeat.
        num_val: number of different validation problems, which do not depend on `seed`.
        seed: seed of the training problems.

    Returns:
        The training and the validation problems.

    Raises:
        DataError: the library is missing, has no such task, or has too few different problems.
    """
    where = f"prepare data {PREFIX}{task}"
    # Not at the top of the file: the import takes a second.
    try:
        import reasoning_gym as library
        import reasoning_gym.factory
    except ImportError as error:
        raise DataError(
            "prepare data",
            got="no package reasoning-gym",
            expected="the package",
            fix="pip install reasoning-gym.",
        ) from error
    # The data set "composite" mixes other tasks, and needs a configuration of them.
    known = sorted(set(library.factory.DATASETS) - {"composite"})
    if task not in known:
        near = difflib.get_close_matches(task, known, n=3)
        raise DataError(
            where,
            got="no such task of reasoning-gym",
            expected=f"one of its {len(known)} tasks",
            fix=f"Did you mean {' or '.join(near)}?" if near else f"There are {', '.join(known)}.",
        )
    val = {}
    train = []

    def progress() -> str:
        return f"{len(val)} of {num_val} validation and {len(train)} of {num_train} training rows"

    # Some puzzles take the library a second each.
    with waiting(where, progress):
        for problem in _generate(library, task, _DRAWS_PER_ROW * num_val, _VALIDATION_SEED, where):
            if len(val) == num_val:
                break
            val.setdefault(problem.text, problem)
        for problem in _generate(library, task, _DRAWS_PER_ROW * num_train, seed, where):
            if len(train) == num_train:
                break
            if problem.text not in val:
                train.append(problem)
    _require_enough(where, "--num-val", num_val, len(val))
    _require_enough(where, "--num-train", num_train, len(train))
    return train, list(val.values())


def _require_enough(where: str, option: str, num_rows: int, num_generated: int) -> None:
    """Raise a DataError if fewer rows were generated than an option asks for.

    Args:
        where: the command, for the error.
        option: "--num-train" or "--num-val".
        num_rows: value of the option.
        num_generated: number of rows that were generated.
    """
    if num_generated < num_rows:
        raise DataError(
            where,
            got=f"{num_generated} rows for {option} {num_rows}",
            expected="enough different questions,"
            " none of them both for training and for validation",
            fix=f"Lower {option}: this task has few different questions.",
        )


def encode_metadata(entry: Mapping[str, Any], score: Any) -> str:
    """Encode the metadata of an entry as JSON with which the scorer still gives the same score.

    Args:
        entry: question, answer and metadata, as the library generated them.
        score: the library's scorer, called with `answer` and `entry`.

    Returns:
        JSON text. Tuples are written as {"__tuple__": [...]} if the entry's own answer gets another
        score with lists in place of them.
    """
    plain = json.dumps(entry["metadata"], default=str)
    answer = entry["answer"]
    decoded_entry = {**entry, "metadata": json.loads(plain)}
    # Without an answer there is no score to compare.
    if answer is None:
        return plain
    if score(answer=answer, entry=decoded_entry) == score(answer=answer, entry=entry):
        return plain
    return json.dumps(_tag_tuples(entry["metadata"]), default=str)


def _tag_tuples(value: Any) -> Any:
    """Replace tuples by {"__tuple__": [...]}, at any depth."""
    if isinstance(value, tuple):
        return {"__tuple__": [_tag_tuples(part) for part in value]}
    if isinstance(value, list):
        return [_tag_tuples(part) for part in value]
    if isinstance(value, dict):
        return {key: _tag_tuples(part) for key, part in value.items()}
    return value


def _generate(library: Any, task: str, size: int, seed: int, where: str) -> Iterator[Problem]:
    """Yield up to `size` problems of a task, each generated when it is needed.

    Raises:
        DataError: the metadata of a problem cannot be written as JSON.
    """
    entries = library.create_dataset(task, size=size, seed=seed)
    score = library.get_score_answer_fn(task)
    for number in range(size):
        entry = entries[number]
        try:
            metadata = encode_metadata(entry, score)
        except TypeError as error:
            raise DataError(
                where,
                got=f"metadata that JSON cannot represent ({error})",
                expected="plain values",
            ) from error
        question = entry["question"]
        extra = {"task": task, "question": question, "metadata": metadata}
        yield Problem(f"{question}\n\n{INSTRUCTION}", entry["answer"], extra)
