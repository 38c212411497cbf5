# SPDX-License-Identifier: Apache-2.0
"""Ends processes that run users' code, everything that they started, and their temporary folders.

    driver -- lifeline --> supervisor -- fork --> users' code -- starts --> others, in new sessions
                               ^                                              |
                               +------ adopts each process whose parent ends -+

supervisor  waits for: the end of its child, or of the driver.
            unblocked by: SIGCHLD; a byte in the lifeline, or its end; a change of its parent.
            Then it kills all its descendants until none is left.

A process that cannot have a supervisor, because another program started it, has a `Guardian`. This
is a separate process that records the descendants and their shared memory, and ends the remaining
ones after the guarded process has ended. It also removes the shared memory of processes that were
killed. A similar process cleans up after each Ray cluster that a run starts.

If a supervisor is killed, its child ends with it, but not the processes that the child has started.
If control groups (cgroup v2) are writable, the child and these are in one, and the driver, or the
next supervisor on the machine, kills all processes in it.

The owner of a temporary folder (`own_folder`) holds a lock on it while it is alive. Supervisors
remove unlocked folders of any run when they start and when they end.
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

# Options of prctl(2): the signal of which a process dies with its parent, and the adoption of orphans.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SWEEP_LIMIT_S = 10.0
_POLL_S = 1.0
# Age up to which a file of shared memory counts as new; longer than the time between two records.
_NEW_FILE_AGE_S = 3.0
_FOLDER_PREFIX = "quadriga-folder-"
# Environment variable with the marks of the guardians of a process: "1f0c...,77ab...,".
_MARKS_VARIABLE = "QUADRIGA_GUARDED_BY"
# Added to a guardian's import path: it runs with `-S`, so that Python does not find an editable
# installation by itself.
_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[1])
# Programs that end after the others: multiprocessing's and a Ray cluster's clean up behind them, and
# wandb's service still writes.
_LATE_PROGRAMS = (b"resource_tracker", b"_end_sessions_behind", b"wandb-core")


def supervise(lifeline_fd: int) -> None:
    """Fork this process, which must have a single thread, into a supervisor and its child.

    The child returns from this function, in its own process group. The kernel kills it first when
    memory runs out. The supervisor never returns: it exits with the status of the child.

    Args:
        lifeline_fd: file descriptor. When a byte arrives there, or its other end is closed, the
            supervisor kills the child.
    """
    supervisor = os.getpid()
    driver = os.getppid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    remove_stale_folders()
    control_group = _create_control_group(supervisor)
    # Signals wake the supervisor: Python writes a byte to `note_fd`, which arrives at `wake_fd`.
    wake_fd, note_fd = os.pipe()
    child = os.fork()
    if child:
        _run_supervisor(child, driver, lifeline_fd, wake_fd, note_fd)  # does not return
    for fd in (lifeline_fd, wake_fd, note_fd):
        os.close(fd)
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The supervisor may have died before the option was set.
    if os.getppid() != supervisor:
        os._exit(1)
    # Some systems refuse the next two steps, which are not essential.
    with suppress(OSError):
        # The highest score: killed first when memory runs out.
        Path("/proc/self/oom_score_adj").write_bytes(b"1000")
    with suppress(OSError):
        if control_group is not None:
            # 0 stands for the process that writes.
            (control_group / "cgroup.procs").write_bytes(b"0")


def descendants(root: int) -> list[int]:
    """Ids of all processes below `root`, parents first, including zombies."""
    children: dict[int, list[int]] = defaultdict(list)
    for pid in _all_pids():
        fields = stat_of(pid)
        # The process may have ended since it was listed.
        if fields[0] != b"X":
            parent = int(fields[1])
            children[parent].append(pid)
    pids = [root]
    for pid in pids:
        pids += children[pid]  # the loop visits them too
    return pids[1:]


def end_descendants(root: int) -> None:
    """Kill all processes below `root`."""
    # All are stopped before the first is killed, so that none can start another one.
    stopped = set()
    while running := set(descendants(root)) - stopped:
        _signal_all(running, signal.SIGSTOP)
        stopped |= running
    _signal_all(stopped, signal.SIGKILL)


def end_group(supervisor: int) -> None:
    """Kill all processes in the control group of a supervisor's child, and remove the group."""
    group = _control_group_of(supervisor)
    if group is None or not group.is_dir():
        return
    until = time.monotonic() + _SWEEP_LIMIT_S
    # Another process may end the same group at this time, so that the group's files disappear.
    with suppress(OSError):
        (group / "cgroup.kill").write_bytes(b"1")
        while (group / "cgroup.procs").read_bytes() and time.monotonic() < until:
            time.sleep(0.005)
        group.rmdir()


@contextmanager
def own_folder() -> Iterator[str]:
    """Context manager: yield an empty temporary folder, and remove it on exit.

    Other users may enter the folder but not list it. A lock on it shows that its owner is alive.
    """
    folder = ""
    lock = -1
    while lock < 0:
        folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
        # Another process may remove the folder before it is locked, because it looks abandoned.
        # Then `lock` is -1 again, and another folder is made.
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
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        # The folder may be another user's, or another process may have removed it.
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with suppress(BlockingIOError):  # its owner, which holds the lock, is alive
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove_folder(str(path))
            os.close(lock)


def _remove_folder(folder: str) -> None:
    """Remove a folder, in several attempts, because dying processes may still write there."""
    for pause_s in (0.0, 0.01, 0.1, 1.0):
        time.sleep(pause_s)
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return


def start_beside(
    function: str, *arguments: object, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a process that calls a function of this module, beside this process.

    The process is in its own session, so that neither Ctrl-C nor a signal to this process's group
    ends it.

    Args:
        function: name of the function.
        arguments: its arguments, whose `repr` must be valid Python.
        pass_fds: file descriptors that the process inherits.

    Returns:
        The process.
    """
    program = (
        "import sys; sys.path[:] = sys.argv[1:]; "
        f"from quadriga.descendants import {function} as call; call(*{arguments!r})"
    )
    command = [sys.executable, "-S", "-c", program, *map(str, sys.path), _PACKAGE_FOLDER]
    # Without site, the import hook of an editable installation does not find quadriga_verl's names.
    environment = {**os.environ, "QUADRIGA_VERL": "0"}
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env=environment,
        pass_fds=pass_fds,
        start_new_session=True,
    )


class Guardian:
    """Ends all processes that this process starts from now on, at `close` or when this one ends.

    A separate process, the guardian, lists the descendants of this one every second. It recognizes
    those whose parent has ended by a mark in the environment, which all of them inherit. A file of
    shared memory is removed once all processes that had mapped it have ended.

    Args:
        folder: folder to remove at the end; "": none.
    """

    def __init__(self, folder: str = "") -> None:
        mark = uuid.uuid4().hex
        os.environ[_MARKS_VARIABLE] = f"{os.environ.get(_MARKS_VARIABLE, '')}{mark},"
        self._lifeline, guardian_end = socket.socketpair()
        with guardian_end:
            fd = guardian_end.fileno()
            # Descendants that the guardian must not end.
            before = {pid: start_time_of(pid) for pid in descendants(os.getpid())}
            self.process = start_beside(
                "_guard", fd, os.getpid(), before, mark, folder, pass_fds=(fd,)
            )

    def close(self) -> None:
        """End all remaining processes but the late programs, and wait until they have ended.

        Late programs (`_LATE_PROGRAMS`) end after this process has ended.

        Raises:
            TimeoutError: the guardian did not reply within three times `_SWEEP_LIMIT_S`.
        """
        with self._lifeline as lifeline:
            lifeline.settimeout(3 * _SWEEP_LIMIT_S)
            # The guardian itself may have been killed.
            with suppress(BrokenPipeError, ConnectionResetError):
                lifeline.sendall(b"x")
                lifeline.recv(1)  # the guardian's reply


def shared_memory(pids: set[int]) -> set[Path]:
    """Files in /dev/shm that processes have mapped."""
    files = set()
    for pid in pids:
        # The process may have ended, or be another user's.
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
            for line in maps.splitlines():
                if "/dev/shm/" not in line:
                    continue
                path = line[73:].strip()  # the column of the path
                if path.startswith("/dev/shm/") and not path.endswith(" (deleted)"):
                    files.add(Path(path))
    return files


def _guard(lifeline_fd: int, root: int, before: dict[int, bytes], mark: str, folder: str) -> None:
    """Main function of a guardian's process.

    Args:
        lifeline_fd: socket to the guarded process, which sends a byte, or closes its end, to have
            its descendants ended.
        root: id of the guarded process.
        before: start times, by process id, of descendants that were there before the guardian. They
            are not ended.
        mark: mark in the environment of all other descendants.
        folder: folder to remove at the end; "": none.
    """
    # Signals that end a whole process group must not end the process that cleans up behind it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lifeline = socket.socket(fileno=lifeline_fd)
    guarded = _Guarded(root, before, mark)
    poll = select.poll()
    poll.register(lifeline_fd, select.POLLIN)
    # A forked child may hold the lifeline open, so the parent is checked as well.
    while not poll.poll(1000 * _POLL_S) and os.getppid() == root:
        guarded.record_processes()
    guarded.end()
    # The reply that `Guardian.close` waits for.
    with suppress(BrokenPipeError):
        lifeline.sendall(b"x")
    # Late programs are needed until the guarded process has ended, and get time to finish then.
    while os.getppid() == root:
        time.sleep(0.02)
    guarded.end(with_late_programs=True)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


class _Guarded:
    """Processes that a guardian ends, and the shared memory that they have mapped.

    A process is identified by its id and its start time, because ids are reused.

    Args:
        root: id of the guarded process.
        before: descendants that are not ended, as for `_guard`.
        mark: mark in the environment of all other descendants.
    """

    def __init__(self, root: int, before: dict[int, bytes], mark: str) -> None:
        self._root = root
        self._before = before
        self._mark = mark.encode()
        # Start times of the processes that were found, by id.
        self._known: dict[int, bytes] = {}
        # For each file of shared memory, the start times of the processes that have mapped it, by id.
        self._memory: dict[Path, dict[int, bytes]] = {}

    def record_processes(self) -> None:
        """Record new processes and shared memory. Remove memory whose processes have all ended."""
        # Remembered, because a process is no longer found as a descendant once its parent has ended.
        self._known |= {pid: start_time_of(pid) for pid in descendants(self._root)}
        self._known = _living_among(self._known)
        # The file system may not exist, or a file may have disappeared.
        with suppress(FileNotFoundError):
            now = time.time()
            entries = os.scandir("/dev/shm")
            new_files = {
                Path(entry) for entry in entries if now - entry.stat().st_ctime < _NEW_FILE_AGE_S
            }
            # Looking for the owners of files takes long, so it is only done for new ones.
            pids = self._pids() if new_files else set()
            for pid in pids:
                for file in shared_memory({pid}) & new_files:
                    self._memory.setdefault(file, {})[pid] = start_time_of(pid)
        unowned = [file for file, owners in self._memory.items() if not _living_among(owners)]
        for file in unowned:
            # Another process may have mapped the file after it stopped being new.
            late_owners = [pid for pid in _all_pids() if file in shared_memory({pid})]
            if late_owners:
                self._memory[file] = {pid: start_time_of(pid) for pid in late_owners}
            else:
                del self._memory[file]
                file.unlink(missing_ok=True)

    def end(self, *, with_late_programs: bool = False) -> None:
        """Kill the processes and remove their shared memory.

        Args:
            with_late_programs: whether to wait until `_LATE_PROGRAMS` have ended as well. They are
                killed after a third of the time limit, in which they can end by themselves.
        """
        until = time.monotonic() + _SWEEP_LIMIT_S
        late_until = time.monotonic() + _SWEEP_LIMIT_S / 3
        # Processes may start others while they are killed, so look again until none is left.
        while time.monotonic() < until:
            pids = self._pids()
            late_pids = set()
            for pid in pids:
                command = _read_proc_file(pid, "cmdline")
                if any(program in command for program in _LATE_PROGRAMS):
                    late_pids.add(pid)
            remaining = pids if with_late_programs else pids - late_pids
            if not remaining:
                break
            # Late programs are spared, unless this call waits for them and their time is over.
            victims = pids
            if not with_late_programs or time.monotonic() < late_until:
                victims = pids - late_pids
            # Before they are killed: afterwards the kernel no longer lists the memory that they have
            # mapped.
            for file in shared_memory(victims):
                self._memory[file] = {}
            # All are stopped first, so that none sees the end of another one and replaces it.
            _signal_all(victims, signal.SIGSTOP)
            _signal_all(victims, signal.SIGKILL)
            time.sleep(0.02)
        for file in self._memory:
            file.unlink(missing_ok=True)

    def _pids(self) -> set[int]:
        """Ids of the guarded processes that have not ended."""
        pids = {*descendants(self._root), *_living_among(self._known)}
        pids |= {pid for pid in _all_pids() if self._mark in _read_proc_file(pid, "environ")}
        pids -= {os.getpid(), self._root, *_living_among(self._before)}
        return {pid for pid in pids if start_time_of(pid)}


def end_session(folder: str) -> None:
    """Kill the processes of a Ray cluster that is over, and remove the folder of its session."""
    until = time.monotonic() + _SWEEP_LIMIT_S
    while time.monotonic() < until:
        pids = _processes_of_session(folder)
        if not pids and not os.path.exists(folder):
            break
        _signal_all(pids, signal.SIGKILL)
        # Dying processes may still write there, which the next iteration removes.
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)
    latest = Path(folder).with_name("session_latest")
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)


def _processes_of_session(folder: str) -> set[int]:
    """Find the processes of a Ray session, by the files that they have open in its folder."""
    pids = set()
    for pid in _all_pids():
        # The process may have ended, or be another user's.
        with suppress(OSError):
            fd_folder = Path(f"/proc/{pid}/fd")
            # Of a worker of Ray any open file counts. Of other processes only standard output and
            # error do: a user's program may read a file there.
            is_ray_worker = _read_proc_file(pid, "cmdline").startswith(b"ray::")
            candidates = (
                fd_folder.iterdir() if is_ray_worker else (fd_folder / "1", fd_folder / "2")
            )
            if any(os.readlink(file).startswith(f"{folder}/") for file in candidates):
                pids.add(pid)
    return pids


def _end_sessions_behind(driver: int, folders: Sequence[str]) -> None:
    """Main function of a process that ends a driver's Ray sessions when the driver ends.

    After a driver that was killed, Ray's agents would remain for a minute, and the folders forever.

    Args:
        driver: id of the driver, the parent of this process.
        folders: folders of the sessions.
    """
    while os.getppid() == driver:
        time.sleep(0.2)
    for folder in folders:
        end_session(folder)


def _living_among(processes: dict[int, bytes]) -> dict[int, bytes]:
    """Select the processes that have not ended.

    Args:
        processes: start times by process id; b"" for a process that had ended when it was recorded.
    """
    return {pid: start for pid, start in processes.items() if start and start_time_of(pid) == start}


def _all_pids() -> list[int]:
    """Ids of all processes of this machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read_proc_file(pid: int, name: str) -> bytes:
    """Read a file of a process in /proc; empty if the process has ended or is another user's."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def stat_of(pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat from the state and the parent's id on.

    Only the state `X` if there is no such process.
    """
    # The file begins with the id and the name. The name is in parentheses, and may contain some.
    return _read_proc_file(pid, "stat").rpartition(b")")[2].split() or [b"X"]


def start_time_of(pid: int) -> bytes:
    """Start time of a process in clock ticks since the boot; b"" if it has ended.

    Ids are reused, but no two processes have the same id and start time.
    """
    fields = stat_of(pid)
    # Z: it has ended, but its parent has not collected the status. Field 19 is the start time.
    return b"" if fields[0] in b"ZX" else fields[19]


def process_start_time() -> float:
    """Time at which this process was started, in seconds since 1970; the present time if unknown."""
    ticks = start_time_of(os.getpid())
    if not ticks:
        return time.time()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - max(0.0, age_s)


def _run_supervisor(child: int, driver: int, lifeline_fd: int, wake_fd: int, note_fd: int) -> None:
    """Wait for the end of the child or of the driver, kill all descendants, and exit.

    Args:
        child: id of the child.
        driver: id of this process's parent.
        lifeline_fd: pipe from the driver.
        wake_fd: pipe that wakes this process when a child has ended.
        note_fd: the other end of `wake_fd`, to which Python writes a byte for each signal.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Copies of descriptors here would keep the child's connections open after its end.
    for fd in map(int, os.listdir("/dev/fd")):
        if fd > 2 and fd not in (lifeline_fd, wake_fd, note_fd):
            with suppress(OSError):  # the descriptor of the listing itself
                os.close(fd)
    # With a handler, even an empty one, Python writes a byte to the pipe for each SIGCHLD.
    os.set_blocking(note_fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(note_fd, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(lifeline_fd, select.POLLIN)
    poll.register(wake_fd, select.POLLIN)

    # Wait statuses of ended children, which include adopted ones, by process id.
    ends: dict[int, int] = {}
    is_over = False
    while not is_over:
        _reap_children(ends)
        # The descriptors that can be read.
        ready = []
        if child not in ends:
            ready = [fd for fd, _ in poll.poll(1000 * _POLL_S)]
        if wake_fd in ready:
            os.read(wake_fd, 4096)
        # A forked child of the driver may hold the lifeline open, so the parent is checked as well.
        is_over = child in ends or lifeline_fd in ready or os.getppid() != driver

    # Repeated, because processes are adopted one after the other, as their parents end.
    until = time.monotonic() + _SWEEP_LIMIT_S
    while _reap_children(ends) and time.monotonic() < until:
        end_descendants(os.getpid())
        time.sleep(0.002)
    # Without /proc only this group is known.
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    end_group(os.getpid())
    remove_stale_folders()

    # End in the same way as the child. One that has not been collected counts as killed.
    code = os.waitstatus_to_exitcode(ends.get(child, signal.SIGKILL))
    if code < 0:
        # A negative code is a signal. Die of the same one, without a core file of this process.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _reap_children(ends: dict[int, int]) -> bool:
    """Collect the exit statuses of ended children.

    Args:
        ends: wait statuses by process id; added to.

    Returns:
        Whether there are children that have not ended.
    """
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return True
            ends[pid] = status
    except ChildProcessError:
        return False


def _signal_all(pids: set[int], number: signal.Signals) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        # The id may now belong to another user's process.
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _control_group_of(supervisor: int) -> Path | None:
    """Path of the control group for a supervisor's child, below the group of this process.

    None: the system has no cgroup v2.
    """
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            # The line of cgroup v2 is `0::` and the path of the group below the mount.
            if not line.startswith("0::"):
                continue
            for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
                parent = Path(f"{mount}{line[3:]}".rstrip("/"))
                if (parent / "cgroup.procs").exists():
                    return parent / f"quadriga-{supervisor}"
    return None


def _create_control_group(supervisor: int) -> Path | None:
    """Create the control group for a supervisor's child, and end groups whose supervisor has died.

    Returns:
        The path of the group. None: groups cannot be created here.
    """
    group = _control_group_of(supervisor)
    if group is None:
        return None
    with suppress(OSError):
        group.mkdir()
        for other in group.parent.glob("quadriga-*"):
            other_supervisor = other.name.removeprefix("quadriga-")
            if not Path("/proc", other_supervisor).exists():
                end_group(int(other_supervisor))
        return group
    return None


def _prctl(option: int, value: int) -> None:
    """Call prctl(2); does nothing on systems other than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
