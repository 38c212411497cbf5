# SPDX-License-Identifier: Apache-2.0
"""Damage to every file of a checkpoint: bytes flipped, files cut, missing, swapped, unreadable.

A case takes a finished run of a variant of campaigns/kills.py, with its last four checkpoints, and damages a file of
the newest one, of several, or of all; or the file that names the newest. The same command is then to find it before it
is used, to say so, to keep what is damaged as it is, to resume from the newest checkpoint that is whole, and to end
with the files of the run left alone. Where none is whole it must end with an error and change nothing.

Whole folders that were swapped agree with their manifests each, and are told by the step in their state. Where root
runs the campaign, the runs give up its right to read what nobody may read. They are forks of an interpreter that has
loaded the modules and computed nothing.
"""

import ctypes
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from campaigns import kills
from campaigns.campaign import Campaign, Outcome
from campaigns.kills import difference, main, tiny

KINDS = ("flipped", "cut", "missing", "swapped", "unreadable")
LATEST, MANIFEST = "latest_checkpointed_iteration.txt", "manifest.json"
LIMIT_S, KEPT = 300.0, 4
CAPABILITY_VERSION, READS_ALL = 0x20080522, 1 << 1 | 1 << 2


def words(variant: str, files: Path) -> list[str]:
    """The arguments of a run that keeps its last checkpoints."""
    key = "trainer.max_ckpt_to_keep"
    return [
        *(word for word in kills.words(variant, files) if not word.startswith(key)),
        f"{key}={KEPT}",
    ]


def prepare(files: Path) -> None:
    """Models and data; again where the package has changed."""
    kills.prepare(files)


def run_alone(files: Path, variant: str) -> Path:
    """The directory of a variant's run that nothing happens to, with its last checkpoints."""
    folder = files / "kept" / variant
    with kills.made_once(folder) as is_missing:
        if is_missing and (status := forked(folder, words(variant, files))):
            raise SystemExit(
                f"the run of {variant} left alone ended with {status}: {folder / 'log'}"
            )
    return folder / "run"


def forked(
    folder: Path,
    arguments: list[str],
    *,
    meanwhile: Callable[[int], None] | None = None,
) -> int:
    """The exit status of `quadriga` in a fork of this process that works in a folder; its output is added to `log`.

    Args:
        meanwhile: called again and again with its process, as long as it lives.
    """
    (folder / "tmp").mkdir(exist_ok=True)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            os.chdir(folder)
            log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            heed_permissions()
            ctypes.CDLL(None).prctl(tiny.PR_SET_PDEATHSIG, signal.SIGKILL)
            os.environ |= {
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "TMPDIR": str(folder / "tmp"),
            }
            tempfile.tempdir = None
            for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
                os.dup2(descriptor, number)
            status = main(arguments)
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(status)
    until = time.monotonic() + LIMIT_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
        if meanwhile is not None:
            meanwhile(pid)
        time.sleep(0.002)


def heed_permissions() -> None:
    """Without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH the modes of files hold for root too."""
    library = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    for call in (library.capget, library.capset):
        if call(header, sets):
            raise OSError(ctypes.get_errno(), "capabilities")
        sets[0] &= ~READS_ALL
        sets[1] &= ~READS_ALL


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def spoil(kind: str, file: Path, other: Path, draw: random.Random) -> None:
    """Damage a file; `other` is the one that it is swapped with."""
    content = file.read_bytes()
    if kind == "flipped":
        place = draw.randrange(len(content))
        changed = bytes([content[place] ^ (1 << draw.randrange(8))])
        file.write_bytes(content[:place] + changed + content[place + 1 :])
    elif kind == "cut":
        file.write_bytes(content[: draw.randrange(len(content))])
    elif kind == "missing":
        file.unlink()
    elif kind == "unreadable":
        file.chmod(0)
    else:
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)


def spoil_checkpoints(
    kind: str, name: str, steps: list[int], draw: random.Random, top: Path, alone: Path
) -> tuple[str, list[int]]:
    """Damage the file of this name in the newest checkpoint, in several, or in all. Returns what, and their steps."""
    if name == LATEST:
        spoil(kind, top / LATEST, Path(shutil.copy2(top / "config.yaml", top.parent)), draw)
        return LATEST, []
    first, second = (top / f"global_step_{step}" for step in (steps[-1], steps[-2]))
    if kind == "swapped" and draw.random() < 0.3:
        for one, other in ((first, top / "aside"), (second, first), (top / "aside", second)):
            one.rename(other)
        return "whole folders", steps[-2:]
    damaged = steps[-draw.choice((1, 1, 1, 2, len(steps))) :]
    for step in damaged:
        # Swapped with another file of the checkpoint, or with the same one of another checkpoint.
        place, content = (
            top / f"global_step_{step}",
            (top / f"global_step_{step}" / name).read_bytes(),
        )
        others = [
            path for path in place.rglob("*") if path.is_file() and path.read_bytes() != content
        ]
        copy = shutil.copy2(
            alone / f"global_step_{steps[0] if step != steps[0] else steps[1]}" / name, top.parent
        )
        is_own = draw.random() < 0.5 or Path(copy).read_bytes() == content
        spoil(kind, place / name, draw.choice(others) if is_own else Path(copy), draw)
    return f"{name} of {len(damaged)} of {len(steps)}", damaged


def run(number: int, folder: Path, files: Path) -> Outcome:
    """One damaged run, started again."""
    draw = random.Random(number)
    turn, variant = divmod(number, len(kills.VARIANTS))
    variant = list(kills.VARIANTS)[variant]
    turn, kind = turn // len(KINDS), KINDS[turn % len(KINDS)]
    alone, top = run_alone(files, variant), folder / "run"
    shutil.copytree(alone, top)
    *steps, last = sorted(int(path.name.rpartition("_")[2]) for path in top.glob("global_step_*"))
    # As if it had been killed before the last: a run that has ended reads no checkpoint.
    shutil.rmtree(top / f"global_step_{last}")
    (top / LATEST).write_text(f"{steps[-1]}\n")
    newest = top / f"global_step_{steps[-1]}"
    # Each file in turn, and the one that names the newest.
    names = [
        *(str(path.relative_to(newest)) for path in sorted(newest.rglob("*")) if path.is_file()),
        LATEST,
    ]
    name = names[(turn + KINDS.index(kind) * 5) % len(names)]
    told, damaged = spoil_checkpoints(kind, name, steps, draw, top, alone)
    before = contents(top)
    begun = time.monotonic()
    status = forked(folder, words(variant, files))
    seconds, log = time.monotonic() - begun, (folder / "log").read_text(errors="replace")
    failure = (
        "a traceback"
        if "Traceback" in log
        else judged(before, top, alone, log, status, damaged, steps)
    )
    return Outcome(
        kind,
        f"{variant}, {kind}, {told}: {failure}, in {folder}" if failure else "",
        {"seconds": seconds},
    )


def judged(
    before: dict[str, bytes],
    top: Path,
    alone: Path,
    log: str,
    status: int,
    damaged: list[int],
    steps: list[int],
) -> str:
    """What is not as promised, "" where all is."""
    if damaged == steps:
        after = contents(top)
        if status != 1 or "is whole" not in log:
            return f"all are damaged: status {status}, and the log does not say how to go on"
        changed = {
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        }
        return f"all are damaged, and {changed} were changed" if changed - {"config.yaml"} else ""
    if status:
        return f"status {status}"
    # A flip in the space between two entries of the manifest damages nothing.
    is_passed_over = bool(damaged) and "DAMAGED: " in log
    for step in damaged if is_passed_over else []:
        kept = top / f"damaged_global_step_{step}"
        name = f"global_step_{step}/"
        if contents(kept) != {
            path.removeprefix(name): each for path, each in before.items() if path.startswith(name)
        }:
            return f"{kept.name} is not as the damage has left it"
        shutil.rmtree(kept)
    left = [step for step in steps if not is_passed_over or step not in damaged]
    if f"resumed from {Path('run') / f'global_step_{left[-1]}'}" not in log and damaged:
        return f"not resumed from step {left[-1]}"
    return difference(alone, top)


CAMPAIGN = Campaign(
    what="Every file of a checkpoint: bytes flipped, file truncated, missing, swapped, unreadable",
    promise="Damage is found before use and reported; the damaged folder is kept; an older checkpoint is "
    "used; the final files equal those of an undisturbed run",
    wanted={"": 300} | dict.fromkeys(KINDS, 50),
    run=run,
    cases=100,
    processes=2,
    prepare=prepare,
)
