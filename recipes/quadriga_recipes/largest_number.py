# SPDX-License-Identifier: Apache-2.0
"""Task of the quickstart: which of three numbers is the largest.

A model of 135 million parameters solves few problems at the start, and learns the task in minutes
on a CPU.
"""

from random import Random

from quadriga.errors import DataError
from quadriga_recipes.rows import Problem

DATA_SOURCE = "quadriga/largest"
ABILITY = "math"
DEFAULT_NUM_TRAIN = 2000
DEFAULT_NUM_VAL = 200

# The numbers are from 10 to 99.
_LOW = 10
_COUNT = 90
NUM_PROMPTS = _COUNT * (_COUNT - 1) * (_COUNT - 2)
# The validation problems do not depend on the seed, so that runs can be compared.
_VALIDATION_SEED = "quadriga/largest validation"


def draw_problems(
    *, num_train: int, num_val: int, seed: int
) -> tuple[list[Problem], list[Problem]]:
    """Draw training and validation problems, all different from each other.

    Args:
        num_train: number of training problems.
        num_val: number of validation problems, which do not depend on `seed`.
        seed: seed of the training problems.

    Returns:
        The training and the validation problems.

    Raises:
        DataError: there are not so many different problems.
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
    # Up to `num_val` of the drawn problems may be held out; enough remain.
    drawn = Random(seed).sample(range(NUM_PROMPTS), num_train + num_val)
    train = [number for number in drawn if number not in held_out][:num_train]
    return [_problem(number) for number in train], [_problem(number) for number in val]


def _problem(number: int) -> Problem:
    """Make a problem by its number among all ordered choices of three different numbers.

    The number is read as three digits: the place of the first number among 90, of the second one
    among the remaining 89, and of the third one among the remaining 88.
    """
    quotient, first_place = divmod(number, _COUNT)
    third_place, second_place = divmod(quotient, _COUNT - 1)
    # Each chosen number is removed, so that all three are different.
    remaining = list(range(_LOW, _LOW + _COUNT))
    first = remaining.pop(first_place)
    second = remaining.pop(second_place)
    third = remaining.pop(third_place)
    text = f"Which is the largest: {first}, {second} or {third}? Answer with just the number."
    return Problem(text, str(max(first, second, third)))
