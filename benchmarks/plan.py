# SPDX-License-Identifier: Apache-2.0
"""Predictions of `quadriga plan` beside runs on this CPU, and beside published runs on GPUs.

    .venv/bin/quadriga prepare playground --output outputs/playground
    .venv/bin/python benchmarks/plan.py --playground outputs/playground --seed 1 --number 8
    .venv/bin/python benchmarks/plan.py --published

`--published` compares with the figures of plan_published.tsv, which has the address of each. The
layout is always FSDP, whatever the published run used; its mean lengths are given.

On this CPU each configuration has a model of a drawn shape with random weights, all weights or an
adapter, a critic or none, float32 or bfloat16, a token budget, one rank or two. Responses have
their full length, so lengths are known. Rewards depend on the response: where all rewards of a
prompt are equal, an update without a critic computes nothing. The time is the mean of the steps
after the first, without grading; the memory is the largest resident size of a rank's process.
`--memory` leaves times out.
"""

import argparse
import csv
import json
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from quadriga.cli.plan import unmeasured_cpu
from quadriga.config import load_config
from quadriga.config.placement import ACTOR, CRITIC
from quadriga.observe.machine import GIB
from quadriga.planning.devices import Devices
from quadriga.planning.phases import Lengths
from quadriga.planning.plan import make_plan, on_devices, plan_roles, read_sizes
from quadriga.workers.layer_times import measure_cpu

PUBLISHED = Path(__file__).with_name("plan_published.tsv")
# Hidden size, that of the MLP, heads, key-value heads, size of a head, layers, vocabulary.
SHAPES = {
    "Llama-2-13B": (5120, 13824, 40, 40, 128, 40, 32000),
    "Llama-3-8B": (4096, 14336, 32, 8, 128, 32, 128256),
    "Llama-3-70B": (8192, 28672, 64, 8, 128, 80, 128256),
    "Qwen2.5-1.5B": (1536, 8960, 12, 2, 128, 28, 151936),
    "Qwen3-32B": (5120, 25600, 64, 8, 128, 64, 151936),
    "SmolLM2-360M": (960, 2560, 15, 5, 64, 32, 49152),
}
TIED = ("Qwen2.5-1.5B", "SmolLM2-360M")

_SAMPLE_S = 0.1  # seconds between two looks at the memory of ranks
NUM_STEPS = 3  # from the third step on, both copies of the state exist
# The rewards of a drawn model's words: it solves no task, and equal rewards teach nothing.
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 100
"""


def draw(number: int, seed: int, playground: Path, output: Path) -> tuple[str, list[str], int]:
    """A model's folder and a command line: a description, overrides, and the number of ranks."""
    choose = random.Random(f"{seed} {number}").choice
    base = json.loads((playground / "model" / "config.json").read_text())
    num_heads = choose([4, 6, 8])
    shape = {
        "hidden_size": 64 * num_heads,
        "intermediate_size": 64 * num_heads * choose([2, 3, 4]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": 2,
        "num_hidden_layers": choose([4, 8, 12]),
    }
    folder = output / f"model_{number}"
    shutil.copytree(playground / "model", folder, dirs_exist_ok=True)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    torch.manual_seed(number)
    config = Qwen2Config(**{**base, **shape, "layer_types": None})
    Qwen2ForCausalLM(config).save_pretrained(folder)

    dtype = choose(["float32", "bfloat16"])
    num_ranks = choose([1, 1, 2])
    has_adapter = choose([False, True])
    has_critic = choose([False, False, True])
    length = choose([48, 96, 160])
    budget = choose([1024, 2048, 4096])
    reward = output / "reward.py"
    reward.write_text(REWARD)
    overrides = [
        f"actor_rollout_ref.model.path={folder}",
        f"custom_reward_function.path={reward}",
        f"data.max_response_length={length}",
        "data.train_batch_size=16",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    ]
    for role in (ACTOR, CRITIC)[: 2 if has_critic else 1]:
        overrides.append(f"{role}.ppo_max_token_len_per_gpu={budget}")
        overrides.append(f"{role}.fsdp_config.model_dtype={dtype}")
    if has_adapter:
        overrides.append("actor_rollout_ref.model.lora_rank=8")
    if has_critic:
        overrides.append("algorithm.adv_estimator=gae")
    words = [f"{shape['num_hidden_layers']} x {shape['hidden_size']}", dtype]
    words.append("adapter" if has_adapter else "full")
    if has_critic:
        words.append("critic")
    words.append(f"{length} new tokens, budget {budget}, {num_ranks} ranks")
    return ", ".join(words), overrides, num_ranks


def predict(
    overrides: list[str], playground: Path, num_ranks: int
) -> tuple[float, float, dict[str, Any]]:
    """Predicted GiB and seconds of a step, and its phases."""
    config = load_config(overrides, [playground / "sums.yaml"]).config
    dtype = config.actor_rollout_ref.actor.fsdp_config.model_dtype
    devices = unmeasured_cpu(num_ranks, dtype)
    config = on_devices(config, devices)
    sizes = {ACTOR: read_sizes(Path(config.actor_rollout_ref.model.path) / "config.json", {})}
    if config.algorithm.adv_estimator == "gae":
        sizes[CRITIC] = sizes[ACTOR].with_value_head()
    # Prompts of the playground have about 8 tokens.
    lengths = Lengths(prompt=8, response=config.data.max_response_length)
    itemsize = 4 if dtype == "float32" else 2
    roles = plan_roles(config, devices, lengths, sizes, itemsize)
    devices = measure_cpu(
        config, devices, roles, lengths, dtype=dtype, imported="quadriga.trainer.task_runner"
    )
    plan = make_plan(config, devices, lengths, sizes, itemsize)
    facts = {"seconds": dict(plan.time.phases), "bytes": {}}
    for phase in plan.phases:
        facts["bytes"][f"{phase.role} {phase.name}"] = dict(phase.parts)
    return plan.largest.total / GIB, plan.time.total, facts


def rank_gib(parent: int) -> float:
    """Largest resident size so far of a Ray worker among the descendants of a process."""
    children: dict[int, list[int]] = {}
    sizes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # Processes end while the list is read.
        with suppress(OSError):
            status = dict(
                line.split(":", 1) for line in (folder / "status").read_text().splitlines()
            )
            children.setdefault(int(status["PPid"]), []).append(int(folder.name))
            if (folder / "cmdline").read_bytes().startswith(b"ray::"):
                sizes[int(folder.name)] = int(status["VmHWM"].split()[0]) * 1024 / GIB
    largest = 0.0
    left = [parent]
    while left:
        number = left.pop()
        largest = max(largest, sizes.get(number, 0.0))
        left += children.get(number, [])
    return largest


def measure(
    overrides: list[str], playground: Path, num_ranks: int, run: Path
) -> tuple[float, float, dict[str, Any]]:
    """Measured GiB and seconds of a step, and its metrics."""
    words = [
        *overrides,
        f"trainer.default_local_dir={run}",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.logger=[jsonl]",
    ]
    if num_ranks > 1:
        words += ["trainer.backend=ray", f"trainer.n_gpus_per_node={num_ranks}"]
    command = [sys.executable, "-m", "quadriga", "train", "--config", playground / "sums.yaml"]
    gib = 0.0
    with subprocess.Popen([*command, *words], stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if num_ranks > 1:
                gib = max(gib, rank_gib(process.pid))
            time.sleep(_SAMPLE_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "timing_s/step" in line][1:]
    seconds = 0.0
    for step in steps:
        seconds += (step["timing_s/step"] - step.get("timing_s/reward", 0.0)) / len(steps)
    return gib or steps[-1]["perf/memory_peak_gib"], seconds, steps[-1]


def published_model(name: str, folder: Path) -> Path:
    """Write the config.json of a published model, and return its folder."""
    hidden, intermediate, heads, key_value_heads, head, layers, vocabulary = SHAPES[name]
    shape = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "tie_word_embeddings": name in TIED,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def predict_published(row: dict[str, str], folder: Path) -> dict[str, float]:
    """Predicted seconds of each phase of a published run."""
    overrides = [
        f"actor_rollout_ref.model.path={published_model(row['model'], folder)}",
        "data.train_files=unused.parquet",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
        *row["overrides"].split(),
    ]
    devices = Devices.parse(row["devices"])
    config = on_devices(load_config(overrides).config, devices)
    sizes = {ACTOR: read_sizes(folder / "config.json", {})}
    lengths = Lengths(prompt=float(row["prompt"]), response=float(row["response"]))
    return dict(make_plan(config, devices, lengths, sizes, 2).time.phases)


def compare_published() -> None:
    """Print the table of published runs."""
    print("| run | devices | phases | s predicted | published | error |")
    print("|---|---|---|---|---|---|")
    with PUBLISHED.open(encoding="utf-8") as file, TemporaryDirectory() as folder:
        for row in csv.DictReader(file, delimiter="\t"):
            phases = predict_published(row, Path(folder))
            if row["phase"] != "step":
                phases = {row["phase"]: phases[row["phase"]]}
            predicted = sum(phases.values())
            published = float(row["seconds"])
            parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
            error = f"{predicted / published - 1:+.0%}"
            print(
                f"| {row['run']} | {row['devices']} | {parts} | {predicted:.1f} | {published:g} "
                f"| {error} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--playground", type=Path, default=Path("outputs/playground"))
    parser.add_argument("--output", type=Path, default=Path("outputs/plan"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=8)
    options = parser.parse_args()
    if options.published:
        compare_published()
        return
    shutil.rmtree(options.output, ignore_errors=True)
    options.output.mkdir(parents=True)
    times = "" if options.memory else " s predicted | measured | error |"
    header = f"| configuration | GiB predicted | measured | error |{times}"
    print(header)
    print("|" + "---|" * (header.count("|") - 1), flush=True)
    for number in range(options.number):
        drawn = draw(number, options.seed, options.playground, options.output)
        name, overrides, num_ranks = drawn
        gib, seconds, predicted = predict(overrides, options.playground, num_ranks)
        run = options.output / f"run_{number}"
        real_gib, real_seconds, metrics = measure(overrides, options.playground, num_ranks, run)
        row = f"| {name} | {gib:.2f} | {real_gib:.2f} | {gib / real_gib - 1:+.0%} |"
        if not options.memory:
            row += f" {seconds:.2f} | {real_seconds:.2f} | {seconds / real_seconds - 1:+.0%} |"
        print(row, flush=True)
        facts = {"predicted": predicted, "load": os.getloadavg()[0], "at": time.time()}
        timings = {key: value for key, value in metrics.items() if key.startswith("timing_s/")}
        (run / "plan.json").write_text(json.dumps(facts | {"measured": timings}))


if __name__ == "__main__":
    main()
