# SPDX-License-Identifier: Apache-2.0
"""What a process has started ends with it: with a command, and with the process of pytest, also where it is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from quadriga.descendants import Guardian
from tests.limits import PROGRAM_S, SOON_S

REPOSITORY = Path(__file__).resolve().parents[2]
MARK = f"4311.{os.getpid()}"  # seconds to sleep, by which the processes of this test run are known
STARTS = f"""
import os, subprocess, sys, tempfile, time
from multiprocessing import Process, set_start_method
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

def hold(name):
    memory = SharedMemory(name)
    time.sleep({MARK})

def start(folder):
    memory = SharedMemory(create=True, size=1 << 20)
    child = Process(target=hold, args=(memory.name,))
    child.start()
    subprocess.Popen(["sleep", "{MARK}"], start_new_session=True, env={{}})
    if os.fork() == 0:
        os.setsid()
        os.fork() or os.execvp("sleep", ["sleep", "{MARK}"])
        os._exit(0)
    tempfile.mkdtemp()
    (Path(folder) / f"started-{{os.getpid()}}").write_text(f"/dev/shm{{memory._name}} {{tempfile.gettempdir()}}")
    return memory

def test_that_starts_much(tmp_path):
    start(os.environ["STARTED"])
    time.sleep({MARK})
"""


def sleepers() -> list[int]:
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry.name}/cmdline", "rb") as file:
                found += [int(entry.name)] if MARK.encode() in file.read().split(b"\0") else []
    return found


def wait_for(condition) -> None:
    give_up = time.monotonic() + SOON_S
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.05)
    assert condition()


@pytest.mark.parametrize("killed", ["the process of pytest", "a worker of xdist"])
def test_what_a_test_starts_ends_when_pytest_is_killed(tmp_path: Path, killed: str) -> None:
    """Sessions of their own with an empty environment, orphans, shared memory, temporary files."""
    is_worker = killed == "a worker of xdist"
    if is_worker:
        pytest.importorskip("xdist")
    (tmp_path / "test_much.py").write_text(STARTS)
    words = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        *(["-n", "1"] * is_worker),
    ]
    environment = os.environ | {"STARTED": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    runner = subprocess.Popen(
        [sys.executable, *words, "--rootdir", str(tmp_path), str(tmp_path / "test_much.py")],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: list(tmp_path.glob("started-*")))
        wait_for(lambda: len(sleepers()) == 2)
        (note,) = tmp_path.glob("started-*")
        memory, folder = map(Path, note.read_text().split())
        assert memory.exists() and folder.exists() and folder != Path(tempfile.gettempdir())
        time.sleep(2.5)  # the guardian looks every second
        os.kill(int(note.name.removeprefix("started-")), signal.SIGKILL)
        wait_for(lambda: not sleepers() and not memory.exists())
    finally:
        runner.kill()
        runner.wait()
    wait_for(lambda: not folder.exists())


def test_shared_memory_goes_with_the_processes_that_have_it() -> None:
    """A process is killed with multiprocessing's tracker, as Ray kills a worker; the guardian's process goes on."""
    makes = (
        "import os, time; from multiprocessing.shared_memory import SharedMemory; memory = SharedMemory(create=True, "
        "size=1 << 20); print(memory._name, flush=True); os.fork(); time.sleep(600)"
    )
    program = [sys.executable, "-c", makes]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            memory = Path(f"/dev/shm{process.stdout.readline().strip()}")
            time.sleep(2.5)  # the guardian looks every second
            process.kill()
            time.sleep(2.5)
            assert memory.exists(), "its fork has it"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    wait_for(lambda: not memory.exists())


def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    """The last thing that a user's code does is to start something; the command ends, and it does too."""
    (tmp_path / "leaves.py").write_text(STARTS)
    program = (
        # As where an editable installation is found by no folder of sys.path.
        f"import sys, leaves; from quadriga.descendants import Guardian; sys.path.remove({str(REPOSITORY)!r}); "
        "guardian = Guardian(); memory = leaves.start(sys.argv[1]); guardian.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )
    assert not sleepers() and "Traceback" not in done.stderr, done.stderr
    (note,) = tmp_path.glob("started-*")
    wait_for(lambda: not Path(note.read_text().split()[0]).exists())


def test_a_guardian_does_not_load_the_names_of_verl(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It runs without site, so an editable installation of another package is not found there."""
    monkeypatch.setenv("QUADRIGA_VERL", "1")
    guardian = Guardian()
    guardian.close()
    assert guardian.process.wait(SOON_S) == 0
    assert capfd.readouterr().err == ""
