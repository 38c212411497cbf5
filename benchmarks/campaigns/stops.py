# SPDX-License-Identifier: Apache-2.0
"""SIGSTOP of a worker of a run on Ray, on 2 and 4 ranks: named, killed at its limit, got over.

A case is one run in which workers are stopped at random moments. Named: a line of the run's output has its process.
Recovered: the step in work has been taken. Equal is what is equal in `ray_kills`.
"""

import os
import random
import signal
import time
from pathlib import Path

from campaigns import kills, ray_kills
from campaigns.campaign import Campaign, Outcome
from campaigns.ray_kills import BrokenError, RayRun, titles

NUM_STOPS, STALL_S, NAMED_LIMIT_S, RECOVERY_LIMIT_S = 3, 20, 30.0, 90.0
LIMIT = f"trainer.stall_timeout_s={STALL_S}"


def prepare(files: Path) -> None:
    """Model, data, and the runs left alone."""
    kills.prepare_once(files, __file__, lambda files: ray_kills.run_alone(files, LIMIT))


def run(number: int, folder: Path, files: Path) -> Outcome:
    """One run, of which a worker is stopped `NUM_STOPS` times."""
    draw, num_ranks = random.Random(number), 2 + 2 * (number % 2)
    case, failure, num_stops = RayRun(folder, files, num_ranks, LIMIT), "", 0
    named_s, recovered_s = [0.0], [0.0]
    try:
        case.start()
        for _ in range(NUM_STOPS):
            wanted = case.num_steps() + draw.randint(3, 6)
            case.wait(lambda wanted=wanted: case.num_steps() >= wanted, f"step {wanted}")
            time.sleep(draw.uniform(0, 0.5))
            workers = [
                pid
                for pid, title in sorted(titles(case.driver.pid).items())
                if "ray::WorkerProcess" in title
            ]
            if case.driver.poll() is not None or not workers:
                break
            pid = draw.choice(workers)
            start = time.monotonic()
            os.kill(pid, signal.SIGSTOP)
            num_stops += 1
            name = f"process {pid}, has not answered"
            case.wait(lambda name=name: name in case.text(), f"line with '{name}'")
            named_s.append(time.monotonic() - start)
            # What the others had begun may still end.
            reached = case.num_steps() + 1
            case.wait(lambda reached=reached: case.num_steps() > reached, "step after a recovery")
            recovered_s.append(time.monotonic() - start)
        case.wait(lambda: False, "end")
        case.check_gone()
        if max(named_s) > NAMED_LIMIT_S or max(recovered_s) > STALL_S + RECOVERY_LIMIT_S:
            raise BrokenError(
                f"named after {max(named_s):.0f} s, recovered after {max(recovered_s):.0f} s"
            )
        if different := kills.difference(files / f"alone_{num_ranks}" / "run", folder / "run"):
            raise BrokenError(different)
    except BrokenError as error:
        failure = f"{num_ranks} ranks, {num_stops} stops: {error}; see {folder / 'log'}"
    finally:
        case.end()
    figures = {"named_after_s": max(named_s), "recovered_after_s": max(recovered_s)}
    return Outcome({f"{num_ranks} ranks": num_stops}, failure, figures)


CAMPAIGN = Campaign(
    what="SIGSTOP of a worker at random moments, on Ray, 2 and 4 ranks (trainer.stall_timeout_s=20)",
    promise="Reported within 30 s, killed at the limit, recovered with the numbers of an undisturbed run",
    wanted={"": 30},
    run=run,
    cases=1,
    prepare=prepare,
)
