# SPDX-License-Identifier: Apache-2.0
"""A loop that a user of verl writes out computes what `fit` computes."""

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snippets import Place

from quadriga.config import load_config
from quadriga.errors import ProtocolError

ESTIMATORS = ("gae", "grpo", "remax", "rloo", "reinforce_plus_plus")
NUM_STEPS = 2
LEARNING = (
    f"trainer.total_training_steps={NUM_STEPS}",
    "trainer.seed=3",
    "trainer.logger=[jsonl]",
    "data.shuffle=False",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.optim.eps=1e-3",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "critic.optim.eps=1e-3",
    "algorithm.use_kl_in_reward=True",
)


@pytest.fixture
def make(
    verl_names: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """`make(name, *overrides)`: a trainer with its workers; prompts get the ids of `fit`."""
    import written_loop

    monkeypatch.chdir(tmp_path)
    place = Place(tmp_path)
    words = place.words("run")

    def make(name: str, *overrides: str, is_written: bool = True, first_step: int = 1) -> Any:
        config = load_config(
            [*words, *LEARNING, f"trainer.default_local_dir={tmp_path / name}", *overrides]
        ).config
        ids = (f"{step}-{row}" for step, row in product(range(first_step, 9), range(2)))
        monkeypatch.setattr(written_loop, "uuid", SimpleNamespace(uuid4=ids.__next__))
        cls = written_loop.WrittenOut if is_written else written_loop.RayPPOTrainer
        trainer = cls(
            config=config,
            tokenizer=place.tokenizer,
            role_worker_mapping=written_loop.role_worker_mapping(),
            reward_fn=written_loop.graded,
            val_reward_fn=written_loop.graded,
        )
        trainer.init_workers()
        trainers.append(trainer)
        return trainer

    trainers: list[Any] = []
    yield make
    # A loop that is written out keeps its workers, and its handler of SIGTERM, while it exists.
    for trainer in trainers:
        trainer._steps.close()


def logged(folder: Path) -> Iterator[dict[str, Any]]:
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        yield json.loads(line)


def assert_same_numbers(written: list[dict[str, float]], fitted: list[dict[str, Any]]) -> None:
    """What both report, apart from times, is equal to 1e-4."""
    assert len(written) == len(fitted) == NUM_STEPS
    for ours, theirs in zip(written, fitted, strict=True):
        names = {name for name in ours.keys() & theirs.keys() if "perf/" not in name}
        names = {name for name in names if not name.startswith("timing")}
        assert {"actor/grad_norm", "actor/pg_loss", "actor/reward_kl_penalty"} <= names
        for name in sorted(names):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_it_equals_fit(make: Callable[..., Any], tmp_path: Path, estimator: str) -> None:
    override = f"algorithm.adv_estimator={estimator}"
    trainer = make("written", override)
    trainer.fit()
    make("fitted", override, is_written=False).fit()
    fitted = list(logged(tmp_path / "fitted"))
    assert fitted[0]["actor/grad_norm"] > 1e-3
    assert ("critic/grad_norm" in fitted[0]) == (estimator == "gae")
    assert_same_numbers(trainer.history, fitted)


def test_it_saves_resumes_validates_and_profiles_as_fit(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    def overrides(name: str) -> list[str]:
        folder = tmp_path / name
        return [
            "trainer.test_freq=1",
            "trainer.save_freq=1",
            "trainer.val_before_train=True",
            f"trainer.rollout_data_dir={folder}/rollouts",
            "global_profiler.tool=torch",
            "global_profiler.steps=[2]",
            f"global_profiler.save_path={folder}/profiles",
        ]

    trainer = make("written", *overrides("written"))
    trainer.fit()
    make("fitted", *overrides("fitted"), is_written=False).fit()
    for name in ("rollouts/1.jsonl", "rollouts/2.jsonl", "profiles/step_2.json.gz"):
        assert (tmp_path / "written" / name).is_file(), name
    for step in (1, 2):
        written, fitted = (
            [json.loads(line) for line in (tmp_path / run / f"rollouts/{step}.jsonl").open()]
            for run in ("written", "fitted")
        )
        assert written == [
            # Errors of graders are this package's.
            {name: value for name, value in row.items() if name != "reward_error"}
            for row in fitted
        ]
    assert_same_numbers(trainer.history, list(logged(tmp_path / "fitted"))[1:])

    # Another run goes on from the checkpoint of the first step.
    place = f"trainer.resume_from_path={tmp_path}/written/global_step_1"
    words = [*overrides("resumed"), "trainer.resume_mode=resume_path", place]
    resumed = make("resumed", *words, first_step=2)
    resumed.fit()
    (metrics,) = resumed.history
    assert metrics["training/global_step"] == 2
    assert metrics["actor/pg_loss"] == pytest.approx(trainer.history[1]["actor/pg_loss"], rel=1e-4)


def test_a_curriculum_learns_from_what_graders_return(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    """The accuracy of a row decides, not its score, which differs from it here."""
    words = [
        "trainer.total_training_steps=1",
        "data.sampler.class_path=pkg://quadriga.data.curriculum",
        "data.sampler.class_name=SuccessRateSampler",
    ]
    rates = []
    for name, is_written in (("written", True), ("fitted", False)):
        folder = f"trainer.rollout_data_dir={tmp_path}/{name}/rollouts"
        trainer = make(name, *words, folder, is_written=is_written)
        trainer.fit()
        rates.append(trainer.train_dataloader.sampler.rates)
        accuracies: dict[int, list[float]] = {}
        for line in (tmp_path / name / "rollouts/1.jsonl").open():
            row = json.loads(line)
            # The first row of the data has the index 1.
            item = row["row"]["extra_info"]["index"] - 1
            accuracies.setdefault(item, []).append(row["acc"])
        expected = {item: sum(values) / len(values) for item, values in accuracies.items()}
        learned = {item: float(rate) for item, rate in enumerate(rates[-1]) if rate == rate}
        assert learned == expected
    assert rates[0].nan_to_num(-1).tolist() == rates[1].nan_to_num(-1).tolist()


def test_a_typo_in_a_column_is_named(make: Callable[..., Any]) -> None:
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    trainer = make("typo")
    batch = DataProto.from_single_dict(next(iter(trainer.train_dataloader)))
    batch.non_tensor_batch["uid"] = batch.non_tensor_batch["index"].astype(str).astype(object)
    batch = batch.union(trainer.actor_rollout_wg.generate_sequences(trainer._get_gen_batch(batch)))
    batch.batch["token_level_reward"] = batch.batch["rollout_log_probs"]
    with pytest.raises(ProtocolError, match="Did you mean 'token_level_reward'"):
        compute_advantage(batch, adv_estimator="grpo", config=trainer.config.algorithm)
    with pytest.raises(ProtocolError, match="got no entry"):
        trainer.actor_rollout_wg.update_actor(batch)
    with pytest.raises(ProtocolError, match="input_ids"):
        trainer.actor_rollout_wg.generate_sequences(batch.select(batch_keys=["responses"]))
