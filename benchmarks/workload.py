# SPDX-License-Identifier: Apache-2.0
"""The step that both sides of the benchmark run: the quickstart's task and shape. Needs nothing but Python.

Both sides read the same prompts in the same order, draw the same number of samples of the same length, and ask the
same reward, so that they differ in how they compute and in nothing else.
"""

import random
import re
import zlib
from dataclasses import dataclass
from typing import Any

NUM_PROMPTS = 16
NUM_SAMPLES = 8
NUM_NEW_TOKENS = 16
NUM_SEQUENCES = NUM_PROMPTS * NUM_SAMPLES
TEMPERATURE = 1.0
LEARNING_RATE = 2e-5
ADAM_BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0
DATA_SOURCE = "quadriga/largest"


@dataclass(frozen=True)
class Question:
    """One prompt and its answer."""

    text: str
    answer: str


def questions(num_steps: int, seed: int = 7) -> list[Question]:
    """The prompts of so many steps, in the order in which they are used."""
    rng = random.Random(seed)
    drawn = [rng.sample(range(10, 100), 3) for _ in range(num_steps * NUM_PROMPTS)]
    return [
        Question(
            f"Which is the largest: {a}, {b} or {c}? Answer with just the number.",
            str(max(a, b, c)),
        )
        for a, b, c in drawn
    ]


def task_score(text: str, answer: str) -> float:
    """The quickstart's reward: 1 if the last integer of the text is the answer. Many groups of an untrained model
    then have equal rewards, hence no gradient; a side may leave them out of its computation."""
    numbers = re.findall(r"\d+", text)
    return float(bool(numbers) and numbers[-1] == answer)


def equal_score(text: str, answer: str) -> float:
    """A number between 0 and 1 that depends on every character: all sequences have a gradient, none can be left out."""
    return zlib.crc32(f"{answer}:{text}".encode()) / 2**32


SCORES = {"task": task_score, "equal": equal_score}


def compute_task_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """`task_score` in the form of a custom reward function."""
    return task_score(solution_str, ground_truth)


def compute_equal_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """`equal_score` in the form of a custom reward function."""
    return equal_score(solution_str, ground_truth)
