# SPDX-License-Identifier: Apache-2.0
"""The quickstart's task: which of three numbers is the largest.

Small enough that a model of 135 million parameters learns it in minutes on a CPU, and far from solved at the start.
"""

from random import Random

from quadriga.errors import DataError
from quadriga_recipes.rows import Problem

DATA_SOURCE = "quadriga/largest"
ABILITY = "math"
DEFAULT_NUM_TRAIN, DEFAULT_NUM_VAL = 2000, 200

_LOW, _COUNT = 10, 90
NUM_PROMPTS = _COUNT * (_COUNT - 1) * (_COUNT - 2)
# The same questions are held out whatever the seed, so that runs can be compared.
_VALIDATION_SEED = "quadriga/largest validation"


def problems(*, num_train: int, num_val: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Training and validation problems, all different from each other.

    Args:
        num_train: training problems, drawn with `seed`.
        num_val: validation problems, which do not depend on `seed`.
        seed: of the training problems.
    """
    if num_train + num_val > NUM_PROMPTS:
        raise DataError(
            "prepare data largest",
            got=f"{num_train} training and {num_val} validation rows",
            expected=f"at most {NUM_PROMPTS} together, which is how many there are",
            fix="Lower --num-train or --num-val.",
        )
    val = Random(_VALIDATION_SEED).sample(range(NUM_PROMPTS), num_val)
    held_out = set(val)
    drawn = Random(seed).sample(range(NUM_PROMPTS), num_train + num_val)
    train = [number for number in drawn if number not in held_out][:num_train]
    return [_problem(number) for number in train], [_problem(number) for number in val]


def _problem(number: int) -> Problem:
    """The problem with this number, of all ordered choices of three different numbers from 10 to 99."""
    left = list(range(_LOW, _LOW + _COUNT))
    number, first = divmod(number, _COUNT)
    number, second = divmod(number, _COUNT - 1)
    a, b, c = left.pop(first), left.pop(second), left.pop(number)
    return Problem(
        f"Which is the largest: {a}, {b} or {c}? Answer with just the number.", str(max(a, b, c))
    )
