# SPDX-License-Identifier: Apache-2.0
"""The end of processes that run users' code, with everything that they have started, and with their folders.

    driver ── lifeline ──> supervisor ── fork ──> runs a user's code ── starts ──> others, in sessions of their own
                               ▲                                                      │
                               └── becomes the parent of each that loses its own ─────┘

supervisor   waits for the end of its child, or of the driver; unblocked by SIGCHLD, by a byte in the lifeline or its
             end, or by another parent than the driver; then it kills all that is below it, until nothing is left.

A process that cannot have a supervisor, because it was started by others, has a `Guardian`: a process beside it that
notes what descends from it and what shared memory that has, and ends what is left once it has ended. Shared memory is
removed as well where what had mapped it was killed. Behind a Ray cluster of a run's own another process stands alike.

A supervisor that is killed takes its child along, not what the child has started. Where the kernel's control groups
(cgroup v2) can be written, the child has one, and the driver, or the next supervisor there, ends what is in it.

A temporary folder (`own_folder`) is locked by its owner, which no dead process is: a supervisor removes the unlocked
ones, of whatever run, at its begin and at its end.
"""

import ctypes
import fcntl
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_DIE_WITH_PARENT, _SUBREAPER = 1, 36  # options of prctl
_SWEEP_LIMIT_S = 10.0
_POLL_S = 1.0
_NEW_S = 3.0  # for so long shared memory is new
_FOLDERS = "quadriga-folder-"
_MARKS = "QUADRIGA_GUARDED_BY"
# An editable installation is found by the site's start-up files, which a guardian goes without.
_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[1])
# Programs that take away what others leave behind: multiprocessing's, and that of a cluster of our own; and wandb's
# service, which writes to the end.
_TRACKERS = (b"resource_tracker", b"_end_sessions_behind", b"wandb-core")


def supervise(lifeline_fd: int) -> None:
    """Split this process, which must have a single thread, in two: the child returns from here, in a process group of
    its own and the first that the kernel takes when memory runs out. The other one stays as its supervisor and ends as
    the child has ended; it never returns."""
    supervisor, driver = os.getpid(), os.getppid()
    _prctl(_SUBREAPER, 1)
    remove_stale_folders()
    group = _make_group(supervisor)
    wake_fd, note_fd = os.pipe()
    child = os.fork()
    if child:
        _supervise(child, driver, lifeline_fd, wake_fd, note_fd)
    for fd in (lifeline_fd, wake_fd, note_fd):
        os.close(fd)
    os.setpgid(0, 0)
    _prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    # Each of the two is refused on some systems, and the supervisor works without.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(b"1000")
    with suppress(OSError):
        if group is not None:
            (group / "cgroup.procs").write_bytes(b"0")


def descendants(root: int) -> list[int]:
    """Ids of all processes below one, parents first; ended ones that nobody has waited for are among them."""
    children: dict[int, list[int]] = defaultdict(list)
    for pid in _all_pids():
        if (fields := stat_of(pid))[0] != b"X":
            children[int(fields[1])].append(pid)
    found = [root]
    for pid in found:
        found += children[pid]
    return found[1:]


def end_descendants(root: int) -> None:
    """Kill all processes below one. They are stopped first, so that none starts another in the meantime."""
    stopped: set[int] = set()
    while new := set(descendants(root)) - stopped:
        _signal_all(new, signal.SIGSTOP)
        stopped |= new
    _signal_all(stopped, signal.SIGKILL)


def end_group(supervisor: int) -> None:
    """Kill what is in the control group of a supervisor's child, and remove the group; nothing where there is none."""
    group = _group(supervisor)
    if group is None or not group.is_dir():
        return
    until = time.monotonic() + _SWEEP_LIMIT_S
    # Another process may be at the same, and files of a group that goes away fail in several ways.
    with suppress(OSError):
        (group / "cgroup.kill").write_bytes(b"1")
        while (group / "cgroup.procs").read_bytes() and time.monotonic() < until:
            time.sleep(0.005)
        group.rmdir()


@contextmanager
def own_folder() -> Iterator[str]:
    """An empty temporary folder, which others may pass through but not list. It is removed at the end."""
    folder, lock = "", -1
    while lock < 0:
        folder = tempfile.mkdtemp(prefix=_FOLDERS)
        # Before it is locked, another process may take it for a dead one's, and remove it.
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(folder):
                os.close(lock)
                lock = -1
    try:
        os.chmod(folder, 0o711)
        yield folder
    finally:
        _remove_folder(folder)
        os.close(lock)


def remove_stale_folders() -> None:
    """Remove this user's folders that no living process has locked."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
        # Another user's, or another process has removed it.
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with suppress(BlockingIOError):
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove_folder(str(path))
            os.close(lock)


def _remove_folder(folder: str) -> None:
    """Remove it; what is killed at this moment may still write there for some milliseconds."""
    for pause_s in (0.0, 0.01, 0.1, 1.0):
        time.sleep(pause_s)
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return


def beside(
    function: str, *arguments: object, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """A process that calls a function of this file. In a session of its own: it outlives a Ctrl-C, and what is sent to
    the group of this process."""
    program = f"import sys; sys.path[:] = sys.argv[1:]; from quadriga.descendants import {function} as call; "
    words = [
        sys.executable,
        "-S",
        "-c",
        f"{program}call(*{arguments!r})",
        *map(str, sys.path),
        _PACKAGE_FOLDER,
    ]
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, pass_fds=pass_fds, start_new_session=True
    )


class Guardian:
    """Ends what this process has started from here on, when `close` is called or the process ends, by whatever signal.

    It looks at the descendants every second, and knows others by a mark in their environment. Shared memory that they
    have mapped is removed once all of them have ended that had, and `folder` at the end."""

    def __init__(self, folder: str = "") -> None:
        mark = uuid.uuid4().hex
        os.environ[_MARKS] = f"{os.environ.get(_MARKS, '')}{mark},"
        self._lifeline, theirs = socket.socketpair()
        with theirs:
            fd, before = theirs.fileno(), {pid: start_of(pid) for pid in descendants(os.getpid())}
            self.process = beside("_guard", fd, os.getpid(), before, mark, folder, pass_fds=(fd,))

    def close(self) -> None:
        """End all that is left, and return then."""
        with self._lifeline as lifeline:
            lifeline.settimeout(3 * _SWEEP_LIMIT_S)
            with suppress(BrokenPipeError, ConnectionResetError):
                lifeline.sendall(b"x")
                lifeline.recv(1)


def shared_memory(pids: set[int]) -> set[Path]:
    """Files in /dev/shm that processes have mapped."""
    found = set[Path]()
    for pid in pids:
        # It has ended, or is another user's.
        with suppress(OSError):
            for line in (
                Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
            ):
                place = line[73:].strip() if "/dev/shm/" in line else ""
                if place.startswith("/dev/shm/") and not place.endswith(" (deleted)"):
                    found.add(Path(place))
    return found


def _guard(lifeline_fd: int, root: int, before: dict[int, bytes], mark: str, folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lifeline, guarded = socket.socket(fileno=lifeline_fd), _Guarded(root, before, mark)
    watched = select.poll()
    watched.register(lifeline_fd, select.POLLIN)
    # A forked child may hold the lifeline open: so the parent is looked at as well.
    while not watched.poll(1000 * _POLL_S) and os.getppid() == root:
        guarded.look()
    guarded.end()
    with suppress(BrokenPipeError):
        lifeline.sendall(b"x")
    while os.getppid() == root:
        time.sleep(0.02)
    # Those that take away what the others have left get their time.
    guarded.end(with_trackers=True)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


class _Guarded:
    """The processes that a guardian ends, by id and start, and the shared memory that some of them have mapped."""

    def __init__(self, root: int, before: dict[int, bytes], mark: str) -> None:
        self._root, self._before, self._mark = root, before, mark.encode()
        self._known: dict[int, bytes] = {}
        self._memory: dict[Path, dict[int, bytes]] = {}

    def look(self) -> None:
        """Note what there is; remove memory whose processes have ended."""
        self._known |= {pid: start_of(pid) for pid in descendants(self._root)}
        # One that has lost its parent is a descendant no more.
        self._known = _living(self._known)
        with suppress(FileNotFoundError):  # no such file system, or a file is gone
            now = time.time()
            new = {
                Path(one) for one in os.scandir("/dev/shm") if now - one.stat().st_ctime < _NEW_S
            }
            for pid in self._there() if new else ():
                for file in shared_memory({pid}) & new:
                    self._memory.setdefault(file, {})[pid] = start_of(pid)
        for file in [file for file, owners in self._memory.items() if not _living(owners)]:
            self._memory[file] = {
                pid: start_of(pid) for pid in _all_pids() if file in shared_memory({pid})
            }
            if not self._memory[file]:
                del self._memory[file]
                file.unlink(missing_ok=True)

    def end(self, *, with_trackers: bool = False) -> None:
        """End them, but for those that clean up, or also these once they have had their time."""
        until = time.monotonic() + _SWEEP_LIMIT_S
        patience = time.monotonic() + (_SWEEP_LIMIT_S / 3 if with_trackers else 0)
        while time.monotonic() < until:
            there = self._there()
            trackers = {
                pid for pid in there if any(one in _read(pid, "cmdline") for one in _TRACKERS)
            }
            if not (there if with_trackers else there - trackers):
                break
            victims = (
                there - trackers if time.monotonic() < patience or not with_trackers else there
            )
            self._memory |= {file: {} for file in shared_memory(victims)}
            _signal_all(victims, signal.SIGSTOP)
            _signal_all(victims, signal.SIGKILL)
            time.sleep(0.02)
        for file in self._memory:
            file.unlink(missing_ok=True)

    def _there(self) -> set[int]:
        there = {*descendants(self._root), *_living(self._known)}
        there |= {pid for pid in _all_pids() if self._mark in _read(pid, "environ")}
        there -= {os.getpid(), self._root, *_living(self._before)}
        return {pid for pid in there if start_of(pid)}


def end_session(folder: str) -> None:
    """Kill the processes of a cluster of Ray's that is over, and remove the folder of its session: those whose output
    goes there, and those that Ray has named with a file open there."""
    until = time.monotonic() + _SWEEP_LIMIT_S
    while ((left := _in_session(folder)) or os.path.exists(folder)) and time.monotonic() < until:
        _signal_all(left, signal.SIGKILL)
        # Again where what is dying still wrote into it.
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)
    latest = Path(folder).with_name("session_latest")
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)


def _in_session(folder: str) -> set[int]:
    found = set()
    for pid in _all_pids():
        # It may end meanwhile, or be another user's.
        with suppress(OSError):
            files = Path(f"/proc/{pid}/fd")
            is_named = _read(pid, "cmdline").startswith(b"ray::")
            outputs = files.iterdir() if is_named else (files / "1", files / "2")
            if any(os.readlink(file).startswith(f"{folder}/") for file in outputs):
                found.add(pid)
    return found


def _end_sessions_behind(driver: int, folders: Sequence[str]) -> None:
    """The program of a process that does so when its driver ends, by whatever signal: Ray's own agents would stay for a
    minute then, and the folders for good."""
    while os.getppid() == driver:
        time.sleep(0.2)
    for folder in folders:
        end_session(folder)


def _living(processes: dict[int, bytes]) -> dict[int, bytes]:
    return {pid: start for pid, start in processes.items() if start and start_of(pid) == start}


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    with suppress(OSError):  # it has ended, or is another user's
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def stat_of(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on; the state of one that has ended and left no file is X."""
    return _read(pid, "stat").rpartition(b")")[2].split() or [b"X"]


def start_of(pid: int) -> bytes:
    """When a process was started, which tells it from others with its number; nothing where it has ended."""
    fields = stat_of(pid)
    return b"" if fields[0] in b"ZX" else fields[19]


def begin_of_process() -> float:
    """Seconds since 1970 at which this process was started; where the kernel does not say so, now."""
    ticks = start_of(os.getpid())
    if not ticks:
        return time.time()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - max(0.0, age_s)


def _supervise(child: int, driver: int, lifeline_fd: int, wake_fd: int, note_fd: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for fd in map(int, os.listdir("/dev/fd")):
        if fd > 2 and fd not in (lifeline_fd, wake_fd, note_fd):
            with suppress(OSError):  # that of the listing itself
                os.close(fd)
    os.set_blocking(note_fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(note_fd, warn_on_full_buffer=False)
    watched = select.poll()
    watched.register(lifeline_fd, select.POLLIN)
    watched.register(wake_fd, select.POLLIN)
    ends: dict[int, int] = {}
    is_over = False
    while not is_over:
        _reap(ends)
        ready = [] if child in ends else [fd for fd, _ in watched.poll(1000 * _POLL_S)]
        if wake_fd in ready:
            os.read(wake_fd, 4096)
        # A forked child of the driver may hold the lifeline open: so the parent is looked at as well.
        is_over = child in ends or lifeline_fd in ready or os.getppid() != driver
    until = time.monotonic() + _SWEEP_LIMIT_S
    while _reap(ends) and time.monotonic() < until:
        end_descendants(os.getpid())
        time.sleep(0.002)
    with suppress(ProcessLookupError):  # all that is known of it where there is no /proc
        os.killpg(child, signal.SIGKILL)
    end_group(os.getpid())
    remove_stale_folders()
    code = os.waitstatus_to_exitcode(ends.get(child, signal.SIGKILL))
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _reap(ends: dict[int, int]) -> bool:
    """Note how children have ended; returns whether there are others."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            ends[ended[0]] = ended[1]
    except ChildProcessError:
        return False
    return True


def _signal_all(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        # It has ended, or has become another user's.
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _group(supervisor: int) -> Path | None:
    """The place of a control group beside that of this process; None without cgroup v2."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            for mount in (
                ("/sys/fs/cgroup", "/sys/fs/cgroup/unified") if line.startswith("0::") else ()
            ):
                own = Path(f"{mount}{line[3:]}".rstrip("/"))
                if (own / "cgroup.procs").exists():
                    return own / f"quadriga-{supervisor}"
    return None


def _make_group(supervisor: int) -> Path | None:
    """A control group for a child, where one can be made; those of supervisors that were killed are ended."""
    group = _group(supervisor)
    if group is None:
        return None
    with suppress(OSError):
        group.mkdir()
        for other in group.parent.glob("quadriga-*"):
            if not Path("/proc", other.name.removeprefix("quadriga-")).exists():
                end_group(int(other.name.removeprefix("quadriga-")))
        return group
    return None


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
