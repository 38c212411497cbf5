# SPDX-License-Identifier: Apache-2.0
"""What programs try, and what becomes of it: each scores 0 with its reason, in its time, and nothing is left running.

The tests run in the order of the file: the counts, which are harmless, come before what they contain.

Not shown here: that the kernel's Landlock and seccomp hold what they promise; and arm64, whose table of system calls
has not run.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from quadriga.errors import RewardError
from quadriga.rewards.code import containment, run
from quadriga.rewards.code.containment import ResourceLimits
from quadriga.rewards.graders.code import compute_score
from tests.limits import SOON_S

pytestmark = pytest.mark.skipif(
    bool(containment.why_unavailable()),
    reason=f"no containment here: {containment.why_unavailable()}",
)

TESTS = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
SMALL = {
    "time_s": 1.0,
    "wall_s": 60.0,
    "memory_megabytes": 512,
    "output_megabytes": 2,
    "total_s": 60.0,
}


def graded(program, tests=TESTS, **options):
    return compute_score(f"```python\n{program}\n```", tests, **{**SMALL, **options})


def contained_processes():
    """Processes of users that only contained processes have, and supervisors."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and folder.stat().st_uid > 1_000_000_000:
                found.append(folder.name)
        except FileNotFoundError:
            continue
    return found


def assert_nothing_is_left():
    """Other test runs on the machine may start contained processes meanwhile."""
    processes = set(contained_processes())
    give_up = time.monotonic() + SOON_S
    while processes and time.monotonic() < give_up:
        time.sleep(0.02)
        processes &= set(contained_processes())
    assert not processes


COUNT = """
import os, threading, time
made = 0
for attempt in range(3):
    try:
        if os.fork() == 0:
            os._exit(0)
        made += 1
    except BlockingIOError:
        pass
print(made)
made = 0
try:
    for attempt in range(100):
        threading.Thread(target=time.sleep, args=(0.1,)).start()
        made += 1
except RuntimeError:
    print(0 < made < 32)
"""


def test_no_process_and_a_bounded_number_of_threads_can_be_made():
    assert graded(COUNT, {"inputs": [""], "outputs": ["0\nTrue\n"]})["score"] == 1.0


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os\nwhile True:\n    os.fork()", "process limit"),
        ("import subprocess\nsubprocess.run(['true'])", "process limit"),
        ("while True:\n    pass", "time limit: 1 s of CPU time"),
        ("import time\nwhile True:\n    time.sleep(1)", "time limit: 2 s by the clock"),
        ("blob = bytearray(100 << 30)", "memory limit, 512 MB"),
        ("blobs = []\nwhile True:\n    blobs.append(bytearray(1 << 24))", "memory limit, 512 MB"),
        ("while True:\n    print('y' * 1000)", "output limit: more than 2 MB"),
        (
            "while True:\n    try:\n        print('y' * 1000)\n    except OSError:\n        pass",
            "output limit",
        ),
        (
            "import signal\nfor s in (1, 2, 15, 24, 25):\n    signal.signal(s, signal.SIG_IGN)\nwhile True:\n    pass",
            "time limit: 1 s of CPU time",
        ),
        (
            "print(open('/etc/passwd').read())",
            "PermissionError: [Errno 13] Permission denied: '/etc/passwd'",
        ),
        ("import os\nprint(os.listdir('..'))", "PermissionError"),
        ("import os\nos.symlink('/', 'root')", "PermissionError"),
        ("import socket\nsocket.socket()", "network: it tried to open a socket"),
        ("import socket\ntry:\n    socket.socket()\nexcept OSError:\n    print(3)", "network"),
        ("import socket\nsocket.socket(socket.AF_UNIX)", "PermissionError"),
        ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')", "network"),
        (
            "for n in range(10000):\n    open(str(n), 'w').write('x' * 10**6)",
            "folder limit: more than 32 MB or 64",
        ),
        ("import os\nos.kill(os.getppid(), 9)", "PermissionError: [Errno 1]"),
        ("import os\nos.setsid()", "PermissionError: [Errno 1]"),
        ("import os\nos.chmod('.', 0o777)", "PermissionError: [Errno 1]"),
        ("import os\nos.execv('/bin/sh', ['sh'])", "PermissionError: [Errno 1]"),
        (
            "import resource as r, os\nr.prlimit(os.getppid(), r.RLIMIT_CPU, (1, 1))",
            "PermissionError",
        ),
        (
            "import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))",
            "ValueError: not allowed to raise maximum limit",
        ),
        ("import ctypes\nctypes.string_at(0)", "it was ended by signal 11"),
    ],
)
def test_what_a_program_tries_scores_0_with_its_reason(program, reason):
    # On a busy machine a second of CPU time takes many by the clock.
    result = graded(program, wall_s=2.0) if "sleep" in program else graded(program)
    assert result["score"] == 0.0
    assert reason in result["reason"]
    assert_nothing_is_left()


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (
            "import os\nos.kill(os.getppid(), 9)",
            "Operation not permitted (containment refused kill)",
        ),
        (
            "import os\ntry:\n    os.setsid()\nexcept OSError:\n    print(4)",
            "expected '3\\n' (containment refused setsid)",
        ),
        ("import os\nopen('a', 'w')\nos.chmod('a', 0)", "(containment refused chmod)"),
        (
            "import socket\nsocket.socketpair(type=socket.SOCK_DGRAM)",
            "(containment refused socketpair)",
        ),
        ("import os\nos.memfd_create('x')", "(containment refused memfd_create)"),
        (
            "import os, time\ntry:\n    os.setsid()\nfinally:\n    time.sleep(60)",
            "clock (containment refused setsid)",
        ),
    ],
)
def test_a_program_that_needs_what_is_refused_learns_which_call(program, told):
    assert told in graded(program, wall_s=2.0)["reason"]


def test_a_program_that_is_refused_again_and_again_keeps_nobody_busy():
    refused = "\n    try:\n        os.kill(1, 9)\n    except OSError as error:\n        number = error.errno"
    begun = time.process_time()
    reason = graded(f"import os\nwhile True:{refused}\n    print(number)")["reason"]
    # Whichever limit comes first.
    assert "limit" in reason and "(containment refused kill)" in reason
    assert time.process_time() - begun < 1
    program = f"import os\nfor _ in range(99):{refused}\nprint(number)"
    assert graded(program, {"inputs": [""], "outputs": ["38"]})["score"] == 1.0
    assert_nothing_is_left()


def test_nothing_of_the_run_is_seen(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_KEY", "hidden")
    (tmp_path / "truth.txt").write_text("3")
    assert (
        graded(
            "import os\nprint(os.environ.get('SECRET_KEY'))", {"inputs": [""], "outputs": ["None"]}
        )["score"]
        == 1
    )
    assert (
        "PermissionError"
        in graded(f"print(open({str(tmp_path / 'truth.txt')!r}).read())")["reason"]
    )
    assert "ModuleNotFoundError" in graded("import quadriga")["reason"]


def test_its_own_folder_is_empty_writable_and_gone_afterwards(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = "import os\nopen('a', 'w').write('x')\nprint(os.listdir('.'), os.getcwd() == os.environ['TMPDIR'])"
    tests = {"inputs": ["", ""], "outputs": ["['a'] True"] * 2}
    assert graded(program, tests)["score"] == 1.0
    assert not list(tmp_path.iterdir())


def test_the_time_of_all_tests_together_ends_them():
    tests = {"inputs": [""] * 1000, "outputs": ["1"] * 1000}
    result = graded("import time\ntime.sleep(0.5)\nprint(1)", tests, total_s=3.0, parallel=1)
    assert 0 < result["pass_rate"] < 0.1
    assert "the 3 s for all 1000 tests were over" in result["reason"]
    assert_nothing_is_left()


def test_everything_ends_with_the_grader():
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; from quadriga.rewards.graders.code import compute_score; "
        "compute_score('import time; time.sleep(300)', {'inputs': [''], 'outputs': ['']}, wall_s=300, total_s=300)"
    )
    root = str(Path(run.__file__).parents[3])
    grader = subprocess.Popen([sys.executable, "-c", code, root])
    give_up = time.monotonic() + SOON_S
    while not contained_processes() and time.monotonic() < give_up and os.geteuid() == 0:
        time.sleep(0.02)
    time.sleep(0 if os.geteuid() == 0 else 3)
    grader.send_signal(signal.SIGKILL)
    grader.wait()
    assert_nothing_is_left()


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv") or not Path("/usr/bin/python3").exists(),
    reason="needs root, setpriv and a system's Python, to become another user",
)
def test_a_user_who_is_not_root_is_contained_as_well():
    # Not in `tmp_path`: each start of pytest closes the folder above it to other users.
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    program = COUNT.replace("\n", "\\n")
    files = "import tempfile\\nfile = tempfile.TemporaryFile()\\nprint(file.write(b'x'))"
    hostile = [
        "open('/etc/passwd')",
        "import os; os.fork()",
        "import socket; socket.socket()",
        "bytearray(100 << 30)",
    ]
    code = f"""
import sys, tempfile
sys.path[:0] = [{str(folder)!r}]
from quadriga.rewards.code import run
from quadriga.rewards.graders.code import compute_score
print(compute_score("{program}", dict(inputs=[""], outputs=["0\\nTrue\\n"]), memory_megabytes=512))
for may_mount in (run.can_mount(), False):
    run.can_mount = lambda: may_mount
    print(may_mount, compute_score("{files}", dict(inputs=[""], outputs=["1"])))
for program in {hostile!r}:
    print(compute_score(program, dict(inputs=[""], outputs=[""])))
import os, time
from quadriga.rewards.code import containment
is_confined, tell = os.pipe()
child = os.fork()
if child == 0:
    containment.confine(tempfile.mkdtemp(), containment.ResourceLimits(), [], may_remove=True)
    os.write(tell, b"x")
    time.sleep(60)
os.read(is_confined, 1)
print("memory of user", os.stat(f"/proc/{{child}}/mem").st_uid)
os.kill(child, 9)
"""
    # Where the user can read it: our tree may lie in a folder of root's.
    shutil.copytree(
        Path(run.__file__).parents[2],
        folder / "quadriga",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    as_nobody = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "/usr/bin/python3",
        "-c",
        code,
    ]
    done = subprocess.run(
        as_nobody, capture_output=True, text=True, cwd="/tmp", env={"TMPDIR": "/tmp"}
    )
    assert done.returncode == 0, done.stderr
    first, in_memory, on_disk, *others, owner = done.stdout.splitlines()
    assert owner == "memory of user 0", "nobody of the same user may attach to it"
    assert "'score': 1.0" in first
    assert in_memory.startswith("False") or "'score': 1.0" in in_memory
    assert "'score': 0.0" in on_disk
    reasons = ["PermissionError", "process limit", "network", "memory limit"]
    assert [(0, reason in line) for reason, line in zip(reasons, others, strict=True)] == [
        (0, True)
    ] * 4
    assert all("'score': 0.0" in line for line in others)


def test_without_containment_no_program_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(containment, "why_unavailable", lambda: "this kernel has no Landlock")
    run.require_containment.cache_clear()
    try:
        with pytest.raises(RewardError, match=r"no Landlock.*sandbox_url"):
            graded("print(3)")
    finally:
        run.require_containment.cache_clear()


def test_a_process_that_cannot_be_contained_runs_nothing_and_blames_nobody(monkeypatch):
    command = run.COMMAND.replace(
        "; main()",
        "\nfrom quadriga.rewards.code import containment\n"
        "def refuse(**_): raise OSError('seccomp: refused')\n"
        "containment.filter_calls = refuse\nmain()",
    )
    monkeypatch.setattr(run, "COMMAND", command)
    with pytest.raises(RewardError, match=r"(?s)could not be contained.*seccomp: refused"):
        graded("print(3)")
    assert_nothing_is_left()


def test_limits_are_what_they_say():
    program = "import resource as r\nprint(r.getrlimit(r.RLIMIT_AS)[0] >> 20, r.getrlimit(r.RLIMIT_NOFILE)[1])"
    limits = ResourceLimits(memory_megabytes=300)
    tests = {"inputs": [""], "outputs": [f"300 {limits.num_files}"]}
    assert graded(program, tests, memory_megabytes=300)["reason"] == ""
