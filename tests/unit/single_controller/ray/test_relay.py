# SPDX-License-Identifier: Apache-2.0
"""What a process prints arrives whole and in order; here without Ray in between.

A process that takes over its own output has nowhere left to report to: each of these runs is a program of its own,
whose chunks come back in a file.
"""

import os
import pickle
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from quadriga.single_controller.ray.relay import RAY_ON_DEATHS, STDERR, STDOUT, Chunk, Screen, Streams

BEGIN = """
import os, pickle, sys, threading
from quadriga.single_controller.ray.relay import CapturedOutput, Streams
captured = CapturedOutput(Streams({sizes}, {is_one}, "utf-8"))
arrived = []

def follow():
    is_over = False
    while not is_over:
        chunks, is_over = captured.take(len(arrived), 60.0)
        arrived.extend(chunks)

"""
FOLLOWED = """
follower = threading.Thread(target=follow)
follower.start()
{body}
captured.end()
follower.join()
"""
END = """
with open({file!r}, "wb") as file:
    pickle.dump(arrived, file)
"""


def captured(
    tmp_path: Path, body: str, *, sizes: str = "{1: None, 2: None}", is_one: bool = False, is_followed: bool = True
) -> list[Chunk]:
    """What arrives of a program's output; one that is not followed puts it into `arrived` itself."""
    file = tmp_path / "chunks"
    middle = FOLLOWED.format(body=body) if is_followed else body
    program = BEGIN.format(sizes=sizes, is_one=is_one) + middle + END.format(file=str(file))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
    return pickle.loads(file.read_bytes())


def text_of(chunks: list[Chunk], stream: int) -> str:
    return b"".join(chunk.data for chunk in chunks if chunk.stream == stream).decode()


def test_everything_arrives_from_python_c_and_children(tmp_path: Path) -> None:
    body = (
        "for number in range(20000):\n    print(number, 'ü' * 50)\n"
        "os.write(1, b'from below\\n')\n"
        "print('an error', file=sys.stderr)\n"
        "os.system('echo from a child; echo its error >&2')\n"
    )
    chunks = captured(tmp_path, body)
    lines = text_of(chunks, STDOUT).splitlines()
    assert lines == [*(f"{number} {'ü' * 50}" for number in range(20000)), "from below", "from a child"]
    assert text_of(chunks, STDERR) == "an error\nits error\n"


def test_one_file_for_both_keeps_their_order(tmp_path: Path) -> None:
    body = "for number in range(200):\n    print(number, file=(sys.stdout, sys.stderr)[number % 2])\n"
    chunks = captured(tmp_path, body, is_one=True)
    assert text_of(chunks, STDERR) == ""
    assert text_of(chunks, STDOUT).split() == [str(number) for number in range(200)]


def test_a_terminal_at_the_other_end_is_a_terminal_here(tmp_path: Path) -> None:
    body = (
        "print(sys.stdout.isatty(), sys.stderr.isatty(), tuple(os.get_terminal_size(1)))\n"
        "captured.resize({1: (50, 20), 2: (50, 20)})\n"
        "print(tuple(os.get_terminal_size(2)))\n"
    )
    chunks = captured(tmp_path, body, sizes="{1: (91, 31), 2: (91, 31)}", is_one=True)
    # Line feeds stay line feeds: the terminal that shows them makes new lines of them.
    assert text_of(chunks, STDOUT) == "True True (91, 31)\n(50, 20)\n"


def test_chunks_stay_until_they_have_arrived(tmp_path: Path) -> None:
    """An answer that gets lost is asked for again."""
    body = (
        "print('first')\n"
        "one, _ = captured.take(0, 60.0)\n"
        "again, _ = captured.take(0, 60.0)\n"
        "print('second')\n"
        "captured.end()\n"
        "two, is_over = captured.take(len(again), 60.0)\n"
        "assert is_over\n"
        "arrived = [*one, *again, *two]\n"
    )
    assert text_of(captured(tmp_path, body, is_followed=False), STDOUT) == "first\nfirst\nsecond\n"


def test_the_screen_shows_characters_that_were_cut_in_two(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    encoded = "grün\n".encode()
    screen.show([Chunk(STDOUT, encoded[:3]), Chunk(STDERR, b"error\n")])
    screen.show([Chunk(STDOUT, encoded[3:])])
    assert capsys.readouterr() == ("grün\n", "error\n")
    assert not screen.has_open_line


def test_others_print_whole_lines_above_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = pty.openpty()
    with open(terminal, "w", encoding="utf-8", closefd=False) as file:
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(sys, "stderr", file)
        assert Streams.here().is_one
        screen = Screen()
        with screen.sharing():
            screen.show([Chunk(STDOUT, b"step 1/3 ===")])
            print("(actor[0] pid=7)", end=" ")
            print("half a line")
            print(" ".join([*RAY_ON_DEATHS, "while executing a task ..."]))
            print("the next")
        assert sys.stdout is file
    printed = ""
    while "the next\r\n" not in printed:
        printed += os.read(controller, 1000).decode()
    assert printed == "step 1/3 ===\r\x1b[2K(actor[0] pid=7) half a line\r\nthe next\r\n"


def test_streams_of_a_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    assert Streams.here().sizes == {STDOUT: None, STDERR: None}
    assert not Streams.here().is_one
