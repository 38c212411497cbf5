# SPDX-License-Identifier: Apache-2.0
"""verl's trainer and tracker, which run the same code as `quadriga train`.

RayPPOTrainer(config, tokenizer, ...)   stores the objects that replace parts of the configured run
  init_workers()                        builds the run with these parts (`trainer/build.py`)
  fit()                                 trains to the last step (`trainer/task_runner.py`)

A subclass may replace `fit` by its own loop, with the steps that verl's documentation shows: methods
of the worker groups, and methods that begin with an underscore.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch.utils.data import Dataset, Sampler

from quadriga.config import Config, training_findings
from quadriga.errors import ConfigError
from quadriga.observe import tracking
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.redact import redact
from quadriga.rewards import RewardManager
from quadriga.trainer import launch, ray_trainer
from quadriga.trainer.balance import order_for_ranks
from quadriga.trainer.build import Replacements, build_run
from quadriga.trainer.roles import Needs, Role
from quadriga.workers.base import PROMPT_TENSORS
from quadriga_verl.shim.loop_view import NumProcesses, blocking_view, policy_view, verl_config
from quadriga_verl.shim.rewards import ExistingManager
from quadriga_verl.shim.tools import marked_timer

_GRADING_COLUMNS = ("data_source", "reward_model", "extra_info", "uid")
"""Columns that identify and grade a row. `_get_gen_batch` leaves them in the batch."""


@dataclass(eq=False)
class RayPPOTrainer:
    """verl's trainer of PPO and related algorithms.

    After `init_workers`, `actor_rollout_wg`, `ref_policy_wg`, `critic_wg` and `rm_wg` are worker
    groups, or None. Their methods wait for the outputs; `METHOD.remote` returns a future instead,
    whose `get()` waits. `loop` is Quadriga's trainer, and `loop.config` its configuration. `config`
    is a read-only copy with verl's names and meanings (see `verl_config`).

    Args:
        config: result of `quadriga.config.load_config`.
        tokenizer: None: that of `data.tokenizer`, or of the model.
        role_worker_mapping: worker classes by role, or `ray.remote(cls)`. Each is a subclass of
            Quadriga's class for the role. Other roles have Quadriga's class itself.
        resource_pool_manager: pools of processes and the roles in each, on Ray. None: those of the
            section `trainer`.
        ray_worker_group_cls: ignored.
        processor: ignored; it is loaded with the model.
        reward_fn: reward manager with verl's or Quadriga's interface. None: the configured one.
        val_reward_fn: reward manager of validation. None: as in training.
        train_dataset: None: made by `create_rl_dataset`.
        val_dataset: None: made by `create_rl_dataset`.
        collate_fn: makes a batch from rows.
        train_sampler: None: made by `create_rl_sampler`.
        device_name: replaces `trainer.device`.

    Raises:
        ConfigError: arguments contradict the configuration, or a class does not fit its role.
    """

    config: Any
    tokenizer: Any = None
    role_worker_mapping: Mapping[Any, Any] | None = None
    resource_pool_manager: Any = None
    ray_worker_group_cls: Any = None
    processor: Any = None
    reward_fn: Callable[..., Any] | None = None
    val_reward_fn: Callable[..., Any] | None = None
    train_dataset: Dataset | None = None
    val_dataset: Dataset | None = None
    collate_fn: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None
    train_sampler: Sampler | None = None
    device_name: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.config, Config):
            raise ConfigError(
                "RayPPOTrainer",
                got=type(self.config).__name__,
                expected="a quadriga.config.Config",
                fix="Load it with quadriga.config.load_config. `quadriga config translate` converts a "
                "command line of verl to the file that it reads.",
            )
        needs = Needs.of(self.config)
        trainer_config = type(self.config.trainer)(**self._trainer_settings(self.config, needs))
        self._config = self.config.model_copy(update={"trainer": trainer_config})
        problems, notices = training_findings(self._config)
        if len(problems) > 1:
            raise ConfigError("\n  ".join(["RayPPOTrainer", *map(str, problems)]))
        if problems:
            raise problems[0]
        for notice in notices:
            print(notice)
        worker_classes = {}
        for role, cls in (self.role_worker_mapping or {}).items():
            decorated = getattr(cls, "__ray_metadata__", None)
            if decorated is not None:
                # This is `ray.remote(cls)`.
                cls = decorated.modified_class.__ray_actor_class__
            worker_classes[Role(role)] = cls
        self._parts = Replacements(
            workers=worker_classes,
            tokenizer=self.tokenizer,
            reward=_manager_factory(self.reward_fn),
            val_reward=_manager_factory(self.val_reward_fn),
            train=self.train_dataset,
            val=self.val_dataset,
            sampler=self.train_sampler,
            collate=self.collate_fn,
        )
        self.config: DictConfig = verl_config(self._config)
        self.use_critic = needs.critic
        self.use_reference_policy = needs.reference
        self.use_rm = self._config.reward_model.enable
        self.async_rollout_mode = self._config.actor_rollout_ref.rollout.mode == "async"
        self.loop: Any = None
        self._steps: Any = None

    def _trainer_settings(self, config: Config, needs: Needs) -> dict[str, Any]:
        """Settings of the section `trainer`, with the device and pools of the trainer's arguments."""
        settings = dict(config.trainer)
        if self.device_name:
            settings["device"] = self.device_name
        manager = self.resource_pool_manager
        if manager is not None:
            placement = {str(role): pool for role, pool in manager.mapping.items()}
            # verl's programs map the reference to a pool whether it is used or not. Here only roles that
            # are used may have one.
            if not needs.reference:
                placement.pop(Role.RefPolicy, None)
            settings["backend"] = "ray"
            settings["placement"] = placement
            settings["resource_pools"] = manager.resource_pool_spec
        return settings

    def init_workers(self) -> None:
        """Start the workers, load the models and prepare the data."""
        self._steps = launch.steps(self._config, partial(build_run, parts=self._parts))
        # Closing the generator ends the workers. That happens also if the user drops the trainer.
        weakref.finalize(self, self._steps.close)
        first_step = next(self._steps, None)
        # There is no step if an earlier run in this folder has finished, which was reported.
        if first_step is not None:
            self._copy_attributes(first_step.loop)

    def _copy_attributes(self, loop: Any) -> None:
        """Copy the step and, if the loop is a new one, its objects to attributes with verl's names.

        Args:
            loop: Quadriga's trainer. After a restart of the workers it is a new one.
        """
        assert isinstance(loop, ray_trainer.RayPPOTrainer)
        self.global_steps = loop.global_steps
        if loop is self.loop:
            return
        self.loop = loop
        self.total_training_steps = loop.total_training_steps
        num_epochs = math.ceil(loop.total_training_steps / max(1, len(loop.train_dataloader)))
        self.config = verl_config(loop.config, num_epochs)
        self.actor_rollout_wg = policy_view(loop, lambda: self.global_steps)
        self.async_rollout_manager = self.actor_rollout_wg
        self.ref_policy_wg = blocking_view(loop.reference, loop)
        # With LoRA, the reference is the actor without its adapter.
        self.ref_in_actor = loop.reference is not None and loop.reference is loop.actor
        self.critic_wg = blocking_view(loop.critic, loop)
        self.rm_wg = blocking_view(getattr(loop.reward, "model", None), loop)
        self.kl_ctrl_in_reward = loop.kl_controller
        self.train_dataloader = loop.train_dataloader
        self.train_dataset = loop.train_dataloader.dataset
        self.val_dataloader = loop.validator.dataloader
        self.tokenizer = loop.tokenizer
        if self.resource_pool_manager is None:
            self.resource_pool_manager = NumProcesses(self._config)
        if self._parts.reward is None:
            self.reward_fn = loop.reward
        if self._parts.val_reward is None and self.val_dataloader is not None:
            self.val_reward_fn = loop.reward

    def fit(self) -> None:
        """Train to the last step, and then end the workers.

        Raises:
            ConfigError: `init_workers` was not called.
        """
        if self._steps is None:
            raise ConfigError(
                "RayPPOTrainer.fit", got="no workers", expected="init_workers() before it"
            )
        for step in self._steps:
            self._copy_attributes(step.loop)

    # ---- steps of a user's own loop -------------------------------------------------------------

    def _load_checkpoint(self) -> None:
        """Resume from the checkpoint that the configuration names, and set `global_steps`."""
        if self.loop.load_checkpoint():
            self.loop.weights.publish(self.loop.global_steps)
        self.global_steps = self.loop.global_steps

    def _save_checkpoint(self) -> None:
        """Write a checkpoint of the step, and wait until it is on disk."""
        self.loop.global_steps = self.global_steps
        # The user's loop has read the dataloader itself, one batch per step. The checkpoint stores how
        # many batches were read.
        self.loop.prompts.num_taken = self.global_steps
        self.loop.save()

    def _validate(self) -> dict[str, float]:
        """Generate and grade responses to the validation prompts, and return the metrics."""
        metrics, _ = self.loop.validator.run(self.global_steps)
        return metrics

    def _start_profiling(self, do_profile: bool) -> None:
        """Begin to profile the step if it is one of `global_profiler.steps`.

        Args:
            do_profile: ignored; `global_profiler` decides.
        """
        is_last = self.global_steps >= self.total_training_steps
        self._profile = self.loop.profiler.step(self.global_steps, is_last=is_last)
        self._profile.__enter__()

    def _stop_profiling(self, do_profile: bool) -> None:
        """End the profile that `_start_profiling` began, if this is its last step."""
        self._profile.__exit__(None, None, None)

    def _log_rollout_data(
        self,
        batch: DataProto,
        reward_extra_infos_dict: Mapping[str, Sequence[Any]],
        timing_raw: dict[str, float],
        rollout_data_dir: str,
    ) -> None:
        """Write the graded responses of a step to `rollout_data_dir/STEP.jsonl`.

        Args:
            batch: the responses.
            reward_extra_infos_dict: values that graders returned beside the score, by name.
            timing_raw: seconds by phase, to which the seconds of writing are added.
            rollout_data_dir: the folder.
        """
        self.loop.global_steps = self.global_steps
        extras: list[dict[str, Any]] = [{} for _ in range(len(batch))]
        for name, values in reward_extra_infos_dict.items():
            for extra, value in zip(extras, values, strict=True):
                extra[name] = value
        # The loop reads a dictionary per response instead of a column per name.
        columns = {"reward_extra": object_array(extras)}
        for name, column in batch.non_tensor_batch.items():
            if name not in reward_extra_infos_dict:
                columns[name] = column
        with marked_timer("dump_rollout_generations", timing_raw):
            self.loop.write_rollouts(DataProto(batch.batch, columns), rollout_data_dir)

    def compute_rollout_importance_weights_and_add_to_batch(
        self, batch: DataProto
    ) -> tuple[DataProto, dict[str, float]]:
        """Apply `algorithm.rollout_correction` to a batch.

        Returns:
            The same batch, with importance weights if they are configured, and metrics.
        """
        return batch, self.loop.correct_rollout(batch)

    def _balance_batch(self, batch: DataProto, metrics: dict[str, float], **options: Any) -> None:
        """Reorder rows in place, so that all ranks get equal work.

        Args:
            batch: the batch.
            metrics: metrics, to which those of the balance are added.
            options: ignored.
        """
        policy = self._config.actor_rollout_ref
        loop = self.loop
        metrics |= order_for_ranks(batch, loop.num_ranks, policy.rollout.n, policy.actor, loop.cost)

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """Move the columns that generation reads out of a batch.

        Object columns that identify and grade a row (`_GRADING_COLUMNS`) are in both batches afterwards.
        The `meta_info` of both gets the number of this step, on which the seeds of responses depend, and
        of all steps, for the learning rates of updates.

        Returns:
            The batch for generation.
        """
        columns = [name for name in batch.non_tensor_batch if name not in _GRADING_COLUMNS]
        prompts = batch.pop(batch_keys=list(PROMPT_TENSORS), non_tensor_batch_keys=columns)
        prompts.non_tensor_batch |= batch.non_tensor_batch
        for part in (batch, prompts):
            part.meta_info["global_steps"] = self.global_steps
            part.meta_info["total_training_steps"] = self.total_training_steps
        return prompts


def _manager_factory(reward_fn: Any) -> Callable[[], RewardManager] | None:
    """Return a function that returns the user's reward manager, adapted if it has verl's interface.

    If there is none (`reward_fn` is None), return None: the configured manager is used.
    """
    if reward_fn is None:
        return None
    return lambda: reward_fn if isinstance(reward_fn, RewardManager) else ExistingManager(reward_fn)


class Tracking(tracking.Tracking):
    """verl's tracker, which logs metrics of steps to the console, to files or to services.

    Files are in the default folder of a run with this name (`trainer.default_local_dir`).

    Args:
        project_name: name of the project.
        experiment_name: the run's name.
        default_backend: name of a tracker, or a list of names.
        config: settings to store with the metrics.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: Any = "console",
        config: Any = None,
    ):
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        settings = {"project_name": project_name, "experiment_name": experiment_name}
        folder = Path(Config(trainer=settings).trainer.directory)
        facts = tracking.RunFacts(project_name, experiment_name, redact(dict(config or {})), folder)
        super().__init__(names, facts)

    def log(self, data: Mapping[str, float], step: int, backend: Any = None) -> None:
        """Log the metrics of a step to all trackers.

        Args:
            data: metrics by name.
            step: the step.
            backend: ignored.
        """
        super().log(data, step)
