# SPDX-License-Identifier: Apache-2.0
"""`trainer.backend=ray`: the numbers and the output of a local run, on every placement; what a cluster lacks.

What it does not prove: several nodes, GPUs, several processes to a pool (test_data_parallel.py has those), nor how much
time it saves that models compute at the same time (benchmarks/overlap.py measures it).
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quadriga.cli.main import main
from quadriga.config import load_config
from quadriga.errors import WorkerError
from quadriga.trainer.task_runner import TaskRunner
from quadriga.workers import ActorRolloutRefWorker, CriticWorker
from tests.e2e.conftest import command_line
from tests.limits import PASSES_BEGIN_S
from watching import assert_nothing_left

CRITIC_AND_REFERENCE = (
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.use_kl_loss=True",
    # Two updates a step, so that there is a pass for the old log-probabilities.
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.val_before_train=True",
    "trainer.test_freq=2",
    "trainer.logger=[console,jsonl]",
)
PASSES = ("compute_log_prob", "compute_ref_log_prob", "compute_values")
PROFILE = ("global_profiler.tool=torch", "global_profiler.steps=[2]")
# In the workers: each of the passes that are named returns once all have begun it, in its first two calls, which are
# those of the first two steps. In its third call the reference raises then, and the others have no end.
TOGETHER = """
import pathlib, time
from functools import wraps
from itertools import count
from quadriga.workers import ActorRolloutRefWorker, CriticWorker

HERE, PASSES = pathlib.Path(__file__).parent, {passes!r}

def meets(compute):
    numbers = count(1)

    @wraps(compute)
    def begun(*args):
        number = next(numbers)
        (HERE / f"{{compute.__name__}} {{number}}").touch()
        deadline = time.monotonic() + {limit_s!r}
        while not all((HERE / f"{{name}} {{number}}").exists() for name in PASSES):
            assert time.monotonic() < deadline, "the others have not begun"
            time.sleep(0.01)
        is_last = number == 3
        if is_last and compute.__name__ == "compute_ref_log_prob":
            raise ValueError("the reference has no opinion")
        while is_last:
            time.sleep(0.1)
        return compute(*args)
    return begun

for name in PASSES:
    worker = CriticWorker if name == "compute_values" else ActorRolloutRefWorker
    setattr(worker, name, meets(getattr(worker, name)))
"""
Lines = Callable[[Path], list[dict[str, Any]]]


class LocalRun(NamedTuple):
    """A run in this process.

    Attributes:
        directory: of the run.
        output: what the command printed.
    """

    directory: Path
    output: str


@pytest.fixture(scope="module")
def words(teacher: Path) -> list[str]:
    """The overrides of every run here: with each role that there can be but a reward model."""
    distillation = ["enable=True", f"path={teacher}", "fsdp_config.model_dtype=float32"]
    return [*CRITIC_AND_REFERENCE, *(f"distillation.{word}" for word in distillation)]


@pytest.fixture(scope="module")
def local(words: list[str], home: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    """What all placements are compared with; its second step is profiled."""
    folder = tmp_path_factory.mktemp("local")
    profile = (*PROFILE, f"global_profiler.save_path={folder / 'profile'}")
    with redirect_stdout(StringIO()) as output:
        assert main(["train", *command_line(home, folder, *words, *profile)]) == 0
    return LocalRun(folder / "run", output.getvalue())


@pytest.fixture
def _workers_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver, which is this process, loads the file of `patched` too: what it changes here ends with the test."""
    for name in ("compute_log_prob", "compute_ref_log_prob"):
        monkeypatch.setattr(ActorRolloutRefWorker, name, getattr(ActorRolloutRefWorker, name))
    monkeypatch.setattr(CriticWorker, "compute_values", CriticWorker.compute_values)


def patched(folder: Path) -> str:
    """The override with which the passes of the workers meet."""
    text = TOGETHER.format(passes=PASSES, limit_s=PASSES_BEGIN_S)
    (folder / "together.py").write_text(text)
    return f"actor_rollout_ref.model.external_lib={folder / 'together.py'}"


def without_numbers(text: str) -> list[str]:
    """Lines of output without what depends on the clock, the machine's load and where the run is."""
    lines = [line for line in text.splitlines() if not line.startswith("notice: ")]
    lines = [re.sub(r"\s+mfu .*", "", line).replace("together", "local") for line in lines]
    lines = [re.sub("^done: [^,]+,", "done:", line) for line in lines]
    elsewhere = r"quadriga [\d.]+: |start-up +[\d.]+ s|  pool |state copies: |waiting \d|time in steps|profile written"
    return [line for line in lines if " ━" not in line and not re.match(elsewhere, line)]


def pools_of(output: str) -> list[str]:
    """The pools that a run prints."""
    return [line.split()[1] for line in output.splitlines() if line.startswith("  pool ")]


POOLS = {"together": ["all"], "grouped": ["policy", "scoring"]}


@pytest.mark.parametrize("placement", ["together", pytest.param("grouped", marks=pytest.mark.slow)])
def test_placements_give_the_numbers_of_one_process(
    placement: str,
    ray_cluster: str,
    words: list[str],
    local: LocalRun,
    train: Callable[..., Path],
    metric_lines: Lines,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Bit for bit, validation too, with reference, critic and teacher in the actor's pool, and in one of their own.

    The command prints what it prints of a local run, line by line, but for times and the lines about the pools.
    """
    capfd.readouterr()
    run = train(*words, "trainer.backend=ray", f"trainer.placement={placement}")
    output = capfd.readouterr().out
    assert metric_lines(run) == metric_lines(local.directory)
    assert pools_of(output) == POOLS[placement]
    if placement == "together":
        assert without_numbers(output) == without_numbers(local.output)
    assert_nothing_left()


@pytest.mark.usefixtures("_workers_as_before")
def test_models_apart_compute_at_the_same_time(
    ray_cluster: str,
    words: list[str],
    local: LocalRun,
    arguments: Callable[..., list[str]],
    metric_lines: Lines,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """A pool for each model: the numbers of one process, bit for bit.

    Each pass waits until the two others have begun: one after the other, the first would wait in vain. The second step
    is profiled: all processes in one trace. In the third one the reference fails, which is named at once: the actor
    would compute for ever, and is waited for first.
    """
    profile = (*PROFILE, f"global_profiler.save_path={tmp_path / 'profile'}")
    more = (*profile, patched(tmp_path), "trainer.total_training_steps=3")
    capfd.readouterr()
    command = arguments(*words, *more, "trainer.backend=ray", "trainer.placement=apart")
    assert main(["train", *command]) == 1
    printed = capfd.readouterr()
    assert pools_of(printed.out) == ["actor_rollout", "ref", "critic", "teacher"]
    failure = r"^quadriga train: ref\[rank 0/1 .*compute_ref_log_prob.*the reference has no opinion"
    assert re.search(failure, printed.err, re.MULTILINE)
    run = tmp_path / "run"
    assert metric_lines(run) == metric_lines(local.directory)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (first,) = [line for line in lines if line["step"] == 1]
    passes_s = [first[f"timing_s/{name}"] for name in ("old_log_prob", "ref", "values")]
    assert 0 < max(passes_s) <= first["timing_s/prepare"]
    assert_nothing_left()
    check_trace(events_of(tmp_path / "profile"), events_of(local.directory.parent / "profile"))


def events_of(folder: Path) -> list[dict[str, Any]]:
    """The events of the one trace in a folder."""
    (path,) = folder.iterdir()
    assert path.name == "step_2.json.gz"
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def check_trace(apart: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    """At least 95 % of the operators of one process, each in its role's; phases and calls lie where they happened."""
    theirs, ours = (
        Counter(one["name"] for one in events if one.get("cat") == "cpu_op")
        for events in (alone, apart)
    )
    assert (ours & theirs).total() >= 0.95 * theirs.total() > 1000
    titles = {one["pid"]: one["args"]["name"] for one in apart if one["name"] == "process_name"}
    assert sorted(titles.values()) == [
        "actor_rollout[0]",
        "critic[0]",
        "driver",
        "ref[0]",
        "teacher[0]",
    ]

    def marked(name: str) -> tuple[str, float, float]:
        """Process, start and end of the one block of a name."""
        (one,) = [
            one for one in apart if one.get("cat") == "user_annotation" and one["name"] == name
        ]
        return titles[one["pid"]], one["ts"], one["ts"] + one["dur"]

    phases = {name: marked(name) for name in ("step", "gen", "prepare", "update_critic")}
    assert {process for process, _, _ in phases.values()} == {"driver"}
    for phase, call in {
        "gen": ("actor_rollout[0]", "actor_rollout.generate_sequences"),
        "prepare": ("ref[0]", "ref.compute_ref_log_prob"),
        "update_critic": ("critic[0]", "critic.update_critic"),
    }.items():
        process, start, end = marked(call[1])
        assert process == call[0]
        assert phases[phase][1] <= start < end <= phases[phase][2] <= phases["step"][2]


def test_pool_that_the_cluster_has_not(
    ray_cluster: str, arguments: Callable[..., list[str]]
) -> None:
    """It is said at once, what is there and what is missing, and nothing was started."""
    config = load_config(arguments("trainer.backend=ray", "trainer.n_gpus_per_node=10")).config
    with pytest.raises(
        WorkerError, match=r"resource pool all \[10\]: got .* has 9 of 9 CPU free.*: 1 CPU missing"
    ):
        TaskRunner().run(config)
    assert_nothing_left()
