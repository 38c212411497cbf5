# SPDX-License-Identifier: Apache-2.0
"""Builds the objects of a run. Names in the configuration become classes only here."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pkgutil import resolve_name
from typing import Any

from quadriga.background import in_background
from quadriga.config import Config, place_roles
from quadriga.config.async_training import AsyncTrainingConfig
from quadriga.config.placement import (
    POLICIES,
    enabled_roles,
    role_pools,
    rollout_devices,
    rollout_group_size,
)
from quadriga.data import create_dataloader, create_rl_dataset, create_rl_sampler, load_tokenizer
from quadriga.data.episodes import with_episodes
from quadriga.data.prompt_lengths import PromptContext
from quadriga.data.rl_dataset import RLHFDataset
from quadriga.data.rm_dataset import RMDataset
from quadriga.data.sft_dataset import MultiTurnSFTDataset, SFTDataset
from quadriga.errors import ConfigError, WorkerLostError
from quadriga.observe.timing import Timeline
from quadriga.observe.tracking.services import check_services
from quadriga.rewards import RewardManager, load_reward_manager
from quadriga.rewards.by_name import ROW
from quadriga.single_controller import ClassWithInitArgs, WorkerGroup, WorkerGroups
from quadriga.trainer.asynchronous.streams import StreamPool
from quadriga.trainer.checkpoint import checkpoint_to_resume
from quadriga.trainer.launch import cluster_of
from quadriga.trainer.profiler import Profiler
from quadriga.trainer.ray_trainer import RayPPOTrainer, Workers
from quadriga.trainer.responses import ModelReward
from quadriga.trainer.roles import Needs, Role
from quadriga.trainer.rollout_pool import RolloutPool, WeightPublisher
from quadriga.trainer.serving import TrainingServer, check_server
from quadriga.trainer.sft import RewardModelTrainer, SFTTrainer, SupervisedTrainer
from quadriga.workers import (
    ActorRolloutRefWorker,
    CriticWorker,
    RewardModelWorker,
    RolloutWorker,
    TeacherWorker,
)
from quadriga.workers.base import UpdateInputs
from quadriga.workers.generation import build_processor, declared_stop_token_ids, prompt_context
from quadriga.workers.models import check_checkpoint, check_models, layout_tables
from quadriga.workers.rollout_engines import rollout_engine_class
from quadriga.workers.sft import RewardModelTrainingWorker, SFTWorker
from quadriga.workers.teacher import check_teachers, require_teachers

# Import strings: Ray is imported only if the configuration names it.
_CONTROLLER = "quadriga.single_controller"
TEAMS = {
    "local": f"{_CONTROLLER}.worker_group:WorkerGroups",
    "ray": f"{_CONTROLLER}.ray:RayWorkerGroups",
}
STATE_COPIES = f"{_CONTROLLER}.ray.copies:StateCopies"
NSIGHT = {
    "t": "cuda,nvtx,cublas,cudnn",
    "capture-range": "cudaProfilerApi",
    "capture-range-end": "repeat",
    "kill": "none",
    "o": "'quadriga_%p'",
}
"""Arguments of `nsys profile` for each process: a report per profile, without ending the process."""
SUPERVISED_WORKERS = {"sft": SFTWorker, "reward_model": RewardModelTrainingWorker}
"""Class of the worker of each `task` except `rl`."""
SUPERVISED_TRAINERS = {"sft": SFTTrainer, "reward_model": RewardModelTrainer}
"""Class of the training loop of each `task` except `rl`."""


@dataclass(frozen=True)
class Replacements:
    """Objects that replace those that a configuration names; None replaces nothing."""

    # Worker classes by role; each is a subclass of the role's own class.
    workers: Mapping[Role, type[Any]] = field(default_factory=dict)
    tokenizer: Any = None
    # Make the reward managers. They are called again after a restart of the workers.
    reward: Callable[[], RewardManager] | None = None
    val_reward: Callable[[], RewardManager] | None = None
    # Data sets.
    train: Any = None
    val: Any = None
    sampler: Any = None
    collate: Callable[..., Any] | None = None
    # A subclass of `RayPPOTrainer`, for `task=rl`.
    trainer: type[RayPPOTrainer] | None = None


NO_PARTS = Replacements()


@dataclass(frozen=True)
class BuiltRun:
    """The objects of a run: the trainer on the driver, and the workers that it calls."""

    trainer: RayPPOTrainer | SupervisedTrainer
    team: WorkerGroups
    server: TrainingServer | None = None

    def close(self, *, is_cut_short: bool = False) -> None:
        """Stop the trainer and end the workers.

        Args:
            is_cut_short: whether the loop ended before its last step, so that remote workers may
                be dead or in the middle of a call. Otherwise all results have arrived, and the
                loss of a worker is only reported.
        """
        try:
            if self.server is not None:
                self.server.close()
            self.trainer.close()
        finally:
            try:
                # `close` calls the workers, which may never reply; `end` does not.
                if is_cut_short and self.team.is_remote:
                    self.team.end()
                else:
                    self.team.close()
            except WorkerLostError as error:
                print(f"The run is complete. {error}")
            if isinstance(self.trainer, RayPPOTrainer):
                # Waits for engines that are being restarted, so it comes after the workers' end.
                self.trainer.weights.close()


def check_async_training(config: Config, needs: Needs) -> None:
    """Check that the algorithm works with `async_training`.

    Raises:
        ConfigError: the estimator needs greedy responses, or the critic's mini-batches are larger
            than the parts of a batch.
    """
    settings = config.async_training
    if needs.greedy_baseline and settings.enable:
        raise ConfigError(
            "async_training.enable",
            got="an estimator with a greedy response as baseline",
            expected="one without",
            fix="Take another estimator, such as rloo.",
        )
    critic_rows = config.critic.ppo_mini_batch_size
    actor_rows = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if needs.critic and settings.by_mini_batch and critic_rows > actor_rows:
        raise ConfigError(
            "critic.ppo_mini_batch_size",
            got=f"{critic_rows}, with async_training.by_mini_batch=True",
            expected=f"at most the actor's, {actor_rows}",
        )


def build_run(config: Config, timeline: Timeline, parts: Replacements = NO_PARTS) -> BuiltRun:
    """Check, build and load everything that a run of any `task` needs.

    Remote workers load their models while this process prepares the data.

    Args:
        config: the resolved configuration.
        timeline: records how long each part of the start-up takes.
        parts: objects that replace those that the configuration names.

    Raises:
        QuadrigaError: the configuration, the data or a model is wrong, or a worker is lost. The
            workers have been ended.
    """
    config = with_episodes(config)
    with timeline.part("checks"):
        needs = Needs.of(config)
        check_before_start(config, needs)
    with timeline.part("tokenizer"):
        tokenizer = parts.tokenizer or build_tokenizer(config)
        check_teachers(config, tokenizer)

    reward = None
    server = None
    team = start_workers(config, tokenizer, needs, parts.workers)
    try:
        finish_loading: Callable[[], dict[str, str]] = partial(load_models, team, timeline)
        # Remote workers load while this process reads the data, local ones afterwards.
        if team.is_remote:
            finish_loading = in_background(finish_loading, "loading models").result
        with timeline.part("data"):
            context = prompt_context(config, tokenizer)
            train = build_train_loader(config, tokenizer, context, parts)
            val = build_val_loader(config, tokenizer, context, parts)
        if config.task == "rl":
            with timeline.part("rewards"):
                make_reward = parts.reward or partial(build_reward, config, tokenizer, train, val)
                reward = make_reward()
        # Automatic choices by name, with the reason of each.
        choices = finish_loading()

        num_batches = max(1, len(train))
        num_steps = config.trainer.num_steps(num_batches)
        config = _with_counted_epochs(config, num_batches)
        trainer: RayPPOTrainer | SupervisedTrainer
        if reward is None:
            learner = team.groups[Role.ActorRollout].as_worker()
            trainer_class = SUPERVISED_TRAINERS[config.task]
            trainer = trainer_class(config, learner, train, val, num_steps)
        else:
            workers = make_handles(team, config)
            if workers.reward_model is not None:
                reward = ModelReward(workers.reward_model, reward)
            rl_class = parts.trainer or RayPPOTrainer
            trainer = rl_class(config, tokenizer, workers, reward, train, val, num_steps)
            if parts.val_reward:
                trainer.validator.reward = parts.val_reward()
            trainer.recorder.take_call_times = team.take_call_times
            choices |= needs.describe()
            asynchronous = config.async_training
            if asynchronous.enable:
                choices["asynchronous"] = (
                    f"staleness up to {asynchronous.max_staleness}, in versions; "
                    f"{asynchronous.in_flight}"
                )
            if config.actor_rollout_ref.rollout.serve.enable:
                server = TrainingServer(config, tokenizer, rollout_of(team))
    except BaseException:
        # Graders and workers are processes, which would otherwise keep running.
        if reward is not None:
            reward.close()
        team.end()
        raise

    trainer.profiler = Profiler(config, team.groups)
    # Everything that was chosen automatically is printed, with its reason.
    width = max(map(len, choices), default=0)
    for name, choice in choices.items():
        print(f"  {name:<{width}}  {choice}")
    for table in layout_tables(config, has_critic=needs.critic):
        print(table)
    return BuiltRun(trainer, team, server)


def check_before_start(config: Config, needs: Needs) -> None:
    """Refuse a configuration that cannot run, before any process is started.

    Args:
        config: the resolved configuration.
        needs: optional passes of a training step.

    Raises:
        ConfigError: an algorithm, an engine, a model or a checkpoint cannot be used.
    """
    check_services(config.trainer.loggers)
    if config.task == "rl":
        # The first two results are not used: the calls raise the errors of a wrong loss, option or
        # engine.
        UpdateInputs(config)
        rollout_engine_class(config)
        check_async_training(config, needs)
        check_server(config)
    check_models(config, has_critic=needs.critic)
    check_checkpoint(config, checkpoint_to_resume(config.trainer))


def _with_counted_epochs(config: Config, num_batches: int) -> Config:
    """Replace `after_each_epoch` in `save_freq` and `test_freq` by the number of batches."""
    frequencies = {}
    for name in ("save_freq", "test_freq"):
        if getattr(config.trainer, name) == "after_each_epoch":
            frequencies[name] = num_batches
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=frequencies)})


def start_workers(
    config: Config, tokenizer: Any, needs: Needs, replacements: Mapping[Role, type[Any]]
) -> WorkerGroups:
    """Start a worker group for each role.

    They run on the pools of `trainer.placement` and the backend of `trainer.backend`.

    Args:
        config: the resolved configuration.
        tokenizer: the tokenizer of the policy.
        needs: optional passes of a training step, which decide on the roles.
        replacements: worker classes by role, which replace the role's own class. The policy has
            one of the roles in `POLICIES`; a class for any of them is used for the policy.

    Raises:
        ConfigError: a replacement is not a subclass of its role's class.
    """
    # The user need not know which of its roles the policy has in this run.
    policies = map(Role, POLICIES)
    policy_class = next((replacements[role] for role in policies if role in replacements), None)
    role_classes = {
        Role.Critic: CriticWorker,
        Role.RewardModel: RewardModelWorker,
        Role.Teacher: TeacherWorker,
        Role.Rollout: RolloutWorker,
    }
    optional_roles = ()
    if config.task == "rl":
        optional_roles = enabled_roles(config)
    else:
        role_classes[Role.ActorRollout] = SUPERVISED_WORKERS[config.task]
    placement = place_roles(
        config.trainer,
        has_reference=needs.reference,
        has_critic=needs.critic,
        optional_roles=optional_roles,
    )

    workers = {}
    for role in map(Role, placement.roles):
        base = role_classes.get(role, ActorRolloutRefWorker)
        cls = replacements.get(role, base)
        if role in POLICIES and role not in replacements:
            cls = policy_class or base
        if not issubclass(cls, base):
            raise ConfigError(
                f"the worker of {role}", got=cls.__name__, expected=f"a subclass of {base.__name__}"
            )
        if role in role_classes:
            workers[role] = ClassWithInitArgs(cls, config, tokenizer)
        else:
            # One class serves all roles of the policy, so it is told which role it has.
            workers[role] = ClassWithInitArgs(cls, config, tokenizer, role)

    runtime_env = {"nsight": NSIGHT} if config.global_profiler.tool == "nsys" else {}
    pools = dict(placement.pools)
    devices = {}
    num_devices = rollout_devices(config)
    if num_devices > 1:
        # Each process of the rollout's pool drives several devices.
        pool = placement.roles["rollout"]
        pools[pool] = [count // num_devices for count in pools[pool]]
        devices[pool] = num_devices
    team_class = resolve_name(TEAMS[config.trainer.backend])
    return team_class(workers, placement.roles, pools, config.trainer, runtime_env, devices)


def state_copies(config: Config) -> Any:
    """Create the `StateCopies` of a run, which survive its workers; None if it keeps none."""
    trainer = config.trainer
    if trainer.backend != "ray" or not trainer.state_copies:
        return None
    if not trainer.max_worker_restarts or trainer.val_only:
        return None
    # With requests in flight between steps, each copy would have to wait for all of them.
    if config.async_training.is_stale:
        return None
    return resolve_name(STATE_COPIES)()


def load_models(team: WorkerGroups, timeline: Timeline) -> dict[str, str]:
    """Load the models of all workers; workers in separate processes load at the same time.

    Args:
        team: the workers, which have been started.
        timeline: records how long it takes.

    Returns:
        Automatic choices of the workers, to be printed: those of rank 0, followed by those of
        ranks that chose differently.
    """
    if team.is_remote:
        with timeline.part("workers"):
            team.await_start()
    with timeline.part("models"):
        # All groups start to load before any is awaited.
        futures = [group.method("init_model")() for group in team.groups.values()]
        choices_of_groups = [future.get() for future in futures]

    choices = dict(team.describe())
    for choices_of_ranks in choices_of_groups:
        choices_of_group = dict(choices_of_ranks[0])
        for rank, choices_of_rank in enumerate(choices_of_ranks):
            for name, choice in choices_of_rank.items():
                if choice != choices_of_ranks[0].get(name):
                    so_far = choices_of_group.get(name, "none")
                    choices_of_group[name] = f"{so_far}; rank {rank}: {choice}"
        choices |= choices_of_group
    return choices


def rollout_of(team: WorkerGroups) -> WorkerGroup[Any]:
    """The worker group that generates: a separate rollout, or the actor's."""
    roles = (Role.Rollout, Role.ActorRolloutRef, Role.ActorRollout)
    return next(team.groups[role] for role in roles if role in team.groups)


def make_handles(team: WorkerGroups, config: Config) -> Workers:
    """Make the handles through which the training loop calls the team's groups.

    A rollout in separate processes receives the actor's weights through a `RolloutPool`.
    """
    groups = team.groups
    workers = {role: group.as_worker() for role, group in groups.items()}
    policy = next(role for role in POLICIES if role in groups)
    rollout = workers[policy]
    weights = WeightPublisher(groups[policy])
    # The role `actor` has no rollout, so the rollout runs in separate processes.
    if policy == Role.Actor:
        pool_class = StreamPool if config.async_training.enable else RolloutPool
        rollout = weights = pool_class(
            groups[policy], groups[Role.Rollout], rollout_group_size(config)
        )
    return Workers(
        actor=workers[policy],
        rollout=rollout,
        weights=weights,
        # The actor's group may contain the reference model.
        reference=workers.get(Role.ActorRolloutRef) or workers.get(Role.RefPolicy),
        critic=workers.get(Role.Critic),
        reward_model=workers.get(Role.RewardModel),
        teacher=workers.get(Role.Teacher),
    )


@contextmanager
def frozen_workers(config: Config, tokenizer: Any, *roles: Role) -> Iterator[list[Any]]:
    """Context manager: start a `frozen_team`; yields a handle for each of the roles, in order."""
    with frozen_team(config, tokenizer, *roles) as team:
        yield [team.groups[role].as_worker() for role in roles]


@contextmanager
def frozen_team(config: Config, tokenizer: Any, *roles: Role) -> Iterator[WorkerGroups]:
    """Context manager: start workers that are not trained, on the processes that a run would use.

    Args:
        config: the resolved configuration.
        tokenizer: the tokenizer of the policy.
        roles: `Role.ActorRollout`, which is placed like a run's rollout, and `Role.RewardModel`.
    """
    pools = role_pools(config.trainer, [role for role in roles if role == Role.RewardModel])
    # The pool of a separate rollout, or else that of the policy.
    rollout_pool = next(pools[role] for role in (Role.Rollout, *POLICIES) if role in pools)
    # Nothing is trained, so generation has nothing to overlap with. A single call may have all
    # rows, so its time is not limited.
    trainer = config.trainer.model_copy(update={"phase_timeout_s": None})
    config = config.model_copy(update={"async_training": AsyncTrainingConfig(), "trainer": trainer})
    workers = {}
    pool_of_role = {}
    for role in roles:
        if role == Role.RewardModel:
            pool_of_role[role] = pools[role]
            workers[role] = ClassWithInitArgs(RewardModelWorker, config, tokenizer)
        else:
            pool_of_role[role] = rollout_pool
            workers[role] = ClassWithInitArgs(
                ActorRolloutRefWorker, config, tokenizer, role, is_trained=False
            )
    processes = {pool: trainer.processes_of(pool) for pool in pool_of_role.values()}
    team_class = resolve_name(TEAMS[trainer.backend])
    with cluster_of(config):
        team = team_class(workers, pool_of_role, processes, trainer)
        try:
            load_models(team, Timeline())
            yield team
        except BaseException:
            # Remote workers may be dead or in the middle of a call.
            team.end()
            raise
        team.close()


def build_reward(config: Config, tokenizer: Any, *loaders: Any) -> RewardManager:
    """Build the reward manager of a run, and check that it can grade every row of the data.

    If the manager reads whole rows, the data sets are set to provide them.

    Args:
        config: the resolved configuration.
        tokenizer: the tokenizer of the policy.
        loaders: loaders of the rows; None is skipped.

    Raises:
        RewardError: the manager cannot grade responses to a row.
    """
    manager = load_reward_manager(config, tokenizer)
    try:
        for loader in loaders:
            if loader is None:
                continue
            # A mixture has several data sets.
            for dataset in getattr(loader.dataset, "parts", [loader.dataset]):
                _check_rows(manager, dataset)
                # Each row then has a copy of all its columns in `extra_info`, under this key.
                if manager.reads_rows and isinstance(dataset, RLHFDataset):
                    dataset.columns_entry = ROW
    except BaseException:
        manager.close()
        raise
    for notice in manager.notices:
        print(notice)
    return manager


def _check_rows(manager: RewardManager, dataset: Any) -> None:
    """Check that a reward manager can grade the rows of a data set.

    Raises:
        RewardError: the manager cannot grade responses to a row.
    """
    # A user's class may change the rows of the files, so they cannot be checked in advance.
    if getattr(type(dataset), "__getitem__", None) is not RLHFDataset.__getitem__:
        return
    # Each column yields pairs: the place of a row, and the row's value.
    sources = dataset.column(dataset.config.reward_fn_key)
    truths = dataset.column("reward_model")
    rows = (
        (place, source, truth) for (place, source), (_, truth) in zip(sources, truths, strict=True)
    )
    # In chunks, to bound the memory.
    while chunk := list(islice(rows, 4096)):
        manager.check_rows(chunk)


def build_tokenizer(config: Config) -> Any:
    """Load the tokenizer that `data.tokenizer` names, by default the model's."""
    model = config.actor_rollout_ref.model
    return load_tokenizer(
        config.data.tokenizer or model.path,
        trust_remote_code=config.data.trust_remote_code or model.trust_remote_code,
        chat_template=model.custom_chat_template,
    )


def _load_dataset(config: Config, tokenizer: Any, context: PromptContext, *, is_train: bool) -> Any:
    """Load the training or the validation data set of a task."""
    data = config.data
    files = data.train_files if is_train else data.val_files
    if config.task == "rl":
        if config.reward_model.enable:
            # The reward model may have a chat template of its own, for which it needs the messages.
            data = data.model_copy(update={"return_raw_chat": True})
        return create_rl_dataset(
            files,
            data,
            tokenizer,
            build_processor(config),
            is_train=is_train,
            max_samples=data.train_max_samples if is_train else data.val_max_samples,
            context=context,
        )

    dataset_class = SFTDataset
    if config.task == "reward_model":
        dataset_class = RMDataset
    elif data.format == "messages":
        dataset_class = MultiTurnSFTDataset
    return dataset_class(
        files,
        tokenizer,
        data,
        is_train=is_train,
        processor=build_processor(config),
        stop_token_ids=declared_stop_token_ids(config.actor_rollout_ref.model.path),
        vocabulary_size=context.vocabulary_size,
    )


def build_train_loader(
    config: Config, tokenizer: Any, context: PromptContext, parts: Replacements = NO_PARTS
) -> Any:
    """Build the loader of the training rows, which yields only full batches.

    Args:
        config: the resolved configuration.
        tokenizer: the tokenizer of the policy.
        context: limits of the rollout and the model that prompts must keep to.
        parts: objects that replace those that the configuration names.
    """
    data = config.data
    rows = parts.train
    if rows is None:
        rows = _load_dataset(config, tokenizer, context, is_train=True)
    if config.distillation.enable and isinstance(rows, RLHFDataset):
        require_teachers(config, rows.column(data.reward_fn_key))

    # With dynamic sampling, a batch of prompts may be larger or smaller than that of an update.
    size = data.train_batch_size
    if data.gen_batch_size is not None and config.algorithm.filter_groups.enable:
        size = data.gen_batch_size
    if config.task != "rl" and len(rows) < size:
        size = len(rows)
        print(f"data.train_batch_size: there are {size} rows; a batch has all of them.")
    elif len(rows) > size and not (data.mixture or data.streaming):
        num_dropped = len(rows) % size
        if num_dropped:
            print(
                f"data.train_batch_size: {len(rows)} rows in batches of {size}: "
                f"each epoch leaves {num_dropped} of them out."
            )

    sampler = parts.sampler
    if sampler is None:
        sampler = create_rl_sampler(data, rows)
    return create_dataloader(
        rows, data, batch_size=size, sampler=sampler, drop_last=True, collate=parts.collate
    )


def build_val_loader(
    config: Config, tokenizer: Any, context: PromptContext, parts: Replacements = NO_PARTS
) -> Any:
    """Build the loader of all validation rows; None if there are none.

    They are in the order of their files unless `data.validation_shuffle` is set.

    Args:
        config: the resolved configuration.
        tokenizer: the tokenizer of the policy.
        context: limits of the rollout and the model that prompts must keep to.
        parts: objects that replace those that the configuration names.
    """
    data = config.data
    rows = parts.val
    if rows is None:
        if not data.val_files:
            return None
        rows = _load_dataset(config, tokenizer, context, is_train=False)
    return create_dataloader(
        rows,
        data,
        batch_size=data.val_batch_size,
        sampler=create_rl_sampler(data, rows, is_train=False),
        drop_last=False,
        collate=parts.collate,
    )
