# SPDX-License-Identifier: Apache-2.0
"""The commands of a shell script with their variables filled in. Nothing is run.

    text ──_statements──> statements ──_Shell.read, one by one──> commands with their words

It reads what scripts that start a training are made of: variables and their defaults (`${X:-y}`),
arrays, arithmetic, quotes, continued lines, `if [ a = b ]`, `case`, `export`, `$(pwd)`,
`$(basename x)` and `$(date +x)`. Variables whose values the script does not determine come from the
environment. A value that cannot be determined carries the reason, which is reported only if a
command needs the value. So loops, functions and other programs do not prevent a script from being
read.
"""

import ast
import operator
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from quadriga.errors import ConfigError

LAUNCHERS = ("torchrun", "python", "python3")
_PROCESS_OPTIONS = {"nnodes": "trainer.nnodes", "nproc_per_node": "trainer.n_gpus_per_node"}

_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=(.*)", re.DOTALL)
_ARRAY_ASSIGNMENT = re.compile(rf"{_NAME}\+?=")
_PARAMETER = re.compile(rf"({_NAME}|[@*0-9])(\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_PLAIN_PARAMETER = re.compile(rf"{_NAME}|[@*0-9#?]")
_BLANK = re.compile(r"(?:[ \t\r]|\\\n|(?<![^\s;(])#.*)+")
_SEPARATOR = re.compile(r"&&|\|\||;;|[\n;&|()]")
_REDIRECTION = re.compile(r"(&>>?|\d*(?:<<<|<<-?|>>|>\||[<>])(?:&[\d-]+)?)[ \t]*")

# Characters that no script contains mark places in a value:
_GAP = "\0"  # between the words that one word of the script becomes
_KEPT = "\1"  # before a word that stays although it is empty

_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
UNDECIDED = "it is in a loop, a function or under a condition that is not decided here"
"""Problem of a command that may be run."""
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


class _Unknown(Exception):  # noqa: N818
    """The value of a word cannot be determined; the message says why."""


@dataclass
class Command:
    """A command of a script.

    Attributes:
        line: line in which it begins.
        words: its words, without those that cannot be determined.
        problems: why words cannot be determined, or whether the command is run.
        notices: variables that have the environment's value in place of the script's.
    """

    line: int
    words: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def commands(text: str, environment: Mapping[str, str]) -> list[Command]:
    """Read the commands that a shell would run. Conditions are decided if that is possible.

    Args:
        text: the script.
        environment: values of variables whose values the script does not determine.

    Raises:
        ConfigError: a quote or a bracket is not closed.
    """
    shell = _Shell(environment)
    read_commands = map(shell.read, _statements(text))
    return [command for command in read_commands if command is not None]


# ---- splitting a script -------------------------------------------------------------------------


@dataclass
class _Array:
    """An assignment of an array: `NAME=` or `NAME+=`, and its elements."""

    prefix: str
    elements: list[Any]


@dataclass
class _Statement:
    """A command as it is written.

    Attributes:
        before: the separator before it.
        line: line in which it begins.
        words: its words, as text or `_Array`.
    """

    before: str = "\n"
    line: int = 0
    words: list[Any] = field(default_factory=list)


def _piece_end(text: str, start: int) -> int:
    """Position after a piece of a word: a quoted part, an expansion, or one character."""
    sign = text[start]
    if sign in "'`":
        return text.index(sign, start + 1) + 1
    opening = sign if sign == '"' else text[start : start + 2]
    closing = {'"': '"', "${": "}", "$(": ")"}.get(opening)
    if closing is None:
        return start + (2 if sign == "\\" else 1)
    position = start + len(opening)
    depth = 1
    while depth:
        if text[position] == closing:
            depth -= 1
            position += 1
        elif closing == ")" and text[position] == "(":
            depth += 1
            position += 1
        elif closing == '"' and text[position] == "'":
            # Between double quotes, a single one is an ordinary character.
            position += 1
        else:
            position = _piece_end(text, position)
    return position


def _word_end(text: str, start: int) -> int:
    """Position after a word, at the first blank or operator outside of quotes and expansions."""
    position = start
    try:
        while position < len(text) and text[position] not in " \t\r\n;&|<>()":
            position = _piece_end(text, position)
    except (IndexError, ValueError) as error:
        raise _unclosed(text, start) from error
    return position


def _unclosed(text: str, start: int) -> ConfigError:
    """The error of a quote or bracket that is not closed."""
    where = f"line {text.count(chr(10), 0, start) + 1}"
    return ConfigError(where, got="a quote or bracket without its end", expected="both")


def _statements(text: str) -> Iterator[_Statement]:
    """Split a script into statements. Redirections and the text of here-documents are left out."""
    statement = _Statement()
    here_end = ""  # the line that ends a here-document, once its operator was read
    position = 0
    while position < len(text):
        blank = _BLANK.match(text, position)
        redirection = _REDIRECTION.match(text, position)
        separator = _SEPARATOR.match(text, position)
        if blank:
            position = blank.end()
        elif redirection:
            start = position = redirection.end()
            # `2>&1` has no file behind it.
            if "&" not in redirection[1][1:]:
                position = _word_end(text, start)
            if "<<" in redirection[1] and "<<<" not in redirection[1]:
                here_end = text[start:position].strip("'\"")
        elif separator:
            if statement.words:
                yield statement
            # After `)`, `&&` and the like the statement may begin on a later line.
            is_empty_line = separator[0] == "\n" and not statement.words
            before = statement.before if is_empty_line else separator[0]
            statement = _Statement(before)
            position = separator.end()
            if here_end and separator[0] == "\n":
                last_line = re.compile(rf"^\t*{re.escape(here_end)}$", re.MULTILINE)
                match = last_line.search(text, position)
                position = match.end() if match else len(text)
                here_end = ""
        else:
            if not statement.line:
                statement.line = text.count("\n", 0, position) + 1
            word, position = _read_word(text, position)
            statement.words.append(word)
    if statement.words:
        yield statement


def _read_word(text: str, start: int) -> tuple[Any, int]:
    """Read a word, or the assignment of an array; returns it and the position after it."""
    end = _word_end(text, start)
    word = text[start:end]
    if text[end : end + 1] != "(" or not _ARRAY_ASSIGNMENT.fullmatch(word):
        return word, end
    # The brackets of an array nest as those of `$(...)` do, so read it as such an expansion.
    expansion = f"${text[end:]}"
    try:
        expansion_length = _piece_end(expansion, 0)
    except (IndexError, ValueError) as error:
        raise _unclosed(text, end) from error
    # The script has no `$` here.
    array_end = end + expansion_length - 1
    elements = []
    for part in _statements(text[end + 1 : array_end - 1]):
        elements += part.words
    return _Array(word, elements), array_end


# ---- following a script -------------------------------------------------------------------------


@dataclass
class _ShellBlock:
    """An open block, such as `if` or `for`.

    Attributes:
        is_run: whether the commands that follow are run. None: not known.
        is_done: whether this or an earlier branch is run, so that no later one is. None: not known.
        subject: the word of `case`.
        patterns: patterns of the next branch of `case` that were read so far. None: the script is
            within a branch, or the block is not a `case`.
    """

    is_run: bool | None
    is_done: bool | None
    subject: Any = ""
    patterns: list[Any] | None = None

    def begin_branch(self, is_chosen: bool | None) -> None:
        """Begin a branch that is run if it is chosen and no earlier one is."""
        self.is_run = _all((is_chosen, _negated(self.is_done)))
        # Done if either is true; unknown if either is unknown.
        self.is_done = _negated(_all((_negated(self.is_done), _negated(is_chosen))))


class _Shell:
    """Variables, open blocks and exit status after each statement of a script."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._variables: dict[str, str | _Unknown] = dict(environment)
        self._notices: list[str] = []
        self._blocks: list[_ShellBlock] = []
        self._status: bool | None = True  # of the last command; None: not known
        self._line = 0
        self._end = ""  # why no later command is run, once the script has ended
        self._is_condition = False  # whether a condition is read, before `then`

    def read(self, statement: _Statement) -> Command | None:
        """Update the state by a statement.

        Returns:
            The command that the statement runs or may run; None if it runs none.
        """
        self._line = statement.line
        words = list(statement.words)
        if self._read_pattern(statement):
            return None
        if not self._read_keywords(words) or not words:
            return None
        # None if a block or the status before it is not known: the command may run.
        is_run = _all(block.is_run for block in self._blocks)
        if statement.before == "&&":
            is_run = _all((is_run, self._status))
        elif statement.before == "||":
            is_run = _all((is_run, _negated(self._status)))
        if is_run is False:
            return None

        # `export A=1 B` assigns A; the other words only name variables.
        declares = words[0] in ("export", "local", "declare", "readonly", "typeset")
        while words and (declares or _is_assignment(words[0])):
            if _is_assignment(words[0]):
                self._assign(words[0], is_run)
            del words[0]
        if not words:
            return None
        if words[0] in ("[", "[[", "test"):
            self._status = self._test(words)
            return None
        # Nothing is executed here: other commands are taken to succeed.
        self._status = True
        if words[0] in ("exit", "return") and is_run and not self._end:
            self._end = f"the script ends in line {self._line}, before this command"
        return self._command(words, is_run)

    def _command(self, words: list[Any], is_run: bool | None) -> Command:
        command = Command(self._line, notices=list(self._notices))
        for word in words:
            try:
                command.words += self._fields(word)
            except _Unknown as unknown:
                command.problems.append(str(unknown))
        if is_run is None:
            command.problems.append(UNDECIDED)
        if self._end:
            command.problems.append(self._end)
        return command

    def _read_keywords(self, words: list[Any]) -> bool:
        """Remove keywords of blocks from the front of `words`, and open or close their blocks.

        Returns:
            Whether the remaining words may be a command.
        """
        while words and isinstance(words[0], str):
            keyword = words[0]
            if keyword in ("if", "elif"):
                self._open_branch(keyword, words[1:])
                return False
            if keyword == "else" and self._blocks:
                is_done = self._blocks.pop().is_done
                self._blocks.append(_ShellBlock(_negated(is_done), True))
            elif keyword == "case":
                block = _ShellBlock(False, False, subject=words[1:2], patterns=words[3:])
                self._blocks.append(block)
                return False
            elif keyword in ("for", "while", "until", "select", "{", "function"):
                self._blocks.append(_ShellBlock(None, None))
                return False
            elif keyword in ("fi", "done", "esac", "}"):
                del self._blocks[-1:]
                return False
            elif keyword == "then":
                self._is_condition = False
            elif keyword not in ("do", "!", "nohup", "exec", "time", "sudo"):
                break
            del words[0]
        if self._is_condition and words:
            # A condition of several commands is not decided.
            self._blocks[-1:] = [_ShellBlock(None, None)]
            return False
        return True

    def _open_branch(self, keyword: str, condition: list[Any]) -> None:
        """Begin a branch of `if`, given the words of its condition."""
        result = self._test(condition)
        if keyword == "if" or not self._blocks:
            self._blocks.append(_ShellBlock(False, False))
        self._blocks[-1].begin_branch(result)
        self._is_condition = True

    def _read_pattern(self, statement: _Statement) -> bool:
        """Collect the patterns of a branch of `case`, and begin the branch after their `)`.

        Returns:
            Whether the statement consists of patterns, and so is not a command.
        """
        block = self._blocks[-1] if self._blocks else _ShellBlock(None, None)
        if statement.before == ";;":
            if block.patterns:
                # The branch of these patterns is empty.
                block.begin_branch(self._matches(block))
            block.patterns = []
        # None: the statement is within a branch, or the block is not a `case`.
        if block.patterns is None or statement.words[0] == "esac":
            return False
        if statement.before == ")":
            block.begin_branch(self._matches(block))
            block.patterns = None
            return False
        block.patterns += statement.words
        return True

    def _matches(self, block: _ShellBlock) -> bool | None:
        """Whether the word of `case` has one of the patterns read; None if it is not known."""
        try:
            patterns = [self._text(pattern) for pattern in block.patterns or ()]
            if "*" in patterns:
                return True
            subject = "".join(self._text(word) for word in block.subject)
        except _Unknown:
            return None
        return any(fnmatchcase(subject, pattern) for pattern in patterns)

    def _test(self, words: list[Any]) -> bool | None:
        """Result of a condition between brackets; None if it is not decided."""
        try:
            operands = []
            for word in words:
                if word not in ("[", "]", "[[", "]]", "test", ";"):
                    operands.append(self._text(word))
            match operands:
                case [first, sign, second] if sign in _COMPARISONS:
                    is_pattern = "[[" in words and not set(second).isdisjoint("*?[")
                    if is_pattern:
                        return None
                    if sign.startswith("-"):
                        return _COMPARISONS[sign](int(first), int(second))
                    return _COMPARISONS[sign](first, second)
                case ["-z", operand]:
                    return operand == ""
                case ["-n", operand]:
                    return operand != ""
        except (_Unknown, ValueError):
            return None
        return None

    def _assign(self, word: str | _Array, is_run: bool | None) -> None:
        prefix = word.prefix if isinstance(word, _Array) else word
        name, appends, text = _ASSIGNMENT.fullmatch(prefix).groups()  # type: ignore[union-attr]
        try:
            if is_run is None:
                raise _Unknown(
                    f"{name} is set in line {self._line}, under a condition that is not decided here"
                )
            if isinstance(word, _Array):
                fields = [part for element in word.elements for part in self._fields(element)]
                value = _GAP.join(_KEPT + part for part in fields)
                gap = _GAP
            else:
                value = self._text(text)
                gap = ""
            self._variables[name] = self._value(name) + gap + value if appends else value
        except _Unknown as unknown:
            self._variables[name] = self._environment.get(name, unknown)
            if name in self._environment:
                self._notices.append(f"{name} (line {self._line}) is the environment's.")

    # ---- values of words ----

    def _value(self, name: str) -> str:
        """Value of a variable; the arguments of a script are empty."""
        value = "" if name in "@*" else self._variables.get(name)
        if value is None:
            raise _Unknown(f"{name} is not set (line {self._line})")
        if isinstance(value, _Unknown):
            raise value
        return value

    def _text(self, raw: str) -> str:
        """Value of a word as one text, as in an assignment."""
        return self._expand(raw).replace(_GAP, " ").replace(_KEPT, "")

    def _fields(self, raw: str) -> list[str]:
        """The words that a word of the script becomes."""
        parts = self._expand(raw, splits=True).split(_GAP)
        return [part.replace(_KEPT, "") for part in parts if part]

    def _expand(self, raw: str | _Array, *, is_quoted: bool = False, splits: bool = False) -> str:
        """Expand the pieces of a word.

        Args:
            raw: the word as it is written.
            is_quoted: whether it stands between double quotes.
            splits: whether blanks in expanded values separate words.
        """
        if isinstance(raw, _Array):
            raise _Unknown(f"{raw.prefix}(...) is an argument of a command (line {self._line})")
        values = []
        position = 0
        while position < len(raw):
            start = position
            # Between double quotes, a single one is an ordinary character.
            is_plain = is_quoted and raw[start] == "'"
            position = start + 1 if is_plain else _piece_end(raw, start)
            piece = raw[start:position]
            name = _PLAIN_PARAMETER.match(raw, position) if piece == "$" else None
            if name is not None:
                position = name.end()
                value = self._parameter(name[0])
            elif piece.startswith("$(("):
                value = self._arithmetic(piece[3:-2])
            elif piece.startswith("$("):
                value = self._output(piece[2:-1])
            elif piece.startswith("`"):
                value = self._output(piece[1:-1])
            elif piece.startswith("${"):
                value = self._parameter(piece[2:-1])
            else:
                values.append(self._literal(piece, is_quoted))
                continue
            values.append(re.sub(r"\s+", _GAP, value) if splits else value)
        return "".join(values)

    def _literal(self, piece: str, is_quoted: bool) -> str:
        """Value of a piece that is no expansion: a quoted part, or a character."""
        if piece.startswith("\\"):
            is_escape = not is_quoted or piece[1:] in '$`"\\\n'
            return piece[1:].strip("\n") if is_escape else piece
        if is_quoted or len(piece) == 1:
            return piece
        if piece.startswith("'"):
            return _KEPT + piece[1:-1]
        return _KEPT + self._expand(piece[1:-1], is_quoted=True)

    def _parameter(self, inner: str) -> str:
        """Value of `${inner}`; the elements of an array have a `_GAP` between them."""
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            raise _Unknown(f"${{{inner}}} is more than is read here (line {self._line})")
        name, all_elements, modifier, word = match.groups()
        value = self._variables.get(name)
        is_missing = value is None
        action = ""
        if modifier:
            action = modifier[-1]
            # With a colon, an empty value counts as missing.
            is_missing = is_missing or (modifier[0] == ":" and value == "")
        if action == "+":
            return "" if is_missing else self._text(word)
        if is_missing and action in ("-", "="):
            text = self._text(word)
            if action == "=":
                self._variables[name] = text
            return text
        if is_missing and action == "?":
            raise _Unknown(f"{name} is not set (line {self._line})")
        elements = self._value(name)
        return elements if all_elements or name in "@*" else elements.partition(_GAP)[0]

    def _arithmetic(self, inner: str) -> str:
        """Value of `$((inner))`, of integers and a few operators."""

        def number(node: ast.expr) -> int:
            match node:
                case ast.Constant(int() as value):
                    return value
                case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
                    return _OPERATORS[type(sign)](number(left), number(right))
            raise SyntaxError

        # A variable needs no `$` there.
        filled = re.sub(rf"(?<!\$)(?<!\{{)\b{_NAME}\b", r"${\g<0>}", inner)
        try:
            return str(number(ast.parse(self._text(filled).strip(), mode="eval").body))
        except (SyntaxError, ZeroDivisionError) as error:
            text = f"$(({inner})) is more than is read here (line {self._line})"
            raise _Unknown(text) from error

    def _output(self, inner: str) -> str:
        """Output of a command, for the few by which scripts make names."""
        words = []
        for statement in _statements(inner):
            for raw in statement.words:
                words += self._fields(raw)
        match words:
            case ["pwd"]:
                return str(Path.cwd())
            case ["basename", path]:
                return Path(path).name
            case ["date", form] if form.startswith("+"):
                return time.strftime(form[1:])
        raise _Unknown(f"$({inner}) is not run here (line {self._line})")


def _is_assignment(word: str | _Array) -> bool:
    return isinstance(word, _Array) or _ASSIGNMENT.fullmatch(word) is not None


def _negated(state: bool | None) -> bool | None:
    return None if state is None else not state


def _all(states: Iterable[bool | None]) -> bool | None:
    """Whether all states are true; None if that is not known."""
    listed = list(states)
    if False in listed:
        return False
    return None if None in listed else True


# ---- launchers ----------------------------------------------------------------------------------


def launched(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Find the program that a command line starts.

    Args:
        words: the command line, such as `torchrun --nproc_per_node 8 -m MODULE key=value`.

    Returns:
        The program, as a module or a script, and its arguments. The processes that torchrun starts
        precede these, as `trainer.nnodes` and `trainer.n_gpus_per_node`. None: no program.
    """
    sizes: list[str] = []
    for number, word in enumerate(words):
        option, _, value = word.partition("=")
        following = words[number + 1] if number + 1 < len(words) else ""
        option = option.lstrip("-").replace("-", "_")
        size = value or following
        if option in _PROCESS_OPTIONS and size.isdigit():
            sizes.append(f"{_PROCESS_OPTIONS[option]}={size}")
        elif word == "-m" and not following.startswith("torch.distributed"):
            return following, [*sizes, *words[number + 2 :]]
        elif word.endswith(".py") and not word.startswith("-"):
            return word, [*sizes, *words[number + 1 :]]
    return None
