# SPDX-License-Identifier: Apache-2.0
"""The lock of a run's directory: refused while its holder lives, free once it is dead, whatever that one has started.

What it does not prove: that the locks of a certain network file system reach from host to host.
"""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from quadriga.errors import CheckpointError
from quadriga.trainer import run_lock as module
from quadriga.trainer.run_lock import LOCK, run_lock
from tests.limits import SOON_S

HOLDER = """
import os, sys, time
from pathlib import Path
from quadriga.trainer.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def soon_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No holder here has memory that the kernel must free first."""
    monkeypatch.setattr(module, "DEATH_S", 0.5)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds the lock of `tmp_path / run`, and its fork."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def named(directory: Path, **facts: object) -> None:
    """A lock file that names another holder."""
    directory.mkdir()
    (directory / LOCK).write_text(
        json.dumps({"host": "far", "pid": 17, "started": "noon", "kernel": "other"} | facts)
    )


def test_a_second_run_is_refused_by_the_name_of_the_first(
    holder: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    before = (tmp_path / "run" / LOCK).read_bytes()
    words = rf"default_local_dir={tmp_path}/run: got .*process {holder[0].pid} on {socket.gethostname()}, begun 20"
    with pytest.raises(CheckpointError, match=words), run_lock(tmp_path / "run"):
        pass
    assert (tmp_path / "run" / LOCK).read_bytes() == before


def test_a_dead_process_holds_nothing_though_its_fork_lives(
    holder: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    process, fork = holder
    process.kill()
    process.wait()
    os.kill(fork, 0)
    with run_lock(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / LOCK).read_text())["pid"] == os.getpid()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_holder_that_is_ending_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel holds the lock of a killed process until it has freed its memory."""
    monkeypatch.setattr(module, "DEATH_S", SOON_S)
    descriptor = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    threading.Timer(0.3, os.close, (descriptor,)).start()
    with run_lock(tmp_path):
        pass


def test_a_process_has_one_run_in_a_directory_at_a_time(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} "), run_lock(tmp_path):
            pass
        assert (tmp_path / LOCK).is_file()
    with run_lock(tmp_path):
        pass


def test_a_fork_that_leaves_by_an_error_takes_nothing_away(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        pid = os.fork()
        if pid == 0:
            with suppress(ZeroDivisionError), run_lock(tmp_path / "own"):
                raise ZeroDivisionError
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    process = os.getpid()
    with suppress(SystemExit), run_lock(tmp_path):
        pid = os.fork()
        if pid == 0:
            raise SystemExit
        os.waitpid(pid, 0)
        assert (tmp_path / LOCK).is_file()
    if os.getpid() != process:
        os._exit(0)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"pid": 3}\n'], ids=["empty", "cut", "no record", "old"]
)
def test_what_no_process_holds_is_taken_whatever_stands_in_it(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.1)
    (tmp_path / LOCK).write_text(content)
    with run_lock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def without_locks(*args: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("has_locks", [True, False])
def test_the_silent_lock_of_another_host_is_taken_over_and_said(
    has_locks: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.2)
    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", without_locks)
    named(tmp_path / "run")
    with run_lock(tmp_path / "run"):
        pass
    said = capsys.readouterr().out
    assert "names process 17 on far, begun noon" in said and "its run is over" in said
    assert ("has no locks (No locks available)" in said) != has_locks


@pytest.mark.parametrize("has_locks", [True, False])
def test_the_lock_of_another_host_that_gives_signs_of_life_is_refused(
    has_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signs are those that a holder gives: the time of its file changes."""
    monkeypatch.setattr(module, "BEAT_S", 0.1)
    directory = tmp_path / "run"
    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", without_locks)
    named(directory)
    facts = (directory / LOCK).read_bytes()
    (directory / LOCK).unlink()
    with run_lock(directory):
        # What another kernel would see: the file, its time, and no lock.
        if has_locks:
            for descriptor in module._held:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        with open(directory / LOCK, "r+b") as file:
            file.truncate(0)
            file.write(facts)
        with (
            pytest.raises(CheckpointError, match="a run that is still running: process 17 on far"),
            run_lock(directory),
        ):
            pass


def test_a_lock_that_is_deleted_while_it_is_waited_for_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run ends: the file that was opened is gone, and locking it would hold nothing."""
    named(tmp_path / "run")
    timer = threading.Timer(0.3, (tmp_path / "run" / LOCK).unlink)
    timer.start()
    begun = time.monotonic()
    with run_lock(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / LOCK).read_text())["pid"] == os.getpid()
    timer.join()
    assert time.monotonic() - begun < module.SILENCE_S


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = pytest.raises(CheckpointError, match=r"default_local_dir=.*NotADirectoryError")
    with refused, run_lock(tmp_path / "file" / "run"):
        pass


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(other)
    with (
        pytest.raises(CheckpointError, match=r"symbolic links .*run/\.lock"),
        run_lock(tmp_path / "run"),
    ):
        pass
    assert other.read_text() == "mine"


def test_the_directory_of_a_run_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with run_lock(tmp_path / "link"):
        assert (tmp_path / "run" / LOCK).is_file()
