# SPDX-License-Identifier: Apache-2.0
"""What asynchronous training brings on two cores: one trains, the other generates; and what the simulator says of it.

    .venv/bin/python benchmarks/async.py               # about 5 minutes, on 2 cores that nobody else uses
    .venv/bin/python benchmarks/async.py --rounds 1    # about 3 minutes

The sides take turns, each a whole run with the same prompts and the same lengths of responses, drawn beforehand from a
log-normal law whose longest is 16 times the median:

    lockstep        trains on one core, generates on the other, in turns
    one_step_off    the same split with async_training.preset=one_step_off
    bounded(1)      with preset=bounded
    bounded(4)      with preset=bounded and max_staleness=4
    colocated       lockstep with two ranks, each of which trains and generates, on a core each

Processes that train or generate have one thread and are pinned to their core; the driver and Ray's own are not. A
side's time is from when everything is built to its last step, its first and last ones included, in which nothing can
overlap. A core is idle where its process uses none of it; beside are the seconds a step that the driver and Ray's
processes compute, which they take from either core.

By default generation and training are about equal work in lockstep: as many seconds of its core each.

Predicted is what `async_simulation.py` makes of the lockstep side alone: the lengths of its responses, the seconds of
generation, training and publication of each of its steps. Colocated ranks sum their gradients at each update, which are
as many bytes as a publication has, and are taken to last as long.
"""

import os
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks")]
os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

import ray  # noqa: E402
import torch  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from async_simulation import Costs, Simulation, colocated, fit_recorded_run  # noqa: E402
from drawn_lengths import SETTINGS  # noqa: E402
from quadriga.config import load_config  # noqa: E402
from quadriga.single_controller.ray.cluster import OWN_CLUSTER  # noqa: E402
from quadriga.trainer.asynchronous.schedule import Rules  # noqa: E402
from quadriga.trainer.launch import cluster_of  # noqa: E402
from quadriga.trainer.task_runner import TaskRunner  # noqa: E402
from tests.e2e import conftest as tiny  # noqa: E402

SPLIT = ("trainer.placement={actor: training, rollout: generation}",)
ON = (*SPLIT, "async_training.enable=True")
SIDES: dict[str, tuple[str, ...]] = {
    "lockstep": SPLIT,
    "one_step_off": (*ON, "async_training.preset=one_step_off"),
    "bounded(1)": (*ON, "async_training.preset=bounded"),
    "bounded(4)": (*ON, "async_training.preset=bounded", "async_training.max_staleness=4"),
    "colocated": ("trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.fsdp_config.fsdp_size=1"),
}
RULES: dict[str, dict[str, Any]] = {
    "lockstep": {},
    "one_step_off": {"max_staleness": 1, "in_flight": "finish"},
    "bounded(1)": {"max_staleness": 1},
    "bounded(4)": {"max_staleness": 4},
}
UPDATES = 2  # of a step, so that every side computes old log-probs
WANTED, NEAR = 1.5, 0.15
"""Of bounded(1) over lockstep on the same split; how far the simulator may be from what is measured."""
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Outcome:
    """Seconds of a run; the share of them that each core's process is idle; seconds that the driver and Ray's processes
    have computed; what each step was."""

    seconds: float
    idle: list[float]
    beside: float
    steps: list[dict[str, Any]]
    staleness: float


def prepare(folder: Path, args: Namespace) -> None:
    """A small model, prompts and a reward."""
    torch.manual_seed(0)
    tokenizer = tiny.build_tokenizer()
    sizes = {
        "hidden_size": args.hidden,
        "intermediate_size": 2 * args.hidden,
        "num_hidden_layers": args.layers,
    }
    config = tiny.build_config(tokenizer, **sizes, max_position_embeddings=2 * args.longest)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    tiny.write_rows(
        folder / "train.parquet", [tiny.make_row(number) for number in range(args.prompts * 4)]
    )
    tiny.write_rows(folder / "val.parquet", [tiny.make_row(number) for number in range(4)])
    (folder / "reward.py").write_text(tiny.REWARD)


def command(folder: Path, name: str, args: Namespace) -> list[str]:
    """The configuration of a side, as overrides."""
    return tiny.command_line(
        folder,
        folder,
        "trainer.backend=ray",
        f"actor_rollout_ref.model.external_lib={REPOSITORY / 'benchmarks' / 'drawn_lengths.py'}",
        f"data.train_batch_size={args.prompts}",
        f"data.max_response_length={args.longest}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.prompts // UPDATES}",
        f"actor_rollout_ref.rollout.n={args.responses}",
        f"actor_rollout_ref.rollout.max_num_seqs={8 * args.prompts * args.responses}",
        f"trainer.total_training_steps={args.steps}",
        "trainer.state_copies=False",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        *SIDES[name],
        run=f"run_{time.time_ns()}",
    )


def pin(pid: int, core: int) -> None:
    """All threads of a process."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def cpu_s(pid: int) -> float:
    """Seconds that a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def beside_s() -> float:
    """Seconds that the driver and Ray's own processes, which are told where its session is, have computed."""
    session, total = ray._private.worker._global_node.get_session_dir_path(), cpu_s(os.getpid())
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if session in (place / "cmdline").read_text(errors="replace"):
                total += cpu_s(int(place.name))
    return total


def run(folder: Path, name: str, args: Namespace) -> Outcome:
    """A side, from the first step to the last."""
    config = load_config(command(folder, name, args)).config
    runner, cores = TaskRunner(), sorted(os.sched_getaffinity(0))[:2]
    steps: list[dict[str, Any]] = []
    staleness: list[float] = []
    started, before, pids = 0.0, [], []
    used: list[float] = []
    beside = 0.0
    with (
        cluster_of(config),
        open(folder / "log", "a", encoding="utf-8") as log,
        redirect_stdout(log),
    ):
        for step in runner.steps(config):
            if step.batch is None:
                assert runner._run is not None
                groups = runner._run.team.groups.values()
                pids = [address.pid for group in groups for address in group.processes.addresses]
                for pid, core in zip(pids, cores, strict=True):
                    pin(pid, core)
                beside = beside_s()
                before, started = [cpu_s(pid) for pid in pids], time.perf_counter()
                continue
            now = time.perf_counter()
            lengths: dict[str, list[int]] = {}
            counts = step.batch.batch["response_mask"].sum(-1)
            for uid, length in zip(step.batch.non_tensor_batch["uid"], counts, strict=True):
                lengths.setdefault(uid, []).append(int(length))
            seconds = {key: step.metrics[f"timing_s/{key}"] for key in ("gen", "publish_weights")}
            steps.append(
                {"lengths": [*lengths.values()], "at_s": now - started, "reward_s": 0.0, **seconds}
            )
            staleness.append(step.metrics.get("async/staleness_mean", 0.0))
            if step.number == args.steps:
                used = [cpu_s(pid) - own for pid, own in zip(pids, before, strict=True)]
                beside = beside_s() - beside
    total = steps[-1]["at_s"]
    return Outcome(total, [1 - own / total for own in used], beside, steps, mean(staleness))


def predicted(runs: Sequence[Outcome], folder: Path, args: Namespace) -> dict[str, float]:
    """Seconds of each side, from the steps of the lockstep runs alone."""
    lines = []
    for number in range(args.steps):
        own = [one.steps[number] for one in runs]
        whole = median(
            run.steps[number]["at_s"] - (run.steps[number - 1]["at_s"] if number else 0.0)
            for run in runs
        )
        gen_s, sent_s = (median(one[key] for one in own) for key in ("gen", "publish_weights"))
        lines.append(
            {**own[0], "gen_s": gen_s, "train_s": whole - gen_s - sent_s, "publish_s": sent_s}
        )
    publish_s = median(line["publish_s"] for line in lines)
    loads = {"publish_s": 0.0, "load_s": publish_s, "switch_s": UPDATES * publish_s}
    costs = replace(Costs(), **loads, capacity=10**6, recomputes=True)
    workload, costs = fit_recorded_run(lines, args.steps, costs, 1, 1)
    print("recorded: " + ", ".join(f"{key} {value:.3g}" for key, value in vars(costs).items()))
    sizes = {"num_groups": args.prompts, "group_size": args.responses, "num_steps": args.steps}
    found = {
        name: Simulation(Rules(**sizes, **own), workload, costs, 1, 1).run().seconds
        for name, own in RULES.items()
    }
    return found | {"colocated": colocated(Rules(**sizes), workload, costs, 2, 2).seconds}


def report(found: dict[str, list[Outcome]], told: dict[str, float], args: Namespace) -> None:
    """A table, and what of it is wanted."""
    lockstep = found["lockstep"]
    own = [one for run in lockstep for one in run.steps]
    generation = mean(one["gen"] for one in own)
    training = (
        mean(run.seconds for run in lockstep) / args.steps
        - generation
        - mean(one["publish_weights"] for one in own)
    )
    tokens = [length for one in lockstep[0].steps for group in one["lengths"] for length in group]
    print(
        f"{args.steps} steps of {args.prompts} x {args.responses} responses, medians of {args.rounds} rounds"
    )
    print(
        f"a lockstep step: generation {generation:.2f} s, training {training:.2f} s; "
        f"responses of {median(tokens):g} tokens in the middle, up to {max(tokens)}"
    )
    print(
        "| side | s a step | over lockstep | over colocated | predicted | idle by core | beside | staleness |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, runs in found.items():
        turns = f"{speed(found['colocated'], runs):.2f}" if "colocated" in found else ""
        idle = " / ".join(
            f"{mean(values):.2f}" for values in zip(*(run.idle for run in runs), strict=True)
        )
        a_step, ahead = (
            median(run.seconds for run in runs) / args.steps,
            told["lockstep"] / told[name],
        )
        print(
            f"| {name} | {a_step:.2f} | {speed(lockstep, runs):.2f} | {turns} | {ahead:.2f} | {idle} ",
            end="",
        )
        beside, staleness = map(
            mean, zip(*((run.beside, run.staleness) for run in runs), strict=True)
        )
        print(f"| {beside / args.steps:.3f} | {staleness:.2f} |")
    judge(found, told)


def judge(found: dict[str, list[Outcome]], told: dict[str, float]) -> None:
    """What is wanted, and whether it was reached."""
    lockstep = found["lockstep"]
    for name in [name for name in found if name != "lockstep"]:
        error = told["lockstep"] / told[name] / speed(lockstep, found[name]) - 1
        print(
            f"{name}: predicted {error:+.0%}, {'within' if abs(error) <= NEAR else 'BEYOND'} {NEAR:.0%}"
        )
    if "bounded(1)" in found:
        reached = speed(lockstep, found["bounded(1)"])
        print(f"bounded(1): {reached:.2f}, {'at least' if reached >= WANTED else 'BELOW'} {WANTED}")


def speed(base: Sequence[Outcome], runs: Sequence[Outcome]) -> float:
    """How much faster runs are, each than that of its own round: what else the machine does falls on all of a round."""
    return median(one.seconds / run.seconds for one, run in zip(base, runs, strict=True))


def main() -> None:
    """All sides in turns."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--responses", type=int, default=4, help="to a prompt")
    parser.add_argument(
        "--median",
        type=int,
        default=48,
        help="tokens of a response; the longest has 16 times as many",
    )
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithms of lengths")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    args = parser.parse_args()
    args.longest = 16 * args.median
    os.environ[SETTINGS] = f"{args.median} {args.longest} {args.sigma}"
    os.environ |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
    }
    found: dict[str, list[Outcome]] = {name: [] for name in args.sides}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, args)
        own = {
            "include_dashboard": False,
            "log_to_driver": False,
            "_system_config": OWN_CLUSTER,
        }  # as a run's
        ray.init(address="local", num_cpus=4, **own)
        print(f"load of the machine before: {os.getloadavg()[0]:.1f}", flush=True)
        for number in range(args.rounds):
            for side in args.sides:
                outcome = run(folder, side, args)
                found[side].append(outcome)
                print(f"round {number + 1}, {side}: {outcome.seconds:.1f} s", flush=True)
        ray.shutdown()
        report(found, predicted(found["lockstep"], folder, args), args)


if __name__ == "__main__":
    main()
