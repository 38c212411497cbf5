# SPDX-License-Identifier: Apache-2.0
"""Samples that GRPO and GiGPO take to learn a task of two turns.

    .venv/bin/python benchmarks/turn_credit.py
    .venv/bin/python benchmarks/turn_credit.py --seeds 5 --steps 160 --bar 0.9 --worth 0.5

A small model with random weights writes one character in each of two turns. The first turn is worth
0.8 (--worth) if its character is one of 20, half of all; the second has the rest of the reward for
one of 10 characters. The second turn begins in the same state whatever the first one was. GRPO
gives both turns the advantage of their sum, in which the smaller and rarer reward of the second
counts little; GiGPO also compares the second turns with one another. All other settings are equal.
A run has reached the bar when the mean score of three steps in a row is at least --bar.

Prints the samples of each run, the median of each estimator, and the ratio of the medians.
"""

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaForCausalLM

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from quadriga.cli.main import main as quadriga  # noqa: E402
from tests.e2e.conftest import build_config, build_tokenizer, make_row, write_rows  # noqa: E402

NUM_PROMPTS = 4
NUM_ROLLOUTS = 8
WINDOW = 3  # steps
LOOP = """
from quadriga.rewards.outcome import Outcome
from quadriga.rollout.agent_loop import AgentLoop, register

SETS = ("abcdefghijklmnopqrst", "0123456789")

@register("two_turns")
class TwoTurns(AgentLoop):
    async def run(self, chat):
        for number, characters in enumerate(SETS):
            chat.states[number] = str(number)
            turn = await chat.generate(max_tokens=1)
            character = turn.text[:1]
            is_right = bool(character) and character in characters
            chat.turn_rewards.append(WORTH[number] * is_right)
            if number == 0:
                chat.append([{"role": "user", "content": "b"}])
        chat.outcome = Outcome(sum(chat.turn_rewards), {}, "", "graded")
"""


def prepare(folder: Path, worth: float) -> None:
    """Write the model, the rows and the loop, whose first turn is worth `worth`."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    LlamaForCausalLM(build_config(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rows(folder / "train.parquet", [make_row(number) for number in range(40)])
    (folder / "loop.py").write_text(f"WORTH = {(worth, 1 - worth)}\n{LOOP}")


def scores_of(folder: Path, estimator: str, seed: int, num_steps: int) -> list[float]:
    """Mean score of each step of a run."""
    run = folder / f"{estimator}-{seed}"
    rollout = "actor_rollout_ref.rollout"
    options = [
        f"data.train_files={folder / 'train.parquet'}",
        f"data.train_batch_size={NUM_PROMPTS}",
        "data.max_prompt_length=32",
        "data.max_response_length=16",
        "data.return_raw_chat=True",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=float32",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"{rollout}.n={NUM_ROLLOUTS}",
        f"{rollout}.mode=async",
        f"{rollout}.agent.agent_loop_path={folder / 'loop.py'}",
        f"{rollout}.agent.default_agent_loop=two_turns",
        f"algorithm.adv_estimator={estimator}",
        "reward_model.num_workers=1",
        f"trainer.total_training_steps={num_steps}",
        "trainer.total_epochs=1000",
        f"trainer.seed={seed}",
        "trainer.val_before_train=False",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={run}",
        "trainer.save_freq=-1",
    ]
    # A fixed reward function, because the loop grades.
    reward = folder / "reward.py"
    reward.write_text("def compute_score(**_):\n    raise RuntimeError('the loop grades')\n")
    options.append(f"custom_reward_function.path={reward}")
    if quadriga(["train", *options]):
        raise SystemExit(f"{estimator}, seed {seed}: the run has failed")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["critic/score/mean"] for line in lines]


def samples_to(bar: float, scores: Sequence[float]) -> int | None:
    """Samples until the mean score of `WINDOW` steps is at least `bar`. None: it never is."""
    for end in range(WINDOW, len(scores) + 1):
        if mean(scores[end - WINDOW : end]) >= bar:
            return end * NUM_PROMPTS * NUM_ROLLOUTS
    return None


def main() -> None:
    """Run the comparison and print its table."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each estimator")
    parser.add_argument("--steps", type=int, default=160, help="steps of each run")
    parser.add_argument("--bar", type=float, default=0.9, help="mean score to reach, 0 to 1")
    parser.add_argument("--worth", type=float, default=0.8, help="reward of the first turn")
    arguments = parser.parse_args()
    num_all = arguments.steps * NUM_PROMPTS * NUM_ROLLOUTS
    medians = {}
    lines = []
    with TemporaryDirectory(prefix="quadriga-") as name:
        folder = Path(name)
        prepare(folder, arguments.worth)
        for estimator in ("grpo", "gigpo"):
            counts = []
            for seed in range(1, arguments.seeds + 1):
                scores = scores_of(folder, estimator, seed, arguments.steps)
                count = samples_to(arguments.bar, scores)
                # A run that never reaches the bar counts with all of its samples.
                counts.append(num_all if count is None else count)
                shown = f"more than {num_all}" if count is None else str(count)
                lines.append(
                    f"{estimator:6} seed {seed}: {shown} samples, at last {scores[-1]:.2f}"
                )
            medians[estimator] = median(counts)
    print(*lines, sep="\n")
    for estimator, count in medians.items():
        print(f"{estimator:6} median: {count:g} samples")
    print(f"gigpo / grpo: {medians['gigpo'] / medians['grpo']:.2f}")


if __name__ == "__main__":
    main()
