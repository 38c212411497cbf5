# SPDX-License-Identifier: Apache-2.0
"""When a command is started again, when it is not, and what becomes of signals.

The commands are small programs; a training is in tests/e2e/test_keep_alive.py.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quadriga.config import load_config
from quadriga.errors import ConfigError
from quadriga.trainer import keep_alive as module
from quadriga.trainer.keep_alive import keep_alive, own_command, require_resumable
from tests.limits import HANGS_S, SOON_S

# Each start takes the next line of the plan: the step that it reports, and what it does then.
COMMAND = """
import os, signal, sys, time
folder, steps, limit_s = sys.argv[1], int(os.environ["QUADRIGA_STEP_FILE"]), float(sys.argv[2])
with open(folder + "/plan") as file:
    line, *rest = file.read().splitlines()
with open(folder + "/plan", "w") as file:
    file.write("\\n".join(rest))
step, what = line.split()

def request(number, frame):
    # As a training does: the second one is not handled.
    signal.signal(number, signal.SIG_DFL)
    open(folder + "/requested", "w").close()
    time.sleep(float(os.environ.get("AFTER_S", "0")))
    sys.exit(7)

if what == "waits":
    signal.signal(signal.SIGTERM, request)
os.pwrite(steps, f"{step:>20}".encode(), 0)
if what == "waits":
    open(folder + "/waits", "w").close()
    time.sleep(limit_s)
if what.isdecimal():
    sys.exit(int(what))
os.kill(os.getpid(), getattr(signal, what))
"""


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., list[str]]:
    """`command("3 SIGKILL", "4 0")`: a program whose starts report this step and then end so, in turn."""

    def make(*starts: str) -> list[str]:
        (tmp_path / "plan").write_text("\n".join(starts))
        return [sys.executable, "-S", "-c", COMMAND, str(tmp_path), str(HANGS_S)]

    return make


def when_there(path: Path, act: Callable[[], None]) -> None:
    """Call a function from a thread once a file is there."""

    def wait() -> None:
        until = time.monotonic() + SOON_S
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.01)
        act()

    threading.Thread(target=wait).start()


@pytest.mark.parametrize(
    ("starts", "status", "num_starts"),
    [
        # Three deaths without a new step, one of them before a step, end it.
        (["-1 SIGKILL", "0 SIGKILL", "0 SIGABRT", "1 0"], 128 + signal.SIGABRT, 3),
        # A step that is done again is not new.
        (["5 SIGKILL", "3 SIGKILL", "5 SIGSEGV", "4 SIGKILL", "6 0"], 128 + signal.SIGKILL, 4),
        (["1 SIGKILL", "2 SIGKILL", "3 SIGBUS", "4 SIGKILL", "5 SIGKILL", "6 0"], 0, 6),
        (["1 SIGKILL", "2 1", "3 0"], 1, 2),
        (["1 2", "3 0"], 2, 1),
        (["1 130", "3 0"], 130, 1),
        (["1 SIGTERM", "3 0"], 128 + signal.SIGTERM, 1),
        (["1 SIGINT", "3 0"], 128 + signal.SIGINT, 1),
    ],
)
def test_what_is_started_again(
    command: Callable[..., list[str]],
    starts: list[str],
    status: int,
    num_starts: int,
    tmp_path: Path,
) -> None:
    assert keep_alive(command(*starts), pause_s=0.001) == status
    left = (tmp_path / "plan").read_text().splitlines()
    assert len(starts) - len(left) == num_starts


def test_pauses_double_up_to_their_limit(
    command: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.003)
    assert keep_alive(command("1 SIGKILL", "2 SIGKILL", "3 SIGKILL", "4 0"), pause_s=0.001) == 0
    said = [line.rpartition(" in ")[2] for line in capsys.readouterr().out.splitlines()]
    assert said == ["0.001 s.", "0.002 s.", "0.003 s."]


def test_a_request_to_stop_is_passed_on(command: Callable[..., list[str]], tmp_path: Path) -> None:
    when_there(tmp_path / "waits", lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert keep_alive(command("1 waits"), pause_s=0.001) == 7
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_training_that_has_the_request_gets_no_second_one(
    command: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Schedulers signal all processes of a job: a second SIGTERM would end the training at once."""
    monkeypatch.setenv("AFTER_S", "0.5")
    monkeypatch.setattr(module, "_NOTICED_S", 0.05)
    started: list[int] = []
    popen = module.subprocess.Popen

    def start(*args: object, **options: object) -> object:
        process = popen(*args, **options)
        started.append(process.pid)
        return process

    def signal_both() -> None:
        os.kill(started[0], signal.SIGTERM)
        when_there(tmp_path / "requested", lambda: os.kill(os.getpid(), signal.SIGTERM))

    monkeypatch.setattr(module.subprocess, "Popen", start)
    when_there(tmp_path / "waits", signal_both)
    assert keep_alive(command("1 waits"), pause_s=0.001) == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_during_the_start_reaches_the_child(
    number: signal.Signals, command: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child exists, and is not known yet: it would live on without this process."""
    monkeypatch.setattr(module, "_NOTICED_S", 0.05)
    started: list[module.subprocess.Popen[bytes]] = []
    popen = module.subprocess.Popen

    def start(*args: object, **options: object) -> object:
        started.append(popen(*args, **options))
        os.kill(os.getpid(), number)
        return started[-1]

    monkeypatch.setattr(module.subprocess, "Popen", start)
    try:
        assert keep_alive(command("1 waits"), pause_s=0.001) in (7, 128 + number)
    finally:
        alive = [process for process in started if process.poll() is None]
        for process in alive:
            process.kill()
    assert len(started) == 1
    assert alive == []


def test_a_request_to_a_child_that_has_just_died_is_not_lost(
    command: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nor is a run started again that is killed while it ends after a request."""
    monkeypatch.setattr(module, "_NOTICED_S", 0.05)
    wait = module.subprocess.Popen.wait

    def wait_and_signal(process: module.subprocess.Popen[bytes]) -> int:
        status = wait(process)
        os.kill(os.getpid(), signal.SIGTERM)
        return status

    monkeypatch.setattr(module.subprocess.Popen, "wait", wait_and_signal)
    assert keep_alive(command("1 SIGKILL", "2 0"), pause_s=0.001) == 128 + signal.SIGKILL
    assert "it was asked to stop" in capsys.readouterr().out


def test_a_request_in_a_pause_ends_it(
    command: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        keep_alive(command("1 SIGKILL", "2 0"))
    assert ended.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["trainer.resume_mode=disable", "trainer.save_freq=1"], "got trainer.resume_mode=disable"),
        (
            [
                "trainer.resume_mode=resume_path",
                "trainer.resume_from_path=x",
                "trainer.save_freq=1",
            ],
            "got trainer.resume_mode=resume_path",
        ),
        (["trainer.save_freq=-1"], "got a run that writes no checkpoint"),
    ],
)
def test_runs_that_would_not_go_on_are_refused(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"--keep-alive: {reason}"):
        require_resumable(load_config(overrides).config)


def test_the_command_is_that_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train", "--keep-alive", "trainer.seed=2"]
    line = ["python3", "bin/quadriga", "train", "--traceback", *words[1:]]
    monkeypatch.setattr(sys, "orig_argv", line)
    assert own_command(words) == [sys.executable, *line[1:]]
    with pytest.raises(ConfigError, match="a Python program"):
        own_command(["sft", *words[1:]])


def test_the_parent_stays_small() -> None:
    """Neither torch nor Ray is loaded by the modules of the command."""
    program = "import sys, quadriga.cli.train, quadriga_verl.cli; print({'torch', 'ray'} & sys.modules.keys())"
    assert (
        module.subprocess.check_output([sys.executable, "-c", program], text=True).strip()
        == "set()"
    )
