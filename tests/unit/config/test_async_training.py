# SPDX-License-Identifier: Apache-2.0
"""`async_training`: presets, the correction that it brings, what it refuses and what it says."""

import pytest

from quadriga.config import Config, explain, load_config, training_findings
from quadriga.config.adapter import adapter_route
from quadriga.errors import ConfigError

ON = "async_training.enable=True"
ON_RAY = (
    "trainer.backend=ray",
    "trainer.placement={actor: training, ref: training, rollout: generation}",
    "trainer.resource_pools.generation=[2]",
)
IN_A_GROUP = (*ON_RAY, "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
ON_VLLM = ("actor_rollout_ref.rollout.name=vllm", "trainer.backend=ray")


def config(*changes: str) -> Config:
    return load_config([ON, *changes]).config


def findings(*changes: str) -> tuple[dict[str, str], str]:
    """What is refused by key, and the notices, as far as they come from `async_training`."""
    problems, notices = training_findings(config(*changes))
    return {one.where: str(one) for one in problems if ON in str(one)}, "\n".join(notices)


def test_presets_are_choices_of_keys() -> None:
    one_step_off = config("async_training.preset=one_step_off").async_training
    assert (one_step_off.max_staleness, one_step_off.in_flight, one_step_off.on_stale) == (
        1,
        "finish",
        "wait",
    )
    bounded = config(
        "async_training.preset=bounded", "async_training.max_staleness=4"
    ).async_training
    assert (bounded.max_staleness, bounded.in_flight) == (4, "continue")


def test_stale_samples_are_corrected_for_unless_a_correction_is_named() -> None:
    key = "algorithm.rollout_correction"
    assert config().algorithm.rollout_correction.rollout_is == "token"
    assert (
        config("algorithm.adv_estimator=rloo").algorithm.rollout_correction.preset
        == "decoupled_token_is"
    )
    assert config("async_training.max_staleness=0").algorithm.rollout_correction.rollout_is is None
    assert config(f"{key}.rollout_is=sequence").algorithm.rollout_correction.preset is None
    assert load_config([]).config.algorithm.rollout_correction.rollout_is is None
    _, notices = findings(f"{key}.preset=disabled")
    assert f"{key}: nothing corrects for samples up to 1 versions old" in notices


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["trainer.backend=ray"], "trainer.placement"),
        ([*ON_RAY, "async_training.replay=a.jsonl"], "async_training.replay"),
        ([*ON_RAY, "async_training.deterministic=True"], "async_training.deterministic"),
        (
            [*IN_A_GROUP, *ON_VLLM, "trainer.placement.ref=generation"],
            "trainer.placement",
        ),
        (
            [*IN_A_GROUP, "actor_rollout_ref.model.lora_rank=4"],
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
        ),
        (["actor_rollout_ref.rollout.name=hf"], "actor_rollout_ref.rollout.name"),
        (
            ["actor_rollout_ref.rollout.name=vllm", "async_training.deterministic=True"],
            "actor_rollout_ref.rollout.name",
        ),
        (
            [
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.data_parallel_size=2",
            ],
            "actor_rollout_ref.rollout.data_parallel_size",
        ),
        (["actor_rollout_ref.rollout.skip.enable=True"], "actor_rollout_ref.rollout.skip.enable"),
        (
            ["async_training.deterministic=True", "actor_rollout_ref.rollout.mode=async"],
            "actor_rollout_ref.rollout.mode",
        ),
        (["async_training.replay=a.jsonl", "trainer.save_freq=5"], "async_training.replay"),
        (
            ["async_training.on_stale=drop", "algorithm.filter_groups.enable=True"],
            "async_training.on_stale",
        ),
        (
            ["async_training.preset=streaming", "algorithm.filter_groups.enable=True"],
            "async_training.by_mini_batch",
        ),
        (
            ["async_training.preset=streaming", "actor_rollout_ref.actor.shuffle=True"],
            "actor_rollout_ref.actor.shuffle",
        ),
        (["algorithm.filter_groups.enable=True"], "trainer.total_training_steps"),
    ],
)
def test_what_cannot_run_beside_training_is_refused(changes: list[str], key: str) -> None:
    problems, _ = findings(*changes)
    assert key in problems


def test_an_adapter_comes_to_vllm_merged() -> None:
    own = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.lora_rank=4")
    assert not adapter_route(config(*own)).is_alone
    assert adapter_route(load_config(list(own)).config).is_alone
    with pytest.raises(ConfigError, match="with the adapter merged"):
        adapter_route(config(*own, "actor_rollout_ref.model.lora_merge=false"))


def test_ranks_of_their_own_generate_on_ray() -> None:
    problems, notices = findings(
        *ON_RAY, "async_training.deterministic=True", "async_training.in_flight=finish"
    )
    assert problems == {} and "a run that loses its actor resumes from a checkpoint" in notices
    one = (
        *ON_RAY[:2],
        "trainer.resource_pools.generation=[1]",
        "async_training.deterministic=True",
    )
    assert findings(*one)[0] == findings(*IN_A_GROUP, "async_training.deterministic=True")[0] == {}
    assert findings(*IN_A_GROUP, *ON_VLLM, "actor_rollout_ref.model.lora_rank=4")[0] == {}
    problems, _ = training_findings(
        config(*IN_A_GROUP, *ON_VLLM, "trainer.resource_pools.generation=[3, 1]")
    )
    assert any(
        "groups of 2 processes, but 4 generate, expected a number that divides" in str(one)
        for one in problems
    )


@pytest.mark.parametrize(
    "change", ["async_training.max_staleness=2", "async_training.on_stale=drop"]
)
def test_there_are_checkpoints(change: str) -> None:
    assert findings("trainer.save_freq=5", change)[0] == {}


def test_what_is_dropped_is_no_function_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="Which samples are dropped depends on timing"):
        config("async_training.on_stale=drop", "async_training.deterministic=True")
    for other in ("on_stale=drop", "max_staleness=0"):
        with pytest.raises(
            ConfigError, match="expected on_stale=wait and max_staleness of at least 1"
        ):
            config("async_training.preset=streaming", f"async_training.{other}")


def test_a_critic_reads_tokens_of_several_versions() -> None:
    assert "tokens from several versions" in findings("algorithm.adv_estimator=gae")[1]


def test_explain_says_what_overlaps() -> None:
    text = explain(config("async_training.max_staleness=2", "async_training.sync_every=3"))
    assert "up to 2 versions behind" in text and "up to 9 batches are in flight" in text
    assert "the responses to 256 prompts are complete" in explain(
        config("async_training.preset=streaming")
    )
    assert "Overlap" not in explain(load_config([]).config)
