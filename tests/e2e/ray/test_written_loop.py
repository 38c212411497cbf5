# SPDX-License-Identifier: Apache-2.0
"""A loop that a user of verl writes out has the same numbers on two of Ray's processes as in one.

`tests/contract/test_written_loop.py` compares those of one process with `fit`. Each step has another estimator, so that
the processes start once.
"""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from omegaconf import read_write
from snippets import Place

from quadriga.config import load_config
from quadriga.protocol import DataProto, DataProtoFuture

pytestmark = pytest.mark.usefixtures("ray_cluster", "verl_names")

ESTIMATORS = ("gae", "grpo", "remax", "rloo", "reinforce_plus_plus")


def test_a_future_over_rays_references() -> None:
    parts = [DataProto.from_dict(tensors={"x": torch.tensor([number])}) for number in (1, 2)]
    future = DataProtoFuture(collect_fn=DataProto.concat, futures=[ray.put(part) for part in parts])
    assert future.get().batch["x"].tolist() == [1, 2]


def test_two_ranks_compute_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import written_loop
    from verl.trainer.ppo.ray_trainer import ResourcePoolManager, Role

    monkeypatch.chdir(tmp_path)
    place = Place(tmp_path)
    words = [
        *place.words("run"),
        f"trainer.total_training_steps={len(ESTIMATORS)}",
        "trainer.logger=[jsonl]",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.optim.eps=1e-3",
        "critic.optim.eps=1e-3",
    ]

    class EachOnce(written_loop.WrittenOut):
        """Another estimator in each step."""

        def take_step(self, *args: Any) -> bool:
            with read_write(self.config):
                self.config.algorithm.adv_estimator = ESTIMATORS[self.global_steps - 1]
            return super().take_step(*args)

    def history(name: str, manager: Any = None) -> list[dict[str, float]]:
        ids = (f"{step}-{row}" for step, row in product(range(1, 9), range(2)))
        monkeypatch.setattr(written_loop, "uuid", SimpleNamespace(uuid4=ids.__next__))
        config = load_config([*words, f"trainer.default_local_dir={tmp_path / name}"]).config
        trainer = EachOnce(
            config=config,
            tokenizer=place.tokenizer,
            role_worker_mapping=written_loop.role_worker_mapping(),
            resource_pool_manager=manager,
            reward_fn=written_loop.graded,
            val_reward_fn=written_loop.graded,
        )
        trainer.init_workers()
        trainer.fit()
        if manager is not None:
            ranks = [
                one.execute_all("mesh_place", "replicas")
                for one in trainer.actor_rollout_wg.workers
            ]
            assert ranks == [[(0, True)], [(1, True)]]
        return trainer.history

    roles = (Role.ActorRollout, Role.Critic, Role.RefPolicy)
    manager = ResourcePoolManager({"all": [2]}, dict.fromkeys(roles, "all"))
    on_ray = history("two", manager)
    here = history("one")
    assert len(on_ray) == len(here) == len(ESTIMATORS)
    for theirs, ours in zip(on_ray, here, strict=True):
        assert ours["actor/grad_norm"] > 1e-4
        for name in ours.keys() & theirs.keys():
            if not name.startswith(("timing", "perf/", "balance/")) and "packed_tokens" not in name:
                assert theirs[name] == pytest.approx(ours[name], rel=1e-4, abs=2e-6), name
