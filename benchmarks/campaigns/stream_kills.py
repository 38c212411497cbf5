# SPDX-License-Identifier: Apache-2.0
"""Rollout ranks killed beside training: each prompt's samples exactly once, with the tokens of the run left alone.

A case is a deterministic asynchronous run on Ray (`one_step_off`, `native`, float32) with three rollout ranks. In each
step but the first one or two of them get SIGKILL at random moments, whether they generate, take weights or wait; the
step after waits until they are there again. In every fifth case it is `bounded` with `max_staleness=2` and not
deterministic: there every prompt has all of its samples once, and no token is over 2 versions old.
"""

import json
import math
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks")]

from campaigns import engine_kills  # noqa: E402
from campaigns.campaign import Campaign, Outcome  # noqa: E402
from campaigns.engine_kills import NUM_SAMPLES, NUM_STEPS, RESTART_LIMIT_S, differences, read  # noqa: E402
from quadriga.cli.main import main  # noqa: E402
from quadriga.trainer.asynchronous.batches import AsyncBatches  # noqa: E402
from tests.e2e import conftest as tiny  # noqa: E402

ON = ("async_training.enable=True", "trainer.placement={actor: training, rollout: generation}")
ALIKE = (*ON, "async_training.preset=one_step_off", "async_training.deterministic=True")
BOUNDED = (*ON, "async_training.preset=bounded", "async_training.max_staleness=2")
COUNTS = ("rollout/engine_restarts", "async/restarted_groups")


def prepare(files: Path) -> None:
    """Model, data, and the run left alone."""
    engine_kills.prepare(files, __file__)


class Killer:
    """Kills ranks, chosen with their moments by the number of the case; 0: none."""

    def __init__(self, number: int) -> None:
        self.random, self.kills, self.is_on = (
            random.Random(number),
            list[dict[str, Any]](),
            number > 0,
        )
        self.take, self.last, self.seconds = AsyncBatches.take, math.inf, 1.0
        self.lock, self.killed = threading.Lock(), set[int]()  # pids

    def next_batch(self, batches: AsyncBatches, step: int) -> Any:
        """`AsyncBatches.take`, with kills that are due in the time that a step takes from here."""
        pool = batches._workers.pool
        assert pool is not None
        if math.isfinite(self.last):
            self.seconds = min(5.0, time.monotonic() - self.last)
        if self.is_on and 1 < step < NUM_STEPS:
            with batches._changed:
                batches._refresh_streams()
            pool._restarts.wait(RESTART_LIMIT_S)
            with batches._changed:
                batches._refresh_streams()
                batches._wait_for(lambda: not batches._workers.joining)
            ranks = list(pool._rollout.ranks)
            for rank in self.random.sample(ranks, self.random.randint(1, max(1, len(ranks) - 1))):
                wait_s = self.random.uniform(0.0, 0.9) * self.seconds
                threading.Timer(wait_s, self._kill, (batches, rank, step, wait_s)).start()
        self.last = time.monotonic()
        return self.take(batches, step)

    def _kill(self, batches: AsyncBatches, rank: int, step: int, wait_s: float) -> None:
        pool = batches._workers.pool
        assert pool is not None
        with self.lock:
            pids = {
                one: pool._rollout.processes.addresses[one].pid
                for one in tuple(pool._rollout.ranks)
            }
            # Whoever was killed may not be missed yet. One is left: without any the run starts again.
            alive = [one for one, pid in pids.items() if pid not in self.killed]
            if batches._is_ended or rank not in alive or len(alive) == 1:
                return
            os.kill(pids[rank], signal.SIGKILL)
            self.killed.add(pids[rank])
            self.kills.append({"step": step, "rank": rank, "after_s": wait_s})


def drive(number: int, files: Path) -> int:
    """A run in the working directory; the file `kills.json` says who was killed when."""
    killer = Killer(number)
    AsyncBatches.take = lambda batches, step: killer.next_batch(batches, step)  # type: ignore[method-assign]
    own = BOUNDED if number and number % 5 == 0 else ALIKE
    try:
        return main(["train", *tiny.command_line(files / "home", Path(), *engine_kills.KEYS, *own)])
    finally:
        Path("kills.json").write_text(json.dumps(killer.kills))


def broken(folder: Path) -> str:
    """What is not as promised in a run that is not deterministic."""
    for step, line in enumerate(read(folder / "run/metrics.jsonl"), start=1):
        if line["async/staleness_max"] > 2:
            return f"step {step}: {line['async/staleness_max']} versions old"
        rows = read(folder / "run" / "rollouts" / f"{step}.jsonl")
        found = sorted(row["uid"] for row in rows)
        if found != sorted(
            f"{step}-{row}" for row in range(len(rows) // NUM_SAMPLES) for _ in range(NUM_SAMPLES)
        ):
            return f"step {step}: rows of {found}"
    return ""


def case(number: int, folder: Path, files: Path) -> Outcome:
    """A run with ranks that are killed, and what came of it."""
    start, is_bounded = time.monotonic(), number % 5 == 0
    failure = engine_kills.run(folder, files, number, __file__)
    if not failure:
        failure = (
            broken(folder)
            if is_bounded
            else differences(folder, files / "alone", ("async/", *COUNTS, "training/"))
        )
    kills = (
        json.loads((folder / "kills.json").read_text()) if (folder / "kills.json").is_file() else []
    )
    figures = {"seconds": time.monotonic() - start}
    if not failure:
        lines = read(folder / "run/metrics.jsonl")
        figures |= {
            name.rpartition("/")[2]: sum(line.get(name, 0.0) for line in lines) for name in COUNTS
        }
    failure = failure and f"{failure}; kills {kills}; {folder / 'log'}"
    return Outcome({"bounded" if is_bounded else "deterministic": len(kills)}, failure, figures)


CAMPAIGN = Campaign(
    what="Rollout ranks killed while they generate beside training (three ranks, Ray)",
    promise="Each prompt has its samples exactly once; with deterministic=True they have the tokens and "
    "scores of an undisturbed run",
    wanted={"": 20},
    run=case,
    cases=1,
    prepare=prepare,
)

if __name__ == "__main__":
    sys.exit(drive(int(sys.argv[1]), Path(sys.argv[2])))
