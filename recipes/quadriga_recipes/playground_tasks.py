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


@dataclass(frozen=True)
class Task:
    """Questions with digits in them.

    Attributes:
        name: name of the task.
        question: text with a place for each digit.
        num_digits: number of digits.
        habits: ways to respond by name, the right one first.
        num_held_out: number of questions for validation only; 0: both have all questions.
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
        """Question by its number among all choices of digits."""
        return self.question.format(*self.digits(number))

    def digits(self, number: int) -> list[int]:
        """Digits of a question by its number."""
        return [number // 10**place % 10 for place in reversed(range(self.num_digits))]

    def answers(self, number: int) -> list[str]:
        """Response of each habit to a question by its number, the right one first."""
        return [str(habit(*self.digits(number))) for habit in self.habits.values()]

    def split(self) -> tuple[list[int], list[int]]:
        """Numbers of the training and the validation questions, the same in every run."""
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
    """Training questions, each with the response of a random habit.

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


def preference_pairs(task: Task) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Pairs of the right answer and a wrong one, for training and validation.

    With held-out questions, validation has all wrong answers to these, and training every third one
    to each of the others. Without, validation has every fifth wrong answer to each question, and
    training the others.

    Args:
        task: the task.

    Returns:
        The pairs of training and of validation.
    """
    train, val = task.split()
    highest = max(int(task.answers(number)[0]) for number in train)

    def pairs(numbers: list[int], is_selected: Callable[[int], bool]) -> list[dict[str, str]]:
        rows = []
        for number in numbers:
            right = task.answers(number)[0]
            for wrong in range(highest + 1):
                if str(wrong) != right and is_selected(number + wrong):
                    row = {"prompt": task.text(number), "chosen": right, "rejected": str(wrong)}
                    rows.append(row)
        return rows

    if task.num_held_out:
        return pairs(train, lambda place: place % 3 == 0), pairs(val, lambda place: True)
    return pairs(train, lambda place: place % 5 != 0), pairs(val, lambda place: place % 5 == 0)
