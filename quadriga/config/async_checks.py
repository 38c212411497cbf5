# SPDX-License-Identifier: Apache-2.0
"""Checks of asynchronous training and of streamed data."""

from collections.abc import Iterator

from quadriga.config.base import Findings
from quadriga.config.placement import (
    ACTOR,
    enabled_roles,
    engine_ranks,
    role_pools,
    rollout_devices,
    rollout_group_size,
    rollout_ranks,
)
from quadriga.config.rollout import ROLLOUT
from quadriga.config.root import Config
from quadriga.config.trainer import AT_THE_END
from quadriga.engine_traits import engines_with
from quadriga.errors import ConfigError

_KEY = "async_training"


def check_async(config: Config) -> Findings:
    """Yield settings that asynchronous training does not support, and notices about its effects."""
    if not config.async_training.enable:
        return
    yield from _check_generating_ranks(config)
    yield from _check_engine(config)
    yield from _check_schedule(config)
    yield from _stale_notices(config)


def _async_error(key: str, got: str, expected: str, fix: str = "") -> ConfigError:
    """Error about a value that asynchronous training does not support."""
    return ConfigError(key, f"{got}, with {_KEY}.enable=True", expected, fix)


def _check_generating_ranks(config: Config) -> Findings:
    """Yield problems with the pools and ranks that generate."""
    settings = config.async_training
    rollout = config.actor_rollout_ref.rollout
    trainer = config.trainer
    pools = role_pools(trainer, enabled_roles(config))
    is_on_ray = trainer.backend == "ray"
    if is_on_ray and "rollout" not in pools:
        expected = "actor and rollout in pools of their own"
        fix = "For example {actor: training, ref: training, rollout: generation}."
        yield _async_error("trainer.placement", str(trainer.placement), expected, fix)

    # If a rollout process starts vLLM on several devices, no other role can use these devices.
    rollout_pool = pools.get("rollout")
    neighbours = [
        role for role, pool in pools.items() if pool == rollout_pool and role != "rollout"
    ]
    if rollout_devices(config) > 1 and neighbours:
        got = f"{' and '.join(neighbours)} in the rollout's pool"
        expected = "a pool for the rollout alone: its processes use several devices each"
        yield _async_error(
            "trainer.placement", got, expected, "Place the other roles in another pool."
        )
    if rollout_group_size(config) > 1 and config.actor_rollout_ref.model.has_adapter:
        got = f"{rollout.tensor_model_parallel_size}, with an adapter"
        fix = "Use one rank per engine, or vllm."
        yield _async_error(f"{ROLLOUT}.tensor_model_parallel_size", got, "1", fix)

    # The rest is about engines in other processes that take new weights during generation: at which
    # token they do so depends on timing.
    if not is_on_ray or settings.in_flight != "continue":
        return
    if settings.replay:
        got = f"{settings.replay}, with in_flight=continue"
        fix = "The record does not say at which step an engine in another process takes weights."
        yield _async_error(f"{_KEY}.replay", got, "null, with trainer.backend=ray", fix)
    num_engines = sum(rollout_ranks(config)) // engine_ranks(config)
    if settings.deterministic and num_engines > 1:
        got = f"true, with in_flight=continue and {num_engines} engines that generate"
        fix = "How far each engine is when the weights change depends on timing."
        yield _async_error(f"{_KEY}.deterministic", got, "in_flight=finish, or one engine", fix)


def _check_engine(config: Config) -> Findings:
    """Yield problems with the engine, its replicas and the rollout cache."""
    settings = config.async_training
    rollout = config.actor_rollout_ref.rollout
    if not rollout.traits.streams:
        expected = engines_with("streams")
        expected += ", which can take weights between two tokens and record versions"
        yield _async_error(f"{ROLLOUT}.name", rollout.name, expected)
    elif not rollout.traits.is_deterministic and (settings.deterministic or settings.replay):
        expected = f"{engines_with('is_deterministic')}, with {_KEY}.deterministic or replay"
        fix = f"{rollout.engine_title}'s numbers depend on which requests it computes together."
        yield _async_error(f"{ROLLOUT}.name", rollout.name, expected, fix)
    num_replicas = rollout.data_parallel_size
    if num_replicas > 1 and rollout.traits.computes_in != "caller":
        fix = f"Use one rank per {rollout.engine_title} engine."
        yield _async_error(f"{ROLLOUT}.data_parallel_size", str(num_replicas), "1", fix)
    if rollout.skip.enable:
        fix = "Cached responses have no weight versions."
        yield _async_error(f"{ROLLOUT}.skip.enable", "true", "false", fix)


def _check_schedule(config: Config) -> Findings:
    """Yield combinations of keys that no schedule of samples and steps can satisfy."""
    settings = config.async_training
    trainer = config.trainer
    has_conversations = config.actor_rollout_ref.rollout.mode == "async"
    has_filter = config.algorithm.filter_groups.enable
    with_filter = "with algorithm.filter_groups.enable=True"
    drops = settings.on_stale == "drop"
    if settings.deterministic and has_conversations:
        fix = "The configuration does not determine how long tools and users take."
        yield _async_error(f"{ROLLOUT}.mode", f"async, with {_KEY}.deterministic=True", "sync", fix)
    if settings.replay and (has_conversations or drops or trainer.save_freq != -1):
        expected = f"null with {ROLLOUT}.mode=async, on_stale=drop or trainer.save_freq"
        fix = "A record only says when sequences start and weights change."
        yield _async_error(f"{_KEY}.replay", str(settings.replay), expected, fix)
    if has_filter and drops:
        yield _async_error(f"{_KEY}.on_stale", f"drop, {with_filter}", "wait")
    if has_filter and settings.by_mini_batch:
        fix = "A batch is filled in rounds."
        yield _async_error(f"{_KEY}.by_mini_batch", f"true, {with_filter}", "false", fix)
    if settings.by_mini_batch and config.actor_rollout_ref.actor.shuffle:
        fix = "Mini-batches are trained on in the order in which they are completed."
        yield _async_error(
            f"{ACTOR}.shuffle", f"true, with {_KEY}.by_mini_batch=True", "false", fix
        )
    if has_filter and trainer.total_training_steps is None:
        key = "trainer.total_training_steps"
        fix = "Prompts are read ahead of the steps."
        yield _async_error(key, f"null, {with_filter}", "a number of steps", fix)


def _stale_notices(config: Config) -> Iterator[str]:
    """Yield notices about checkpoints, and about learning from stale samples."""
    settings = config.async_training
    rollout = config.actor_rollout_ref.rollout
    trainer = config.trainer
    correction = config.algorithm.rollout_correction
    # `save_minutes` is for runs in lockstep, so such a run saves nothing before its end.
    saves_by_default = trainer.save_freq == -1 and trainer.save_minutes
    if saves_by_default or trainer.save_freq == AT_THE_END:
        yield (
            "trainer.save_freq: without it an asynchronous run writes no checkpoint on the way. "
            "If it is killed, all its steps are lost: set trainer.save_freq=N."
        )
    if not settings.is_stale:
        return
    # From here on about samples of older weights.
    continues = settings.in_flight == "continue"
    if continues and trainer.save_freq != -1 and not rollout.has_unfinished:
        unfinished = "conversations" if rollout.mode == "async" else "responses"
        yield f"trainer.save_freq: a save waits until all {unfinished} in flight have ended."
    if trainer.backend == "ray" and trainer.state_copies:
        yield (
            "trainer.state_copies: no copies are made during asynchronous training: "
            "a run that loses its actor resumes from a checkpoint."
        )
    if not correction.needs_old_log_probs and not correction.bypass_mode:
        key = "algorithm.rollout_correction"
        versions = settings.max_staleness
        yield f"{key}: nothing corrects for samples up to {versions} versions old: set {key}.preset."
    if continues and config.algorithm.adv_estimator == "gae":
        yield (
            f"{_KEY}.in_flight: the critic at the beginning of a step computes the values "
            "of tokens from several versions."
        )


def check_streaming(config: Config) -> Findings:
    """Yield settings that `data.streaming` does not support, as rows are only read when needed."""
    data = config.data
    if data.streaming is None:
        return
    yield from _check_unknown_length(config)
    if data.mixture:
        yield _streaming_error(config, "data.mixture", data.mixture, "none", "Leave it out.")
    other_source = "Leave one of them out."
    path = data.custom_cls.path
    if path:
        yield _streaming_error(config, "data.custom_cls.path", path, "null", other_source)
    path = data.datagen.path
    if path:
        yield _streaming_error(config, "data.datagen.path", path, "null", other_source)
    path = data.sampler.class_path
    if path:
        fix = "Rows are read in the order of the files; data.shuffle shuffles each portion."
        yield _streaming_error(config, "data.sampler.class_path", path, "null", fix)
    if data.train_max_samples != -1:
        yield _streaming_error(config, "data.train_max_samples", data.train_max_samples, "-1")
    if data.dataloader_num_workers > 0:
        key = "data.dataloader_num_workers"
        fix = "A thread reads ahead."
        yield _streaming_error(config, key, data.dataloader_num_workers, "0", fix)


def _check_unknown_length(config: Config) -> Findings:
    """Yield settings that need the number of rows, which is unknown."""
    trainer = config.trainer
    if trainer.total_training_steps is None:
        yield _streaming_error(config, "trainer.total_training_steps", "null", "a number of steps")
    if trainer.total_epochs is not None:
        yield _streaming_error(config, "trainer.total_epochs", trainer.total_epochs, "null")
    for name in ("save_freq", "test_freq"):
        frequency = getattr(trainer, name)
        if frequency == "after_each_epoch":
            yield _streaming_error(config, f"trainer.{name}", frequency, "a number")


def _streaming_error(
    config: Config,
    key: str,
    value: object,
    expected: str,
    fix: str = "The number of rows is unknown.",
) -> ConfigError:
    """Error about a value that streamed data do not support."""
    return ConfigError(key, f"{value}, with data.streaming={config.data.streaming}", expected, fix)
