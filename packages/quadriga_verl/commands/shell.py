# SPDX-License-Identifier: Apache-2.0
"""The commands of a shell script, with their words filled in; nothing is run.

What scripts that start a training are made of is read: variables and their defaults (`${X:-y}`), arrays, arithmetic,
quotes, lines that go on, `if [ a = b ]`, `export`, `$(pwd)`, `$(basename x)`, `$(date +x)`. Variables that the script
does not set come from the environment. A value that is not known keeps the reason, which is told where a command needs
it: so loops, functions and other programs stand in nobody's way.
"""

import ast
import operator
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quadriga.errors import ConfigError

_NAME = r"[A-Za-z_]\w*"
_ASSIGNED = re.compile(rf"({_NAME})(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(rf"({_NAME}|[@*0-9])(\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_SEPARATOR = re.compile(r"&&|\|\||;;|[\n;&|()]")
_REDIRECTION = re.compile(r"&>>?|\d*(?:<<<|<<-?|>>|>\||[<>])(?:&[\d-]+)?")
LAUNCHERS = ("torchrun", "python", "python3")
_LAUNCHER = {"nnodes": "trainer.nnodes", "nproc_per_node": "trainer.n_gpus_per_node"}
_GAP, _KEPT = (
    "\0",
    "\1",
)  # between words that one word becomes; before one that stays though it is empty
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "-eq": operator.eq, "-ne": operator.ne,
    "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip


class _Unknown(Exception):  # noqa: N818
    """Why the value of a word is not known."""


@dataclass
class Command:
    """One command of a script: its line, its words, and why some of them, or whether it is run, is not known."""

    line: int
    words: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class _Statement:
    """A command as it is written, behind the sign `before`; an array that is assigned is a pair."""

    before: str = "\n"
    line: int = 0
    words: list[Any] = field(default_factory=list)


def commands(text: str, environment: Mapping[str, str]) -> list[Command]:
    """The commands of a script that a shell would run, with conditions decided as far as they can be.
    Raises ConfigError: a quote or a bracket does not end."""
    shell = _Shell(environment)
    return [
        found for statement in _statements(text) if (found := shell.read(statement)) is not None
    ]


def _end(text: str, at: int) -> int:
    """Where the piece of a word that begins at `at` ends: a quoted part, an expansion, or one character."""
    sign = text[at]
    close = {'"': '"', "${": "}", "$(": ")"}.get(sign if sign == '"' else text[at : at + 2])
    if close is None:
        return text.index(sign, at + 1) + 1 if sign in "'`" else at + (2 if sign == "\\" else 1)
    at, depth = at + (1 if sign == '"' else 2), 1
    while depth:
        if text[at] == close or (close == ")" and text[at] == "("):
            depth += -1 if text[at] == close else 1
            at += 1
        else:
            at = at + 1 if close == '"' and text[at] == "'" else _end(text, at)
    return at


def _word_end(text: str, at: int) -> int:
    start = at
    try:
        while at < len(text) and text[at] not in " \t\r\n;&|<>()":
            at = _end(text, at)
    except (IndexError, ValueError) as error:
        line = text.count("\n", 0, start) + 1
        raise ConfigError(
            f"line {line}", got="a quote or bracket without its end", expected="both"
        ) from error
    return at


def _statements(text: str) -> Iterator[_Statement]:
    at, statement, here = 0, _Statement(), ""
    while at < len(text):
        if blank := re.compile(r"(?:[ \t\r]|\\\n|(?<![^\s;(])#.*)+").match(text, at):
            at = blank.end()
        elif found := _REDIRECTION.match(text, at):
            at = re.compile(r"[ \t]*").match(text, found.end()).end()  # type: ignore[union-attr]
            start, at = at, at if "&" in found[0][1:] else _word_end(text, at)
            here = (
                text[start:at].strip("'\"") if "<<" in found[0] and "<<<" not in found[0] else here
            )
        elif found := _SEPARATOR.match(text, at):
            if statement.words:
                yield statement
            statement, at = _Statement(found[0]), found.end()
            if here and found[0] == "\n":
                last = re.compile(rf"^\t*{re.escape(here)}$", re.MULTILINE).search(text, at)
                at, here = last.end() if last else len(text), ""
        else:
            statement.line = statement.line or text.count("\n", 0, at) + 1
            start, at = at, _word_end(text, at)
            word: Any = text[start:at]
            if text[at : at + 1] == "(" and re.fullmatch(rf"{_NAME}\+?=", word):
                closed = _end(f"${text[at:]}", 0) - 1 + at
                word = (
                    word,
                    [one for part in _statements(text[at + 1 : closed - 1]) for one in part.words],
                )
                at = closed
            statement.words.append(word)
    if statement.words:
        yield statement


class _Shell:
    """Variables and conditions, statement after statement. A condition is true, false, or None: not decided."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.variables: dict[str, str | _Unknown] = dict(environment)
        self.blocks: list[tuple[bool | None, bool | None]] = []
        """Of each open block: whether what is read now is run, and whether a branch before it or it was."""
        self.status: bool | None = True
        self.line, self.ended, self.is_condition = 0, "", False

    def read(self, statement: _Statement) -> Command | None:
        """The command that a statement is, once what it changes is noted; None: it is none, or is not run."""
        self.line, words = statement.line, list(statement.words)
        if not self._within_blocks(words):
            return None
        runs = _all(state for state, _ in self.blocks)
        if statement.before in ("&&", "||"):
            negated = None if self.status is None else not self.status
            runs = _all((runs, self.status if statement.before == "&&" else negated))
        if runs is False or not words:
            return None
        declares = words[0] in ("export", "local", "declare", "readonly", "typeset")
        while words and (declares or self._is_assignment(words[0])):
            if self._is_assignment(words[0]):
                self._assign(words[0], runs)
            del words[0]
        if not words:
            return None
        if words[0] in ("[", "[[", "test"):
            self.status = self._test(words)
            return None
        self.status = True
        if words[0] in ("exit", "return") and runs:
            self.ended = self.ended or f"the script ends in line {self.line}, before this command"
        command = Command(self.line)
        for word in words:
            try:
                command.words += self.fields(word)
            except _Unknown as unknown:
                command.problems.append(str(unknown))
        if runs is None:
            command.problems.append(
                "it is in a loop, a function or under a condition that is not decided here"
            )
        command.problems += [self.ended] * bool(self.ended)
        return command

    def _within_blocks(self, words: list[Any]) -> bool:
        """Takes the words of blocks from the front; whether a command may be left."""
        while words and isinstance(words[0], str):
            first, blocks = words[0], self.blocks
            if first in ("if", "elif"):
                test, taken = (
                    self._test(words[1:]),
                    blocks.pop()[1] if first == "elif" and blocks else False,
                )
                state = _all((test, None if taken is None else not taken))
                blocks.append(
                    (state, True if taken or test else None if None in (taken, test) else False)
                )
                self.is_condition = True
                return False
            if first == "else" and blocks:
                taken = blocks.pop()[1]
                blocks.append((None if taken is None else not taken, True))
            elif first in ("for", "while", "until", "case", "select", "{", "function"):
                blocks.append((None, None))
                return False
            elif first in ("fi", "done", "esac", "}"):
                del blocks[-1:]
                return False
            elif first == "then":
                self.is_condition = False
            elif first not in ("do", "!", "nohup", "exec", "time", "sudo"):
                break
            del words[0]
        if self.is_condition and words:
            # A condition of several commands.
            self.blocks[-1:] = [(None, None)]
            return False
        return True

    def _test(self, words: list[Any]) -> bool | None:
        try:
            operands = [
                self.text(word) for word in words if word not in ("[", "]", "[[", "]]", "test", ";")
            ]
            match operands:
                case [one, sign, other] if sign in _COMPARED and not (
                    "[[" in words and set(other) & set("*?[")
                ):
                    is_number = sign.startswith("-")
                    return _COMPARED[sign](*map(int, (one, other)) if is_number else (one, other))
                case ["-z" | "-n" as sign, one]:
                    return (one == "") == (sign == "-z")
        except (_Unknown, ValueError):
            return None
        return None

    @staticmethod
    def _is_assignment(word: Any) -> bool:
        return isinstance(word, tuple) or _ASSIGNED.fullmatch(word) is not None

    def _assign(self, word: Any, runs: bool | None) -> None:
        prefix, elements = word if isinstance(word, tuple) else (word, None)
        name, more, text = _ASSIGNED.fullmatch(prefix).groups()  # type: ignore[union-attr]
        try:
            if runs is None:
                raise _Unknown(
                    f"{name} is set in line {self.line}, under a condition that is not decided here"
                )
            listed = [_KEPT + one for raw in elements or () for one in self.fields(raw)]
            value = self.text(text) if elements is None else _GAP.join(listed)
            self.variables[name] = (
                self._value(name) + ("" if elements is None else _GAP) + value if more else value
            )
        except _Unknown as unknown:
            self.variables[name] = unknown

    def _value(self, name: str) -> str:
        value = "" if name in "@*" else self.variables.get(name)
        if value is None:
            value = _Unknown(f"{name} is not set (line {self.line})")
        if isinstance(value, _Unknown):
            raise value
        return value

    def text(self, raw: str) -> str:
        """A word as one text, as in an assignment."""
        return " ".join(self._filled(raw).split(_GAP)).replace(_KEPT, "")

    def fields(self, raw: str) -> list[str]:
        """The words that one word of the script becomes."""
        return [
            part.replace(_KEPT, "") for part in self._filled(raw, splits=True).split(_GAP) if part
        ]

    def _filled(self, raw: str, *, quoted: bool = False, splits: bool = False) -> str:
        """A word with what stands for its parts; with `splits` a `_GAP` for blanks that part words."""
        found, at = [], 0
        while at < len(raw):
            start, at = at, _end(raw, at)
            piece, is_value = raw[start:at], True
            if piece == "$" and (name := re.compile(rf"{_NAME}|[@*0-9#?]").match(raw, at)):
                at, value = name.end(), self._parameter(name[0])
            elif piece.startswith("$(("):
                value = self._arithmetic(piece[3:-2])
            elif piece.startswith(("$(", "`")):
                value = self._output(piece[2:-1] if piece[0] == "$" else piece[1:-1])
            elif piece.startswith("${"):
                value = self._parameter(piece[2:-1])
            elif piece[0] == "\\":
                value, is_value = (
                    piece if quoted and piece[1:] not in '$`"\\\n' else piece[1:].strip("\n"),
                    False,
                )
            elif piece[0] in "'\"" and not quoted and len(piece) > 1:
                value = piece[1:-1] if piece[0] == "'" else self._filled(piece[1:-1], quoted=True)
                value, is_value = _KEPT + value, False
            else:
                value, is_value = piece, False
            found.append(re.sub(r"\s+", _GAP, value) if is_value and splits else value)
        return "".join(found)

    def _parameter(self, inner: str) -> str:
        """What `${inner}` stands for; a list has a `_GAP` between its elements."""
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            raise _Unknown(f"${{{inner}}} is more than is read here (line {self.line})")
        name, every, sign, word = match.groups()
        sign, value = sign or "", self.variables.get(name)
        is_missing = value is None or (sign[:1] == ":" and value == "")
        if sign[-1:] == "+":
            return "" if is_missing else self.text(word)
        if is_missing and sign[-1:] in ("-", "="):
            value = self.text(word)
            if sign[-1] == "=":
                self.variables[name] = value
            return value
        if is_missing and sign[-1:] == "?":
            raise _Unknown(f"{name} is not set (line {self.line})")
        value = self._value(name)
        return value if every or name in "@*" else value.partition(_GAP)[0]

    def _arithmetic(self, inner: str) -> str:
        def number(node: ast.expr) -> int:
            match node:
                case ast.Constant(int() as value):
                    return value
                case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
                    return _OPERATORS[type(sign)](number(left), number(right))
            raise SyntaxError

        filled = re.sub(rf"(?<!\$)(?<!\{{)\b{_NAME}\b", lambda found: f"${{{found[0]}}}", inner)
        try:
            return str(number(ast.parse(self.text(filled).strip(), mode="eval").body))
        except (SyntaxError, ZeroDivisionError) as error:
            raise _Unknown(f"$(({inner})) is more than is read here (line {self.line})") from error

    def _output(self, inner: str) -> str:
        """What a command would print, of the few that scripts make names with."""
        words = [
            one
            for statement in _statements(inner)
            for raw in statement.words
            for one in self.fields(raw)
        ]
        match words:
            case ["pwd"]:
                return str(Path.cwd())
            case ["basename", path]:
                return Path(path).name
            case ["date", form] if form.startswith("+"):
                return time.strftime(form[1:])
        raise _Unknown(f"$({inner}) is not run here (line {self.line})")


def _all(states: Any) -> bool | None:
    """Whether all are true; None where that is not decided."""
    found = list(states)
    return False if False in found else None if None in found else True


def launched(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """The program that a command line starts, as a module or a script, and its words; None: it starts none.
    The processes that torchrun is asked for go before the words, as `trainer.nnodes` and `trainer.n_gpus_per_node`."""
    sizes: list[str] = []
    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        following = words[number + 1] if number + 1 < len(words) else ""
        if name.lstrip("-").replace("-", "_") in _LAUNCHER and (value or following).isdigit():
            sizes.append(f"{_LAUNCHER[name.lstrip('-').replace('-', '_')]}={value or following}")
        elif word == "-m" and not following.startswith("torch.distributed"):
            return following, [*sizes, *words[number + 2 :]]
        elif word.endswith(".py") and not word.startswith("-"):
            return word, [*sizes, *words[number + 1 :]]
    return None
