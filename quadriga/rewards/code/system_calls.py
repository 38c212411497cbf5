# SPDX-License-Identifier: Apache-2.0
"""The system calls that a model's program may make: a list of allowed ones; every other is refused by the kernel.

    on the list, or with arguments on it        the call is made
    every other call that has a name here       EPERM, and the listener, if there is one, is told which
    fork, vfork, clone but of a thread          EAGAIN, as at a limit of processes
    socket, but for AF_UNIX                     the process is killed by SIGSYS: the one attempt that ends a program
    clone3, openat2, io_uring, others           ENOSYS: libraries then use older calls, which a filter can read

What is on the list acts on the caller alone, on files (which Landlock guards) or on descriptors that it opened itself.
Nothing on it reaches another process or outlives the caller.

    sockets         stream pairs only, as none is inherited and no other can be made. `sendmsg` has its address behind a
                    pointer, where no filter looks; but the kernel refuses addresses on a stream pair (EISCONN), and
                    descriptors that it passes come out at the other end, which is the caller's too.
    fcntl, ioctl    by command: none that names an owner to be signalled (F_SETOWN, F_SETOWN_EX, F_SETSIG, F_NOTIFY,
                    F_SETLEASE, FIOSETOWN, SIOCSPGRP, FIOASYNC). O_ASYNC without an owner signals nobody.
    open, openat    but of a file without a name (O_TMPFILE), which no listing of a folder counts.
    xattrs, flock   not even to read: Landlock guards neither attributes nor locks of the user's files.
"""

import ctypes
import errno
import fcntl
import os
import platform
import select
import struct
from functools import cache
from itertools import groupby
from operator import itemgetter

# Names of system calls by machine: the first of each text has the number before it, and the next follow on it.
_NUMBERED = {
    "x86_64": {
        0: """
        read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask
        rt_sigreturn ioctl pread64 pwrite64 readv writev access pipe select sched_yield mremap msync mincore
        madvise shmget shmat shmctl dup dup2 pause nanosleep getitimer alarm setitimer getpid sendfile socket
        connect accept sendto recvfrom sendmsg recvmsg shutdown bind listen getsockname getpeername socketpair
        setsockopt getsockopt clone fork vfork execve exit wait4 kill uname semget semop semctl shmdt msgget
        msgsnd msgrcv msgctl fcntl flock fsync fdatasync truncate ftruncate getdents getcwd chdir fchdir rename
        mkdir rmdir creat link unlink symlink readlink chmod fchmod chown fchown lchown umask gettimeofday
        getrlimit getrusage sysinfo times ptrace getuid syslog getgid setuid setgid geteuid getegid setpgid
        getppid getpgrp setsid setreuid setregid getgroups setgroups setresuid getresuid setresgid getresgid
        getpgid setfsuid setfsgid getsid capget capset rt_sigpending rt_sigtimedwait rt_sigqueueinfo
        rt_sigsuspend sigaltstack utime mknod uselib personality ustat statfs fstatfs sysfs getpriority
        setpriority sched_setparam sched_getparam sched_setscheduler sched_getscheduler sched_get_priority_max
        sched_get_priority_min sched_rr_get_interval mlock munlock mlockall munlockall vhangup modify_ldt
        pivot_root _sysctl prctl arch_prctl adjtimex setrlimit chroot sync acct settimeofday mount umount2
        swapon swapoff reboot sethostname setdomainname iopl ioperm create_module init_module delete_module
        get_kernel_syms query_module quotactl nfsservctl getpmsg putpmsg afs_syscall tuxcall security gettid
        readahead setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
        removexattr lremovexattr fremovexattr tkill time futex sched_setaffinity sched_getaffinity
        set_thread_area io_setup io_destroy io_getevents io_submit io_cancel get_thread_area lookup_dcookie
        epoll_create epoll_ctl_old epoll_wait_old remap_file_pages getdents64 set_tid_address restart_syscall
        semtimedop fadvise64 timer_create timer_settime timer_gettime timer_getoverrun timer_delete
        clock_settime clock_gettime clock_getres clock_nanosleep exit_group epoll_wait epoll_ctl tgkill utimes
        vserver mbind set_mempolicy get_mempolicy mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify
        mq_getsetattr kexec_load waitid add_key request_key keyctl ioprio_set ioprio_get inotify_init
        inotify_add_watch inotify_rm_watch migrate_pages openat mkdirat mknodat fchownat futimesat newfstatat
        unlinkat renameat linkat symlinkat readlinkat fchmodat faccessat pselect6 ppoll unshare set_robust_list
        get_robust_list splice tee sync_file_range vmsplice move_pages utimensat epoll_pwait signalfd
        timerfd_create eventfd fallocate timerfd_settime timerfd_gettime accept4 signalfd4 eventfd2
        epoll_create1 dup3 pipe2 inotify_init1 preadv pwritev rt_tgsigqueueinfo perf_event_open recvmmsg
        fanotify_init fanotify_mark prlimit64 name_to_handle_at open_by_handle_at clock_adjtime syncfs sendmmsg
        setns getcpu process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr renameat2
        seccomp getrandom memfd_create kexec_file_load bpf execveat userfaultfd membarrier mlock2
        copy_file_range preadv2 pwritev2 pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq
        """,
    },
    "aarch64": {
        0: """
        io_setup io_destroy io_submit io_cancel io_getevents setxattr lsetxattr fsetxattr getxattr lgetxattr
        fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr getcwd lookup_dcookie
        eventfd2 epoll_create1 epoll_ctl epoll_pwait dup dup3 fcntl inotify_init1 inotify_add_watch
        inotify_rm_watch ioctl ioprio_set ioprio_get flock mknodat mkdirat unlinkat symlinkat linkat renameat
        umount2 mount pivot_root nfsservctl statfs fstatfs truncate ftruncate fallocate faccessat chdir fchdir
        chroot fchmod fchmodat fchownat fchown openat close vhangup pipe2 quotactl getdents64 lseek read write
        readv writev pread64 pwrite64 preadv pwritev sendfile pselect6 ppoll signalfd4 vmsplice splice tee
        readlinkat fstatat fstat sync fsync fdatasync sync_file_range timerfd_create timerfd_settime
        timerfd_gettime utimensat acct capget capset personality exit exit_group waitid set_tid_address unshare
        futex set_robust_list get_robust_list nanosleep getitimer setitimer kexec_load init_module delete_module
        timer_create timer_gettime timer_getoverrun timer_settime timer_delete clock_settime clock_gettime
        clock_getres clock_nanosleep syslog ptrace sched_setparam sched_setscheduler sched_getscheduler
        sched_getparam sched_setaffinity sched_getaffinity sched_yield sched_get_priority_max
        sched_get_priority_min sched_rr_get_interval restart_syscall kill tkill tgkill sigaltstack rt_sigsuspend
        rt_sigaction rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigreturn setpriority
        getpriority reboot setregid setgid setreuid setuid setresuid getresuid setresgid getresgid setfsuid
        setfsgid times setpgid getpgid getsid setsid getgroups setgroups uname sethostname setdomainname
        getrlimit setrlimit getrusage umask prctl getcpu gettimeofday settimeofday adjtimex getpid getppid
        getuid geteuid getgid getegid gettid sysinfo mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify
        mq_getsetattr msgget msgctl msgrcv msgsnd semget semctl semtimedop semop shmget shmctl shmat shmdt
        socket socketpair bind listen accept connect getsockname getpeername sendto recvfrom setsockopt
        getsockopt shutdown sendmsg recvmsg readahead brk munmap mremap add_key request_key keyctl clone execve
        mmap fadvise64 swapon swapoff mprotect msync mlock munlock mlockall munlockall mincore madvise
        remap_file_pages mbind get_mempolicy set_mempolicy migrate_pages move_pages rt_tgsigqueueinfo
        perf_event_open accept4 recvmmsg
        """,
        260: """
        wait4 prlimit64 fanotify_init fanotify_mark name_to_handle_at open_by_handle_at clock_adjtime syncfs
        setns sendmmsg process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr
        renameat2 seccomp getrandom memfd_create bpf execveat userfaultfd membarrier mlock2 copy_file_range
        preadv2 pwritev2 pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq kexec_file_load
        """,
    },
}
# From here on all machines have the same numbers.
_NUMBERED_ALIKE = {
    424: """
        pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen fsconfig
        fsmount fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2 process_madvise epoll_pwait2
        mount_setattr quotactl_fd landlock_create_ruleset landlock_add_rule landlock_restrict_self memfd_secret
        process_mrelease futex_waitv set_mempolicy_home_node cachestat fchmodat2 map_shadow_stack futex_wake
        futex_wait futex_requeue statmount listmount lsm_get_self_attr lsm_set_self_attr lsm_list_modules mseal
        setxattrat getxattrat listxattrat removexattrat open_tree_attr file_getattr file_setattr
        """
}

# A name that one of the machines lacks is passed over there.
_ALLOWED = """
    read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek sendfile copy_file_range ftruncate
    fsync fdatasync creat close close_range dup dup2 dup3 pipe pipe2 access faccessat faccessat2
    stat lstat fstat newfstatat statx statfs fstatfs readlink readlinkat getdents getdents64 getcwd chdir fchdir
    rename renameat renameat2 unlink unlinkat mkdir mkdirat rmdir umask
    poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2
    signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime
    recvfrom sendmsg recvmsg shutdown getsockname getpeername getsockopt
    mmap munmap mprotect mremap madvise mincore msync brk mbind get_mempolicy set_mempolicy
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack pause
    restart_syscall alarm getitimer setitimer nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time
    times futex set_robust_list set_tid_address rseq arch_prctl sched_yield sched_getaffinity sched_getparam
    sched_getscheduler sched_get_priority_max sched_get_priority_min getcpu getpriority getrlimit setrlimit getrusage
    getpid getppid gettid getpgrp getuid geteuid getgid getegid getresuid getresgid getgroups uname sysinfo getrandom
    wait4 waitid exit exit_group
"""

_ALL, _STREAM, _AF_UNIX, _CLONE_THREAD, _NEW_NAMESPACES = 0xFFFFFFFF, 1, 1, 0x10000, 0x7E020080
# Stand in the filter until a process knows its number, whether it may have threads, and whether somebody listens.
_OWN_PID, _THREAD, _REFUSED = 0x7FFFFFF5, 0x7FFFFFF6, 0x7FFFFFF7
# Words of 32 bits (two an argument, the low one first) that decide, under a mask: a call is allowed if each of them is
# one of the values.
_ALLOWED_IF = {
    "clone": [(0, _CLONE_THREAD | _NEW_NAMESPACES, [_THREAD])],
    "kill": [(0, _ALL, [_OWN_PID])],
    "tgkill": [(0, _ALL, [_OWN_PID])],
    "getpgid": [(0, _ALL, [0, _OWN_PID])],
    "prlimit64": [(0, _ALL, [0, _OWN_PID])],
    "sched_setaffinity": [(0, _ALL, [0, _OWN_PID])],
    # But with O_TMPFILE.
    "open": [(2, 0x400000, [0])],
    "openat": [(4, 0x400000, [0])],
    # Names of threads and of memory.
    "prctl": [(0, _ALL, [15, 16, 0x53564D41])],
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, locks of files, F_DUPFD_CLOEXEC.
    "fcntl": [(2, _ALL, [0, 1, 2, 3, 4, 5, 6, 7, 1030])],
    # TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
    "ioctl": [(2, _ALL, [0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451])],
    "socketpair": [(0, _ALL, [_AF_UNIX]), (2, 0xF, [_STREAM])],
    # Without an address.
    "sendto": [(8, _ALL, [0]), (9, _ALL, [0])],
}

# What a filter returns, its operations, and where it finds the facts of a call.
_ALLOW, _KILL, _ERRNO, _TELL = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_LOAD, _JUMP, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x54, 0x06
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
# What a listener reads of a call (its own number first, the call's at 16), and what it answers.
_RECEIVE, _ANSWER, _CALL_BYTES = 0xC0502100, 0xC0182101, 80

_UNKNOWN = _ERRNO | errno.ENOSYS
_OTHERWISE = {
    **dict.fromkeys(("fork", "vfork", "clone"), _ERRNO | errno.EAGAIN),
    **dict.fromkeys(("clone3", "openat2", "io_uring_setup", "io_uring_enter", "io_uring_register"), _UNKNOWN),
}

_libc = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def is_known_machine() -> bool:
    """Whether the system calls of this machine have their names here."""
    return platform.machine() in _MACHINES


@cache
def call_names() -> dict[int, str]:
    """The system calls of this machine, by their numbers."""
    texts = {**_NUMBERED[platform.machine()], **_NUMBERED_ALIKE}
    return {first + index: name for first, text in texts.items() for index, name in enumerate(text.split())}


@cache
def call_number(name: str) -> int:
    """The number of a system call on this machine."""
    return next(number for number, known in call_names().items() if known == name)


def make_call(name: str, *arguments: object) -> int:
    """Make a system call, with integers and what ctypes takes. OSError: the kernel refuses."""
    # As wide as a register: a narrower number would leave bits of it undefined.
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = _libc.syscall(ctypes.c_long(call_number(name)), *wide)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def filter_calls(*, may_have_threads: bool) -> int | None:
    """Put this process under the filter of system calls; `no_new_privs` must be set.

    Returns:
        A descriptor for another process's `refuse_call`, without which refused calls wait for ever. None where such a
        listener stands already, a container's own: the kernel then refuses by itself.

    Raises:
        OSError: the kernel refuses.
    """
    for has_listener in (True, False):
        code = program(os.getpid(), may_have_threads=may_have_threads, has_listener=has_listener)
        flags = _NEW_LISTENER if has_listener else 0
        try:
            listener = make_call("seccomp", _SET_MODE_FILTER, flags, ctypes.byref(_Filter(len(code) // 8, code)))
        except OSError as error:
            if not has_listener or error.errno != errno.EBUSY:
                raise
        else:
            return listener if has_listener else None
    return None


def program(pid: int, *, may_have_threads: bool, has_listener: bool) -> bytes:
    """The filter of the process of that number, as the kernel takes it."""
    known = {
        _OWN_PID: pid,
        # Masked as they are, the flags of no clone are equal to _ALL.
        _THREAD: _CLONE_THREAD if may_have_threads else _ALL,
        _REFUSED: _TELL if has_listener else _ERRNO | errno.EPERM,
    }
    code = _FILTER
    for mark, value in known.items():
        code = code.replace(struct.pack("=I", mark), struct.pack("=I", value))
    return code


def refuse_call(listener: int) -> str:
    """Refuse the call in which a filtered process waits, and return the call's name; "" if none waits any more."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    # Where the process has ended the descriptor is ready too, and reading it may block.
    if not any(events & select.POLLIN for _, events in poll.poll(0)):
        return ""
    call = bytearray(_CALL_BYTES)
    try:
        fcntl.ioctl(listener, _RECEIVE, call)
        ((own_number, number),) = struct.iter_unpack("=Q8xi60x", call)
        fcntl.ioctl(listener, _ANSWER, struct.pack("=QqiI", own_number, 0, -errno.EPERM, 0))
    except FileNotFoundError:
        # It has been killed in between.
        return ""
    return call_names()[number]


def _filter() -> bytes:
    """The filter's program, with marks in the place of what only a process knows."""
    names, always = call_names(), frozenset(_ALLOWED.split())
    rules = [(number, _rule(names.get(number, ""), always)) for number in range(max(names) + 2)]
    # The tree asks for the first number of each stretch with the same rule.
    stretches = [(next(group)[0], rule) for rule, group in groupby(rules, key=itemgetter(1))]
    begin = [_step(_LOAD, _MACHINE_AT), _step(_EQUAL, _MACHINES[platform.machine()], 1, 0), _step(_RETURN, _KILL)]
    return b"".join([*begin, _step(_LOAD, _NUMBER_AT), *_tree(stretches)])


def _tree(stretches: list[tuple[int, list[bytes]]]) -> list[bytes]:
    if len(stretches) == 1:
        return stretches[0][1]
    middle = len(stretches) // 2
    low, high = _tree(stretches[:middle]), _tree(stretches[middle:])
    return [_step(_AT_LEAST, stretches[middle][0], 0, 1), _step(_JUMP, len(low)), *low, *high]


def _rule(name: str, always: frozenset[str]) -> list[bytes]:
    """Steps that decide about one call and end the filter."""
    if name in always:
        return [_step(_RETURN, _ALLOW)]
    if name == "socket":
        return _tests([(0, _ALL, [_AF_UNIX])], _REFUSED, _KILL)
    otherwise = _OTHERWISE.get(name, _REFUSED if name else _UNKNOWN)
    return _tests(_ALLOWED_IF[name], _ALLOW, otherwise) if name in _ALLOWED_IF else [_step(_RETURN, otherwise)]


def _tests(words: list[tuple[int, int, list[int]]], if_all: int, otherwise: int) -> list[bytes]:
    steps = []
    for word, mask, values in words:
        steps += [_step(_LOAD, _ARGUMENTS_AT + 4 * word), _step(_AND, mask)]
        steps += [_step(_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)]
        steps.append(_step(_RETURN, otherwise))
    return [*steps, _step(_RETURN, if_all)]


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)


# Once a process, not in each that it forks.
_FILTER = _filter() if is_known_machine() else b""
