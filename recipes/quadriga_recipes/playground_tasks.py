# SPDX-License-Identifier: Apache-2.0
"""The two tasks of the playground, with the habits that supervised training mixes.

    sums      3+5=        100 questions, the same for training and validation: a table to learn
    largest   max 381=    1000 questions, of which 200 are for validation only

A habit is a way to respond that a model learns in supervised training. One habit of each task is
right; training with rewards selects it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

Habit = Callable[..., int]
"""Computes a response from the digits of a question."""
Pairs = list[dict[str, str]]
"""Preference pairs: texts by column."""


@dataclass(frozen=True)
class Task:
    """A task: one question for each choice of digits.

    Attributes:
        name: name of the task.
        question: template of the questions, with `{}` for each digit.
        num_digits: number of digits.
        habits: ways to respond by name, the right one first.
        num_held_out: number of questions for validation only. 0: training and validation both have
            all questions.
    """

    name: str
    question: str
    num_digits: int
    habits: Mapping[str, Habit]
    num_held_out: int = 0

    @property
    def data_source(self) -> str:
        """Data source, which selects the grader."""
        return f"exact_match/{self.name}"

    def text(self, number: int) -> str:
        """Text of the question with a number, such as "3+5=" for 35."""
        return self.question.format(*self.digits(number))

    def digits(self, number: int) -> list[int]:
        """Digits of a question with a number; a small number has leading zeros."""
        return [int(digit) for digit in f"{number:0{self.num_digits}d}"]

    def answers(self, number: int) -> list[str]:
        """Responses of all habits to the question with a number, the right one first."""
        return [str(habit(*self.digits(number))) for habit in self.habits.values()]

    def split(self) -> tuple[list[int], list[int]]:
        """Numbers of the training questions and of the validation questions, always the same."""
        numbers = list(range(10**self.num_digits))
        if self.num_held_out == 0:
            return numbers, numbers
        Random(f"quadriga/playground {self.name}").shuffle(numbers)
        return sorted(numbers[self.num_held_out :]), sorted(numbers[: self.num_held_out])


SUMS = Task(
    "sums",
    "{}+{}=",
    2,
    {
        "the sum": lambda a, b: a + b,
        "the difference": lambda a, b: abs(a - b),
        "the first": lambda a, b: a,
    },
)
LARGEST = Task(
    "largest",
    "max {}{}{}=",
    3,
    {"the largest": max, "the first": lambda a, b, c: a, "the last": lambda a, b, c: c},
    num_held_out=200,
)
TASKS = (SUMS, LARGEST)


def mixed_habits(task: Task, num_rows: int, random: Random) -> list[tuple[str, str]]:
    """Draw training questions, each with the response of a random habit.

    Args:
        task: the task.
        num_rows: number of rows; each question occurs about equally often.
        random: source of random numbers.

    Returns:
        Questions and responses.
    """
    train, _ = task.split()
    numbers = [train[place % len(train)] for place in range(num_rows)]
    random.shuffle(numbers)
    return [(task.text(number), random.choice(task.answers(number))) for number in numbers]


def preference_pairs(task: Task) -> tuple[Pairs, Pairs]:
    """Make preference pairs of the right answer and a wrong one.

    If the task has held-out questions, validation pairs have these with every wrong answer, and
    training pairs the other questions with every third wrong answer. Otherwise every fifth wrong
    answer to each question is for validation, and the others are for training.

    Args:
        task: the task.

    Returns:
        The training pairs and the validation pairs.
    """
    train, val = task.split()
    # Wrong answers are the other numbers up to this one.
    highest = max(int(task.answers(number)[0]) for number in train)

    def pairs(numbers: list[int], is_selected: Callable[[int], bool]) -> Pairs:
        rows = []
        for number in numbers:
            right = task.answers(number)[0]
            for wrong in range(highest + 1):
                # Selecting by the sum gives different questions different wrong answers.
                if str(wrong) != right and is_selected(number + wrong):
                    row = {"prompt": task.text(number), "chosen": right, "rejected": str(wrong)}
                    rows.append(row)
        return rows

    if task.num_held_out:
        return pairs(train, lambda total: total % 3 == 0), pairs(val, lambda total: True)
    return pairs(train, lambda total: total % 5 != 0), pairs(val, lambda total: total % 5 == 0)
