# SPDX-License-Identifier: Apache-2.0
"""What a process on the cluster prints appears on the terminal of the command line as if it had been printed there.

    process on the cluster                                     command line
      print, rich, C code, child processes
        -> file descriptors 1 and 2
        -> pipe, or pseudo-terminal where the command         `Screen.show`
           line has a terminal -> reading thread
        -> `CapturedOutput.take`       -- a Ray call -->        -> standard output and error

Nothing is lost and nothing changes its order: the kernel's buffers are in between, and a chunk is forgotten only when
the next call says that it has arrived. Ray's own way, by the log files, would add a prefix to each line and a delay.
"""

import codecs
import fcntl
import io
import os
import pty
import selectors
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

STDOUT, STDERR = 1, 2
# What a pseudo-terminal was given appears at its other end a moment later.
SETTLE_S = 0.05
# A child process that goes on printing is not waited for any longer.
LAST_WORD_S = 1.0
# Ray's page of guesses about a process that died; our own error names its role, its rank and what ended it.
RAY_ON_DEATHS = ("(raylet)", "A worker died or was killed")
_READ_BYTES = 65536
_ERASE_LINE = "\r\x1b[2K"
_SHOW_CURSOR = "\n\x1b[?25h"

Size = tuple[int, int]
"""Columns and lines of a terminal."""


@dataclass(frozen=True)
class Chunk:
    """A piece of output: the stream of the command line that it is for, and the bytes."""

    stream: int
    data: bytes


@dataclass(frozen=True)
class Streams:
    """What standard output and error of the command line are.

    Attributes:
        sizes: stream -> size of the terminal that it is; None: it is none.
        is_one: both are the same file or terminal, so that their order counts.
        encoding: of text.
    """

    sizes: dict[int, Size | None]
    is_one: bool
    encoding: str

    @classmethod
    def here(cls) -> "Streams":
        """Those of this process."""
        sizes = {STDOUT: terminal_size(sys.stdout), STDERR: terminal_size(sys.stderr)}
        return cls(sizes, _is_same(sys.stdout, sys.stderr), sys.stdout.encoding or "utf-8")


def terminal_size(stream: TextIO) -> Size | None:
    """Columns and lines; None if the stream is no terminal."""
    if not stream.isatty():
        return None
    columns, lines = os.get_terminal_size(stream.fileno())
    return columns, lines


def _is_same(one: TextIO, other: TextIO) -> bool:
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, io.UnsupportedOperation):
        # A stream without a file behind it, as in a notebook.
        return False


class CapturedOutput:
    """All that this process and its children write from now on.

    Args:
        streams: of the command line. Where it has a terminal, this process has one too, of the same size, so that
            programs which look for one find it.
    """

    def __init__(self, streams: Streams) -> None:
        self._changed = threading.Condition()
        self._chunks: list[Chunk] = []
        self._num_gone = 0
        self._is_ended = False
        self._sizes = dict(streams.sizes)
        self._terminals: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        sys.stdout.flush()
        sys.stderr.flush()
        for stream in (STDOUT,) if streams.is_one else (STDOUT, STDERR):
            self._redirect(stream, streams.sizes[stream])
        if streams.is_one:
            os.dup2(STDOUT, STDERR)
        sys.stdout = open(STDOUT, "w", buffering=1, encoding=streams.encoding, closefd=False)  # noqa: SIM115
        sys.stderr = open(  # noqa: SIM115
            STDERR, "w", buffering=1, encoding=streams.encoding, errors="backslashreplace", closefd=False
        )
        threading.Thread(target=self._read, name="output", daemon=True).start()

    def _redirect(self, stream: int, size: Size | None) -> None:
        if size is None:
            reader, writer = os.pipe()
        else:
            reader, writer = pty.openpty()
            attributes = termios.tcgetattr(writer)
            # The terminal at the other end turns a line feed into a new line; once is enough.
            attributes[1] &= ~termios.OPOST
            termios.tcsetattr(writer, termios.TCSANOW, attributes)
            self._terminals[stream] = reader
            _resize(reader, size)
        os.dup2(writer, stream)
        os.close(writer)
        self._selector.register(reader, selectors.EVENT_READ, stream)

    def _read(self) -> None:
        while True:
            for key, _ in self._selector.select():
                data = os.read(key.fd, _READ_BYTES)
                with self._changed:
                    self._chunks.append(Chunk(key.data, data))
                    self._changed.notify_all()

    def take(self, num_arrived: int, wait_s: float) -> tuple[list[Chunk], bool]:
        """The chunks from `num_arrived` on, counted since the beginning, and whether they are the last.

        Args:
            num_arrived: chunks that have arrived, and need not be kept.
            wait_s: how long to wait for one if there is none.
        """
        with self._changed:
            del self._chunks[: num_arrived - self._num_gone]
            self._num_gone = max(self._num_gone, num_arrived)
            self._changed.wait_for(lambda: self._chunks or self._is_ended, wait_s)
            return list(self._chunks), self._is_ended

    def end(self) -> None:
        """What was written so far is the last."""
        sys.stdout.flush()
        sys.stderr.flush()
        deadline = time.monotonic() + LAST_WORD_S
        with self._changed:
            while self._changed.wait(SETTLE_S) and time.monotonic() < deadline:
                continue
            self._is_ended = True
            self._changed.notify_all()

    def resize(self, sizes: dict[int, Size | None]) -> None:
        """Follow the terminals of the command line."""
        for stream, reader in self._terminals.items():
            size = sizes.get(stream)
            if size is not None and size != self._sizes[stream]:
                self._sizes[stream] = size
                _resize(reader, size)


def _resize(terminal: int, size: Size) -> None:
    columns, lines = size
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


class Screen:
    """Standard output and error of the command line, while a process on the cluster prints on them.

    On a terminal, what others print meanwhile, such as Ray for the workers, stands in lines of its own above a progress
    bar of that process.
    """

    def __init__(self) -> None:
        self._files = {STDOUT: sys.stdout, STDERR: sys.stderr}
        encoding = sys.stdout.encoding or "utf-8"
        self._decoders = {stream: codecs.getincrementaldecoder(encoding)(errors="replace") for stream in self._files}
        self.lock = threading.Lock()
        self.has_open_line = False

    def show(self, chunks: Sequence[Chunk]) -> None:
        """Print chunks as they are."""
        with self.lock:
            for chunk in chunks:
                text = self._decoders[chunk.stream].decode(chunk.data)
                self._files[chunk.stream].write(text)
                self._files[chunk.stream].flush()
                self.has_open_line = not chunk.data.endswith(b"\n")

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Inside, what this process prints stands above the open line."""
        sys.stdout, sys.stderr = (_AboveOpenLine(self, file) for file in self._files.values())
        try:
            yield
        finally:
            sys.stdout, sys.stderr = self._files.values()
            if self.has_open_line and self._files[STDOUT].isatty():
                # A progress bar that could not say goodbye: its process was killed.
                self._files[STDOUT].write(_SHOW_CURSOR)


class _AboveOpenLine(io.TextIOBase):
    """Writes whole lines, in the place of a line that is still open; whoever keeps that line prints it again."""

    def __init__(self, screen: Screen, file: TextIO) -> None:
        self._screen, self._file = screen, file
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        lines = [line for line in lines if not all(words in line for words in RAY_ON_DEATHS)]
        if lines:
            with self._screen.lock:
                is_in_the_way = self._screen.has_open_line and self._file.isatty()
                self._screen.has_open_line = False
                self._file.write((_ERASE_LINE if is_in_the_way else "") + "".join(f"{line}\n" for line in lines))
                self._file.flush()
        return len(text)

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def encoding(self) -> str:
        return self._file.encoding
