# SPDX-License-Identifier: Apache-2.0
"""verl's trainer by its constructor, and its tracker: what it builds and runs is what `quadriga train` does.

RayPPOTrainer(config, tokenizer, ...)   notes what takes the place of what the configuration names
  init_workers()                        builds a run with it (`trainer/build.py`)
  fit()                                 trains to the last step (`trainer/task_runner.py`)
"""

import weakref
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, Sampler

from quadriga.config import Config, training_findings
from quadriga.errors import ConfigError
from quadriga.observe import tracking
from quadriga.protocol import DataProto
from quadriga.rewards import RewardManager
from quadriga.trainer import launch, ray_trainer
from quadriga.trainer.balance import order_for_ranks
from quadriga.trainer.build import Parts, build_run
from quadriga.trainer.roles import Needs, Role
from quadriga_verl.shim.rewards import GivenManager

_PROMPTS = ("input_ids", "attention_mask", "position_ids")
_STAY = ("data_source", "reward_model", "extra_info", "uid")


@dataclass(eq=False)
class RayPPOTrainer:
    """The trainer of PPO and its relatives.
    `config`: of this package (`quadriga.config.load_config`).
    `tokenizer`, `processor`: the tokenizer is that of `data.tokenizer` or of the model where this is None.
    `role_worker_mapping`: class of the worker of a role, also as `ray.remote(cls)`; a subclass of this package's, which
    roles that are left out have.
    `resource_pool_manager`: the pools and who runs in which, on Ray. None: as the section `trainer` says.
    `reward_fn`, `val_reward_fn`: reward managers of verl's contract or of this package. None: as the configuration
    says; in validation, as in training.
    `train_dataset`, `val_dataset`, `train_sampler`: None: by `create_rl_dataset` and `create_rl_sampler`.
    `collate_fn`: makes a batch of rows.

    From `init_workers` on `actor_rollout_wg`, `ref_policy_wg`, `critic_wg` and `rm_wg` are worker groups, or None: a
    method waits for its outputs, `METHOD.remote` returns a future of them, whose `get()` waits. `loop` is the trainer
    of this package behind it.
    Raises ConfigError: what is given contradicts the configuration, or a class is not one of the role."""

    config: Config
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
            fix = "Load it with quadriga.config.load_config; `quadriga config translate` makes its file of verl's line."
            expected = "a configuration of this package"
            raise ConfigError(
                "RayPPOTrainer", got=type(self.config).__name__, expected=expected, fix=fix
            )
        settings = dict(self.config.trainer) | (
            {"device": self.device_name} if self.device_name else {}
        )
        if (manager := self.resource_pool_manager) is not None:
            placement = {str(role): pool for role, pool in manager.mapping.items()}
            if not Needs.of(self.config).reference:
                placement.pop(Role.RefPolicy, None)
            settings |= {
                "backend": "ray",
                "placement": placement,
                "resource_pools": manager.resource_pool_spec,
            }
        self.config = self.config.model_copy(
            update={"trainer": type(self.config.trainer)(**settings)}
        )
        problems, notes = training_findings(self.config)
        if problems[1:]:
            raise ConfigError("\n  ".join(["RayPPOTrainer", *map(str, problems)]))
        if problems:
            raise problems[0]
        print(*notes, sep="\n", end="\n" * bool(notes))
        classes = {
            Role(role): _plain(cls) for role, cls in (self.role_worker_mapping or {}).items()
        }
        self._parts = Parts(
            classes, self.tokenizer, self._reward(self.reward_fn), self._reward(self.val_reward_fn),
            self.train_dataset, self.val_dataset, self.train_sampler, self.collate_fn,
        )  # fmt: skip
        needs = Needs.of(self.config)
        self.use_critic, self.use_reference_policy = needs.critic, needs.reference
        self.use_rm = self.config.reward_model.enable
        self._steps: Any = None

    @staticmethod
    def _reward(given: Any) -> Callable[[], RewardManager] | None:
        """Makes the manager of a run of what is given, in either contract."""
        if given is None:
            return None
        return lambda: given if isinstance(given, RewardManager) else GivenManager(given)

    def init_workers(self) -> None:
        """Start the workers, load the models and prepare the data."""
        self._steps = launch.steps(self.config, partial(build_run, parts=self._parts))
        weakref.finalize(self, self._steps.close)
        # None: a run of this folder has come to its end before, which is said.
        if (first := next(self._steps, None)) is not None:
            self._follow(first.loop)

    def _follow(self, loop: Any) -> None:
        """Take over what a loop has; it is another one after the workers were started again."""
        assert isinstance(loop, ray_trainer.RayPPOTrainer)
        self.loop, self.total_training_steps = loop, loop.total_training_steps
        groups = (loop.actor, loop.reference, loop.critic, getattr(loop.reward, "model", None))
        self.actor_rollout_wg, self.ref_policy_wg, self.critic_wg, self.rm_wg = map(
            _waiting, groups
        )
        self.actor_rollout_wg.update_actor = partial(
            self._update_actor, self.actor_rollout_wg.update_actor
        )
        self.train_dataloader, self.val_dataloader = (
            loop.train_dataloader,
            loop.validator.dataloader,
        )
        self.tokenizer, self.global_steps = loop.tokenizer, loop.global_steps

    def _update_actor(
        self, update: Callable[[DataProto], DataProto], batch: DataProto
    ) -> DataProto:
        """An update after which the rollout has the new weights, as in verl."""
        updated = update(batch)
        self.loop.weights.publish(self.global_steps)
        return updated

    def fit(self) -> None:
        """Train to the last step, and end the workers. Raises ConfigError: they were not started."""
        if self._steps is None:
            raise ConfigError(
                "RayPPOTrainer.fit", got="no workers", expected="init_workers() before it"
            )
        for step in self._steps:
            self._follow(step.loop)

    def _validate(self) -> dict[str, float]:
        """The metrics of responses to all validation prompts."""
        metrics, _ = self.loop.validator.run(self.loop.global_steps)
        return metrics

    def _balance_batch(self, batch: DataProto, metrics: dict[str, float], **options: Any) -> None:
        """Arrange the rows, in place, so that equal chunks of the batch are equal work; they are numbered first."""
        policy, loop = self.config.actor_rollout_ref, self.loop
        metrics |= order_for_ranks(batch, loop.num_ranks, policy.rollout.n, policy.actor, loop.cost)

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """What generation reads, taken out of the batch; who a row is and what grades it is in both,
        and so is `global_steps`, the step whose responses and learning rate they get."""
        others = [name for name in batch.non_tensor_batch if name not in _STAY]
        found = batch.pop(batch_keys=list(_PROMPTS), non_tensor_batch_keys=others)
        found.non_tensor_batch |= batch.non_tensor_batch
        facts = {
            "global_steps": self.global_steps,
            "total_training_steps": self.total_training_steps,
        }
        for one in (batch, found):
            one.meta_info |= facts
        return found


def _waiting(group: Any) -> Any:
    """The group with methods that return when their outputs are there, but for `METHOD.remote`; None of None."""
    if group is None:
        return None
    view = copy(group)
    view.methods = {name: replace(how, blocking=True) for name, how in group.methods.items()}
    return view.as_worker()


def _plain(cls: Any) -> type[Any]:
    """The class that `ray.remote` has wrapped, or the class itself."""
    wrapped = getattr(cls, "__ray_metadata__", None)
    return cls if wrapped is None else wrapped.modified_class.__ray_actor_class__


class Tracking(tracking.Tracking):
    """verl's tracker: metrics of steps to a console, files or services. File-based ones write to the folder that this
    package has for runs of that name."""

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: Any = "console",
        config: Any = None,
    ):
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        trainer = Config(
            trainer={"project_name": project_name, "experiment_name": experiment_name}
        ).trainer
        facts = tracking.RunFacts(
            project_name, experiment_name, dict(config or {}), Path(trainer.directory)
        )
        super().__init__(names, facts)

    def log(self, data: Mapping[str, float], step: int, backend: Any = None) -> None:
        super().log(data, step)
