# SPDX-License-Identifier: Apache-2.0
"""Find the commands of a shell script, with their variables expanded. Nothing is run.

    text ──_split_statements──> statements ──_Shell.read, one by one──> commands with their words

It understands what scripts that start a training usually contain: variables and their defaults
(`${X:-y}`), arrays, arithmetic, quotes, continued lines, `if [ a = b ]`, `case`, `export`, `$(pwd)`,
`$(basename x)` and `$(date +x)`. Variables that the script does not set are read from the
environment. A variable whose value is unknown stores the reason (`_Unknown`), which is reported only
if a command needs the value. Therefore a script may contain loops, functions and other programs.
"""

import ast
import operator
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from quadriga.errors import ConfigError

LAUNCHERS = ("torchrun", "python", "python3")
_PROCESS_OPTIONS = {"nnodes": "trainer.nnodes", "nproc_per_node": "trainer.n_gpus_per_node"}

_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=(.*)", re.DOTALL)
_ARRAY_ASSIGNMENT = re.compile(rf"{_NAME}\+?=")
_PARAMETER = re.compile(rf"({_NAME}|[@*0-9])(\[[@*]\])?(?:(:?)([-=+?])(.*))?", re.DOTALL)
_PLAIN_PARAMETER = re.compile(rf"{_NAME}|[@*0-9#?]")
_BLANK = re.compile(r"(?:[ \t\r]|\\\n|(?<![^\s;(])#.*)+")
_SEPARATOR = re.compile(r"&&|\|\||;;|[\n;&|()]")
_REDIRECTION = re.compile(r"(&>>?|\d*(?:<<<|<<-?|>>|>\||[<>])(?:&[\d-]+)?)[ \t]*")

# Expanded values contain these marks, which are characters that no script contains.
_GAP = "\0"  # between words, if a word of the script expands to several
_QUOTED = "\1"  # at the start of quoted text, so that a word is kept even if the text is empty

_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
Trilean: TypeAlias = bool | None
"""A condition; None: not known."""
UNDECIDED = "it is in a loop, a function or under a condition that is not decided here"
"""Problem of a command that a shell may or may not run."""
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
        words: its words, expanded. Words that cannot be expanded are left out.
        problems: why words cannot be expanded, why it is not known whether the command is run, or
            why it is not reached.
        notices: notices about variables before the command whose values are the environment's.
    """

    line: int
    words: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def find_commands(text: str, environment: Mapping[str, str]) -> list[Command]:
    """Find the commands that a shell would run.

    A command whose condition cannot be decided is included, with the problem `UNDECIDED`.

    Args:
        text: the script.
        environment: values of variables for which the script has no value, or an unknown one.

    Raises:
        ConfigError: a quote or a bracket is not closed.
    """
    shell = _Shell(environment)
    commands = []
    for statement in _split_statements(text):
        command = shell.read(statement)
        if command is not None:
            commands.append(command)
    return commands


# ---- splitting a script -------------------------------------------------------------------------


@dataclass
class _Array:
    """An assignment of an array, `NAME=(...)` or `NAME+=(...)`."""

    prefix: str  # "NAME=" or "NAME+="
    elements: list[Any]  # words between the brackets


@dataclass
class _Statement:
    """A piece of the script between two separators: a command, a keyword, or a pattern of `case`.

    Attributes:
        before: the separator before it, such as "&&".
        line: line in which it begins.
        words: its words, unexpanded: texts, or `_Array`s.
    """

    before: str = "\n"
    line: int = 0
    words: list[Any] = field(default_factory=list)


def _piece_end(text: str, start: int) -> int:
    """Find the position after a piece of a word: a quoted part, an expansion, or a character.

    A backslash and the character after it are one piece.

    Raises:
        IndexError, ValueError: a quote or a bracket is not closed.
    """
    sign = text[start]
    if sign in "'`":
        return text.index(sign, start + 1) + 1
    opening = sign if sign == '"' else text[start : start + 2]
    closing = {'"': '"', "${": "}", "$(": ")"}.get(opening)
    if closing is None:
        return start + (2 if sign == "\\" else 1)
    return _bracket_end(text, start + len(opening), closing)


def _bracket_end(text: str, start: int, closing: str) -> int:
    """Find the position after the closing quote or bracket.

    Args:
        text: the script.
        start: position after the opening character.
        closing: the closing character.

    Raises:
        IndexError, ValueError: a quote or a bracket is not closed.
    """
    # Pieces may be nested, so that the closing character is searched for piece by piece.
    position = start
    depth = 1  # closing characters that are still missing
    while depth:
        if text[position] == closing:
            depth -= 1
            position += 1
        elif closing == ")" and text[position] == "(":
            depth += 1
            position += 1
        elif closing == '"' and text[position] == "'":
            # Inside double quotes, a single quote is an ordinary character.
            position += 1
        else:
            position = _piece_end(text, position)
    return position


def _split_statements(text: str) -> Iterator[_Statement]:
    """Split a script into statements. Redirections and the text of here-documents are left out."""
    statement = _Statement()
    here_end = ""  # line that ends a here-document, after its operator `<<` was read
    position = 0
    while position < len(text):
        blank = _BLANK.match(text, position)
        redirection = _REDIRECTION.match(text, position)
        separator = _SEPARATOR.match(text, position)
        if blank:
            position = blank.end()
        elif redirection:
            start = position = redirection.end()
            # No file follows `2>&1`, but one follows `&>`, whose first character is the sign, too.
            if "&" not in redirection[1][1:]:
                _, position = _read_word(text, start)
            if "<<" in redirection[1] and "<<<" not in redirection[1]:
                here_end = text[start:position].strip("'\"")
        elif separator:
            if statement.words:
                yield statement
            # After `)` or `&&` there may be line breaks, which do not replace this separator.
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
    """Read a word, up to the first blank or operator outside of quotes and expansions.

    Returns:
        The word as text, or an assignment as `_Array`; and the position after it.

    Raises:
        ConfigError: a quote or a bracket is not closed.
    """
    end = start
    try:
        while end < len(text) and text[end] not in " \t\r\n;&|<>()":
            end = _piece_end(text, end)
        word = text[start:end]
        if text[end : end + 1] != "(" or not _ARRAY_ASSIGNMENT.fullmatch(word):
            return word, end
        array_end = _bracket_end(text, end + 1, ")")
    except (IndexError, ValueError) as error:
        where = f"line {text.count(chr(10), 0, start) + 1}"
        got = "a quote or bracket without its end"
        raise ConfigError(where, got=got, expected="a closing one") from error
    # The elements may be on several lines, between comments: they are split like commands.
    elements = []
    for part in _split_statements(text[end + 1 : array_end - 1]):
        elements += part.words
    return _Array(word, elements), array_end


# ---- following a script -------------------------------------------------------------------------


@dataclass
class _ShellBlock:
    """A block that has begun and not ended, such as `if` or `for`.

    Attributes:
        is_run: whether the commands of the current branch are run. None: not known.
        is_done: whether this or an earlier branch is run, so that no later one is. None: not known.
        subject: the word between `case` and `in`, as a list of at most one; empty if the block is not
            a `case`.
        patterns: patterns of the next branch of `case` that were read so far. None: its branch has
            begun, or the block is not a `case`.
    """

    is_run: Trilean
    is_done: Trilean
    subject: Sequence[Any] = ()
    patterns: list[Any] | None = None

    def begin_branch(self, is_chosen: Trilean) -> None:
        """Begin the next branch, which is run if no earlier one is.

        Args:
            is_chosen: whether the branch's own condition is true. None: not known.
        """
        self.is_run = _all_true(is_chosen, _not(self.is_done))
        # By De Morgan's law: done if one of the two is true, else unknown if one is unknown.
        self.is_done = _not(_all_true(_not(self.is_done), _not(is_chosen)))


class _Shell:
    """State of the shell after each statement: variables, open blocks and exit status.

    Args:
        environment: environment variables.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._variables: dict[str, str | _Unknown] = dict(environment)
        self._notices: list[str] = []
        self._blocks: list[_ShellBlock] = []
        self._status: Trilean = True  # of the last command; None: not known
        self._line = 0
        self._end = ""  # why no later command is run, once the script has ended
        self._is_condition = False  # whether the statement is part of a condition, before `then`

    def read(self, statement: _Statement) -> Command | None:
        """Follow the next statement of the script: update variables, open blocks and exit status.

        Returns:
            The command that the statement runs, or may run. None: it is not a command, or is
            certainly not run.
        """
        self._line = statement.line
        words = list(statement.words)
        if self._read_pattern(statement) or not self._read_keywords(words) or not words:
            return None
        # None: it depends on a condition or an exit status that is not known.
        is_run = _all_true(*(block.is_run for block in self._blocks))
        if statement.before == "&&":
            is_run = _all_true(is_run, self._status)
        elif statement.before == "||":
            is_run = _all_true(is_run, _not(self._status))
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
            self._status = self._evaluate_condition(words)
            return None
        # Commands are not executed, and assumed to succeed.
        self._status = True
        if words[0] in ("exit", "return") and is_run and not self._end:
            self._end = f"the script ends in line {self._line}, before this command"
        return self._expand_command(words, is_run)

    def _expand_command(self, words: list[Any], is_run: Trilean) -> Command:
        """Make a command by expanding its words.

        Args:
            words: the words, unexpanded.
            is_run: whether the command is run. None: not known, which is a problem of the command.
        """
        command = Command(self._line, notices=list(self._notices))
        for word in words:
            try:
                command.words += self._expand_to_words(word)
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
                result = self._evaluate_condition(words[1:])
                # An `elif` continues the innermost block.
                if keyword == "if" or not self._blocks:
                    self._blocks.append(_ShellBlock(False, False))
                self._blocks[-1].begin_branch(result)
                self._is_condition = True
                return False
            if keyword == "else" and self._blocks:
                self._blocks[-1].begin_branch(True)
            elif keyword == "case":
                # `case SUBJECT in PATTERN ...`
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

    def _read_pattern(self, statement: _Statement) -> bool:
        """Collect the patterns before a branch of `case`, and begin the branch after their `)`.

        Returns:
            Whether the statement is a list of patterns instead of a command.
        """
        block = self._blocks[-1] if self._blocks else _ShellBlock(None, None)
        if statement.before == ";;":
            if block.patterns:
                # The branch of these patterns is empty.
                block.begin_branch(self._matches_case(block))
            block.patterns = []
        # None: the statement is within a branch, or the block is not a `case`.
        if block.patterns is None or statement.words[0] == "esac":
            return False
        if statement.before == ")":
            block.begin_branch(self._matches_case(block))
            block.patterns = None
            return False
        block.patterns += statement.words
        return True

    def _matches_case(self, block: _ShellBlock) -> Trilean:
        """Whether the word of a `case` matches one of the collected patterns. None: not known."""
        try:
            patterns = [self._expand_to_text(pattern) for pattern in block.patterns or ()]
            if "*" in patterns:
                return True
            subject = "".join(self._expand_to_text(word) for word in block.subject)
        except _Unknown:
            return None
        return any(fnmatchcase(subject, pattern) for pattern in patterns)

    def _evaluate_condition(self, words: list[Any]) -> Trilean:
        """Whether a condition in brackets is true. None: it cannot be decided."""
        try:
            operands = []
            for word in words:
                if word not in ("[", "]", "[[", "]]", "test", ";"):
                    operands.append(self._expand_to_text(word))
            match operands:
                case [first, sign, second] if sign in _COMPARISONS:
                    # `[[ a = b* ]]` compares with a pattern, which is not decided.
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

    def _assign(self, word: str | _Array, is_run: Trilean) -> None:
        """Assign a variable.

        If its value cannot be determined, the variable has the environment's value, or else the
        reason.

        Args:
            word: the assignment, `NAME=VALUE` or `NAME+=VALUE`.
            is_run: whether it is run. None: not known.
        """
        prefix = word.prefix if isinstance(word, _Array) else word
        name, appends, text = _ASSIGNMENT.fullmatch(prefix).groups()  # type: ignore[union-attr]
        try:
            if is_run is None:
                raise _Unknown(
                    f"{name} is set in line {self._line}, under a condition that is not decided here"
                )
            value = self._expand_to_text(text)
            gap = ""
            if isinstance(word, _Array):
                gap = _GAP
                fields = chain.from_iterable(map(self._expand_to_words, word.elements))
                value = gap.join(_QUOTED + part for part in fields)
            if appends:
                value = self._variable_value(name) + gap + value
            self._variables[name] = value
        except _Unknown as unknown:
            self._variables[name] = self._environment.get(name, unknown)
            if name in self._environment:
                self._notices.append(f"{name} (line {self._line}) is the environment's.")

    # ---- values of words ----

    def _variable_value(self, name: str) -> str:
        """Value of a variable. `$@` and `$*` are empty, since the script has no arguments.

        Raises:
            _Unknown: the variable is not set, or its value cannot be determined.
        """
        value = "" if name in ("@", "*") else self._variables.get(name)
        if value is None:
            raise _Unknown(f"{name} is not set (line {self._line})")
        if isinstance(value, _Unknown):
            raise value
        return value

    def _expand_to_text(self, raw: str) -> str:
        """Expand a word to a single text, as in an assignment."""
        return self._expand(raw).replace(_GAP, " ").replace(_QUOTED, "")

    def _expand_to_words(self, raw: str) -> list[str]:
        """Expand a word to any number of words, as in a command."""
        parts = self._expand(raw, splits=True).split(_GAP)
        return [part.replace(_QUOTED, "") for part in parts if part]

    def _expand(self, raw: str | _Array, *, is_quoted: bool = False, splits: bool = False) -> str:
        """Expand the pieces of a word.

        Args:
            raw: the word as it is written.
            is_quoted: whether it is inside double quotes.
            splits: whether blanks in expanded values separate words.

        Returns:
            The value, with the marks `_GAP` and `_QUOTED`.

        Raises:
            _Unknown: a piece cannot be expanded.
        """
        if isinstance(raw, _Array):
            raise _Unknown(f"{raw.prefix}(...) is an argument of a command (line {self._line})")
        values = []
        position = 0
        while position < len(raw):
            start = position
            # Inside double quotes, a single quote is an ordinary character.
            is_plain = is_quoted and raw[start] == "'"
            position = start + 1 if is_plain else _piece_end(raw, start)
            piece = raw[start:position]
            name = _PLAIN_PARAMETER.match(raw, position) if piece == "$" else None
            if name is not None:
                position = name.end()
                value = self._parameter_value(name[0])
            elif piece.startswith("$(("):
                value = self._arithmetic_value(piece[3:-2])
            elif piece.startswith("$("):
                value = self._command_output(piece[2:-1])
            elif piece.startswith("`"):
                value = self._command_output(piece[1:-1])
            elif piece.startswith("${"):
                value = self._parameter_value(piece[2:-1])
            else:
                values.append(self._literal_value(piece, is_quoted))
                continue
            # As in a shell, only the values of expansions are split at blanks.
            values.append(re.sub(r"\s+", _GAP, value) if splits else value)
        return "".join(values)

    def _literal_value(self, piece: str, is_quoted: bool) -> str:
        """Value of a piece that is not an expansion: a quoted part, an escape, or a character."""
        if piece.startswith("\\"):
            # Of a continued line, both the backslash and the line break are removed.
            is_escape = not is_quoted or piece[1:] in '$`"\\\n'
            return piece[1:].strip("\n") if is_escape else piece
        if is_quoted or len(piece) == 1:
            return piece
        if piece.startswith("'"):
            return _QUOTED + piece[1:-1]
        return _QUOTED + self._expand(piece[1:-1], is_quoted=True)

    def _parameter_value(self, inner: str) -> str:
        """Value of `${inner}`. Elements of an array are joined by `_GAP`.

        Raises:
            _Unknown: the value is not known, or `inner` has a form that is not supported.
        """
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            raise _Unknown(f"${{{inner}}} has a form that is not supported (line {self._line})")
        name, all_elements, colon, action, word = match.groups()
        value = self._variables.get(name)
        # With a colon, an empty value counts as missing.
        is_missing = value is None or (colon and value == "")

        # ${NAME+word}, ${NAME-word}, ${NAME=word} and ${NAME?}.
        if action == "+":
            return "" if is_missing else self._expand_to_text(word)
        if is_missing and action in ("-", "="):
            text = self._expand_to_text(word)
            if action == "=":
                self._variables[name] = text
            return text
        if is_missing and action == "?":
            raise _Unknown(f"{name} is not set (line {self._line})")

        # A name alone means the first element of an array.
        elements = self._variable_value(name)
        return elements if all_elements or name in ("@", "*") else elements.partition(_GAP)[0]

    def _arithmetic_value(self, inner: str) -> str:
        """Value of `$((inner))`, which may have integers, variables and the `_OPERATORS`.

        Raises:
            _Unknown: it has another form.
        """

        def evaluate(node: ast.expr) -> int:
            """Value of an expression; SyntaxError if it has another form."""
            match node:
                case ast.Constant(int() as value):
                    return value
                case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
                    return _OPERATORS[type(sign)](evaluate(left), evaluate(right))
            raise SyntaxError

        # In arithmetic, variables may be written without `$`: write them as `${NAME}`.
        filled = re.sub(rf"(?<!\$)(?<!\{{)\b{_NAME}\b", r"${\g<0>}", inner)
        try:
            expression = ast.parse(self._expand_to_text(filled).strip(), mode="eval")
            return str(evaluate(expression.body))
        except (SyntaxError, ZeroDivisionError) as error:
            text = f"$(({inner})) has a form that is not supported (line {self._line})"
            raise _Unknown(text) from error

    def _command_output(self, inner: str) -> str:
        """Output of `$(inner)`, for the few commands with which scripts usually make names.

        Raises:
            _Unknown: it is another command.
        """
        words = chain.from_iterable(statement.words for statement in _split_statements(inner))
        match list(chain.from_iterable(map(self._expand_to_words, words))):
            case ["pwd"]:
                return str(Path.cwd())
            case ["basename", path]:
                return Path(path).name
            case ["date", form] if form.startswith("+"):
                return time.strftime(form[1:])
        raise _Unknown(f"$({inner}) is not run here (line {self._line})")


def _is_assignment(word: str | _Array) -> bool:
    """Whether a word is an assignment of a variable."""
    return isinstance(word, _Array) or _ASSIGNMENT.fullmatch(word) is not None


def _not(state: Trilean) -> Trilean:
    """Negate a state that may be unknown."""
    return None if state is None else not state


def _all_true(*states: Trilean) -> Trilean:
    """Whether all states are true. None: that depends on unknown ones."""
    if False in states:
        return False
    return None if None in states else True


# ---- launchers ----------------------------------------------------------------------------------


def find_program(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Find the Python program that a command line starts.

    Args:
        words: the command line, such as `torchrun --nproc_per_node 8 -m MODULE key=value`.

    Returns:
        The program, as a module or a script, and its arguments. Before these, torchrun's numbers of
        processes are added as `trainer.nnodes` and `trainer.n_gpus_per_node`. None: the command
        line starts no Python program.
    """
    sizes = []
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
