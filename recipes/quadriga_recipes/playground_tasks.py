# SPDX-License-Identifier: Apache-2.0
"""The two tasks of the playground, and the habits that supervised training mixes before rewards choose among them.

    sums      3+5=        100 questions, in training and in validation: what is learned is a table
    largest   max 381=    1000 questions, of which 200 are for validation and in no training file

A habit is a way to respond that needs no reward to be learned. One habit of each task is right.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

Habit = Callable[..., int]


@dataclass(frozen=True)
class Task:
    """Questions with digits in them.

    Attributes:
        name: of the task; `exact_match/NAME` is its data source.
        question: text with a place for each digit.
        num_digits: places.
        habits: ways to respond by name, the right one first.
        num_held_out: questions for validation alone; 0: all questions are for both.
    """

    name: str
    question: str
    num_digits: int
    habits: Mapping[str, Habit]
    num_held_out: int = 0

    @property
    def data_source(self) -> str:
        """Chooses the grader."""
        return f"exact_match/{self.name}"

    def text(self, number: int) -> str:
        """The question with this number, of all choices of digits."""
        return self.question.format(*self.digits(number))

    def digits(self, number: int) -> list[int]:
        """Its digits."""
        return [number // 10**place % 10 for place in reversed(range(self.num_digits))]

    def answers(self, number: int) -> list[str]:
        """The response of each habit, the right one first."""
        return [str(habit(*self.digits(number))) for habit in self.habits.values()]

    def split(self) -> tuple[list[int], list[int]]:
        """The questions of training and of validation; the same in every run."""
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
    """Questions of training, each answered by a habit drawn evenly.

    Args:
        task: of the questions.
        num_rows: questions; each occurs about equally often.
        random: draws.
    """
    train, _ = task.split()
    numbers = [train[place % len(train)] for place in range(num_rows)]
    random.shuffle(numbers)
    return [(task.text(number), random.choice(task.answers(number))) for number in numbers]


def preference_pairs(task: Task) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Pairs of the right answer and a wrong one, for training and validation.

    Where questions are held out, validation has all wrong answers to these, and training every third to each of the
    others. Where none are, every fifth wrong answer to each question is kept for validation.

    Args:
        task: of the questions.
    """
    train, val = task.split()
    highest = max(int(task.answers(number)[0]) for number in train)
    parts: tuple[list[dict[str, str]], list[dict[str, str]]] = ([], [])
    for part, numbers in enumerate((train, val)):
        for number in numbers:
            right = task.answers(number)[0]
            for wrong in range(highest + 1):
                place = number + wrong
                is_taken = (
                    (part == 1 or place % 3 == 0)
                    if task.num_held_out
                    else (place % 5 == 0) == (part == 1)
                )
                if str(wrong) != right and is_taken:
                    parts[part].append(
                        {"prompt": task.text(number), "chosen": right, "rejected": str(wrong)}
                    )
    return parts
