# SPDX-License-Identifier: Apache-2.0
"""`--keep-alive`: runs the same command in a child process, and again if a signal kills it.

    this process                         the child, in its own process group
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
_STEP_FILE = "QUADRIGA_STEP_FILE"  # environment variable with the descriptor of the step file
_NOTICED_S = 0.5  # time for the child to react to a signal that others have sent to it
_WIDTH = 20  # characters of the number in the step file


def is_kept_alive() -> bool:
    """Whether `keep_alive` has started this process."""
    return _STEP_FILE in os.environ


def step_reporter() -> Callable[[int], None]:
    """Return a function that reports the number of each step to `keep_alive`.

    It does nothing if `keep_alive` has not started this process.
    """
    # Removed from the environment, so that processes that this one starts do not report steps.
    descriptor = os.environ.pop(_STEP_FILE, None)
    if descriptor is None:
        return lambda step: None
    return lambda step: _write_step(int(descriptor), step)


def own_command(words: Sequence[str]) -> list[str]:
    """The command line of this process, to run it again.

    Args:
        words: arguments of the command that is being executed. The command line of the process
            must end with them.

    Raises:
        ConfigError: the line ends otherwise, because a Python program has called the command.
    """
    # `--traceback` may stand anywhere in the line, and is not among the words.
    line = [word for word in sys.orig_argv if word != "--traceback"]
    if line[-len(words) :] != list(words):
        raise ConfigError(OPTION, got="a call by a Python program", expected="a command line")
    return [sys.executable, *sys.orig_argv[1:]]


def require_resumable(config: Config) -> None:
    """Check that a restarted run would continue from its last checkpoint.

    Raises:
        ConfigError: the run does not resume by itself, or writes no checkpoint.
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
    """Run the command of this process in a child, and again each time a signal kills it.

    Args:
        config: the resolved configuration.
        words: arguments of the command, as for `own_command`.

    Returns:
        The exit status; see `keep_alive`.

    Raises:
        ConfigError: a restarted run would not continue.
    """
    require_resumable(config)
    log_to(config.trainer.directory)
    return keep_alive(own_command(words))


def keep_alive(command: Sequence[str], pause_s: float = FIRST_PAUSE_S) -> int:
    """Run a command, and again each time a signal kills it.

    The command is not restarted in these cases:
    - it exits by itself, with any status;
    - it is killed by SIGTERM or SIGINT, or after this process has received one of them;
    - it has been killed `MAX_FUTILE_DEATHS` times in a row without a new step.

    Args:
        command: a command line whose training calls `step_reporter`.
        pause_s: seconds before the first restart; doubled each time, up to `LONGEST_PAUSE_S`.

    Returns:
        The exit status of the last run of the command; 128 + the signal's number if it was killed.
    """
    newest_step = 0
    num_futile = 0
    with TemporaryFile() as step_file, ExitStack() as stack:
        child = _Child(step_file.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            previous_handler = signal.signal(number, child.pass_on)
            stack.callback(signal.signal, number, previous_handler)

        while True:
            status = child.run(command)
            # After an exit with an error, a restart would meet the same error.
            if status >= 0:
                return status
            if -status in (signal.SIGTERM, signal.SIGINT):
                return 128 - status

            step = _read_step(step_file.fileno())
            num_futile = 0 if step > newest_step else num_futile + 1
            newest_step = max(step, newest_step)
            place = f"after step {step}" if step > 0 else "before the end of a step"
            cause = f"signal {-status} ({signal.strsignal(-status)})"
            print(f"{OPTION}: the run was ended by {cause} {place}; ", end="", flush=True)
            if child.num_signals:
                print("it is not started again, because it was asked to stop.")
                return 128 - status
            if num_futile == MAX_FUTILE_DEATHS:
                print(f"it is not started again after {num_futile} deaths without a new step.")
                return 128 - status
            print(f"the same command is started again in {pause_s:g} s.", flush=True)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class _Child:
    """The child process, and the signals that are passed on to it.

    Args:
        step_fd: descriptor of the file into which the child writes its step.

    Attributes:
        num_signals: signals that have arrived for the child, even if it died before it got them.
    """

    def __init__(self, step_fd: int) -> None:
        self._step_fd = step_fd
        self._process: subprocess.Popen[bytes] | None = None
        self.num_signals = 0
        self._is_starting = False
        # Signals that arrived while the child was being started.
        self._early_signals: list[int] = []

    def run(self, command: Sequence[str]) -> int:
        """Run the command to its end. Returns its status: -N if signal N has killed it."""
        # Below 0: the training has not begun.
        _write_step(self._step_fd, -1)
        self._is_starting = True
        self._process = subprocess.Popen(
            command,
            env=os.environ | {_STEP_FILE: str(self._step_fd)},
            pass_fds=[self._step_fd],
            # Then Ctrl-C in a terminal reaches only this process, which passes it on.
            process_group=0,
        )
        self._is_starting = False
        for number in self._early_signals:
            self.pass_on(number, None)
        status = self._process.wait()
        self._process = None
        return status

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: pass the signal on to the child, or exit if none runs."""
        if self._is_starting:
            # The child may exist already, so exiting would leave it alone.
            self._early_signals.append(number)
            return
        if self._process is None:
            raise SystemExit(128 + number)
        self.num_signals += 1
        is_first_sigterm = number == signal.SIGTERM and self.num_signals == 1
        if is_first_sigterm and self._has_received_sigterm(self._process.pid):
            return
        self._process.send_signal(number)

    def _has_received_sigterm(self, pid: int) -> bool:
        """Whether the child has already received SIGTERM itself.

        Schedulers may signal every process of a job. A second SIGTERM would end the training at
        once instead of after its step (`observe/stopping.py`).
        """
        time.sleep(_NOTICED_S)
        status = Path(f"/proc/{pid}/status")
        # Before training begins the child never catches SIGTERM, so the mask below says nothing.
        has_begun = _read_step(self._step_fd) >= 0
        if not has_begun or not status.is_file():
            return False
        # Training catches SIGTERM until it receives one, and then removes its handler. The mask of
        # caught signals has signal N in bit N - 1.
        mask = re.search(r"^SigCgt:\s*(\w+)$", status.read_text(encoding="utf-8"), re.MULTILINE)
        if mask is None:
            return False
        catches_sigterm = int(mask[1], 16) >> (signal.SIGTERM - 1) & 1
        return not catches_sigterm


def _write_step(descriptor: int, step: int) -> None:
    """Write a number to the step file."""
    # With a fixed width, a number overwrites all of a longer one.
    os.pwrite(descriptor, f"{step:{_WIDTH}}".encode(), 0)


def _read_step(descriptor: int) -> int:
    """Read the number in the step file; -1 before training has begun."""
    return int(os.pread(descriptor, _WIDTH, 0))
