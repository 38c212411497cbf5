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
    """Make the error for a value that asynchronous training does not support.

    Args:
        key: dotted key of the value.
        got: the value, to which the message adds that asynchronous training is enabled.
        expected: the values that are supported.
        fix: how to correct the value.
    """
    return ConfigError(key, f"{got}, with {_KEY}.enable=True", expected, fix)


def _check_generating_ranks(config: Config) -> Findings:
    """Yield problems with the pools and ranks that generate."""
    settings = config.async_training
    rollout = config.actor_rollout_ref.rollout
    trainer = config.trainer
    pools = role_pools(trainer, enabled_roles(config))
    is_on_ray = trainer.backend == "ray"
    if is_on_ray and "rollout" not in pools:
        yield _async_error(
            "trainer.placement",
            str(trainer.placement),
            "actor and rollout in pools of their own",
            "For example {actor: training, ref: training, rollout: generation}.",
        )

    # If a rollout process starts vLLM on several devices, no other role can use these devices.
    rollout_pool = pools.get("rollout")
    neighbours = [
        role for role, pool in pools.items() if pool == rollout_pool and role != "rollout"
    ]
    if rollout_devices(config) > 1 and neighbours:
        yield _async_error(
            "trainer.placement",
            f"{' and '.join(neighbours)} in the rollout's pool",
            "a pool for the rollout alone: its processes use several devices each",
            "Place the other roles in another pool.",
        )
    if rollout_group_size(config) > 1 and config.actor_rollout_ref.model.has_adapter:
        yield _async_error(
            f"{ROLLOUT}.tensor_model_parallel_size",
            f"{rollout.tensor_model_parallel_size}, with an adapter",
            "1",
            "Use one rank per engine, or vllm.",
        )

    # The checks below are about engines in other processes that take new weights during generation.
    # At which token they do so depends on timing, so it can be neither repeated nor fixed.
    if not is_on_ray or settings.in_flight != "continue":
        return
    if settings.replay:
        yield _async_error(
            f"{_KEY}.replay",
            f"{settings.replay}, with in_flight=continue",
            "null, with trainer.backend=ray",
            "The record does not say at which step an engine in another process takes weights.",
        )
    num_engines = sum(rollout_ranks(config)) // engine_ranks(config)
    if settings.deterministic and num_engines > 1:
        yield _async_error(
            f"{_KEY}.deterministic",
            f"true, with in_flight=continue and {num_engines} engines that generate",
            "in_flight=finish, or one engine",
            "How far each engine is when the weights change depends on timing.",
        )


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
        yield _async_error(
            f"{ROLLOUT}.name",
            rollout.name,
            expected,
            f"{rollout.engine_title}'s numbers depend on which requests it computes together.",
        )
    # For an engine in the calling process, `RolloutConfig.findings` refuses several replicas.
    num_replicas = rollout.data_parallel_size
    if num_replicas > 1 and rollout.traits.computes_in != "caller":
        yield _async_error(
            f"{ROLLOUT}.data_parallel_size",
            str(num_replicas),
            "1",
            f"Use one rank per {rollout.engine_title} engine.",
        )
    if rollout.skip.enable:
        yield _async_error(
            f"{ROLLOUT}.skip.enable", "true", "false", "Cached responses have no weight versions."
        )


def _check_schedule(config: Config) -> Findings:
    """Yield combinations of keys that no schedule of samples and steps can satisfy."""
    settings = config.async_training
    trainer = config.trainer
    has_conversations = config.actor_rollout_ref.rollout.mode == "async"
    has_filter = config.algorithm.filter_groups.enable
    filter_setting = "algorithm.filter_groups.enable=True"
    drops_stale = settings.on_stale == "drop"
    if settings.deterministic and has_conversations:
        yield _async_error(
            f"{ROLLOUT}.mode",
            f"async, with {_KEY}.deterministic=True",
            "sync",
            "The configuration does not determine how long tools and users take.",
        )
    if settings.replay and (has_conversations or drops_stale or trainer.save_freq != -1):
        yield _async_error(
            f"{_KEY}.replay",
            str(settings.replay),
            f"null with {ROLLOUT}.mode=async, on_stale=drop or trainer.save_freq",
            "A record only says when sequences start and weights change.",
        )
    if has_filter and drops_stale:
        yield _async_error(f"{_KEY}.on_stale", f"drop, with {filter_setting}", "wait")
    if has_filter and settings.by_mini_batch:
        yield _async_error(
            f"{_KEY}.by_mini_batch",
            f"true, with {filter_setting}",
            "false",
            "A batch is filled in rounds.",
        )
    if settings.by_mini_batch and config.actor_rollout_ref.actor.shuffle:
        yield _async_error(
            f"{ACTOR}.shuffle",
            f"true, with {_KEY}.by_mini_batch=True",
            "false",
            "Mini-batches are trained on in the order in which they are completed.",
        )
    if has_filter and trainer.total_training_steps is None:
        yield _async_error(
            "trainer.total_training_steps",
            f"null, with {filter_setting}",
            "a number of steps",
            "Prompts are read ahead of the steps.",
        )


def _stale_notices(config: Config) -> Iterator[str]:
    """Yield notices about checkpoints, and about learning from stale samples."""
    settings = config.async_training
    rollout = config.actor_rollout_ref.rollout
    trainer = config.trainer
    correction = config.algorithm.rollout_correction
    # `save_minutes` is only read by runs that generate and train in turns. So with its default this
    # run saves nothing before its end.
    expects_save_minutes = trainer.save_freq == -1 and trainer.save_minutes
    if expects_save_minutes or trainer.save_freq == AT_THE_END:
        yield (
            "trainer.save_freq: without it an asynchronous run writes no checkpoint on the way. "
            "If it is killed, all its steps are lost: set trainer.save_freq=N."
        )
    if not settings.is_stale:
        return
    # The notices below are about samples of older weights.
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
        yield (
            "algorithm.rollout_correction: nothing corrects for samples up to "
            f"{settings.max_staleness} versions old: set algorithm.rollout_correction.preset."
        )
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
    leave_out = "Leave one of them out."
    path = data.custom_cls.path
    if path:
        yield _streaming_error(config, "data.custom_cls.path", path, "null", leave_out)
    path = data.datagen.path
    if path:
        yield _streaming_error(config, "data.datagen.path", path, "null", leave_out)
    path = data.sampler.class_path
    if path:
        yield _streaming_error(
            config,
            "data.sampler.class_path",
            path,
            "null",
            "Rows are read in the order of the files; data.shuffle shuffles each portion.",
        )
    if data.train_max_samples != -1:
        yield _streaming_error(config, "data.train_max_samples", data.train_max_samples, "-1")
    if data.dataloader_num_workers > 0:
        yield _streaming_error(
            config,
            "data.dataloader_num_workers",
            data.dataloader_num_workers,
            "0",
            "A thread reads ahead.",
        )


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
    """Make the error for a value that streamed data do not support.

    Args:
        config: the run.
        key: dotted key of the value.
        value: the value, to which the message adds `data.streaming`.
        expected: the values that are supported.
        fix: how to correct the value, or why it is not supported.
    """
    return ConfigError(key, f"{value}, with data.streaming={config.data.streaming}", expected, fix)
