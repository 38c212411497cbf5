# SPDX-License-Identifier: Apache-2.0
"""Moves of the games that run offline: for each game a small generator, which mostly follows the rules."""

import random
import re
from collections.abc import Callable

Generator = Callable[[random.Random, str], str]

GARBAGE = ("", "I do not know.", "[]", "[[1]", "[99 99 99]", "\\boxed{", "[é\u2028]", "up" * 2000)
"""A fifth of all moves is one of these."""


def pick(*moves: str) -> Generator:
    """One of the moves."""
    return lambda generator, text: generator.choice(moves)


def numbers(count: int, low: int, high: int, *, separator: str = " ") -> Generator:
    """Different numbers in brackets."""

    def move(generator: random.Random, text: str) -> str:
        chosen = generator.sample(range(low, high + 1), count)
        return f"[{separator.join(map(str, chosen))}]"

    return move


def boxed(move: Generator) -> Generator:
    """The move as GEM's games read it."""
    return lambda generator, text: f"\\boxed{{{move(generator, text)[1:-1]}}}"


def offered(generator: random.Random, text: str) -> str:
    """One of the moves that the observation offers in brackets."""
    moves = re.findall(r"\[[^\[\]\n]{1,30}\]", text)
    return generator.choice(moves) if moves else "[0]"


def _countdown(generator: random.Random, text: str) -> str:
    first, second = generator.sample(range(6), 2)
    return f"[{first} {second} {generator.choice('+-*/')}]"


def _crosswords(generator: random.Random, text: str) -> str:
    row, column = generator.randrange(12), generator.randrange(12)
    return f"[{row} {column} {generator.choice('abcdeo')}]"


def _logic(generator: random.Random, text: str) -> str:
    fuel = generator.choice(["gasoline", "diesel", "electric"])
    person = generator.choice(["bob", "alice", "charlie"])
    return f"[fuel_people {person} {fuel} {generator.choice('OX')}]"


def _letters(generator: random.Random, text: str) -> str:
    return f"[{generator.choice('SENDMORY')} {generator.randrange(10)}]"


def _edges(generator: random.Random, text: str) -> str:
    return f"[{generator.choice('hv')} {generator.randrange(5)} {generator.randrange(5)}]"


TEXTARENA: dict[str, Generator] = {
    "2048-v0": pick("[Up]", "[Down]", "[Left]", "[Right]"),
    "Bandit-v0": pick("[red]", "[blue]", "[green]", "[yellow]", "[purple]"),
    "Blackjack-v0": pick("[Hit]", "[Stand]"),
    "Countdown-v0": _countdown,
    "Crosswords-v0": _crosswords,
    "Cryptarithm-v0": _letters,
    "FifteenPuzzle-v0": pick("[up]", "[down]", "[left]", "[right]"),
    "FrozenLake-v0": pick("[up]", "[down]", "[left]", "[right]"),
    "GuessTheNumber-v0": numbers(1, 1, 20),
    "LightsOut-v0": numbers(2, 0, 4),
    "LogicPuzzle-v0": _logic,
    "Mastermind-v0": numbers(4, 1, 6),
    "Minesweeper-v0": numbers(2, 0, 7),
    "PegJump-v0": numbers(2, 1, 15),
    "RushHour-v0": pick("[X+]", "[X-]", "[A+]", "[A-]", "[B+]", "[B-]", "[C+]", "[C-]"),
    "Secretary-v0": pick("[accept]", "[continue]"),
    "Set-v0": numbers(3, 1, 12, separator=", "),
    "Slitherlink-v0": _edges,
    "Sokoban-v0": pick("[up]", "[down]", "[left]", "[right]", "[w]"),
    "Sudoku-v0-very-easy": numbers(3, 1, 9),
    "ThreeCardMonte-v0": numbers(1, 0, 2),
    "TowerOfHanoi-v0": pick("[A C]", "[A B]", "[B C]", "[B A]", "[C A]", "[C B]"),
}
"""TextArena's games for one player that need neither a corpus of nltk, nor a key, nor Python 3.12."""

GEM: dict[str, Generator] = {
    "GuessTheNumber-v0": boxed(numbers(1, 1, 20)),
    "Mastermind-v0": boxed(lambda generator, text: f"[{generator.randrange(1000, 7000)}]"),
    "Minesweeper-v0": boxed(
        lambda generator, text: f"[reveal {generator.randrange(8)} {generator.randrange(8)}]"
    ),
    "FifteenPuzzle-v0": boxed(pick("[up]", "[down]", "[left]", "[right]")),
}
"""GEM's games that need no corpus."""
