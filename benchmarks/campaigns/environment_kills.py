# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of environments at up to 20 random moments of a run, now and then of the whole run; its numbers must stay.

A case is one run in an environment of several turns with random observations. At random moments one of its
environment processes is killed, or the supervisor of one, whether it plays, waits or loads. One kill in five takes the
trainer instead, and the same command starts it again. Equal is: the same files, and in each the same bytes, but for
times and counts of restarts. The engine's own log-probs, which training does not use, may differ by rounding: a slow
answer of an environment changes which turns are generated together.

A call fails by design when it loses its process three times. Kills of processes that may still be loading therefore
never follow one another directly.
"""

import math
import os
import random
import signal
import time
from collections import Counter
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq

from campaigns import kills
from campaigns.campaign import Campaign, Outcome
from tests.e2e import conftest as tiny

NUM_KILLS = 20
NUM_STEPS = 24
MAX_WAIT_S = 1.5
MIN_AGE_S = 6.0
LOG_PROBS = "rollout_log_probs"
ROUNDING = 2e-6
PROGRAM = b"quadriga.rollout.environments.process"
ENVIRONMENT = '''
import random


class Letters:
    """Asks for a letter that it draws anew in each turn."""

    def reset(self, seed=None):
        self.num_steps = 0
        return self.draw()

    def draw(self):
        self.letter = random.choice("abcdefgh")
        return f"say {self.letter}"

    def step(self, action):
        self.num_steps += 1
        share = action.count(self.letter) / max(1, len(action))
        return self.draw(), share, self.num_steps == 4, False, {"state": self.letter}
'''


def words(files: Path) -> list[str]:
    """The arguments of `quadriga` for a run in the folder `run` of the working directory."""
    overrides = (
        *kills.COMMON,
        f"env={files / 'letters.py'}:Letters",
        "env.num_episodes=64",
        "env.num_val_episodes=4",
        "env.num_processes=2",
        f"data.cache_dir={files / 'cache'}",
        "data.train_files=",
        "data.val_files=",
        "data.max_prompt_length=16",
        "data.max_response_length=64",
        'actor_rollout_ref.rollout.stop=[" "]',
        "custom_reward_function.path=null",
        f"trainer.total_training_steps={NUM_STEPS}",
    )
    return ["train", *tiny.command_line(files / "home", Path(), *overrides)]


def prepare(files: Path) -> None:
    """Write the model and the environment, and train once without kills."""
    kills.prepare_once(files, __file__, _run_alone)


def _run_alone(files: Path) -> None:
    (files / "letters.py").write_text(ENVIRONMENT)
    folder = files / "alone"
    folder.mkdir()
    status = kills.Attempt(words(files), folder).wait()
    if status:
        raise SystemExit(f"the run without kills ended with {status}: {folder / 'log'}")


def environment_processes(session: int) -> list[int]:
    """Processes of environments, and their supervisors, in the session of a run."""
    pids = []
    for pid in tiny.members_of_session(session):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if PROGRAM in command:
            pids.append(pid)
    return sorted(pids)


def is_equal(one: Path, other: Path) -> bool:
    """Whether two files have the same content, but for rounding of the engine's log-probs."""
    if one.parent.name == "rollouts" and one.name.startswith(("step_", "validation_")):
        tables = [pq.read_table(path) for path in (one, other)]
        rest = [table.drop_columns([LOG_PROBS]) for table in tables]
        log_probs = [list(chain(*table[LOG_PROBS].to_pylist())) for table in tables]
        return rest[0].equals(rest[1]) and all(map(is_close, *log_probs))
    if one.name != "metrics.jsonl":
        return kills.is_equal(one, other)
    for line, other_line in zip(kills.metrics(one), kills.metrics(other), strict=True):
        if line.keys() != other_line.keys():
            return False
        for name, value in line.items():
            is_rounded = name.startswith("rollout/") and is_close(value, other_line[name])
            if value != other_line[name] and not is_rounded:
                return False
    return True


def is_close(value: float, other: float) -> bool:
    """Whether two log-probs, or means of them, differ by rounding only."""
    return math.isclose(value, other, rel_tol=0.0, abs_tol=ROUNDING)


class Killer:
    """Kills processes of a run at random moments, which the number of the case determines.

    Attributes:
        kills: kills so far, by what was killed.
        sessions: the sessions of the run's processes.
    """

    def __init__(self, number: int, folder: Path, files: Path) -> None:
        self.kills: Counter[str] = Counter()
        self.sessions: list[int] = []
        self._random = random.Random(number)
        self._folder = folder
        self._files = files
        self._first_seen: dict[int, float] = {}
        self._may_kill_young = True

    def run(self) -> int:
        """Run to the end with all kills. Returns the exit status."""
        attempt = self._start()
        until = time.monotonic() + self._random.uniform(0, MAX_WAIT_S)
        while attempt.wait(is_blocking=False) is None:
            time.sleep(0.01)
            candidates = self._candidates(attempt.pid)
            is_over = self.kills.total() == NUM_KILLS
            if is_over or not candidates or time.monotonic() < until:
                continue
            if self._random.random() < 0.2:
                os.kill(attempt.pid, signal.SIGKILL)
                attempt.wait()
                self.kills["trainer"] += 1
                attempt = self._start()
            else:
                self._kill(self._random.choice(candidates))
            until = time.monotonic() + self._random.uniform(0, MAX_WAIT_S)
        return attempt.status

    def _start(self) -> kills.Attempt:
        attempt = kills.Attempt(words(self._files), self._folder)
        self.sessions.append(attempt.pid)
        return attempt

    def _candidates(self, session: int) -> list[int]:
        """Processes that may be killed now."""
        now = time.monotonic()
        pids = environment_processes(session)
        for pid in pids:
            self._first_seen.setdefault(pid, now)
        if self._may_kill_young:
            return pids
        return [pid for pid in pids if now - self._first_seen[pid] >= MIN_AGE_S]

    def _kill(self, pid: int) -> None:
        age_s = time.monotonic() - self._first_seen[pid]
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._may_kill_young = age_s >= MIN_AGE_S
        self.kills["environment"] += 1


def run(number: int, folder: Path, files: Path) -> Outcome:
    """One run with kills."""
    killer = Killer(number, folder, files)
    status = killer.run()
    shown = f"kills {dict(killer.kills)}"
    failure = ""
    if status:
        failure = f"{shown}: status {status} at the end, see {folder / 'log'}"
    elif not killer.kills:
        failure = "the run ended before the first kill"
    elif different := kills.difference(files / "alone" / "run", folder / "run", is_equal):
        failure = f"{shown}: {different}, in {folder}"
    deadline = time.monotonic() + kills.END_LIMIT_S
    while not failure:
        remaining = [pid for session in killer.sessions for pid in tiny.members_of_session(session)]
        if not remaining:
            break
        if time.monotonic() > deadline:
            failure = f"{shown}: processes {remaining} are left"
        time.sleep(0.05)
    if not failure and (remaining_files := list((folder / "tmp").iterdir())):
        failure = f"{shown}: temporary files {remaining_files} are left"
    return Outcome(dict(killer.kills), failure)


CAMPAIGN = Campaign(
    what="SIGKILL of environments, and of the trainer, at up to 20 random moments of a run",
    promise="The run goes on, or resumes, with the numbers of an undisturbed one; nothing is left",
    wanted={"": 60, "environment": 40, "trainer": 8},
    run=run,
    cases=3,
    prepare=prepare,
)
