# SPDX-License-Identifier: Apache-2.0
"""Asynchronous training in one process, in random time: replayed from its record, killed at a random moment, resumed.

A case is of one of five kinds. `replay`: a run, and its record repeated from the first step. `one_step_off` and
`bounded` (max_staleness=2): a run is killed by SIGKILL and resumed, and the resumed part is repeated from its record
and the checkpoint that it began with. The same with `deterministic=True`: the resumed run beside the one left alone.
Every process waits for random times between the steps of its engine and of its trainer.

Equal are all metrics of all steps, bit for bit, but times, what tells how far the rollout was ahead, and the pass of
the prompts taken last; and every row of rollouts and validations.
"""

import json
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from campaigns import kills
from campaigns.campaign import Campaign, Outcome
from campaigns.kills import Attempt, tiny
from quadriga.rollout.native.generation import Generation
from quadriga.trainer.asynchronous.record import RECORD
from quadriga.trainer.ray_trainer import RayPPOTrainer

NUM_STEPS, SAVE_FREQ = 9, 2
ENGINE_DELAY_S, TRAINER_DELAY_S = 0.01, 0.2
"""The longest delays, of an engine's step and of a trainer's; most are much shorter."""
DETERMINISTIC = ("async_training.deterministic=True",)
SIDES = {
    "one_step_off": ("async_training.preset=one_step_off",),
    "bounded": ("async_training.preset=bounded", "async_training.max_staleness=2"),
}
SIDES |= {f"{name}, deterministic": (*keys, *DETERMINISTIC) for name, keys in SIDES.items()}
KINDS = ("replay", *SIDES)
COMMON = (
    "async_training.enable=True",
    "data.max_response_length=24",
    "data.shuffle=True",
    "actor_rollout_ref.rollout.max_num_seqs=6",
    f"trainer.total_training_steps={NUM_STEPS}",
    f"trainer.save_freq={SAVE_FREQ}",
    "trainer.test_freq=3",
    "trainer.rollout_data_dir=run/rollouts",
    "trainer.validation_data_dir=run/validation",
)
OF_TIME = (*kills.CLOCK, "async/depth", "async/wait_s", "async/rollout_wait_s", "training/epoch")


def words(files: Path, *keys: str) -> list[str]:
    """The arguments of `quadriga` for a run in the folder `run` of the working directory."""
    return ["train", *tiny.command_line(files / "home", Path(), *COMMON, *keys)]


def prepare(files: Path) -> None:
    """Model and data, and each deterministic side's run left alone."""
    kills.prepare_once(files, __file__, run_alone)


def run_alone(files: Path) -> None:
    """The runs to compare with, without delays."""
    for name, keys in SIDES.items():
        (files / name).mkdir()
        if name.endswith("deterministic") and Attempt(words(files, *keys), files / name).wait():
            raise SystemExit(f"the run of {name} left alone has failed: {files / name / 'log'}")


def slow(seed: str) -> None:
    """From here on steps of the engine and of the trainer take a random time."""
    dice = random.Random(seed)

    def slowed(function: Callable[..., Any], most_s: float, *args: Any, **kwargs: Any) -> Any:
        time.sleep(dice.random() ** 3 * most_s)
        return function(*args, **kwargs)

    advance, advantages = Generation.advance, RayPPOTrainer.compute_advantages
    Generation.advance = lambda *args: slowed(advance, ENGINE_DELAY_S, *args)  # type: ignore[method-assign]
    RayPPOTrainer.compute_advantages = lambda *args: slowed(advantages, TRAINER_DELAY_S, *args)  # type: ignore[method-assign]


def content(run: Path, after: int) -> dict[str, Any]:
    """What a run came to in the steps after this one, by name."""
    lines = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    found: dict[str, Any] = {
        f"{name} of step {line['step']}": value
        for line in lines
        for name, value in line.items()
        if line["step"] > after and not name.startswith(OF_TIME)
    }
    files = [*(run / "rollouts").glob("*.jsonl"), *(run / "validation").glob("*.jsonl")]
    return found | {
        f"{path.parent.name}/{path.name}": path.read_bytes()
        for path in files
        if int(path.stem) > after
    }


def difference(one: Path, other: Path, after: int = 0) -> str:
    """The first thing in which two runs differ after a step, "" where there is none."""
    first, second = content(one, after), content(other, after)
    if not any(name.startswith(f"actor/grad_norm of step {NUM_STEPS}") for name in first):
        return f"{one} has not come to its last step"
    return next(
        (
            f"{name} differs"
            for name in sorted(first.keys() | second)
            if first.get(name) != second.get(name)
        ),
        "",
    )


def newest_record(run: Path) -> tuple[Path, int]:
    """The record that was written last, and the step that it begins after."""
    record = max(run.glob("async_schedule*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return record, 0 if record.name == RECORD else int(record.stem.rpartition("_")[2]) - 1


def replayed(folder: Path, files: Path, keys: tuple[str, ...], seed: str) -> str:
    """Repeat the record of the run in a folder, from its first step on. Returns in what it differs."""
    again, run = folder / "again", folder / "run"
    (again / "run").mkdir(parents=True)
    record, after = newest_record(run)
    if after:
        shutil.copytree(run / f"global_step_{after}", again / "run" / f"global_step_{after}")
    own = (f"async_training.replay={record}", "trainer.save_freq=-1")
    if status := Attempt(words(files, *keys, *own), again, first=partial(slow, seed)).wait():
        return f"the replay ended with status {status}"
    steps = [
        [line for line in path.read_text().splitlines() if '"step"' in line]
        for path in (record, again / "run" / record.name)
    ]
    return difference(run, again / "run", after) or (
        "" if steps[0] == steps[1] else "the records differ"
    )


def killed(folder: Path, files: Path, keys: tuple[str, ...], draw: random.Random) -> int:
    """A run that is killed. Returns how often: 1, or 0 where it ended before."""
    attempt = Attempt(words(files, *keys), folder, first=partial(slow, f"{draw.random()}"))
    phase = draw.choice(("generation", "grading", "update", "writing", "publishing"))
    # Late enough for a checkpoint in most cases.
    num_before = draw.randrange(
        *((0, NUM_STEPS // SAVE_FREQ) if phase == "writing" else (SAVE_FREQ, NUM_STEPS))
    )
    return int(attempt.kill_in(phase, draw.uniform(0, 0.05), num_before))


def run(number: int, folder: Path, files: Path) -> Outcome:
    """One case; its kind follows from its number."""
    draw, kind = random.Random(number), KINDS[number % len(KINDS)]
    keys = SIDES[kind] if kind in SIDES else tuple(SIDES.values())[number // len(KINDS) % 2]
    num_kills = 0 if kind == "replay" else killed(folder, files, keys, draw)
    is_over = kind != "replay" and not num_kills
    only = ("trainer.save_freq=-1",) if kind == "replay" else ()
    status = (
        0
        if is_over
        else Attempt(words(files, *keys, *only), folder, first=partial(slow, f"{number}")).wait()
    )
    if status:
        failure = f"status {status} at the end"
    elif kind.endswith("deterministic"):
        failure = difference(files / kind / "run", folder / "run")
    else:
        failure = "" if is_over else replayed(folder, files, keys, f"again {number}")
    if not failure and (files_left := list((folder / "tmp").iterdir())):
        failure = f"temporary files {files_left} are left"
    events = {kind: 1 if kind == "replay" else num_kills}
    after = 0 if status else newest_record(folder / "run")[1]
    return Outcome(
        events,
        f"{kind}, after step {after}: {failure}, in {folder}" if failure else "",
        {"resumed_after": after},
    )


CAMPAIGN = Campaign(
    what="Asynchronous runs with random delays: replayed from their record; killed by SIGKILL at random "
    "moments (one process)",
    promise="A replay, also of the part after a kill, gives the same numbers bit for bit; so does a resumed "
    "run with deterministic=True. No temporary file is left",
    wanted={"replay": 20} | dict.fromkeys(SIDES, 30),
    run=run,
    cases=110,
    processes=2,
    prepare=prepare,
)
