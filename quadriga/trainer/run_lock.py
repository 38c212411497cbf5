# SPDX-License-Identifier: Apache-2.0
"""The lock of a run's directory: one driver at a time writes there.

    DIRECTORY/.lock     who holds it: host, process, start; deleted when its run ends

The lock itself is the kernel's (flock), so that it ends with its process, however that ends. Forks of the process,
such as graders, give it up at once: they may outlive it.

On NFS Linux takes such a lock at the server, for all hosts. There are mounts where locks stay on one host, and file
systems without any. So the holder also changes the file's time every few seconds, and who comes from another host, or
finds no locks, takes the file over only after it has not changed for half a minute. Two runs that begin within that
half minute, where there are no locks, are not told apart.
"""

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quadriga.errors import CheckpointError

LOCK = ".lock"
BEAT_S, SILENCE_S = 5.0, 30.0
# A killed process holds its lock until the kernel has freed its memory.
DEATH_S = 3.0
_KEY = "trainer.default_local_dir"
_held: set[int] = set()


def _give_up_in_fork() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_give_up_in_fork)


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Hold the lock of a run's directory, which is made where it is missing.

    Raises:
        CheckpointError: another run holds it, or nothing can be written there; nothing was changed.
    """
    path, holder, is_over = directory / LOCK, os.getpid(), threading.Event()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = _take(path)
    except OSError as error:
        raise CheckpointError(
            f"{_KEY}={directory}",
            got=f"{type(error).__name__}: {error.strerror or error}",
            expected="a directory that can be written",
            fix=f"Free space or set {_KEY} to another one.",
        ) from error
    _held.add(descriptor)

    def beat() -> None:
        while not is_over.wait(BEAT_S):
            # A disk that has gone away is the run's to report. The lock holds without this.
            with suppress(OSError):
                os.utime(descriptor)

    beating = threading.Thread(target=beat, name="run lock", daemon=True)
    beating.start()
    try:
        yield
    finally:
        is_over.set()
        # A fork that leaves the block by an error does not hold it.
        if os.getpid() == holder:
            # What stays where it cannot be deleted names a process that is gone, and counts for nothing.
            with suppress(OSError):
                path.unlink()
            beating.join()
            _held.discard(descriptor)
            os.close(descriptor)


def _take(path: Path) -> int:
    """The locked file, with this process written into it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        is_taken = False
        try:
            is_taken = _is_free(path, descriptor)
            if is_taken:
                started = datetime.now(UTC).isoformat(" ", "seconds")
                facts = {"host": socket.gethostname(), "pid": os.getpid(), "started": started, "kernel": _kernel()}
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{json.dumps(facts)}\n".encode(), 0)
                return descriptor
        finally:
            if not is_taken:
                os.close(descriptor)


def _is_free(path: Path, descriptor: int) -> bool:
    """Whether the open file is locked now; not if it has been deleted meanwhile. Refuses where another run holds it."""
    without_locks, is_locked, until = "", False, time.monotonic() + DEATH_S
    while not is_locked:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        except BlockingIOError:
            if time.monotonic() > until:
                raise _refusal(path, _holder(descriptor)) from None
            time.sleep(0.1)
        except OSError as error:
            without_locks = f"this file system has no locks ({error.strerror})"
            break
    holder = _holder(descriptor)
    if holder and (without_locks or holder.get("kernel") != _kernel()):
        _wait_for_silence(path, holder, without_locks or "locks may not reach from its host to this one")
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _wait_for_silence(path: Path, holder: dict[str, Any], why: str) -> None:
    """Return when the holder has given no sign of life for long enough, or has deleted the file; refuse if it does."""
    print(f"{path} names {_words(holder)}, and {why}: waiting {SILENCE_S:.0f} s for a sign of life.", flush=True)
    first, until = None, time.monotonic() + SILENCE_S
    while time.monotonic() < until:
        try:
            # Opened each time: NFS looks for changes then.
            with path.open("rb") as file:
                changed = os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return
        first = first or changed
        if changed != first:
            raise _refusal(path, holder)
        time.sleep(BEAT_S / 10)
    print(f"{path}: none; its run is over.", flush=True)


def _refusal(path: Path, holder: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"{_KEY}={path.parent}",
        got=f"the directory of a run that goes on: {_words(holder)} holds {path.name}",
        expected="one that no other run writes to",
        fix=f"Wait for its end, or end it; or set {_KEY} or trainer.experiment_name to others.",
    )


def _words(holder: dict[str, Any]) -> str:
    return "process {pid} on {host}, begun {started}".format_map({"pid": "?", "host": "?", "started": "?"} | holder)


def _holder(descriptor: int) -> dict[str, Any]:
    """What stands in the file; nothing where a process died before it had written it."""
    try:
        facts = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _kernel() -> str:
    """What the processes have in common that see each other's locks, in whatever containers they are."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.is_file() else socket.gethostname()
