# SPDX-License-Identifier: Apache-2.0
"""What programs put into their folders is bounded, removed files too, and nothing of it stays when all is killed.

Both ways are tried: a file system in memory, where the kernel allows it, and a folder on the disk, where not.
Not shown here: how much a program writes on a disk within the 50 ms between two looks.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quadriga.descendants import own_folder, remove_stale_folders
from quadriga.rewards import GradingPool, ScoreFunction
from quadriga.rewards.code import containment, run
from quadriga.rewards.graders.code import compute_score
from tests.limits import GRADED_S, SOON_S

pytestmark = pytest.mark.skipif(
    bool(containment.why_unavailable()),
    reason=f"no containment here: {containment.why_unavailable()}",
)

PACKAGE = str(Path(run.__file__).parents[3])
LIMIT = "folder limit: more than 4 MB or 24 files"
KEEP = """
import mmap, os, tempfile
blob, kept = os.urandom(1 << 20), []
for number in range(64):
    {keep}
print("held", number + 1)
"""
# Files that no listing shows.
BY_DESCRIPTOR = "file = open('a', 'wb', 0); file.write(blob); os.unlink('a'); kept.append(file)"
BY_MAPPING = "file = open('a', 'w+b'); file.write(blob); file.flush(); kept.append(mmap.mmap(file.fileno(), 4096)); "
BY_MAPPING += "file.close(); os.unlink('a')"
BY_RENAME = "file = open('a', 'wb', 0); file.write(blob); os.replace('a', 'b'); kept.append(file)"
WITHOUT_NAME = "fd = os.open('.', os.O_TMPFILE | os.O_RDWR); os.write(fd, blob)"
LISTED = "open(str(number % 6), 'ab').write(blob)"
FALLOCATE = """
import ctypes, os
fd = os.open("a", os.O_RDWR | os.O_CREAT)
print(ctypes.CDLL(None).fallocate(fd, 1, ctypes.c_long(0), ctypes.c_long(1 << 30)), os.fstat(fd).st_blocks)
"""


@pytest.fixture(params=["in memory", "on the disk"])
def is_in_memory(request, monkeypatch):
    if request.param == "in memory" and not run.can_mount():
        pytest.skip("this system gives no process file systems of its own")
    monkeypatch.setattr(run, "can_mount", lambda: request.param == "in memory")
    return request.param == "in memory"


def graded(program, expected="", **limits):
    options = {"folder_megabytes": 4, "num_files": 24, "total_s": 60.0, "wall_s": 60.0, **limits}
    return compute_score(program, {"inputs": [""], "outputs": [expected]}, **options)


@pytest.mark.parametrize("keep", [BY_DESCRIPTOR, BY_MAPPING, BY_RENAME, WITHOUT_NAME, LISTED])
def test_files_without_a_name_count_as_well(is_in_memory, keep):
    result = graded(KEEP.format(keep=keep), "held 64")
    assert result["score"] == 0.0
    # On the disk none is without a name: they cannot be removed, and are counted.
    is_refused = (not is_in_memory and keep != LISTED) or keep == WITHOUT_NAME
    assert ("PermissionError" if is_refused else LIMIT) in result["reason"]


def test_nothing_is_allocated_that_is_not_written(is_in_memory):
    assert graded(FALLOCATE, "-1 0")["reason"] == ""


@pytest.mark.parametrize(
    "program",
    [
        "for n in range(3):\n    open(str(n), 'w').write('x' * 1000)\nprint(len(open('2').read()))",
        # Holes hold nothing.
        "for n in range(7):\n    open(str(n), 'w').truncate(1000)\nprint(1000)",
        "import os\nopen('a', 'w').write('x' * 500)\nopen('a', 'a').write('x' * 500)\nprint(os.path.getsize('a'))",
    ],
)
def test_files_within_the_limits_are_anyones(is_in_memory, program):
    assert graded(program, "1000")["reason"] == ""


def test_a_program_in_memory_may_remove_files():
    if not run.can_mount():
        pytest.skip("this system gives no process file systems of its own")
    program = (
        "import os, tempfile\n"
        "for n in range(64):\n"
        "    with tempfile.TemporaryFile() as file:\n        file.write(b'x' * (1 << 20))\n"
        "    with open('a', 'wb') as file:\n        file.write(b'x' * (1 << 20))\n"
        "    os.replace('a', 'b')\n"
        "os.remove('b')\nprint(os.listdir('.'))"
    )
    assert graded(program, "[]")["reason"] == ""


def test_a_test_finds_nothing_of_the_one_before(is_in_memory):
    program = "import os\nprint(os.listdir('.'))\nopen(input(), 'w').write('x')"
    tests = {"inputs": [str(number) for number in range(6)], "outputs": ["[]"] * 6}
    assert compute_score(program, tests, parallel=2, total_s=60.0)["reason"] == ""


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """Another place for temporary folders: here nobody else makes any."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def test_a_folder_is_removed_by_its_owner_or_when_that_is_dead(temporary):
    with own_folder() as living:
        hold = (
            "import sys, time; sys.path[:0] = sys.argv[1:]; from quadriga.descendants import own_folder\n"
            "with own_folder(): time.sleep(300)"
        )
        owner = subprocess.Popen([sys.executable, "-c", hold, PACKAGE])
        try:
            await_folders(temporary, 2)
            remove_stale_folders()
            assert len(list(temporary.iterdir())) == 2
        finally:
            owner.kill()
            owner.wait()
        (temporary / "not-ours").mkdir()
        (temporary / "quadriga-folder-link").symlink_to(temporary / "not-ours")
        remove_stale_folders()
        assert {path.name for path in temporary.iterdir()} == {
            Path(living).name,
            "not-ours",
            "quadriga-folder-link",
        }
    assert not Path(living).exists()


def await_folders(place, number):
    give_up = time.monotonic() + SOON_S
    while len(list(place.glob("quadriga-folder-*"))) < number and time.monotonic() < give_up:
        time.sleep(0.02)


WRITER = "import time\nopen('a', 'w').write('x' * (1 << 20))\ntime.sleep(300)"
ROW = {
    "data_source": "taco",
    "solution_str": WRITER,
    "ground_truth": {"inputs": [""], "outputs": [""]},
}
OPTIONS = {"code": {"total_s": 300.0, "wall_s": 300.0}}


def test_the_folder_of_a_killed_grader_is_removed(temporary):
    with GradingPool(ScoreFunction(reward_kwargs=OPTIONS), num_workers=1) as pool:
        round_ = pool.begin([{**ROW, "extra_info": {}}], timeout_s=GRADED_S)
        await_folders(temporary, 1)
        assert list(temporary.iterdir())
        round_.cancel()
        assert not list(temporary.iterdir())


def test_the_folders_of_a_killed_run_are_removed(temporary):
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; from quadriga.rewards import GradingPool, ScoreFunction; "
        f"GradingPool(ScoreFunction(reward_kwargs={OPTIONS!r}), num_workers=1)"
        f".grade([{{**{ROW!r}, 'extra_info': {{}}}}], timeout_s={GRADED_S})"
    )
    driver = subprocess.Popen([sys.executable, "-c", code, PACKAGE])
    try:
        await_folders(temporary, 1)
        assert list(temporary.iterdir())
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    give_up = time.monotonic() + SOON_S
    while list(temporary.iterdir()) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not list(temporary.iterdir())
