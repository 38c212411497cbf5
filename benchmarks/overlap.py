# SPDX-License-Identifier: Apache-2.0
"""Times the part of a step in which models on pools of their own and graders work at the same time.

    .venv/bin/python benchmarks/overlap.py               # on 2 cores that nobody else uses

The models are workers that multiply matrices in one thread, on Ray's pools of one process each; graders sleep as long
as a model computes. What is timed is the loop's own `rewards_and`. The ways take turns, so that whatever else the
machine does falls on all of them; the first round is left out. The table gives medians of the rounds' ratios to the
longest part of the round, each part measured alone:

    overlap       all begun, then joined, as the loop does
    in order      each waited for before the next begins

With two pools and the graders at most 1.25 is wanted. Three pools on two cores cannot be below 1.5, in order they are
3; at most 1.7 is wanted.
"""

import os
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
import torch

from quadriga.config import Config, CustomRewardFunctionConfig
from quadriga.observe.timing import PhaseTimer
from quadriga.protocol import DataProto
from quadriga.rewards import RewardManager, load_reward_manager
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from quadriga.trainer.ray_trainer import RayPPOTrainer
from quadriga.trainer.responses import grade
from quadriga.workers.base import timed

SLEEPS = "import time\ndef compute_score(**kwargs):\n    time.sleep({seconds})\n    return 1.0\n"
SIZE = 384
# Pools, whether there are graders, and what the overlap may take, in times of the longest part.
CASES = ((2, True, 1.25), (3, False, 1.7))


class Busy(Worker):
    """A model that takes its time."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    @timed("busy")
    def compute(self, data: DataProto, products: int) -> DataProto:
        """So many matrix products, and a column of the rank's process."""
        torch.set_num_threads(1)
        matrix = torch.eye(SIZE)
        for _ in range(products):
            matrix = matrix @ matrix
        return DataProto.from_dict(
            tensors={f"of_{os.getpid()}": torch.full((len(data),), float(matrix.sum()))}
        )


class Rows:
    """The tokenizer of responses that nobody reads."""

    def batch_decode(self, token_ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        """As many texts as rows."""
        return [""] * len(token_ids)


class Phase(RayPPOTrainer):
    """The loop, with nothing but what `rewards_and` reads."""

    def __init__(self, reward: RewardManager | None) -> None:
        self.reward, self.timer, self.metrics = reward, PhaseTimer(), {}
        self.filters_groups = reward is None


def make_batch() -> DataProto:
    """Two responses."""
    objects = {"data_source": ["sleep"] * 2, "reward_model": [{"ground_truth": ""}] * 2}
    columns = {name: np.array(values, dtype=object) for name, values in objects.items()}
    ones = torch.ones(2, 4, dtype=torch.int64)
    return DataProto.from_dict({"responses": ones[:, :2], "attention_mask": ones}, columns)


def seconds(work: Callable[..., object], *args: object) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    work(*args)
    return time.perf_counter() - start


def overlapped(reward: RewardManager | None, groups: Sequence[Any], products: int) -> None:
    """All begun, then joined, as in a step."""
    with Phase(reward).rewards_and(make_batch()) as begin:
        for group in groups:
            begin(group.compute, make_batch(), products)


def in_order(reward: RewardManager | None, groups: Sequence[Any], products: int) -> None:
    """Each waited for before the next begins."""
    if reward is not None:
        grade(reward, make_batch())
    for group in groups:
        group.compute(make_batch(), products).get()


def measure(args: Namespace, folder: Path) -> None:
    """Both cases, in turns."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    groups = [
        RayWorkerGroup(
            RayResourcePool([1], name_prefix=name), RayClassWithInitArgs(Busy), name=name
        )
        for name in ("actor", "ref", "critic")
    ]
    for group in groups:
        group.compute(make_batch(), 10).get()
    trial = 200
    products = int(trial * args.seconds / seconds(in_order, None, groups[:1], trial))
    part = seconds(in_order, None, groups[:1], products)
    (folder / "sleeps.py").write_text(SLEEPS.format(seconds=part))
    custom = CustomRewardFunctionConfig(path=str(folder / "sleeps.py"))
    settings = {"timeout_s": 10 * part + 10, "num_workers": 2}
    graders = load_reward_manager(
        Config(reward_model=settings, custom_reward_function=custom), Rows()
    )
    try:
        print(
            f"load of the machine before: {os.getloadavg()[0]:.1f}; {products} products, {part:.2f} s a part"
        )
        print("pools  graders  longest part s  overlap  in order  wanted")
        for count, has_graders, wanted in CASES:
            rounds, used, reward = [], groups[:count], graders if has_graders else None
            for _ in range(args.rounds + 1):
                parts = [seconds(in_order, None, [group], products) for group in used]
                parts += [seconds(grade, graders, make_batch())] * has_graders
                ways = [seconds(way, reward, used, products) for way in (overlapped, in_order)]
                rounds.append([max(parts), *(taken / max(parts) for taken in ways)])
            longest, overlap, order = map(median, zip(*rounds[1:], strict=True))
            verdict = f"{'within' if overlap <= wanted else 'ABOVE'} {wanted}"
            told = f"{count:>5}  {'yes' if has_graders else 'no':>7}  {longest:>14.2f}"
            print(f"{told}  {overlap:>7.2f}  {order:>8.2f}  {verdict}", flush=True)
    finally:
        graders.close()
        for group in groups:
            group.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long a part is")
    with tempfile.TemporaryDirectory() as name:
        measure(parser.parse_args(), Path(name))
