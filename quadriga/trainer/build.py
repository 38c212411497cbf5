# SPDX-License-Identifier: Apache-2.0
"""Builds the objects of a run: the one place where a name in a configuration becomes a class."""

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
    asked_roles,
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
from quadriga.trainer.checkpoint import start_of
from quadriga.trainer.launch import cluster_of
from quadriga.trainer.profiler import Profiler
from quadriga.trainer.ray_trainer import RayPPOTrainer, Workers
from quadriga.trainer.responses import ModelReward
from quadriga.trainer.roles import Needs, Role
from quadriga.trainer.rollout_pool import RolloutPool, WeightPublisher
from quadriga.trainer.serving import TrainingServer, check_server, serve_rollout
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
"""Arguments of `nsys profile` for each process: one report per profile, and the process goes on."""
SUPERVISED = {
    "sft": (SFTWorker, SFTTrainer),
    "reward_model": (RewardModelTrainingWorker, RewardModelTrainer),
}
"""Worker and loop of each `task` except `rl`."""


@dataclass(frozen=True)
class Replacements:
    """Objects that replace what a configuration names; None: nothing replaces it."""

    # Classes by role, subclasses of the role's class.
    workers: Mapping[Role, type[Any]] = field(default_factory=dict)
    tokenizer: Any = None
    # reward, val_reward: make the reward managers, and new ones after a restart of the workers.
    reward: Callable[[], RewardManager] | None = None
    val_reward: Callable[[], RewardManager] | None = None
    # train, val: data sets
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
            is_cut_short: the loop did not reach its end, so remote workers may be dead or in the
                middle of a call. Otherwise all results have arrived, and a worker that is lost now
                is only reported.
        """
        try:
            if self.server is not None:
                self.server.close()
            self.trainer.close()
        finally:
            # `close` calls the workers, `end` does not.
            end = self.team.end if is_cut_short and self.team.is_remote else self.team.close
            try:
                end()
            except WorkerLostError as error:
                print(f"The run is complete. {error}")
            if isinstance(self.trainer, RayPPOTrainer):
                self.trainer.weights.close()


def check_overlap(config: Config, needs: Needs) -> None:
    """Check that the estimator's inputs can be computed while responses are generated.

    Raises:
        ConfigError: they cannot.
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
    """Check, build and load everything that a run needs, whatever its `task`.

    Remote workers load their models while this process prepares the data.

    Args:
        config: the resolved configuration.
        timeline: records how long each part of the start-up takes.
        parts: objects that replace what the configuration names.
    """
    config = with_episodes(config)
    with timeline.part("checks"):
        needs = Needs.of(config)
        check_before_start(config, needs)
    with timeline.part("tokenizer"):
        tokenizer = parts.tokenizer or build_tokenizer(config)
        check_teachers(config, tokenizer)

    reward: RewardManager | None = None
    server: TrainingServer | None = None
    team = start_workers(config, tokenizer, needs, parts.workers)
    try:
        loaded_models: Callable[[], dict[str, str]] = partial(load_models, team, timeline)
        # Remote workers load in parallel to this process, local ones when it is their turn.
        if team.is_remote:
            loaded_models = in_background(loaded_models, "loading models").result
        with timeline.part("data"):
            context = prompt_context(config, tokenizer)
            train = build_train_loader(config, tokenizer, context, parts)
            val = None
            if config.data.val_files or parts.val is not None:
                val = build_val_loader(config, tokenizer, context, parts)
        if config.task == "rl":
            with timeline.part("rewards"):
                build = parts.reward or partial(build_reward, config, tokenizer, train, val)
                reward = build()
        choices = loaded_models()

        num_batches = max(1, len(train))
        num_steps = config.trainer.num_steps(num_batches)
        config = _with_counted_epochs(config, num_batches)
        trainer: RayPPOTrainer | SupervisedTrainer
        if reward is None:
            learner = team.groups[Role.ActorRollout].as_worker()
            trainer = SUPERVISED[config.task][1](config, learner, train, val, num_steps)
        else:
            workers = handles(team, config)
            if workers.reward_model is not None:
                reward = ModelReward(workers.reward_model, reward)
            trainer_class = parts.trainer or RayPPOTrainer
            trainer = trainer_class(config, tokenizer, workers, reward, train, val, num_steps)
            if parts.val_reward:
                trainer.validator.reward = parts.val_reward()
            trainer.recorder.take_call_times = team.take_call_times
            choices |= needs.describe()
            overlap = config.async_training
            if overlap.enable:
                choices["asynchronous"] = (
                    f"staleness up to {overlap.max_staleness}, in versions; {overlap.in_flight}"
                )
            server = serve_rollout(config, tokenizer, rollout_of(team))
    except BaseException:
        # Graders and workers are processes that would outlive the error.
        if reward is not None:
            reward.close()
        team.end()
        raise

    trainer.profiler = Profiler(config, team.groups)
    width = max(map(len, choices), default=0)
    for name, choice in choices.items():
        print(f"  {name:<{width}}  {choice}")
    for table in layout_tables(config, has_critic=needs.critic):
        print(table)
    return BuiltRun(trainer, team, server)


def check_before_start(config: Config, needs: Needs) -> None:
    """Refuse a configuration that cannot run, before a process starts.

    Args:
        config: the resolved configuration.
        needs: optional passes of its steps.

    Raises:
        ConfigError: an algorithm, an engine, a model or a checkpoint cannot be used.
    """
    check_services(config.trainer.loggers)
    if config.task == "rl":
        # Both are looked up only to refuse a wrong loss, option or engine.
        UpdateInputs(config)
        rollout_engine_class(config)
        check_overlap(config, needs)
        check_server(config)
    check_models(config, has_critic=needs.critic)
    check_checkpoint(config, start_of(config.trainer))


def _with_counted_epochs(config: Config, num_batches: int) -> Config:
    """Write `after_each_epoch` in `save_freq` and `test_freq` as a number of steps."""
    counts = {}
    for name in ("save_freq", "test_freq"):
        if getattr(config.trainer, name) == "after_each_epoch":
            counts[name] = num_batches
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=counts)})


def start_workers(
    config: Config, tokenizer: Any, needs: Needs, given: Mapping[Role, type[Any]]
) -> WorkerGroups:
    """Start a worker group for each role.

    They run on the pools of `trainer.placement` and the backend of `trainer.backend`.

    Args:
        config: the resolved configuration.
        tokenizer: the tokenizer of the policy.
        needs: optional passes, which decide on the roles.
        given: worker classes that replace those of their roles.

    Raises:
        ConfigError: a class of `given` is not a subclass of its role's class.
    """
    # One class may serve every role that holds the policy.
    policy_class = next((given[Role(role)] for role in POLICIES if role in given), None)
    role_classes: dict[Role, type[Any]] = {
        Role.Critic: CriticWorker,
        Role.RewardModel: RewardModelWorker,
        Role.Teacher: TeacherWorker,
        Role.Rollout: RolloutWorker,
    }
    asked = ()
    if config.task == "rl":
        asked = asked_roles(config)
    else:
        role_classes[Role.ActorRollout] = SUPERVISED[config.task][0]
    placement = place_roles(
        config.trainer, has_reference=needs.reference, has_critic=needs.critic, asked=asked
    )

    workers = {}
    for role in map(Role, placement.roles):
        base = role_classes.get(role, ActorRolloutRefWorker)
        cls = given.get(role) or (policy_class if role in POLICIES else None) or base
        if not issubclass(cls, base):
            raise ConfigError(
                f"the worker of {role}", got=cls.__name__, expected=f"a subclass of {base.__name__}"
            )
        if role in role_classes:
            workers[role] = ClassWithInitArgs(cls, config, tokenizer)
        else:
            # The worker of a policy serves one of several roles.
            workers[role] = ClassWithInitArgs(cls, config, tokenizer, role)

    runtime_env = {"nsight": NSIGHT} if config.global_profiler.tool == "nsys" else {}
    pools = dict(placement.pools)
    devices = {}
    num_devices = rollout_devices(config)
    if num_devices > 1:
        # A process of this pool drives several devices.
        pool = placement.roles["rollout"]
        pools[pool] = [count // num_devices for count in pools[pool]]
        devices[pool] = num_devices
    team_class = resolve_name(TEAMS[config.trainer.backend])
    return team_class(workers, placement.roles, pools, config.trainer, runtime_env, devices)


def state_copies(config: Config) -> Any:
    """Keeper of copies of the state that outlive the workers; None if workers never restart."""
    trainer = config.trainer
    if trainer.backend != "ray" or not trainer.state_copies:
        return None
    if not trainer.max_worker_restarts or trainer.val_only:
        return None
    # A copy at every step would have to wait for every request in flight.
    if config.async_training.is_stale:
        return None
    return resolve_name(STATE_COPIES)()


def load_models(team: WorkerGroups, timeline: Timeline) -> dict[str, str]:
    """Load the models of all workers, at the same time if they are processes of their own.

    Args:
        team: the workers, as started.
        timeline: records the time.

    Returns:
        Choices that were made, to be printed: those of rank 0, and of each rank that chose
        otherwise.
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
        first = choices_of_ranks[0]
        merged = dict(first)
        for rank, choices_of_rank in enumerate(choices_of_ranks):
            for name, choice in choices_of_rank.items():
                if choice != first.get(name):
                    merged[name] = f"{merged.get(name, 'none')}; rank {rank}: {choice}"
        choices |= merged
    return choices


def rollout_of(team: WorkerGroups) -> WorkerGroup[Any]:
    """Worker group of the rollout: one of its own, or the policy's."""
    roles = (Role.Rollout, Role.ActorRolloutRef, Role.ActorRollout)
    return next(team.groups[role] for role in roles if role in team.groups)


def handles(team: WorkerGroups, config: Config) -> Workers:
    """Handles of the team's groups, as the training loop calls them.

    A rollout on processes of its own receives the actor's weights through a `RolloutPool`.
    """
    groups = {Role(role): group for role, group in team.groups.items()}
    workers = {role: group.as_worker() for role, group in groups.items()}
    policy = next(
        role for role in (Role.ActorRolloutRef, Role.ActorRollout, Role.Actor) if role in groups
    )
    rollout = workers[policy]
    weights = WeightPublisher(groups[policy])
    # An actor without the rollout: responses come from processes of their own.
    if policy == Role.Actor:
        pool_class = StreamPool if config.async_training.enable else RolloutPool
        rollout = weights = pool_class(
            groups[policy], groups[Role.Rollout], rollout_group_size(config)
        )
    return Workers(
        actor=workers[policy],
        rollout=rollout,
        weights=weights,
        reference=workers.get(Role.ActorRolloutRef) or workers.get(Role.RefPolicy),
        critic=workers.get(Role.Critic),
        reward_model=workers.get(Role.RewardModel),
        teacher=workers.get(Role.Teacher),
    )


@contextmanager
def frozen_workers(config: Config, tokenizer: Any, *roles: Role) -> Iterator[list[Any]]:
    """Context manager: handles of the groups of `frozen_team`, typed as their workers."""
    with frozen_team(config, tokenizer, *roles) as team:
        yield [team.groups[role].as_worker() for role in roles]


@contextmanager
def frozen_team(config: Config, tokenizer: Any, *roles: Role) -> Iterator[WorkerGroups]:
    """Context manager: workers whose models do not learn, on the processes that a run would use.

    Args:
        config: the resolved configuration.
        tokenizer: the tokenizer of the policy.
        roles: `Role.ActorRollout`, which takes the place of the run's rollout, and
            `Role.RewardModel`.
    """
    pools = role_pools(config.trainer, [role for role in roles if role == Role.RewardModel])
    policy = next(role for role in (Role.Rollout, *POLICIES) if role in pools)
    # Nothing is trained: no generation runs beside training, and a call may have all rows.
    trainer = config.trainer.model_copy(update={"phase_timeout_s": None})
    config = config.model_copy(update={"async_training": AsyncTrainingConfig(), "trainer": trainer})
    workers = {}
    pool_of_role = {}
    for role in roles:
        if role == Role.RewardModel:
            pool_of_role[role] = pools[role]
            workers[role] = ClassWithInitArgs(RewardModelWorker, config, tokenizer)
        else:
            pool_of_role[role] = pools[policy]
            workers[role] = ClassWithInitArgs(
                ActorRolloutRefWorker, config, tokenizer, role, is_trained=False
            )
    processes = {pool: trainer.processes_of(pool) for pool in pool_of_role.values()}
    team_class = resolve_name(TEAMS[trainer.backend])
    with cluster_of(config):
        team: WorkerGroups = team_class(workers, pool_of_role, processes, trainer)
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

    Args:
        config: the resolved configuration.
        tokenizer: the tokenizer of the policy.
        loaders: loaders of the rows; None is skipped.

    Raises:
        RewardError: it cannot grade responses to a row.
    """
    manager = load_reward_manager(config, tokenizer)
    try:
        for loader in loaders:
            if loader is not None:
                # A mixture is a data set of several parts.
                for rows in getattr(loader.dataset, "parts", [loader.dataset]):
                    _check_rows(manager, rows)
                    if manager.reads_rows and isinstance(rows, RLHFDataset):
                        rows.columns_entry = ROW
    except BaseException:
        manager.close()
        raise
    for notice in manager.notices:
        print(notice)
    return manager


def _check_rows(manager: RewardManager, rows: Any) -> None:
    """Check that a reward manager can grade the rows of a data set."""
    # A class of the user may make other rows of the files.
    if getattr(type(rows), "__getitem__", None) is not RLHFDataset.__getitem__:
        return
    sources = rows.column(rows.config.reward_fn_key)
    pairs = zip(sources, rows.column("reward_model"), strict=True)
    checked = ((place, source, truth) for (place, source), (_, truth) in pairs)
    # In chunks, which bound the memory.
    while chunk := list(islice(checked, 4096)):
        manager.check_rows(chunk)


def build_tokenizer(config: Config) -> Any:
    """Load the tokenizer of `data.tokenizer`, by default that of the model."""
    model = config.actor_rollout_ref.model
    return load_tokenizer(
        config.data.tokenizer or model.path,
        trust_remote_code=config.data.trust_remote_code or model.trust_remote_code,
        chat_template=model.custom_chat_template,
    )


def _dataset(config: Config, tokenizer: Any, context: PromptContext, *, is_train: bool) -> Any:
    """The data set of training or of validation."""
    data = config.data
    files = data.train_files if is_train else data.val_files
    if config.task == "rl":
        if config.reward_model.enable:
            # A reward model may read the chats.
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

    dataset_class: type[Any] = SFTDataset
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
    """Build the loader of the training rows, which gives only full batches.

    Args:
        config: the resolved configuration.
        tokenizer: the tokenizer of the policy.
        context: facts about the rollout and the model that decide about prompts.
        parts: objects that replace what the configuration names.
    """
    data = config.data
    rows = parts.train
    if rows is None:
        rows = _dataset(config, tokenizer, context, is_train=True)
    if config.distillation.enable and isinstance(rows, RLHFDataset):
        require_teachers(config, rows.column(data.reward_fn_key))

    # Dynamic sampling may take other numbers of prompts than an update learns from.
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
    """Build the loader of all validation rows.

    They are in the order of their files unless `data.validation_shuffle` is set.

    Args:
        config: the resolved configuration.
        tokenizer: the tokenizer of the policy.
        context: facts about the rollout and the model that decide about prompts.
        parts: objects that replace what the configuration names.
    """
    data = config.data
    rows = parts.val
    if rows is None:
        rows = _dataset(config, tokenizer, context, is_train=False)
    return create_dataloader(
        rows,
        data,
        batch_size=data.val_batch_size,
        sampler=create_rl_sampler(data, rows, is_train=False),
        drop_last=False,
        collate=parts.collate,
    )
