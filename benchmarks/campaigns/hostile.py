# SPDX-License-Identifier: Apache-2.0
"""Hostile programs in the grader `code`: each as root and as another user, with Landlock's scopes and without them.

A case is a grader of its own, as that user, beside a victim: a process of the same user that notes signals, messages
and changes of how it is scheduled and limited. The expected output is a secret. Case 1 is the first program as root;
after all programs come the next user and kernel, and after those the first again.
"""

import json
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from campaigns.campaign import Campaign, Outcome

_USER = 65534
_LIMITS = {"time_s": 1.0, "wall_s": 2.0, "total_s": 4.0, "memory_megabytes": 512}
_VARIANTS = [("root", True), ("user", True), ("root", False), ("user", False)]
_SLACK_S = 1.0
_CASE_LIMIT_S = 60

# By what the system calls are named: for those that Python has no function for. And who the victim is.
_BEGIN = """
import os, sys, time, ctypes, socket, signal, fcntl, struct, threading
libc, victim, address = ctypes.CDLL(None, use_errno=True), {victim}, {address!r}
def call(*numbers):
    return libc.syscall(*[ctypes.c_long(n) if isinstance(n, int) else n for n in numbers])
def owner(command, value):
    r, w = os.pipe()
    command(r, value)
    fcntl.fcntl(r, 10, 9)
    fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(w, b"x")
def attempts(*functions):
    for function in functions:
        try:
            print(function())
        except BaseException as error:
            print(error)
"""

# Under each name its program; one whose name begins with "result" is a function f.
_TEXT = r"""
## kill
attempts(*[lambda s=s: os.kill(victim, s) for s in range(1, 65)])
## kill a group, everybody
attempts(lambda: os.kill(-1, 9), lambda: os.kill(0, 9), lambda: os.killpg(1, 9))
## kill by pidfd
attempts(lambda: signal.pidfd_send_signal(os.pidfd_open(victim), 9))
## kill the supervisor
os.kill(os.getppid(), 9)
## stop the supervisor
attempts(lambda: os.kill(os.getppid(), 19))
time.sleep(60)
## tgkill, tkill, queues
print(call(234, victim, victim, 9), call(200, victim, 9), call(129, victim, 9, 0), call(297, victim, victim, 9, 0))
## F_SETOWN
owner(lambda r, v: fcntl.fcntl(r, 8, v), victim)
## F_SETOWN of a group
owner(lambda r, v: fcntl.fcntl(r, 8, -v), victim)
## F_SETOWN_EX
owner(lambda r, v: fcntl.fcntl(r, 15, struct.pack('ii', 1, v)), victim)
## FIOSETOWN
owner(lambda r, v: fcntl.ioctl(r, 0x8901, struct.pack('i', v)), victim)
## SIOCSPGRP of a pair
a, b = socket.socketpair()
fcntl.ioctl(a, 0x8902, struct.pack('i', victim))
fcntl.ioctl(a, 0x5452, struct.pack('i', 1))
b.send(b'x')
## F_NOTIFY, F_SETLEASE
attempts(lambda: fcntl.fcntl(os.open('.', 0), 1026, 2), lambda: fcntl.fcntl(os.open('x', 66), 1024, 1))
## affinity
print(os.sched_setaffinity(victim, [0]))
## priorities
attempts(lambda: os.setpriority(os.PRIO_PROCESS, victim, 19), lambda: call(251, 1, victim, 0x6000),
    lambda: call(144, victim, 3, ctypes.byref(ctypes.c_int(0))), lambda: call(314, victim, 0, 0))
## limits
import resource as r
attempts(lambda: r.prlimit(victim, r.RLIMIT_NOFILE, (1, 1)))
## memory of another
b = ctypes.create_string_buffer(64)
print(call(310, victim, b, 1, b, 1, 0), call(311, victim, b, 1, b, 1, 0), call(256, victim, 64, b, b),
    call(279, victim, 1, b, b, b, 0))
## ptrace
print([call(101, request, victim, 0, 0) for request in (16, 0x4206)])
## advise, release, compare
print(call(440, 3, 0, 0, 0, 0), call(448, 3, 0), call(312, victim, victim, 0, 0, 0), call(274, victim, 0, 0))
## share a core's cookie
print(call(157, 62, 2, victim, 1, 0))
## another's /proc
names = ('mem', 'environ', 'oom_score_adj', 'cmdline', 'maps', 'fd/0')
attempts(*[lambda n=n: open(f'/proc/{victim}/{n}', 'r+b').read(9) for n in names])
## secret in the supervisor
attempts(lambda: open(f'/proc/{os.getppid()}/mem', 'rb').read(9), lambda: open(f'/proc/{os.getppid()}/fd/0').read(),
    lambda: open('/proc/self/environ').read())
## secret by the collector
import gc
print([o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o],
    [v for f in sys._current_frames().values() for v in f.f_back.f_locals.items()])
## secret on descriptors
attempts(*[lambda fd=fd: os.pread(fd, 99, 0) for fd in range(1, 64)])
## secret in files
import glob
attempts(*[lambda p=p: os.listdir(p) for p in ('/tmp', '..', '/', '/home', '/root')],
    lambda: open('/etc/passwd').read(), lambda: glob.glob('/tmp/**', recursive=True))
## datagram pair
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.sendto(b'x', address)
## packet pair
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
a.connect(address)
## stream pair with an address
a, b = socket.socketpair()
attempts(lambda: a.sendto(b'x', address), lambda: a.sendmsg([b'x'], [], 0, address), lambda: a.connect(address),
    lambda: b.bind('x'))
## abstract socket
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', address)
## internet
socket.create_connection(('127.0.0.1', 22), 1)
## netlink
socket.socket(16, 3, 0)
## io_uring
b = ctypes.create_string_buffer(200)
print(call(425, 4, b), call(426, 0, 1, 1, 0, 0), call(427, 0, 0, b, 0))
## memory files
print(call(319, b'hostile', 0), call(447, 0))
os.memfd_create('hostile')
## shared memory
print(call(29, 0x51554144, 1 << 20, 0o1666), call(64, 0x51554144, 1, 0o1666), call(68, 0x51554144, 0o1666))
open('/dev/shm/hostile', 'w')
## message queue
print(call(240, b'hostile', 0o102, 0o666, 0), call(244, 0, 0))
## keyring
print(call(248, b'user', b'hostile', b'x', 1, -4), call(250, 0, -4, 1), call(249, b'user', b'x', 0, -4))
## inotify, fanotify
print(call(253), call(294, 0), call(300, 0, 0))
## bpf, perf, userfaultfd
b = ctypes.create_string_buffer(128)
print(call(321, 0, b, 48), call(298, b, victim, -1, -1, 0), call(323, 0))
## namespaces, mounts
print(call(272, 0x10000000), call(308, 3, 0), call(165, 0, 0, 0, 0, 0), call(161, b'/'), call(428, -100, b'/', 0))
## 32-bit calls
import mmap
m = mmap.mmap(-1, 4096, prot=7)
m.write(b'\xb8\x25\0\0\0\xbb' + struct.pack('i', victim) + b'\xb9\x09\0\0\0\xcd\x80\xc3')
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()
## x32 calls
print(call(0x40000000 | 62, victim, 9))
## fork bomb
while True:
    try:
        os.fork()
    except OSError:
        pass
## thread bomb
while True:
    try:
        threading.Thread(target=time.sleep, args=(60,)).start()
    except RuntimeError:
        pass
## exec
os.execv('/bin/sh', ['sh', '-c', 'sleep 60'])
## session
attempts(os.setsid, lambda: os.setpgid(0, 0))
time.sleep(60)
## memory
b = []
while True:
    try:
        b.append(bytearray(1 << 22))
    except MemoryError:
        pass
## time
for s in range(1, 65):
    attempts(lambda: signal.signal(s, signal.SIG_IGN))
while True:
    pass
## sleep
time.sleep(600)
## threads that spin
for _ in range(8):
    threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()
## output flood
while True:
    print(chr(1) * 1000)
## output by ftruncate
for fd in (1, 2, 3):
    os.ftruncate(fd, 8 << 20)
## error flood
while True:
    sys.stderr.write('\x00\ud800' * 999)
## fallocate
fd = os.open('x', 66)
print(call(285, fd, 1, 0, 1 << 33))
os.posix_fallocate(fd, 0, 1 << 33)
## unlinked files
import mmap
kept = []
while True:
    with open('x', 'w+b') as f:
        f.truncate(1 << 22)
        m = mmap.mmap(f.fileno(), 1 << 22)
        m[:] = bytes(1 << 22)
        kept.append(m)
    os.unlink('x')
## files without names
kept = []
while True:
    kept.append(os.open('.', os.O_TMPFILE | os.O_RDWR))
    os.write(kept[-1], bytes(1 << 22))
## files in flight
a, b = socket.socketpair()
while True:
    with open('x', 'w+b') as f:
        f.write(bytes(1 << 22))
        f.flush()
        socket.send_fds(a, [b'x'], [f.fileno()])
    os.unlink('x')
## many files
for n in range(10**6):
    open(str(n), 'w').close()
## links
attempts(lambda: os.symlink('/etc/passwd', 'x'), lambda: os.link('/usr/bin/env', 'y'), lambda: os.mkfifo('z'),
    lambda: os.mkdir('w'), lambda: open('x').read())
## whiteout
open('x', 'w').close()
print(call(316, -100, b'x', -100, b'y', 4))
## dumpable again
print(call(157, 4, 1, 0, 0, 0))
## outside files
import sysconfig
attempts(lambda: open(sysconfig.get_path('stdlib') + '/hostile.py', 'w'), lambda: open('/tmp/hostile', 'w'),
    lambda: open('../hostile', 'w'), lambda: os.truncate('/tmp/hostile', 0), lambda: os.rename('..', '/tmp/hostile'),
    lambda: os.chmod('..', 0o777))
## forged outcome
line = b'{"index": 0, "status": "ok"}\n'
for fd in range(1, 64):
    attempts(lambda: os.write(fd, line))
os._exit(0)
## leaves early
print('3', flush=True)
os._exit(0)
## leaves at exit
import atexit
atexit.register(lambda: os._exit(0))
print(3)
## other builtins
import builtins, json
builtins.open = builtins.exec = builtins.compile = lambda *a, **k: 3
json.dumps = lambda *a, **k: '3'
sys.exit = os._exit
## crash
ctypes.string_at(0)
## deep recursion
sys.setrecursionlimit(10**9)
def f():
    return f()
f()
## result: endless text
def f(a, b):
    class T(str):
        __str__ = __repr__ = lambda s: s * 10**9
    return T('x' * 10**8)
## result: huge number
def f(a, b):
    return 10**4300000
## result: infinite
def f(a, b):
    return 10**400
## result: deep lists
def f(a, b):
    os.write(3, b'[' * (1 << 22))
    os._exit(0)
## result: equal to all
def f(a, b):
    class E:
        __eq__ = lambda s, o: True
        tolist = lambda s: s
    return E()
## result: recursive
def f(a, b):
    r = []
    r.append(r)
    return r
## result: of any call
def __getattr__(name):
    return lambda *a: None
sys.modules['__main__'].f = lambda *a: print
"""
PROGRAMS = {
    block.partition("\n")[0].strip(): block.partition("\n")[2]
    for block in _TEXT.split("\n## ")
    if block.strip()
}

_VICTIM = """
import json, os, resource, select, signal, socket, sys
noted = []
for number in set(signal.valid_signals()) - {9, 19, signal.SIGINT}:
    signal.signal(number, lambda number, frame: noted.append(number))
box = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
box.bind(sys.argv[1])
canary = b"canary" * 100
def state():
    limits = [resource.getrlimit(n) for n in range(16)]
    told = [sorted(os.sched_getaffinity(0)), os.getpriority(0, 0), os.sched_getscheduler(0)]
    told.append(open("/proc/self/oom_score_adj").read())
    got = [box.recv(9).hex() for _ in iter(lambda: select.select([box], [], [], 0)[0], [])]
    return json.dumps([noted, got, limits, told, canary == b"canary" * 100])
for line in sys.stdin:
    print(state(), flush=True)
"""

_GRADER = """
import json, os, subprocess, sys, time
job = json.load(sys.stdin)
sys.path[:0] = job["path"]
from quadriga.rewards.code import run
from quadriga.rewards.graders.code import compute_score
if not job["has_scopes"]:
    # As on a kernel before 6.12.
    old = "\\nfrom quadriga.rewards.code import containment\\nversion = min(5, containment.landlock_version())\\n" \\
        "containment.landlock_version = lambda: version\\nmain()"
    run.COMMAND = run.COMMAND.replace("; main()", old)
address = os.path.join(os.environ["TMPDIR"], "..", "victim")
with subprocess.Popen([sys.executable, "-c", job["victim"], address], stdin=-1, stdout=-1, text=True) as victim:
    def state():
        print("", file=victim.stdin, flush=True)
        return victim.stdout.readline()
    before = state() if job["victim"] else ""
    program = job["program"].replace("{victim}", str(victim.pid)).replace("{address!r}", repr(address))
    begun, cpu_s = time.monotonic(), time.process_time()
    result = compute_score(program, job["tests"], **job["options"])
    told = {"wall_s": time.monotonic() - begun, "cpu_s": time.process_time() - cpu_s}
    after = state() if job["victim"] else ""
    told["victim"] = "" if after == before else f"{before} -> {after}"
    victim.stdin.close()
os.path.exists(address) and os.unlink(address)
print(json.dumps({**result, **told}))
"""


def grade(
    user: str,
    program: str,
    tests: dict[str, Any],
    *,
    has_scopes: bool = True,
    has_victim: bool = True,
    **options: float,
) -> dict[str, Any]:
    """The score of a program from a grader that runs as that user, and what it left: `leftover`, `wall_s`, `victim`."""
    repository = str(Path(__file__).resolve().parents[2])
    job = {
        "program": program,
        "tests": tests,
        "options": options,
        "has_scopes": has_scopes,
        "path": [repository],
    }
    job["victim"] = _VICTIM if has_victim else ""
    with tempfile.TemporaryDirectory(prefix="hostile-", dir="/tmp") as base:
        own = Path(base, "tmp")
        own.mkdir()
        command = [sys.executable, "-c", _GRADER]
        if user != "root":
            for path in (base, own):
                os.chown(path, _USER, _USER)
            command = _as_user(command, base)
        done = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, timeout=_CASE_LIMIT_S, cwd=base,
            env={"PATH": os.environ["PATH"], "TMPDIR": str(own), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if done.returncode:
            return {
                "score": -1.0,
                "reason": f"the grader failed: {done.stderr[-2000:]}",
                "leftover": "",
                "victim": "",
            }
        told = json.loads(done.stdout.splitlines()[-1])
        return {**told, "leftover": _leftover(own)}


def _as_user(command: Sequence[str], base: str) -> list[str]:
    """The command as a user without rights, who sees the interpreter even where it lies in root's home."""
    prefix = Path(sys.base_prefix).resolve()
    closed = [folder for folder in reversed(prefix.parents) if not folder.stat().st_mode & 1]
    steps = []
    if closed:
        Path(base, "interpreter").mkdir()
        steps = [
            f"mount --bind {shlex.quote(str(prefix))} {base}/interpreter",
            f"mount -t tmpfs -o mode=755 none {shlex.quote(str(closed[0]))}",
            f"mkdir -p {shlex.quote(str(prefix))}",
            f"mount --bind {base}/interpreter {shlex.quote(str(prefix))}",
        ]
    run = f"exec setpriv --reuid={_USER} --regid={_USER} --clear-groups {shlex.join(command)}"
    return ["unshare", "--mount", "sh", "-ec", "\n".join([*steps, run])]


def _leftover(own: Path) -> str:
    """Files in the temporary folder, processes that work in it, and what is shared by name on the machine."""
    give_up = time.monotonic() + 2
    while True:
        left = [str(path) for path in own.rglob("*")] + [
            str(path) for path in Path("/dev/shm").glob("hostile*")
        ]
        left += [
            line
            for kind in ("shm", "sem", "msg")
            for line in Path("/proc/sysvipc", kind).read_text().splitlines()
            if str(0x51554144) in line
        ]
        left += [
            f"process {path.parent.name}"
            for path in Path("/proc").glob("[0-9]*/cwd")
            if _works_in(path, own)
        ]
        if not left or time.monotonic() > give_up:
            return ", ".join(left)
        time.sleep(0.05)


def _works_in(link: Path, folder: Path) -> bool:
    try:
        return os.readlink(link).startswith(str(folder))
    except OSError:
        # It has ended in between.
        return False


def run(number: int, folder: Path, files: Path) -> Outcome:
    """Grade one hostile program as one user on one kernel."""
    index = (number - 1) % len(PROGRAMS)
    user, has_scopes = _VARIANTS[(number - 1) // len(PROGRAMS) % len(_VARIANTS)]
    name, program = list(PROGRAMS.items())[index]
    function = "f" if name.startswith("result") else ""
    tests: dict[str, Any] = {
        "inputs": [[1, 2]] if function else ["1 2\n"],
        "outputs": [secrets.token_hex(8)],
    }
    if function:
        tests["fn_name"] = function
    told = grade(user, f"{_BEGIN}\n{program}", tests, has_scopes=has_scopes, **_LIMITS)
    over_s = told.get("wall_s", 0.0) - _LIMITS["total_s"]
    wrong = [
        f"score {told['score']}" if told["score"] else "",
        f"the victim was reached: {told['victim']}" if told["victim"] else "",
        f"left: {told['leftover']}" if told["leftover"] else "",
        f"{over_s:.1f} s over its limit" if over_s > _SLACK_S else "",
    ]
    failure = "; ".join(filter(None, wrong))
    group = f"{user}, {'scopes' if has_scopes else 'no scopes'}"
    figures = {key: told[key] for key in ("wall_s", "cpu_s") if key in told}
    return Outcome(group, f"{name}: {failure} ({told['reason']})" if failure else "", figures)


CAMPAIGN = Campaign(
    what="Hostile programs in the grader, as root and as a user, with and without Landlock's scopes",
    promise="Score 0; no other process is reached; nothing is left; no limit is exceeded by more than a second",
    wanted={"": len(PROGRAMS) * len(_VARIANTS)},
    run=run,
    cases=len(PROGRAMS) * len(_VARIANTS),
    processes=2,
)
