# SPDX-License-Identifier: Apache-2.0
"""A disk that is full at a random write of a run, and has room again later; or a folder that may no longer be written.

The folder of the run is a file system in memory of its own, in a mount namespace that only this process and its
children see: that needs root, or CAP_SYS_ADMIN. Two cases of five make it too small for the run; two fill it at a
random moment, so that the small writes between two checkpoints meet it too; one takes the permission to write away
then. What meets it must end the run with one error that names it. All that was whole then must still be: checkpoints,
lines of metrics and samples, responses. With room again the same command must end with the files of the run left
alone.
"""

import ctypes
import errno
import os
import random
import shutil
import time
from pathlib import Path

from campaigns import kills
from campaigns.campaign import Campaign, Outcome
from campaigns.damage import forked, prepare, run_alone, words
from campaigns.kills import difference, is_equal
from quadriga.errors import CheckpointError
from quadriga.trainer.checkpoint import Checkpoints, verify

CLONE_NEWNS, MS_REMOUNT, MS_REC, MS_PRIVATE, MNT_DETACH = 0x20000, 32, 0x4000, 0x40000, 2
PAGE, BALLAST = 4096, "ballast"
LIBRARY = ctypes.CDLL(None, use_errno=True)


def mount(
    source: str, place: Path, kind: str | None, flags: int, options: str | None = None
) -> None:
    """The system call."""
    words = [None if word is None else word.encode() for word in (source, str(place), kind)]
    if LIBRARY.mount(*words, flags, options and options.encode()):
        number = ctypes.get_errno()
        raise OSError(
            number, f"{os.strerror(number)} (file systems in memory need root)", str(place)
        )


def own_namespace() -> None:
    """What is mounted from here on ends with this process and its children."""
    if LIBRARY.unshare(CLONE_NEWNS):
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)} (a mount namespace needs root)")
    mount("none", Path("/"), None, MS_REC | MS_PRIVATE)


def size_of(folder: Path) -> int:
    """Bytes that a file system in memory needs for a folder."""
    return sum(
        -(-path.lstat().st_size // PAGE) * PAGE if path.is_file() else PAGE
        for path in folder.rglob("*")
    )


class Loss:
    """Fills the disk, or forbids to write in a folder, a moment after a run has written so many lines of metrics."""

    def __init__(self, top: Path, num_lines: int, delay_s: float, *, is_full: bool) -> None:
        self.top, self.num_lines, self.delay_s, self.is_full = top, num_lines, delay_s, is_full
        self.at = float("inf")

    def __call__(self, pid: int) -> None:
        lines = self.top / "metrics.jsonl"
        if self.at == float("inf"):
            if (lines.read_bytes().count(b"\n") if lines.is_file() else 0) >= self.num_lines:
                self.at = time.monotonic() + self.delay_s
        elif time.monotonic() >= self.at and not self.is_full:
            self.top.chmod(0o555)
        elif time.monotonic() >= self.at:
            # Again and again: what the run deletes makes no room for it.
            with (self.top / BALLAST).open("ab", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(PAGE))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise


def run(number: int, folder: Path, files: Path) -> Outcome:
    """One run on a disk that gets full, and once more with room."""
    draw = random.Random(number)
    turn, place = divmod(number, len(kills.VARIANTS))
    variant, group = (
        list(kills.VARIANTS)[place],
        ("small", "filled", "small", "filled", "forbidden")[turn % 5],
    )
    alone, top = run_alone(files, variant), folder / "run"
    top.mkdir()
    own_namespace()
    needed = size_of(alone)
    size = draw.randrange(PAGE * 8, needed) // PAGE * PAGE if group == "small" else needed * 3
    mount("tmpfs", top, "tmpfs", 0, f"size={size}")
    try:
        loss = Loss(
            top,
            draw.randint(0, kills.NUM_STEPS - 1),
            draw.uniform(0, 0.4),
            is_full=group == "filled",
        )
        status = forked(folder, words(variant, files), meanwhile=None if group == "small" else loss)
        log = (folder / "log").read_text(errors="replace")
        named = "Permission denied" if group == "forbidden" else "No space left on device"
        failure = "" if status == 0 else judged(top, alone, log, status, named)
        top.chmod(0o755)
        (top / BALLAST).unlink(missing_ok=True)
        mount("tmpfs", top, "tmpfs", MS_REMOUNT, f"size={needed * 3}")
        if not failure and (status := forked(folder, words(variant, files))):
            failure = f"status {status} with room again"
        failure = failure or difference(alone, top)
        if failure:
            # What is mounted goes with its processes.
            shutil.copytree(top, folder / "left")
    finally:
        LIBRARY.umount2(str(top).encode(), MNT_DETACH)
    told = f"{variant}, {group}, {size >> 10} KiB: {failure}, in {folder}" if failure else ""
    return Outcome(group, told, {"has_met_it": float(named in log)})


def judged(top: Path, alone: Path, log: str, status: int, named: str) -> str:
    """What is not as promised of a run that could not write, "" where all is."""
    if status != 1 or "Traceback" in log or named not in log:
        return f"status {status}, and not one error that says {named}"
    checkpoints = Checkpoints(top)
    for step in checkpoints.steps():
        try:
            verify(checkpoints.path(step))
        except CheckpointError as error:
            return str(error)
    # Every line of metrics that was written stays, and has its checkpoint but for the last two: one that is being
    # written, and one that has just begun.
    lines = (
        (top / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        if (top / "metrics.jsonl").exists()
        else []
    )
    if any(not line.endswith(b"\n") for line in lines):
        return "half a line in metrics.jsonl"
    every = 2 if "global_step_7" not in {path.name for path in alone.iterdir()} else 1
    newest = checkpoints.newest() or 0
    if newest < len(lines) - 2 * every:
        return f"{len(lines)} steps were taken, and the newest checkpoint is of step {newest}"
    names = [
        str(path.relative_to(top))
        for folder in ("rollouts", "validation")
        for path in sorted((top / folder).rglob("*"))
        if path.is_file()
    ]
    damaged_names = [name for name in names if not is_equal(alone / name, top / name)]
    return f"{damaged_names} are not whole" if damaged_names else ""


CAMPAIGN = Campaign(
    what="Disk full, or write permission lost, at a random write",
    promise="One error names the cause; no intact file is lost; once there is room, the resumed run ends "
    "like an undisturbed one",
    wanted={"": 50},
    run=run,
    cases=5,
    processes=2,
    prepare=prepare,
)
