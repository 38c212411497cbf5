# SPDX-License-Identifier: Apache-2.0
"""Runs every recipe on the playground from a supervised model, and shows what each learned and how soon.

    .venv/bin/python benchmarks/playground.py                                      # everything, seeds 0 1 2
    .venv/bin/python benchmarks/playground.py --algorithms grpo ppo --seeds 0      # some of it

For each seed a playground is prepared and a model taught by `quadriga sft`; each run then starts from that model:

    quadriga train --config SEED/sums.yaml [--config configs/recipes/NAME.yaml] [--config SEED/over/NAME.yaml]

with that seed, a validation every 5 steps (greedy answers to all questions of the validation file), and nothing else
but where to write: all settings stand in these files. `grpo` has no recipe, it is the base. Beside the recipes:

    largest       GRPO on largest.yaml, whose validation asks what training does not
    kl_target     GRPO with over/kl_target.yaml: an adaptive coefficient
    kl_fixed      the same with algorithm.kl_ctrl.type=fixed
    by_reward_model
                  reward_model.yaml by `quadriga sft`, then PPO with over/by_reward_model.yaml; its answers are compared
                  with the right ones here, the run itself never sees these
    distilled     GRPO's model as the teacher of the supervised model of the next seed, whose weights are others, with
                  over/distilled.yaml: by its log-probs alone, without rewards
    stale_0, 1, 4 GRPO with async_training.max_staleness=0, 1, 4; deterministic, so that samples are as stale as may be
                  and a run can be repeated; _plain without the off-policy correction

Seconds of training are the sum of the steps' own `timing_s/step`: generation, rewards, update, new weights; start-up
and validation are left out. `others` is how many cores other processes used meanwhile. A run that is complete below
--output is not run again; the tables (playground.md) and the picture (playground.png) are of all runs that are there.
"""

import json
import os
import resource
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from playground_ranking import ranking
from playground_report import Course, read_course, report

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPES = REPOSITORY / "configs" / "recipes"
ALGORITHMS = ("grpo", *sorted(file.stem for file in RECIPES.glob("*.yaml")))
OTHERS = ("largest", "kl_target", "kl_fixed", "by_reward_model", "distilled")
STALE = ("stale_0", "stale_1", "stale_4", "stale_1_plain", "stale_4_plain")
NAMES = (*ALGORITHMS, *OTHERS, *STALE)
SUPERVISED = ("sft", "reward_model")
LAYERS = {"kl_fixed": ("kl_target",), "by_reward_model": ("ppo", "by_reward_model")}
"""What lies over sums.yaml, where it is not what has the name of the run."""
NEEDS = {"reward_model": "sft", "by_reward_model": "reward_model", "distilled": "grpo"}
"""What must have run before, where it is not `sft` alone."""
TEST_FREQ = 5
TEACHER = "grpo"


def config_files(name: str, home: Path) -> list[Path]:
    """The configuration files of a run, each over the one before it."""
    if name == "largest":
        return [home / "largest.yaml"]
    layers = [
        place / f"{layer}.yaml"
        for layer in LAYERS.get(name, (name,))
        for place in (RECIPES, home / "over")
    ]
    found = [file for file in layers if file.is_file()]
    if name in OTHERS and not found:
        raise SystemExit(
            f"playground: {name} has no file in {home / 'over'}: another version has written the playground"
        )
    return [home / "sums.yaml", *found]


def run(words: Sequence[object], log: Path, threads: int) -> float:
    """One command of the program, its output in a file. Returns how many cores other processes used meanwhile."""
    busy, start = _busy_seconds(), (time.perf_counter(), _seconds_of_children())
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'recipes'}:{REPOSITORY / 'packages'}",
    }
    command = [sys.executable, "-m", "quadriga.cli.main", *map(str, words)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        ended = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False
        )
    if ended.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        raise SystemExit(
            f"{tail}\n\nplayground: {' '.join(command)} ended with status {ended.returncode}; its output: {log}"
        )
    own = _seconds_of_children() - start[1]
    return max(0.0, (_busy_seconds() - busy - own) / (time.perf_counter() - start[0]))


def _busy_seconds() -> float:
    """Processor seconds that all processes of this machine have used."""
    first = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0]
    user, nice, system, _idle, _wait, irq, soft_irq = (int(field) for field in first.split()[1:8])
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def supervised(name: str, seed: int, args: Namespace) -> Course:
    """A run of `quadriga sft`: of the policy that all begin with, or of the reward model."""
    home = args.output / f"seed{seed}"
    if name == "sft":
        run(
            ["prepare", "playground", "--seed", seed, "--output", home],
            home / "prepare.log",
            args.threads,
        )
    words = ["sft", "--config", home / f"{name}.yaml", f"trainer.seed={seed}", f"data.seed={seed}"]
    others = run([*words, "trainer.save_freq=-1"], home / f"{name}.log", args.threads)
    course = read_course(name, seed, home / "runs" / name, others)
    return (
        course if name == "sft" else replace(course, facts=ranking(home / "runs" / name / "model"))
    )


def trained(name: str, seed: int, args: Namespace) -> Course:
    """A run of `quadriga train`."""
    home = args.output / f"seed{seed}"
    directory = home / "runs" / name
    words: list[object] = ["train"]
    for file in config_files(name, home):
        words += ["--config", file]
    words += [
        f"trainer.seed={seed}",
        f"data.seed={seed}",
        f"trainer.default_local_dir={directory}",
        f"trainer.validation_data_dir={directory / 'answers'}",
        f"trainer.test_freq={TEST_FREQ}",
        f"trainer.save_freq={80 if name == TEACHER else -1}",
        "trainer.resume_mode=disable",
    ]
    words += ["algorithm.kl_ctrl.type=fixed"] if name == "kl_fixed" else []
    words += asynchronous(name) if name in STALE else []
    if name == "distilled":
        student = (seed + 1) % 3
        measure("sft", student, args)
        words.append(
            f"actor_rollout_ref.model.path={args.output / f'seed{student}' / 'runs' / 'sft' / 'model'}"
        )
        export = [
            "export",
            home / "runs" / TEACHER,
            "--output",
            home / "teacher",
            "--dtype",
            "float32",
            "--overwrite",
        ]
        run(export, home / "export.log", args.threads)
    others = run([*words, *args.overrides], home / f"{name}.log", args.threads)
    return read_course(name, seed, directory, others)


def asynchronous(name: str) -> list[str]:
    """The keys of a run that generates and trains at the same time."""
    bound = name.split("_")[1]
    keys = ["enable=True", "preset=bounded", "deterministic=True", f"max_staleness={bound}"]
    words = [f"async_training.{key}" for key in keys]
    return (
        [*words, "algorithm.rollout_correction.preset=disabled"]
        if name.endswith("plain")
        else words
    )


def measure(name: str, seed: int, args: Namespace) -> Course:
    """What a run came to, from its file where it is complete."""
    home = args.output / f"seed{seed}"
    record = home / f"{name}.json"
    if record.is_file():
        return Course(**json.loads(record.read_text(encoding="utf-8")))
    if name != "sft":
        measure(NEEDS.get(name, "sft"), seed, args)
    course = supervised(name, seed, args) if name in SUPERVISED else trained(name, seed, args)
    record.write_text(json.dumps(asdict(course)), encoding="utf-8")
    return course


def read_arguments() -> Namespace:
    """The command line."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--algorithms", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1, help="of each run")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/playground"))
    parser.add_argument("overrides", nargs="*", help="configuration keys for all runs, behind --")
    args = parser.parse_args()
    args.output = args.output.absolute()
    return args


def main() -> None:
    """Run what is not there, and write tables and picture."""
    args = read_arguments()
    for seed in args.seeds:
        for name in args.algorithms:
            course = measure(name, seed, args)
            print(f"{name:30} seed {seed}  {course.in_words()}", flush=True)
    everything = [
        Course(**json.loads(file.read_text(encoding="utf-8")))
        for file in sorted(args.output.glob("seed*/*.json"))
    ]
    print(report(everything, NAMES, args.output))


if __name__ == "__main__":
    main()
