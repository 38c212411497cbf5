# SPDX-License-Identifier: Apache-2.0
"""Standard output and standard error whose failures cannot end a run.

    print, rich, logging, warnings  ->  sys.stdout  ->  Output  ->  descriptor 1
                                        sys.stderr  ->  Output  ->  descriptor 2

Commands, graders and workers of a run install these streams; `quadriga.api` leaves the caller's as
they are. Characters that an encoding lacks are escaped. If a write fails (the reader of a pipe has
ended, the terminal is gone, the disk is full, the descriptor is closed), the descriptor itself is
redirected to `console.log` in the folder that `log_to` sets, so that libraries and processes that
are started later also write there. Output that fails before the folder is known is held until then.
"""

import codecs
import errno
import io
import os
import re
import select
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, TextIO

LOG = "console.log"
LOG_VARIABLE = "QUADRIGA_CONSOLE_LOG"
"""Environment variable that tells processes which a command starts where the log is."""

HELD_BYTES = 1 << 20
"""Largest number of bytes of failed output that are held until the folder is known."""

ESCAPES = "quadriga_escapes"
"""Name of the error handler for characters that an encoding lacks.

Bars of a chart become `-`, other characters are escaped as by `backslashreplace`."""

_BOXES_AND_BLOCKS = re.compile("[\u2500-\u259f]")
_TITLES = {"stdout": "standard output", "stderr": "standard error"}
_outputs: dict[str, "Output"] = {}


def _replace_lacking_characters(error: UnicodeError) -> tuple[str | bytes, int]:
    """Error handler for `codecs`: replace the characters that an encoding lacks.

    Returns:
        The replacement, and the position at which encoding continues.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = _BOXES_AND_BLOCKS.sub("-", error.object[error.start : error.end])
    return lacking.encode("ascii", "backslashreplace").decode(), error.end


codecs.register_error(ESCAPES, _replace_lacking_characters)


class Output(io.RawIOBase):
    """The descriptor of a standard stream, which is redirected to the log once a write fails.

    Args:
        fd: descriptor to write to.
        name: name of the stream in `sys`.
        encoding: encoding of the bytes that are written; the log is UTF-8.
        failure: why the descriptor cannot be written; None if it has not failed.

    Attributes:
        log: the log of all outputs; None until its folder is known.
        raises_failure: whether the next failure is raised instead of redirected, see
            `raise_failures`.
        is_logged: whether the descriptor is redirected.
        replaced: the stream that was in `sys` before.
    """

    log: ClassVar[Path | None] = None

    def __init__(self, fd: int, name: str, encoding: str, failure: OSError | None) -> None:
        self.name = f"<{name}>"
        self.encoding = encoding
        self.failure = failure
        self.raises_failure = False
        self.is_logged = False
        # Kept, because the descriptor would be closed with it.
        self.replaced: TextIO | None = None
        self._fd = fd
        self._title = _TITLES[name]
        self._is_reported = False  # whether the other output was told about the failure
        self._held = bytearray()  # output before the folder of the log is known
        self._decoder = codecs.getincrementaldecoder(encoding)(errors="replace")

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write all of `data`, to the descriptor or to the log, and return its size.

        Raises:
            OSError: the descriptor has failed, and `raises_failure` is set. It is raised only once,
                and only in the main thread.
        """
        remaining = memoryview(data)
        size = len(remaining)
        while remaining and self.failure is None:
            try:
                remaining = remaining[os.write(self._fd, remaining) :]
            except BlockingIOError:
                # Another process has made the pipe non-blocking, and it is full.
                select.select([], [self._fd], [])
            except OSError as error:
                self.failure = error
        if remaining and self.failure is not None:
            # In the main thread the error ends the command. In another one, such as one that
            # reports a wait, it would only end that thread.
            if self.raises_failure and threading.current_thread() is threading.main_thread():
                self.raises_failure = False
                raise self.failure
            self._write_to_log(bytes(remaining))
        return size

    def _write_to_log(self, data: bytes) -> None:
        """Write to the log. As long as its folder is unknown, hold up to `HELD_BYTES` in memory.

        Data beyond `HELD_BYTES` are lost.
        """
        self.use_log()
        if not self.is_logged:
            self._held += data[: HELD_BYTES - len(self._held)]
            return
        text = self._decoder.decode(data)
        # The log may fail as well, such as on a full disk. That must not end the run.
        with suppress(OSError):
            os.write(self._fd, text.encode())

    def use_log(self) -> None:
        """Redirect the descriptor to the log if it has failed and the log's folder is known.

        Then writes the held output to the log, with `_write_to_log`. That calls this method again,
        which does nothing since `is_logged` is set.
        """
        if self.failure is None or self.is_logged or self.log is None:
            return
        reason = f"{self._title} cannot be written ({self.failure.strerror})"
        # Say once, on the other stream, where this output goes on.
        if not self._is_reported:
            self._is_reported = True
            notice = f"{reason}; it goes on in {self.log}\n"
            for other in _outputs.values():
                if other.failure is None:
                    other.write(notice.encode(other.encoding, "backslashreplace"))
        now = datetime.now(UTC).isoformat(" ", "seconds")
        header = f"{now}: {reason}. The output of process {os.getpid()} goes on here.\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        # From here on the descriptor itself is the log, also for programs that inherit it. If this
        # fails, the next write tries again.
        with suppress(OSError):
            self.log.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.log, flags, 0o644)
            try:
                os.write(fd, header.encode(errors="backslashreplace"))
                os.dup2(fd, self._fd)
            finally:
                os.close(fd)
            self.is_logged = True
        if not self.is_logged:
            return
        held = bytes(self._held)
        self._held.clear()
        self._write_to_log(held)


def install(encoding: str | None = None) -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that raise neither OSError nor UnicodeError.

    A stream without a descriptor, as in a notebook, is not replaced.

    Args:
        encoding: encoding of the output. None: that of the replaced streams.
    """
    log = os.environ.get(LOG_VARIABLE)
    if log is not None:
        Output.log = Path(log)
    opened = _open_closed_descriptors()
    for standard_fd, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        failure = None  # why the stream cannot be written from the beginning
        if stream is None:
            # The descriptor was closed when Python started.
            failure = OSError(errno.EBADF, os.strerror(errno.EBADF))
            fd = standard_fd
            if fd not in opened:
                # Its number now belongs to another file, which must not receive the output.
                fd = os.open(os.devnull, os.O_WRONLY)
        else:
            try:
                fd = stream.fileno()
            except (AttributeError, OSError):
                # The stream of a notebook or a test has no descriptor.
                continue
        encoding_name = encoding or getattr(stream, "encoding", None) or "utf-8"
        output = Output(fd, name, encoding_name, failure)
        text = io.TextIOWrapper(
            output,  # type: ignore[arg-type]
            encoding=output.encoding,
            errors=ESCAPES,
            newline="\n",
            line_buffering=True,
            write_through=getattr(stream, "write_through", False),
        )
        output.replaced = stream
        _outputs[name] = output
        setattr(sys, name, text)


def _open_closed_descriptors() -> list[int]:
    """Open closed descriptors among 0, 1 and 2 on /dev/null, and return their numbers.

    Otherwise the next file that is opened would get such a number, and receive the output.
    """
    opened = []
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            new_fd = os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number
            os.set_inheritable(new_fd, True)
            opened.append(fd)
    return opened


def log_to(folder: Path) -> None:
    """Set the folder of `console.log`, to which failed output is redirected.

    Has no effect unless `install` was called, because the streams are then the caller's.
    """
    if not _outputs:
        return
    Output.log = folder.absolute() / LOG
    os.environ[LOG_VARIABLE] = str(Output.log)
    for output in list(_outputs.values()):
        output.use_log()


def raise_failures() -> None:
    """Make failures of standard output raise, for commands whose only result is their output."""
    if "stdout" in _outputs:
        _outputs["stdout"].raises_failure = True


def lost_output() -> OSError | None:
    """Error by which standard output was lost. None: all of it was written, if only to the log."""
    output = _outputs.get("stdout")
    return None if output is None or output.is_logged else output.failure


def write_error(text: str) -> None:
    """Write to standard error without buffers, so that a signal handler may call this during a print."""
    if "stderr" in _outputs:
        output = _outputs["stderr"]
        output.write(text.encode(output.encoding, "backslashreplace"))
    elif sys.__stderr__ is not None:
        # A caller's stream may be closed, or have no descriptor.
        with suppress(OSError, ValueError):
            os.write(sys.__stderr__.fileno(), text.encode(errors="backslashreplace"))


def relay(text: str, stream: TextIO | None, *, flush: bool = False) -> bool:
    """Write output of users' code to a stream that may be a caller's.

    Args:
        text: the output.
        stream: the stream; None if the process has none.
        flush: whether to flush the stream.

    Returns:
        Whether the text was written.
    """
    if stream is None:
        return False
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        if flush:
            stream.flush()
    except (OSError, ValueError):  # ValueError: it is closed
        return False
    return True
