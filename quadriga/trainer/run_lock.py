# SPDX-License-Identifier: Apache-2.0
"""The lock of a run's directory: one driver at a time writes there.

    DIRECTORY/.lock     who holds it: host, process, start; deleted when its run ends

The lock itself is the kernel's (flock): it ends with its process, however that ends; forks of it, such as graders, give
it up at once. On NFS Linux takes it at the server, for all hosts. There are mounts where locks stay on one host, and
file systems without any: so the holder changes the file's time every few seconds, and who comes from another host, or
finds no locks, takes the file over only after half a minute without a change. Two runs that begin within that half
minute, where there are no locks, are not told apart.
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

LOCK, KEY = ".lock", "trainer.default_local_dir"
BEAT_S, SILENCE_S = 5.0, 30.0
# A killed process holds its lock until the kernel has freed its memory.
DEATH_S = 3.0
_held: set[int] = set()


def _give_up_in_fork() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_give_up_in_fork)


@contextmanager
def run_lock(directory: Path, key: str = KEY) -> Iterator[None]:
    """Hold the lock of a run's directory, which is made where it is missing, and which `key` names.
    Raises CheckpointError: another run holds it, or nothing can be written there; nothing was changed."""
    path, holder, is_over = directory / LOCK, os.getpid(), threading.Event()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        while (descriptor := _take(path)) is None:
            pass
    except OSError as error:
        named = f" ({error.filename})" if error.filename else ""
        got, expected = (
            f"{type(error).__name__}: {error.strerror or error}{named}",
            "a directory that can be written",
        )
        fix = f"Free space or set {key} to another one."
        raise CheckpointError(f"{key}={directory}", got=got, expected=expected, fix=fix) from error
    except CheckpointError as error:
        error.where = f"{key}={directory}"
        raise
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


def _take(path: Path) -> int | None:
    """The locked file, with this process written into it; None: its holder has deleted it meanwhile."""
    # Not through a link, which would have another file overwritten.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        without_locks = _lock(descriptor, path)
        holder, boot = _holder(descriptor), Path("/proc/sys/kernel/random/boot_id")
        # Containers of one kernel see each other's locks.
        kernel = (
            boot.read_text(encoding="ascii").strip() if boot.is_file() else socket.gethostname()
        )
        if holder and (without_locks or holder.get("kernel") != kernel):
            _wait_for_silence(
                path, holder, without_locks or "locks may not reach from its host to this one"
            )
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            started = datetime.now(UTC).isoformat(" ", "seconds")
            facts = {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "started": started,
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
    """Lock the open file, or say why the file system cannot; refuses where another process has locked it."""
    until = time.monotonic() + DEATH_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return ""
        except BlockingIOError:
            if time.monotonic() > until:
                raise _refusal(path, _holder(descriptor)) from None
            time.sleep(0.1)
        except OSError as error:
            return f"this file system has no locks ({error.strerror})"


def _wait_for_silence(path: Path, holder: dict[str, str], why: str) -> None:
    """Return when the holder has given no sign of life for long enough, or has deleted the file; refuse if it does."""
    print(
        f"{path} names {_words(holder)}, and {why}: waiting {SILENCE_S:.0f} s for a sign of life.",
        flush=True,
    )
    changes, until = set[int](), time.monotonic() + SILENCE_S
    while time.monotonic() < until:
        try:
            # Opened each time: NFS looks for changes then.
            with path.open("rb") as file:
                changes.add(os.fstat(file.fileno()).st_mtime_ns)
        except FileNotFoundError:
            return
        if len(changes) > 1:
            raise _refusal(path, holder)
        time.sleep(BEAT_S / 10)
    print(f"{path}: none; its run is over.", flush=True)


def _refusal(path: Path, holder: dict[str, str]) -> CheckpointError:
    got = f"the directory of a run that goes on: {_words(holder)} holds {path.name}"
    fix = "Wait for its end, or end it; or choose another one."
    return CheckpointError(
        str(path.parent), got=got, expected="one that no other run writes to", fix=fix
    )


def _words(holder: dict[str, str]) -> str:
    pid, host, started = (holder.get(name, "unknown") for name in ("pid", "host", "started"))
    return f"process {pid} on {host}, begun {started}"


def _holder(descriptor: int) -> dict[str, str]:
    """What stands in the file; nothing where a process died before it had written it."""
    try:
        return dict(json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError, RecursionError):
        return {}
