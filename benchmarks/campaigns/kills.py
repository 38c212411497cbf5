# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at random moments of a training in one process; each resumed run must equal the one left alone.

A case is one run of one variant (GRPO, PPO with a critic, LoRA, several updates a step, images), killed several times
and each time started again by the same command, until it comes to its end. Each kill aims at a phase (generation,
grading, update, writing, publishing, loading) and comes at a random moment of it. The killed process keeps its phase
in a file that it maps; the phase that stands there after its death is the one the kill counts for.

Most starts are forks of an interpreter that has loaded the modules and computed nothing; every fifth is a real one.
Equal is: the same files, and in each the same bytes, but for times and speeds in metrics.jsonl.
"""

import ctypes
import fcntl
import hashlib
import json
import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks")]
# Read when modules are loaded, so the same for forks and for real starts.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import torch  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from campaigns.campaign import Campaign, Outcome  # noqa: E402
from quadriga.cli.main import main  # noqa: E402
from quadriga.observe.timing import PhaseTimer  # noqa: E402
from quadriga.trainer.loop import TrainingLoop  # noqa: E402
from quadriga.trainer.saving import CheckpointSaver  # noqa: E402
from quadriga.trainer.task_runner import TaskRunner  # noqa: E402, F401 (loaded before the forks)
from tests.e2e import conftest as tiny  # noqa: E402
from tests.e2e.colors import of_studio, write_studio  # noqa: E402

PHASES = ("other", "generation", "grading", "update", "writing", "publishing", "loading")
# Phases of a step, by the names of its timer.
OF_TIMER = {
    "gen": "generation",
    "reward": "grading",
    "update_actor": "update",
    "update_critic": "update",
    "publish_weights": "publishing",
}
# A kill comes within so many seconds after its phase has begun; about as long as the phase is here.
SPREAD_S = {
    "generation": 0.03,
    "grading": 0.01,
    "update": 0.03,
    "writing": 0.1,
    "publishing": 0.0005,
    "loading": 0.03,
}
# Short phases are aimed at more often, for some of these kills come too late and count for what follows.
WEIGHTS = {"generation": 1, "grading": 2, "update": 1, "writing": 2, "publishing": 3, "loading": 2}
NUM_STEPS, MAX_KILLS, LIMIT_S, END_LIMIT_S = 8, 6, 300.0, 30.0
COMMON = (
    f"trainer.total_training_steps={NUM_STEPS}",
    "trainer.save_freq=1",
    "trainer.test_freq=3",
    "trainer.log_val_generations=2",
    "trainer.rollout_data_dir=run/rollouts",
    "trainer.validation_data_dir=run/validation",
)
VARIANTS: dict[str, tuple[str, ...]] = {
    "grpo": ("data.shuffle=True", "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"),
    "critic": (
        "algorithm.adv_estimator=gae",
        "critic.ppo_epochs=2",
        "critic.ppo_mini_batch_size=2",
        "critic.shuffle=True",
        "trainer.max_ckpt_to_keep=1",
    ),
    "lora": ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16"),
    "updates": (
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.shuffle=True",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
        "algorithm.kl_ctrl.target_kl=0.01",
        "trainer.max_ckpt_to_keep=2",
    ),
    "images": ("trainer.save_freq=2",),
}
# Changed by the clock, the load of the machine, and kills of environments.
CLOCK = tiny.CLOCK_PREFIXES
RESTARTS = ("env/restarts", "env/replayed_episodes")
ASIDE = re.compile(r"(metrics|samples)\.\d+\.jsonl|rollouts/superseded_\d+/.*")


def words(variant: str, files: Path) -> list[str]:
    """The arguments of `quadriga` for a run in the folder `run` of the working directory."""
    own = (
        (*of_studio(files / "studio"), "actor_rollout_ref.rollout.n=2")
        if variant == "images"
        else ()
    )
    return ["train", *tiny.command_line(files / "home", Path(), *own, *COMMON, *VARIANTS[variant])]


def prepare(files: Path) -> None:
    """Models and data; again where the package has changed. Runs left alone are made when they are needed."""
    prepare_once(files, __file__, lambda files: None)


@contextmanager
def made_once(folder: Path) -> Iterator[bool]:
    """Whether a folder is still to be filled, in the block; other processes wait meanwhile."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_missing = not (folder / "done").is_file()
        if is_missing:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        yield is_missing
        (folder / "done").touch()


def run_alone(files: Path, variant: str) -> Path:
    """The directory of a variant's run that nothing happens to."""
    folder = files / variant
    with made_once(folder) as is_missing:
        if is_missing and (status := Attempt(words(variant, files), folder).wait()):
            raise SystemExit(
                f"the run of {variant} left alone ended with {status}: {folder / 'log'}"
            )
    return folder / "run"


def prepare_once(files: Path, campaign: str, run_alone: Callable[[Path], None]) -> None:
    """Models and data in an empty folder, and what `run_alone` adds; once until package or campaign changes."""
    sources = [*sorted((REPOSITORY / "quadriga").rglob("*.py")), Path(campaign)]
    state = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    done = files / "done"
    if done.is_file() and done.read_text() == state:
        return
    shutil.rmtree(files)
    home, studio = files / "home", files / "studio"
    home.mkdir(parents=True)
    studio.mkdir()
    torch.manual_seed(0)
    tokenizer = tiny.build_tokenizer()
    LlamaForCausalLM(tiny.build_config(tokenizer)).save_pretrained(home / "model")
    tokenizer.save_pretrained(home / "model")
    tiny.write_rows(home / "train.parquet", [tiny.make_row(number) for number in range(10)])
    tiny.write_rows(home / "val.parquet", [tiny.make_row(number) for number in range(20, 24)])
    (home / "reward.py").write_text(tiny.REWARD)
    write_studio(studio)
    run_alone(files)
    done.write_text(state)


# ---- in the process that is killed --------------------------------------------------------------


def run_marked(arguments: list[str]) -> int:
    """A run in the working directory; the file `marks` holds its phase and whether a checkpoint is being written."""
    with open("marks", "r+b") as file:
        marks = mmap.mmap(file.fileno(), 2)
    PhaseTimer.phase = _marked_phase(PhaseTimer.phase, marks)  # type: ignore[method-assign]
    TrainingLoop.load_checkpoint = _marked_load(TrainingLoop.load_checkpoint, marks)  # type: ignore[method-assign]
    CheckpointSaver.start = _marked_writing(CheckpointSaver.start, marks)  # type: ignore[method-assign]
    CheckpointSaver.poll = _marked_writing(CheckpointSaver.poll, marks)  # type: ignore[method-assign]
    return main(arguments)


def _marked_phase(phase: Callable[..., Any], marks: mmap.mmap) -> Callable[..., Any]:
    @contextmanager
    def marked(timer: PhaseTimer, name: str) -> Iterator[None]:
        before = marks[0]
        marks[0] = PHASES.index(OF_TIMER.get(name, "other"))
        try:
            with phase(timer, name):
                yield
        finally:
            marks[0] = before

    return marked


def _marked_load(load: Callable[..., bool], marks: mmap.mmap) -> Callable[..., bool]:
    @wraps(load)
    def marked(loop: TrainingLoop) -> bool:
        marks[0] = PHASES.index("loading")
        try:
            return load(loop)
        finally:
            marks[0] = 0

    return marked


def _marked_writing(method: Callable[..., Any], marks: mmap.mmap) -> Callable[..., Any]:
    @wraps(method)
    def marked(saver: CheckpointSaver, *args: Any, **options: Any) -> Any:
        if method.__name__ == "start":
            marks[1] = 1
        output = method(saver, *args, **options)
        if method.__name__ == "poll" and output:
            marks[1] = 0
        return output

    return marked


# ---- in the process that kills ------------------------------------------------------------------


class Attempt:
    """A start of the run in a folder: a fork of this process, which calls `first` before, or an interpreter of its own;
    its output is in `log`."""

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        *,
        is_real_start: bool = False,
        first: Callable[[], None] | None = None,
    ) -> None:
        (folder / "marks").write_bytes(bytes(2))
        (folder / "tmp").mkdir(exist_ok=True)
        with open(folder / "marks", "r+b") as file:
            self.marks = mmap.mmap(file.fileno(), 2)
        self.limit = time.monotonic() + LIMIT_S
        own = {"TMPDIR": str(folder / "tmp")}
        with open(folder / "log", "ab") as log:
            if is_real_start:
                line = [sys.executable, __file__, *arguments]
                self.pid = subprocess.Popen(
                    line,
                    cwd=folder,
                    env=os.environ | own,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                ).pid
                return
            self.pid = os.fork()
            if self.pid:
                return
            status = 1
            try:
                os.setsid()
                ctypes.CDLL(None).prctl(tiny.PR_SET_PDEATHSIG, signal.SIGKILL)
                os.environ |= own
                tempfile.tempdir = None
                os.chdir(folder)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                if first is not None:
                    first()
                status = run_marked(arguments)
                sys.stdout.flush()
            finally:
                os._exit(status)

    @property
    def phases(self) -> set[str]:
        """What the process is doing, or was when it was killed."""
        return {PHASES[self.marks[0]]} | ({"writing"} if self.marks[1] else set())

    def kill_in(self, phase: str, delay_s: float, num_before: int) -> bool:
        """SIGKILL so long after a phase has begun for the time after `num_before`; False: it ended before that."""
        was_in = False
        while self.wait(is_blocking=False) is None:
            is_in = phase in self.phases
            if is_in and not was_in:
                if num_before == 0:
                    time.sleep(delay_s)
                    break
                num_before -= 1
            was_in = is_in
            time.sleep(0.0002)
        if self.wait(is_blocking=False) is not None:
            return False
        os.kill(self.pid, signal.SIGKILL)
        return self.wait() == -signal.SIGKILL

    def wait(self, *, is_blocking: bool = True) -> int | None:
        """The exit status, negative for a signal; None while it runs. One that runs for too long is killed."""
        while self.pid:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid, self.status = 0, os.waitstatus_to_exitcode(status)
            elif not is_blocking:
                if time.monotonic() > self.limit:
                    os.kill(self.pid, signal.SIGKILL)
                return None
            else:
                time.sleep(0.002)
        return self.status


def run(number: int, folder: Path, files: Path) -> Outcome:
    """One run, killed up to `MAX_KILLS` times."""
    draw = random.Random(number)
    variant = list(VARIANTS)[number % len(VARIANTS)]
    events, sessions = Counter[str](), []
    for attempt_number in range(MAX_KILLS + 1):
        is_real_start = (number * MAX_KILLS + attempt_number) % 5 == 0
        attempt = Attempt(words(variant, files), folder, is_real_start=is_real_start)
        sessions.append(attempt.pid)
        if attempt_number == MAX_KILLS:
            break
        (phase,) = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
        # A run without a checkpoint has nothing to load, and one that has loads it once.
        if (
            phase == "loading"
            and not (folder / "run" / "latest_checkpointed_iteration.txt").is_file()
        ):
            phase = "writing"
        num_before = draw.randint(0, 2) if phase != "loading" else 0
        if not attempt.kill_in(phase, draw.uniform(0, SPREAD_S[phase]), num_before):
            break
        found = attempt.phases
        events[phase if phase in found else min(found)] += 1
    status = attempt.wait()
    told = f"{variant}, {sum(events.values())} kills {dict(events)}"
    failure = f"{told}: status {status} at the end, see {folder / 'log'}" if status else ""
    if not failure and (different := difference(run_alone(files, variant), folder / "run")):
        failure = f"{told}: {different}, in {folder}"
    deadline = time.monotonic() + END_LIMIT_S
    while not failure and (
        left := [pid for session in sessions for pid in tiny.members_of_session(session)]
    ):
        if time.monotonic() > deadline:
            failure = f"{told}: processes {left} are left"
        time.sleep(0.05)
    if not failure and (files_left := list((folder / "tmp").iterdir())):
        failure = f"{told}: temporary files {files_left} are left"
    return Outcome(dict(events), failure)


def is_equal(one: Path, other: Path) -> bool:
    """Whether two files have the same content."""
    return _content(one) == _content(other)


def difference(alone: Path, other: Path, is_equal: Callable[[Path, Path], bool] = is_equal) -> str:
    """The first file in which two runs differ, "" where there is none."""
    of_alone, of_other = (
        # A run that began anew has moved the log and the record of the one before it aside.
        {
            path.relative_to(top)
            for path in top.rglob("*")
            if path.is_file() and not ASIDE.fullmatch(str(path.relative_to(top)))
        }
        for top in (alone, other)
    )
    if of_alone != of_other:
        return f"files {sorted(map(str, of_alone ^ of_other))} are in one of the runs only"
    for name in sorted(of_alone):
        if not is_equal(alone / name, other / name):
            return f"{name} differs"
    return ""


def _content(path: Path) -> Any:
    if path.name == "metrics.jsonl":
        return metrics(path)
    if path.suffix == ".parquet" and path.parent.name == "rollouts":
        return tiny.read_recorded_step(path, (*CLOCK, *RESTARTS))
    return path.read_bytes()


def metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without what the clock, the load and kills of environments change."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [tiny.without_clock(json.loads(line), (*CLOCK, *RESTARTS)) for line in lines]


CAMPAIGN = Campaign(
    what="SIGKILL at random moments, one process (GRPO, PPO with a critic, LoRA, several updates a step, images)",
    promise="The resumed run equals an undisturbed one in every file and row, except times; nothing is left",
    wanted={"": 1000} | dict.fromkeys(PHASES[1:], 100),
    run=run,
    cases=180,
    processes=2,
    prepare=prepare,
)

if __name__ == "__main__":
    sys.exit(run_marked(sys.argv[1:]))
