# SPDX-License-Identifier: Apache-2.0
"""Which lines of the package are for accelerators, and which of them were executed.

A line counts if its code, comments and docstrings aside, names cuda, nccl, an accelerator, a stream or an event of a
device, pinned memory or the index of a device, or asks whether a device is the CPU. It was executed if Python reported
a line of the statement it is in.
Only functions that have such lines are traced, so tests stay about as fast as without.
"""

import ast
import io
import json
import os
import re
import sys
import threading
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = Path(__file__).parents[2] / "quadriga"
LINES = "QUADRIGA_REHEARSAL_LINES"
"""The variable that names the folder into which each process writes what it executed."""
NAMED = re.compile(
    r"cuda|nccl|accelerator\.|empty_cache|set_device|device_count|current_device|device\.index|\.type [!=]= \"cpu\""
    r"|current_stream|wait_stream|record_stream|wait_event|\bStream\b|\._stream\.synchronize|pin_memory|pinned|non_blocking"
)
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
}


def statements(text: str) -> dict[int, range]:
    """The lines of each statement that names an accelerator, or of its head if it has a body, by its first line."""
    tree = ast.parse(text)
    named = {
        number
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _LAYOUT and not token.string.startswith(('"""', 'r"""'))
        for number in [token.start[0]]
        if NAMED.search(token.line.partition("  # ")[0]) and not token.line.lstrip().startswith("#")
    }
    found: dict[int, range] = {}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.stmt, ast.excepthandler)) or isinstance(
            node, (ast.Import, ast.ImportFrom)
        ):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        body = getattr(node, "body", None)
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
        last = body[0].lineno - 1 if body and body[0].lineno > first else node.end_lineno or first
        lines = range(first, max(first, last) + 1)
        if named & set(lines):
            found[first] = lines
    return found


class LineCoverage:
    """The statements of the package that name an accelerator, and those of them that were executed."""

    def __init__(self) -> None:
        self.wanted: dict[str, dict[int, range]] = {}
        self.seen: dict[str, set[int]] = {}
        for file in sorted(PACKAGE.rglob("*.py")):
            if NAMED.search(text := file.read_text(encoding="utf-8")) and (
                found := statements(text)
            ):
                self.wanted[str(file)] = found
                self.seen[str(file)] = set()
        self._of_code: dict[CodeType, frozenset[int]] = {}

    def start(self) -> None:
        """Trace this thread, and those that start from here on."""
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def stop(self) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if (lines := self._of_code.get(code)) is None:
            wanted = self.wanted.get(code.co_filename, {})
            own = {number for *_, number in code.co_lines() if number is not None}
            lines = frozenset(
                number for first in wanted.values() for number in first if number in own
            )
            self._of_code[code] = lines
        if not lines or lines <= self.seen[code.co_filename]:
            return None
        self.seen[code.co_filename] |= {frame.f_lineno} & lines
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.seen[frame.f_code.co_filename].add(frame.f_lineno)
        return self._step

    def write(self, folder: Path) -> None:
        """What this process executed, for another one to read."""
        (folder / f"{os.getpid()}.json").write_text(
            json.dumps({file: sorted(one) for file, one in self.seen.items()})
        )

    def read(self, folder: Path) -> None:
        """What other processes executed."""
        for file in folder.glob("*.json"):
            for name, numbers in json.loads(file.read_text()).items():
                self.seen[name] |= set(numbers)

    def missing(self) -> list[tuple[str, int, str]]:
        """File, number and text of each statement that was not executed."""
        return [
            (
                str(Path(file).relative_to(PACKAGE)),
                first,
                Path(file).read_text().splitlines()[first - 1].strip(),
            )
            for file, found in self.wanted.items()
            for first, lines in sorted(found.items())
            if not self.seen[file] & set(lines)
        ]

    def share(self) -> float:
        """Of the statements that were executed."""
        total = sum(map(len, self.wanted.values()))
        return 1 - len(self.missing()) / total

    def unexplained(self, reasons: Mapping[tuple[str, str], str]) -> list[tuple[str, int, str]]:
        """Statements that were not executed and have no reason."""
        return [one for one in self.missing() if _reason(one, reasons) is None]

    def report(self, reasons: Mapping[tuple[str, str], str]) -> Iterable[str]:
        """For people to read."""
        total, missing = sum(map(len, self.wanted.values())), self.missing()
        yield f"{total - len(missing)} of {total} statements executed ({self.share():.1%}); the rest:"
        for file, number, text in missing:
            yield f"  {file}:{number}  {text}"
            yield f"      {_reason((file, number, text), reasons) or 'NO REASON'}"


def _reason(missing: tuple[str, int, str], reasons: Mapping[tuple[str, str], str]) -> str | None:
    file, _, text = missing
    return next(
        (reason for (of_file, part), reason in reasons.items() if of_file == file and part in text),
        None,
    )
