# SPDX-License-Identifier: Apache-2.0
"""Standard streams that fail: pipes, a full device, a terminal that is gone, closed descriptors."""

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quadriga import streams
from quadriga.observe.stopping import stop_on_sigterm, stop_requested
from quadriga.streams import LOG, LOG_VARIABLE, Output, log_to, lost_output, raise_failures, relay
from tests.limits import SOON_S


def without_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def without_terminal() -> int:
    master, terminal = os.openpty()
    os.close(master)
    return terminal


def full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.fixture
def stdout(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., io.TextIOWrapper]]:
    """`stdout(fd, encoding)`: the standard output of a command that writes to this descriptor."""
    monkeypatch.setattr(streams, "_outputs", {})
    monkeypatch.setattr(Output, "log", None)
    monkeypatch.setenv(LOG_VARIABLE, "")
    monkeypatch.delenv(LOG_VARIABLE)
    opened = []

    def install(fd: int, encoding: str = "utf-8") -> io.TextIOWrapper:
        opened.append(fd)
        with (
            open(fd, "w", encoding=encoding, closefd=False) as replaced,
            monkeypatch.context() as patch,
        ):
            patch.setattr(sys, "stdout", replaced)
            # It has no descriptor, and stays as it is.
            patch.setattr(sys, "stderr", io.StringIO())
            streams.install()
            return sys.stdout

    yield install
    for fd in opened:
        os.close(fd)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (without_reader, "Broken pipe"),
        (full, "No space left on device"),
        (without_terminal, "Input/output error"),
    ],
    ids=["pipe", "disk", "terminal"],
)
def test_a_stream_that_fails_goes_on_in_the_log(
    stdout, tmp_path: Path, broken: Callable[[], int], why: str
) -> None:
    """With what was printed before the folder was known, and with what others write to the descriptor."""
    stream = stdout(broken())
    print("before", file=stream)
    log_to(tmp_path / "run")
    print("after", file=stream)
    subprocess.run(["echo", "of a child"], stdout=stream, check=True)
    first, *lines = (tmp_path / "run" / LOG).read_text(encoding="utf-8").splitlines()
    assert why in first
    assert first[:4].isdecimal()
    assert lines == ["before", "after", "of a child"]
    assert lost_output() is None
    assert not stream.isatty()


def test_nothing_is_lost_where_the_log_fails_for_a_while(stdout, tmp_path: Path) -> None:
    stream = stdout(without_reader())
    (tmp_path / "run").write_text("no folder", encoding="utf-8")
    log_to(tmp_path / "run")
    print("held", file=stream)
    (tmp_path / "run").unlink()
    print("after", file=stream)
    assert (tmp_path / "run" / LOG).read_text(encoding="utf-8").splitlines()[1:] == [
        "held",
        "after",
    ]


def test_a_command_without_a_log_ends_at_its_first_failure(stdout) -> None:
    stream = stdout(without_reader())
    raise_failures()
    # A report of a long wait comes from a thread, and does not end what the main thread does.
    thread = threading.Thread(target=print, args=("waiting 4 s",), kwargs={"file": stream})
    thread.start()
    thread.join()
    with pytest.raises(BrokenPipeError) as caught:
        print("read by nobody", file=stream)
    assert lost_output() is caught.value
    # The interpreter flushes once more at its end.
    print("more", file=stream)


def test_what_an_encoding_lacks_is_escaped(stdout, tmp_path: Path) -> None:
    """In the log nothing is lacking, and it is UTF-8 whatever the terminal took."""
    reader, writer = os.pipe()
    stream = stdout(writer, "latin-1")
    print("é 漢 \udce9 ━━", file=stream)
    assert os.read(reader, 100) == b"\xe9 \\u6f22 \\udce9 --\n"
    os.close(reader)
    log_to(tmp_path)
    print("é", file=stream)
    assert (tmp_path / LOG).read_text(encoding="utf-8").splitlines()[1:] == ["é"]


def test_a_full_pipe_that_does_not_block_is_waited_for(stdout) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    stream = stdout(writer)
    text = "x" * 1_000_000
    thread = threading.Thread(target=print, args=(text,), kwargs={"file": stream}, daemon=True)
    thread.start()
    with open(reader, "rb") as pipe:
        assert pipe.read(len(text) + 1) == f"{text}\n".encode()
    thread.join(SOON_S)


def test_processes_of_a_command_use_its_log(stdout, tmp_path: Path) -> None:
    stdout(os.open(os.devnull, os.O_WRONLY))
    log_to(tmp_path)
    program = "from quadriga import streams; streams.install(); print('of a worker')"
    broken = without_reader()
    subprocess.run([sys.executable, "-c", program], stdout=broken, check=True, timeout=SOON_S)
    os.close(broken)
    assert (tmp_path / LOG).read_text(encoding="utf-8").splitlines()[1:] == ["of a worker"]


CLOSED = """
import logging, sys, warnings
from quadriga import streams
streams.install()
with open("data", "w", encoding="utf-8") as file:
    print("printed")
    warnings.warn("warned")
    logging.warning("logged")
    streams.write_error("from a handler\\n")
    sys.stdout.buffer.write(b"bytes")
from pathlib import Path
streams.log_to(Path("run"))
"""


def test_closed_streams_are_no_other_files(tmp_path: Path) -> None:
    """The file that is opened next does not get their numbers; logging and warnings go to the log as well."""
    words = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, CLOSED]
    subprocess.run(words, cwd=tmp_path, check=True, timeout=SOON_S)
    text = (tmp_path / "run" / LOG).read_text(encoding="utf-8")
    assert text.count("Bad file descriptor") == 2
    for said in ("printed", "warned", "logged", "from a handler", "bytes"):
        assert text.count(said) == 1, text
    assert (tmp_path / "data").read_bytes() == b""


def test_a_signal_is_heeded_where_its_notice_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a program that keeps its own streams: nothing is raised in the midst of a step."""
    with open("/dev/full", "w", encoding="utf-8") as disk:
        for broken in (disk, None):
            monkeypatch.setattr(sys, "__stderr__", broken)
            with stop_on_sigterm():
                signal.raise_signal(signal.SIGTERM)
                assert stop_requested.is_set()


def test_users_prints_never_fail() -> None:
    """Whatever the stream of the program that trains is."""
    ascii_stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    assert relay("é", ascii_stream, flush=True)
    assert ascii_stream.buffer.getvalue() == b"\\xe9"
    closed = io.StringIO()
    closed.close()
    assert not relay("x", closed)
    assert not relay("x", None)
    with (
        open("/dev/full", "wb", buffering=0) as disk,
        io.TextIOWrapper(disk, "utf-8", write_through=True) as text,
    ):
        assert not relay("x", text)
