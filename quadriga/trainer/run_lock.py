# SPDX-License-Identifier: Apache-2.0
"""The lock of a run's directory, so that only one driver at a time writes there.

    DIRECTORY/.lock     names its holder: host, process, start; deleted when the run ends

The lock itself is the kernel's (flock): it ends with its process, however that ends. Forks of the
process, such as graders, release it at once. On NFS, Linux takes it at the server, for all hosts.

But some mounts keep locks on one host, and some file systems have no locks. So the holder updates
the file's time every few seconds, and a run on another host, or on a file system without locks,
takes the file over only after half a minute without an update. Without locks, two runs that start
within the same half minute do not notice each other.
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

from quadriga.errors import CheckpointError
from quadriga.observe.kernel import kernel_identity

LOCK = ".lock"
KEY = "trainer.default_local_dir"
BEAT_S = 5.0  # between two updates of the file's time
SILENCE_S = 30.0  # without an update, after which the holder counts as dead
# Wait for the lock of a killed process, which is held until the kernel has freed its memory.
DEATH_S = 3.0
_held: set[int] = set()  # descriptors of the locks of this process


def _give_up_in_fork() -> None:
    """Close the locks that a forked child has inherited."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_give_up_in_fork)


@contextmanager
def run_lock(directory: Path, key: str = KEY) -> Iterator[None]:
    """Context manager: hold the lock of a run's directory, which is created if it is missing.

    Args:
        directory: the directory.
        key: the key or option that names the directory, for errors.

    Raises:
        CheckpointError: another run holds the lock, or the directory cannot be written. Nothing
            was changed.
    """
    path = directory / LOCK
    holder = os.getpid()
    is_over = threading.Event()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # None if the previous holder has just deleted the file: then it is created again.
        while (descriptor := _lock_and_sign(path)) is None:
            pass
    except OSError as error:
        file = f" ({error.filename})" if error.filename else ""
        raise CheckpointError(
            f"{key}={directory}",
            got=f"{type(error).__name__}: {error.strerror or error}{file}",
            expected="a directory that can be written",
            fix=f"Free space or set {key} to another one.",
        ) from error
    except CheckpointError as error:
        # The error names the directory; the user has to change the key.
        error.where = f"{key}={directory}"
        raise
    _held.add(descriptor)

    def beat() -> None:
        """Update the file's time until the run is over, as a sign of life for other hosts."""
        while not is_over.wait(BEAT_S):
            # If the disk has gone away, the run's own writes report it.
            with suppress(OSError):
                os.utime(descriptor)

    beating = threading.Thread(target=beat, name="run lock", daemon=True)
    beating.start()
    try:
        yield
    finally:
        is_over.set()
        # A forked child may also leave the block, for example by an error. It does not hold the lock.
        if os.getpid() == holder:
            # If the file cannot be deleted, it names a process that has ended, which does no harm.
            with suppress(OSError):
                path.unlink()
            beating.join()
            _held.discard(descriptor)
            os.close(descriptor)


def is_held(directory: Path) -> bool:
    """Whether a run holds the lock of a directory. A directory without a lock is not held."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        # A shared lock, released at once. A run that starts meanwhile tries for a while.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # Nobody on this machine holds the lock, but the lock of another host may not reach here. The
        # file of such a host names another kernel.
        if _read_holder(descriptor).get("kernel") == kernel_identity():
            return False
        return _was_updated(descriptor)
    except BlockingIOError:
        return True
    except OSError:
        # This file system has no locks.
        return _was_updated(descriptor)
    finally:
        os.close(descriptor)


def _was_updated(descriptor: int) -> bool:
    """Whether the holder has updated the file within `SILENCE_S`."""
    return time.time() - os.fstat(descriptor).st_mtime < SILENCE_S


def _lock_and_sign(path: Path) -> int | None:
    """Lock the file, and write who holds it.

    Returns:
        The descriptor; None if the previous holder has deleted the file meanwhile.

    Raises:
        CheckpointError: another run holds the lock.
    """
    # A symbolic link is not followed, because its target would be overwritten.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        why_not_locked = _lock(descriptor, path)
        holder = _read_holder(descriptor)
        kernel = kernel_identity()
        # The kernel's lock is sufficient if the last holder was on this machine.
        if holder and (why_not_locked or holder.get("kernel") != kernel):
            reason = why_not_locked or "locks may not reach from its host to this one"
            _wait_for_silence(path, holder, reason)
        # The previous holder may have deleted the file after it was opened here.
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            facts = {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "started": datetime.now(UTC).isoformat(" ", "seconds"),
                "kernel": kernel,
            }
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{json.dumps(facts)}\n".encode(), 0)
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _lock(descriptor: int, path: Path) -> str:
    """Lock the open file, as soon as another process releases it within `DEATH_S`.

    Returns:
        Why the file system cannot lock the file; "" if it is locked now.

    Raises:
        CheckpointError: another process still holds the lock after `DEATH_S`.
    """
    deadline = time.monotonic() + DEATH_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return ""
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise _held_error(path, _read_holder(descriptor)) from None
            time.sleep(0.1)
        except OSError as error:
            return f"this file system has no locks ({error.strerror})"


def _wait_for_silence(path: Path, holder: dict[str, str], reason: str) -> None:
    """Wait until the holder has not updated the file for `SILENCE_S`, or has deleted it.

    Args:
        path: the file.
        holder: the content of the file, which names the holder.
        reason: why the kernel's lock is not sufficient.

    Raises:
        CheckpointError: the holder is alive.
    """
    print(
        f"{path} names {_describe_holder(holder)}, and {reason}: waiting {SILENCE_S:.0f} s for a sign of "
        "life.",
        flush=True,
    )
    update_times = set()
    deadline = time.monotonic() + SILENCE_S
    while time.monotonic() < deadline:
        try:
            # Opened each time, because NFS checks for changes when a file is opened.
            with path.open("rb") as file:
                update_times.add(os.fstat(file.fileno()).st_mtime_ns)
        except FileNotFoundError:
            return
        # A new time is a sign of life.
        if len(update_times) > 1:
            raise _held_error(path, holder)
        time.sleep(BEAT_S / 10)
    print(f"{path}: no sign of life; its run is over.", flush=True)


def _held_error(path: Path, holder: dict[str, str]) -> CheckpointError:
    """The error for a directory whose lock another run holds."""
    return CheckpointError(
        str(path.parent),
        got=f"the directory of a run that is still running: {_describe_holder(holder)} holds {path.name}",
        expected="one that no other run writes to",
        fix="Wait for its end, or end it; or choose another one.",
    )


def _describe_holder(holder: dict[str, str]) -> str:
    """The holder of a lock, for messages."""
    pid = holder.get("pid", "unknown")
    host = holder.get("host", "unknown")
    return f"process {pid} on {host}, begun {holder.get('started', 'unknown')}"


def _read_holder(descriptor: int) -> dict[str, str]:
    """Content of the file; empty if its holder died before writing it."""
    try:
        return dict(json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError, RecursionError):
        return {}
