# SPDX-License-Identifier: Apache-2.0
"""Rollout engines killed in mid-batch: each prompt's samples exactly once, with the tokens of the run left alone.

A case is a run on Ray with three engines (`native`, float32) in a pool of their own. In each step but the first, one or
two of them get SIGKILL at random moments while they generate; in every fifth case while weights are sent to them. The
step after waits until they are there again, so that three can be hit each time. Every response of every step must be
that of the run left alone: uid, prompt, tokens and score, in order; every metric must be equal to float32 rounding, for
what an engine computes together with what decides the order in which it adds up. No process may stay.
"""

import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks")]

import torch  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from campaigns.campaign import Campaign, Outcome  # noqa: E402
from quadriga.cli.main import main  # noqa: E402
from quadriga.protocol import DataProto  # noqa: E402
from quadriga.trainer.rollout_pool import RolloutPool  # noqa: E402
from tests.e2e import conftest as tiny  # noqa: E402

NUM_ENGINES, NUM_STEPS, NUM_SAMPLES, LIMIT_S, RESTART_LIMIT_S, END_LIMIT_S = (
    3,
    10,
    4,
    1200.0,
    120.0,
    30.0,
)
KEYS = (
    "trainer.backend=ray",
    "trainer.placement={actor: training, ref: training, rollout: generation}",
    f"trainer.resource_pools.generation=[{NUM_ENGINES}]",
    f"trainer.total_training_steps={NUM_STEPS}",
    "trainer.rollout_data_dir=run/rollouts",
    "data.max_response_length=192",
    "actor_rollout_ref.rollout.ignore_eos=True",
    f"actor_rollout_ref.rollout.n={NUM_SAMPLES}",
)
COUNTS = ("rollout/requests_moved", "rollout/engine_restarts")


def prepare(files: Path, script: str = __file__) -> None:
    """Model, data, and the run left alone, by `script`; again where the package has changed."""
    sources = [*sorted((REPOSITORY / "quadriga").rglob("*.py")), Path(script)]
    state = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    done = files / "done"
    if done.is_file() and done.read_text() == state:
        return
    shutil.rmtree(files)
    home = files / "home"
    home.mkdir(parents=True)
    torch.manual_seed(0)
    tokenizer = tiny.build_tokenizer()
    LlamaForCausalLM(tiny.build_config(tokenizer)).save_pretrained(home / "model")
    tokenizer.save_pretrained(home / "model")
    tiny.write_rows(home / "train.parquet", [tiny.make_row(number) for number in range(10)])
    tiny.write_rows(home / "val.parquet", [tiny.make_row(number) for number in range(20, 24)])
    (home / "reward.py").write_text(tiny.REWARD)
    (files / "alone").mkdir()
    if failure := run(files / "alone", files, 0, script):
        raise SystemExit(f"the run left alone: {failure}")
    done.write_text(state)


# ---- in the driver of a run ---------------------------------------------------------------------


class Killer:
    """Kills engines of a pool, chosen with their moments by the number of the case; 0: none."""

    def __init__(self, number: int) -> None:
        self.random, self.kills, self.is_busy = random.Random(number), list[dict[str, Any]](), False
        self.aims_at = "" if not number else "weight sync" if number % 5 == 0 else "generation"
        self.generate, self.publish = RolloutPool.generate_sequences, RolloutPool.publish
        self.seconds = {"generation": math.inf, "weight sync": math.inf}
        self.step = 0

    def generate_sequences(self, pool: RolloutPool, prompts: DataProto) -> DataProto:
        """The pool's method, disturbed."""
        self.step = prompts.meta_info["global_steps"]
        if self.aims_at and self.step > 1:
            pool._restarts.wait(RESTART_LIMIT_S)
            pool._add_restarted_engines()
        return self._disturbed("generation", pool, lambda: self.generate(pool, prompts))

    def publish_weights(self, pool: RolloutPool, version: int) -> None:
        """The pool's method, disturbed."""
        self._disturbed("weight sync", pool, lambda: self.publish(pool, version))

    def _disturbed(self, what: str, pool: RolloutPool, work: Any) -> Any:
        timers = []
        if what == self.aims_at and self.step > 1 and len(pool._rollout.ranks) > 1:
            for rank in self.random.sample(
                pool._rollout.ranks, self.random.randint(1, len(pool._rollout.ranks) - 1)
            ):
                wait_s = self.random.uniform(0.0, 0.9) * self.seconds[what]
                timers.append(threading.Timer(wait_s, self._kill, (pool, rank, wait_s)))
        start, self.is_busy = time.monotonic(), True
        try:
            for timer in timers:
                timer.start()
            return work()
        finally:
            self.is_busy = False
            self.seconds[what] = min(self.seconds[what], time.monotonic() - start)
            for timer in timers:
                timer.cancel()

    def _kill(self, pool: RolloutPool, rank: int, wait_s: float) -> None:
        # One that is over already was not killed in the midst of it.
        if self.is_busy and rank in pool._rollout.ranks and len(pool._rollout.ranks) > 1:
            os.kill(pool._rollout.processes.addresses[rank].pid, signal.SIGKILL)
            self.kills.append({"step": self.step, "rank": rank, "after_s": wait_s})


def drive(number: int, files: Path) -> int:
    """A run in the working directory; the file `kills.json` says who was killed when."""
    killer = Killer(number)
    RolloutPool.generate_sequences = lambda pool, prompts: killer.generate_sequences(pool, prompts)  # type: ignore[method-assign]
    RolloutPool.publish = lambda pool, version: killer.publish_weights(pool, version)  # type: ignore[method-assign]
    try:
        return main(["train", *tiny.command_line(files / "home", Path(), *KEYS)])
    finally:
        Path("kills.json").write_text(json.dumps(killer.kills))


# ---- in the process that looks at it ------------------------------------------------------------


def run(folder: Path, files: Path, number: int, script: str = __file__) -> str:
    """A run in a folder, in a session of its own, by `script`. Returns what was wrong with it."""
    own = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            tiny.with_the_tests(sys.executable, script, str(number), str(files)),
            cwd=folder,
            env=os.environ | own,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        status = None
    until = time.monotonic() + END_LIMIT_S
    while (
        status is not None
        and (left := tiny.members_of_session(process.pid))
        and time.monotonic() < until
    ):
        time.sleep(0.2)
    left = tiny.members_of_session(process.pid)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    if status is None:
        return f"not over after {LIMIT_S:g} s"
    return f"status {status}" if status else f"processes {left} stayed" if left else ""


def differences(folder: Path, alone: Path, ignored: tuple[str, ...] = COUNTS) -> str:
    """How the responses or metrics of a run differ from those of another; "" where they do not."""
    for step in range(1, NUM_STEPS + 1):
        ours, theirs = (read(one / "run" / "rollouts" / f"{step}.jsonl") for one in (folder, alone))
        if wrong := {
            uid: count
            for uid, count in Counter(row["uid"] for row in ours).items()
            if count != NUM_SAMPLES
        }:
            return f"step {step}: samples of prompts {wrong}, not {NUM_SAMPLES}"
        if ours != theirs:
            return f"step {step}: {sum(a != b for a, b in zip(ours, theirs, strict=True))} other responses"
    for ours, theirs in zip(
        read(folder / "run/metrics.jsonl"), read(alone / "run/metrics.jsonl"), strict=True
    ):
        for name in ours.keys() | theirs.keys():
            if name.startswith(("timing_s/", "timing_per_token_ms/", "perf/", *ignored)):
                continue
            if not math.isclose(
                ours.get(name, math.nan), theirs.get(name, math.nan), rel_tol=1e-4, abs_tol=2e-6
            ):
                return f"step {theirs['step']}: {name} {ours.get(name)}, not {theirs.get(name)}"
    return ""


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def case(number: int, folder: Path, files: Path) -> Outcome:
    """A run with engines that are killed, and what came of it."""
    start = time.monotonic()
    failure = run(folder, files, number) or differences(folder, files / "alone")
    kills = (
        json.loads((folder / "kills.json").read_text()) if (folder / "kills.json").is_file() else []
    )
    group = "weight sync" if number % 5 == 0 else "generation"
    told = {name: 0.0 for name in COUNTS}
    if not failure:
        for line in read(folder / "run/metrics.jsonl"):
            told = {name: count + line.get(name, 0.0) for name, count in told.items()}
        in_time = [kill for kill in kills if kill["step"] < NUM_STEPS]
        if group == "generation" and told["rollout/engine_restarts"] < len(in_time):
            failure = (
                f"{told['rollout/engine_restarts']:g} engines restarted after {len(in_time)} kills"
            )
    failure = failure and f"{failure}; kills {kills}; {folder / 'log'}"
    figures = {
        "seconds": time.monotonic() - start,
        "requests_moved": told["rollout/requests_moved"],
    }
    return Outcome({group: len(kills)}, failure, figures)


CAMPAIGN = Campaign(
    what="Rollout engines killed in mid-batch (three engines in a pool of their own, Ray)",
    promise="Each prompt has its samples exactly once, with the tokens and scores of an undisturbed run; no "
    "process is left",
    wanted={"": 50},
    run=case,
    cases=1,
    prepare=prepare,
)

if __name__ == "__main__":
    sys.exit(drive(int(sys.argv[1]), Path(sys.argv[2])))
