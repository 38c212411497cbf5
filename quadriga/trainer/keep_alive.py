# SPDX-License-Identifier: Apache-2.0
"""`--keep-alive`: a process that restarts its own command when a signal has killed it.

    this process                         the command, in a process group of its own
      start  ------------------------->    trains; writes the number of each step into a shared file
      SIGTERM, SIGINT: passed on  ---->    ends after its step
      killed by another signal  <------    (out of memory, a crash in a library, SIGKILL)
      a pause, then start again  ----->    resumes from the newest checkpoint

Waits for: the end of the command. This process imports neither torch nor Ray.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType

from quadriga.config import Config, writes_checkpoints
from quadriga.errors import ConfigError
from quadriga.streams import log_to

OPTION = "--keep-alive"
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
MAX_FUTILE_DEATHS = 3  # deaths in a row without a new step
_STEP_FILE = "QUADRIGA_STEP_FILE"  # variable with the descriptor of the file of the step
_NOTICED_S = 0.5  # time for a training to react to a signal that was sent to it directly
_WIDTH = 20  # digits of the number in the file


def is_kept_alive() -> bool:
    """Whether `keep_alive` has started this process."""
    return _STEP_FILE in os.environ


def step_reporter() -> Callable[[int], None]:
    """A function that passes the number of each step to `keep_alive`, if it runs.

    Processes that this one starts do not see the variable: they are not the command.
    """
    descriptor = os.environ.pop(_STEP_FILE, None)
    if descriptor is None:
        return lambda step: None
    return lambda step: _write_step(int(descriptor), step)


def own_command(words: Sequence[str]) -> list[str]:
    """The command line of this process.

    Args:
        words: the words that it must end with.

    Raises:
        ConfigError: it does not end with them, because a Python program has called the command.
    """
    line = [word for word in sys.orig_argv if word != "--traceback"]
    if line[-len(words) :] != list(words):
        raise ConfigError(OPTION, got="a call by a Python program", expected="a command line")
    return [sys.executable, *sys.orig_argv[1:]]


def require_resumable(config: Config) -> None:
    """Check that a restarted run continues from where it was.

    Raises:
        ConfigError: it would not.
    """
    trainer = config.trainer
    if trainer.resume_mode != "auto":
        raise ConfigError(
            OPTION,
            got=f"trainer.resume_mode={trainer.resume_mode}",
            expected="a run that resumes by itself",
            fix=f"Set trainer.resume_mode=auto, or leave {OPTION} out.",
        )
    if not writes_checkpoints(config) or trainer.val_only:
        raise ConfigError(
            OPTION,
            got="a run that writes no checkpoint",
            expected="one to go on from",
            fix="Set trainer.save_freq=N to write one every N steps.",
        )


def keep_run_alive(config: Config, words: Sequence[str]) -> int:
    """Run the command of this process in a child, again after each death by a signal.

    Args:
        config: the resolved configuration.
        words: the words that the command ends with.

    Returns:
        The exit status, as `keep_alive`.

    Raises:
        ConfigError: a restarted run would not continue.
    """
    require_resumable(config)
    log_to(config.trainer.directory)
    return keep_alive(own_command(words))


def keep_alive(command: Sequence[str], pause_s: float = FIRST_PAUSE_S) -> int:
    """Run a command, again after each death by a signal.

    It is not restarted after SIGTERM, SIGINT or an exit of its own, whatever its status, nor after
    `MAX_FUTILE_DEATHS` without a new step.

    Args:
        command: a command line whose training calls `step_reporter`.
        pause_s: seconds before the first restart; doubled each time, up to `LONGEST_PAUSE_S`.

    Returns:
        The exit status of the last start.
    """
    newest_step = 0
    num_futile = 0
    with TemporaryFile() as step_file, ExitStack() as stack:
        steps = step_file.fileno()
        child = _Child(steps)
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, child.pass_on))
        while True:
            status = child.run(command)
            # An exit of its own is deliberate, also with an error: a restart would repeat it.
            if status >= 0:
                return status
            if -status in (signal.SIGTERM, signal.SIGINT):
                return 128 - status
            # The child writes its step into a file that both processes have open.
            step = _read_step(steps)
            num_futile = 0 if step > newest_step else num_futile + 1
            newest_step = max(step, newest_step)
            place = f"after step {step}" if step > 0 else "before the end of a step"
            cause = f"signal {-status} ({signal.strsignal(-status)})"
            print(f"{OPTION}: the run was ended by {cause} {place}; ", end="", flush=True)
            if num_futile == MAX_FUTILE_DEATHS:
                print(f"it is not started again after {num_futile} deaths without a new step.")
                return 128 - status
            print(f"the same command is started again in {pause_s:g} s.", flush=True)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class _Child:
    """The process of the command, and the signals that are passed on to it."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._process: subprocess.Popen[bytes] | None = None
        self._num_requests = 0

    def run(self, command: Sequence[str]) -> int:
        """Run the command to its end. Returns its status, below 0 for a signal."""
        _write_step(self._steps, -1)
        self._process = subprocess.Popen(
            command,
            env=os.environ | {_STEP_FILE: str(self._steps)},
            pass_fds=[self._steps],
            # Ctrl-C in a terminal reaches the group of this process alone, which passes it on.
            process_group=0,
        )
        status = self._process.wait()
        self._process = None
        return status

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: pass it on to the command, or end this process if none runs."""
        if self._process is None:
            raise SystemExit(128 + number)
        self._num_requests += 1
        is_first_request = number == signal.SIGTERM and self._num_requests == 1
        if not (is_first_request and self._has_request(self._process.pid)):
            self._process.send_signal(number)

    def _has_request(self, pid: int) -> bool:
        """Whether a training has received SIGTERM already, as from a scheduler that signals all.

        A second one would end it at once (`observe/stopping.py`).
        """
        time.sleep(_NOTICED_S)
        status = Path(f"/proc/{pid}/status")
        if _read_step(self._steps) < 0 or not status.is_file():
            return False
        # A training catches SIGTERM until it has received one: then its handler is removed.
        caught = re.search(r"^SigCgt:\s*(\w+)$", status.read_text(encoding="utf-8"), re.MULTILINE)
        return caught is not None and not int(caught[1], 16) >> (signal.SIGTERM - 1) & 1


def _write_step(descriptor: int, step: int) -> None:
    os.pwrite(descriptor, f"{step:{_WIDTH}}".encode(), 0)


def _read_step(descriptor: int) -> int:
    return int(os.pread(descriptor, _WIDTH, 0))
