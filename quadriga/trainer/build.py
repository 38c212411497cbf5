# SPDX-License-Identifier: Apache-2.0
"""From a configuration to the objects of a run: the one place where a name becomes a class."""

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
from quadriga.data.prompt_lengths import PromptContext
from quadriga.data.rl_dataset import RLHFDataset
from quadriga.data.rm_dataset import RMDataset
from quadriga.data.sft_dataset import MultiTurnSFTDataset, SFTDataset
from quadriga.errors import ConfigError, WorkerLostError
from quadriga.observe.timing import Timeline
from quadriga.observe.tracking.services import check_services
from quadriga.rewards import RewardManager, load_reward_manager
from quadriga.single_controller import ClassWithInitArgs, WorkerGroups
from quadriga.trainer.asynchronous.streams import StreamPool
from quadriga.trainer.checkpoint import start_of
from quadriga.trainer.launch import cluster_of
from quadriga.trainer.profiler import Profiler
from quadriga.trainer.ray_trainer import RayPPOTrainer, Workers
from quadriga.trainer.responses import ModelReward
from quadriga.trainer.roles import Needs, Role
from quadriga.trainer.rollout_pool import RolloutPool, WeightPublisher
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

# Import strings: Ray is imported only where the configuration names it.
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
"""Arguments of `nsys profile` for each process: a report for each profile, and the process goes on."""
SUPERVISED = {
    "sft": (SFTWorker, SFTTrainer),
    "reward_model": (RewardModelTrainingWorker, RewardModelTrainer),
}
"""The worker and the loop of each `task` but `rl`."""


@dataclass(frozen=True)
class Parts:
    """What takes the place of what a configuration names; None: nothing does."""

    # Classes by role, subclasses of those that the role has.
    workers: Mapping[Role, type[Any]] = field(default_factory=dict)
    tokenizer: Any = None
    # reward, val_reward: make the reward managers, anew after the workers were started again
    reward: Callable[[], RewardManager] | None = None
    val_reward: Callable[[], RewardManager] | None = None
    # train, val: data sets
    train: Any = None
    val: Any = None
    sampler: Any = None
    collate: Callable[..., Any] | None = None


NO_PARTS = Parts()


@dataclass(frozen=True)
class Run:
    """The objects of a run: the trainer on the driver, and the workers that it calls."""

    trainer: RayPPOTrainer | SupervisedTrainer
    team: WorkerGroups

    def close(self, *, is_cut_short: bool = False) -> None:
        """Stop and end everything. With `is_cut_short` the loop did not reach its end: remote workers may be dead or in
        the middle of a call. Else what they had to give is there, and the loss of one is told."""
        try:
            self.trainer.close()
        finally:
            end = self.team.end if is_cut_short and self.team.is_remote else self.team.close
            try:
                end()
            except WorkerLostError as error:
                print(f"The run is complete. {error}")
            if isinstance(self.trainer, RayPPOTrainer):
                self.trainer.weights.close()


def check_overlap(config: Config, needs: Needs) -> None:
    """Raises ConfigError: what the estimator needs cannot be computed while responses are generated."""
    settings, critic = config.async_training, config.critic.ppo_mini_batch_size
    actor = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if needs.greedy_baseline and settings.enable:
        got, fix = (
            "an estimator with a greedy response as baseline",
            "Take another estimator, such as rloo.",
        )
        raise ConfigError("async_training.enable", got=got, expected="one without", fix=fix)
    if needs.critic and settings.by_mini_batch and critic > actor:
        got = f"{critic}, with async_training.by_mini_batch=True"
        raise ConfigError(
            "critic.ppo_mini_batch_size", got=got, expected=f"at most the actor's, {actor}"
        )


def build_run(config: Config, timeline: Timeline, parts: Parts = NO_PARTS) -> Run:
    """Everything a run needs, loaded and checked, whatever its `task`. Workers that are other processes load their
    models while this one prepares the data."""
    with timeline.part("checks"):
        needs = Needs.of(config)
        check_services(config.trainer.loggers)
        if config.task == "rl":
            UpdateInputs(
                config
            )  # refuses a loss or an option that does not exist, before a process starts
            rollout_engine_class(config)  # likewise an engine
            check_overlap(config, needs)
        check_models(config, has_critic=needs.critic)
        check_checkpoint(config, start_of(config.trainer))
    with timeline.part("tokenizer"):
        tokenizer = parts.tokenizer or build_tokenizer(config)
        check_teachers(config, tokenizer)
    reward: RewardManager | None = None
    team = start_workers(config, tokenizer, needs, parts.workers)
    try:
        models: Callable[[], dict[str, str]] = partial(load_models, team, timeline)
        if team.is_remote:
            models = in_background(models, "loading models").result
        with timeline.part("data"):
            context = prompt_context(config, tokenizer)
            train = build_train_loader(config, tokenizer, context, parts)
            has_val = config.data.val_files or parts.val is not None
            val = build_val_loader(config, tokenizer, context, parts) if has_val else None
        if config.task == "rl":
            with timeline.part("rewards"):
                reward = (
                    parts.reward() if parts.reward else build_reward(config, tokenizer, train, val)
                )
        choices = models()
        total = config.trainer.num_steps(max(1, len(train)))
        names = [
            name
            for name in ("save_freq", "test_freq")
            if getattr(config.trainer, name) == "after_each_epoch"
        ]
        counted = dict.fromkeys(names, max(1, len(train)))
        config = config.model_copy(update={"trainer": config.trainer.model_copy(update=counted)})
        if reward is not None:
            workers = handles(team, config)
            if workers.reward_model is not None:
                reward = ModelReward(workers.reward_model, reward)
            trainer = RayPPOTrainer(config, tokenizer, workers, reward, train, val, total)
            if parts.val_reward:
                trainer.validator.reward = parts.val_reward()
            choices |= needs.describe()
            if (beside := config.async_training).enable:
                choices["asynchronous"] = (
                    f"staleness up to {beside.max_staleness}, in versions; {beside.in_flight}"
                )
        else:
            _, trainer_class = SUPERVISED[config.task]
            trainer = trainer_class(
                config, team.groups[Role.ActorRollout].as_worker(), train, val, total
            )
    except BaseException:
        if reward is not None:
            reward.close()
        team.end()
        raise
    trainer.profiler = Profiler(config, team.groups)
    for name, choice in choices.items():
        print(f"  {name:<{max(map(len, choices))}}  {choice}")
    for table in layout_tables(config, has_critic=needs.critic):
        print(table)
    return Run(trainer, team)


def start_workers(
    config: Config, tokenizer: Any, needs: Needs, given: Mapping[Role, type[Any]]
) -> WorkerGroups:
    """A worker group for each role of the run, on the pools of `trainer.placement` and the backend that
    `trainer.backend` names. Raises ConfigError: a class that is given is not one of its role."""
    asked = asked_roles(config) if config.task == "rl" else ()
    placement = place_roles(
        config.trainer, has_reference=needs.reference, has_critic=needs.critic, asked=asked
    )
    classes: dict[Role, type[Any]] = {
        Role.Critic: CriticWorker,
        Role.RewardModel: RewardModelWorker,
        Role.Teacher: TeacherWorker,
        Role.Rollout: RolloutWorker,
    }
    if config.task != "rl":
        classes[Role.ActorRollout], _ = SUPERVISED[config.task]
    policy = next((given[Role(role)] for role in POLICIES if role in given), None)
    workers = {}
    for role in map(Role, placement.roles):
        base = classes.get(role, ActorRolloutRefWorker)
        cls = given.get(role) or (policy if role in POLICIES else None) or base
        if not issubclass(cls, base):
            raise ConfigError(
                f"the worker of {role}", got=cls.__name__, expected=f"a subclass of {base.__name__}"
            )
        workers[role] = ClassWithInitArgs(
            cls, config, tokenizer, *([] if role in classes else [role])
        )
    under = {"nsight": NSIGHT} if config.global_profiler.tool == "nsys" else {}
    pools, devices = dict(placement.pools), dict[str, int]()
    if (size := rollout_devices(config)) > 1:
        pool = placement.roles["rollout"]
        pools[pool], devices[pool] = [count // size for count in pools[pool]], size
    return resolve_name(TEAMS[config.trainer.backend])(
        workers, placement.roles, pools, config.trainer, under, devices
    )


def state_copies(config: Config) -> Any:
    """What keeps copies of the state over restarts of the workers; None where there are no restarts."""
    trainer = config.trainer
    if (
        trainer.backend != "ray"
        or not trainer.state_copies
        or not trainer.max_worker_restarts
        or trainer.val_only
    ):
        return None
    if config.async_training.is_stale:  # what is under way would have to end at every step
        return None
    return resolve_name(STATE_COPIES)()


def load_models(team: WorkerGroups, timeline: Timeline) -> dict[str, str]:
    """Have all workers load their models, all at once where they can. Returns what was chosen, to be printed: what rank
    0 has chosen, and beside it a rank that chose otherwise."""
    if team.is_remote:
        with timeline.part("workers"):
            team.await_start()
    with timeline.part("models"):
        futures = [group.method("init_model")() for group in team.groups.values()]
        chosen = [future.get() for future in futures]
    choices = dict(team.describe())
    for ranks in chosen:
        merged = dict(ranks[0])
        for rank, own in enumerate(ranks):
            for name, choice in own.items():
                if choice != ranks[0].get(name):
                    merged[name] = f"{merged.get(name, 'none')}; rank {rank}: {choice}"
        choices |= merged
    return choices


def handles(team: WorkerGroups, config: Config) -> Workers:
    """The team's groups as the loop calls them. A rollout on processes of its own has the actor's weights then."""
    groups = {Role(role): group for role, group in team.groups.items()}
    workers = {role: group.as_worker() for role, group in groups.items()}
    policy = next(
        role for role in (Role.ActorRolloutRef, Role.ActorRollout, Role.Actor) if role in groups
    )
    weights = WeightPublisher(groups[policy])
    if policy == Role.Actor:
        rollout = groups[Role.Rollout]
        kind = StreamPool if config.async_training.enable else RolloutPool
        weights = kind(groups[policy], rollout, rollout_group_size(config))
    return Workers(
        actor=workers[policy],
        rollout=weights if isinstance(weights, RolloutPool) else workers[policy],
        weights=weights,
        reference=workers.get(Role.ActorRolloutRef) or workers.get(Role.RefPolicy),
        critic=workers.get(Role.Critic),
        reward_model=workers.get(Role.RewardModel),
        teacher=workers.get(Role.Teacher),
    )


@contextmanager
def frozen_workers(config: Config, tokenizer: Any, *roles: Role) -> Iterator[list[Any]]:
    """Workers of these roles, the policy or a reward model, with models that do not learn, on the processes that a run
    would have for them. A policy is where the run's rollout is."""
    pools = role_pools(config.trainer, [role for role in roles if role == Role.RewardModel])
    policy = next(one for one in (Role.Rollout, *POLICIES) if one in pools)
    homes = {role: pools[policy if role == Role.ActorRollout else role] for role in roles}
    processes = {pool: config.trainer.processes_of(pool) for pool in homes.values()}
    # There is no training: nothing is generated beside it, and one call may have all rows.
    trainer = config.trainer.model_copy(update={"phase_timeout_s": None})
    config = config.model_copy(update={"async_training": AsyncTrainingConfig(), "trainer": trainer})
    policies = ClassWithInitArgs(
        ActorRolloutRefWorker, config, tokenizer, Role.ActorRollout, is_trained=False
    )
    grader = ClassWithInitArgs(RewardModelWorker, config, tokenizer)
    workers = {role: policies if role == Role.ActorRollout else grader for role in roles}
    with cluster_of(config):
        team: WorkerGroups = resolve_name(TEAMS[config.trainer.backend])(
            workers, homes, processes, config.trainer
        )
        try:
            load_models(team, Timeline())
            yield [team.groups[role].as_worker() for role in roles]
        except BaseException:
            # Remote workers may be dead or in the middle of a call.
            team.end()
            raise
        team.close()


def build_reward(config: Config, tokenizer: Any, *loaders: Any) -> RewardManager:
    """The reward manager of a run, which can grade responses to every row of these loaders (RewardError: it cannot)."""
    manager = load_reward_manager(config, tokenizer)
    try:
        found = [loader.dataset for loader in loaders if loader is not None]
        for rows in (part for one in found for part in getattr(one, "parts", [one])):
            # A class of the user's may make other rows of the files.
            if getattr(type(rows), "__getitem__", None) is RLHFDataset.__getitem__:
                sources, models = (
                    rows.column(rows.config.reward_fn_key),
                    rows.column("reward_model"),
                )
                found = (
                    (place, one, other)
                    for (place, one), (_, other) in zip(sources, models, strict=True)
                )
                while some := list(islice(found, 4096)):
                    manager.check_rows(some)
    except BaseException:
        manager.close()
        raise
    for notice in manager.notices:
        print(notice)
    return manager


def build_tokenizer(config: Config) -> Any:
    """The tokenizer of `data.tokenizer`, or of the model."""
    model = config.actor_rollout_ref.model
    trusts, template = (
        config.data.trust_remote_code or model.trust_remote_code,
        model.custom_chat_template,
    )
    return load_tokenizer(
        config.data.tokenizer or model.path, trust_remote_code=trusts, chat_template=template
    )


def _dataset(config: Config, tokenizer: Any, context: PromptContext, *, is_train: bool) -> Any:
    """The rows of training or of validation."""
    data = config.data
    files = data.train_files if is_train else data.val_files
    if config.task != "rl":
        kind = {"messages": MultiTurnSFTDataset, "prompt_response": SFTDataset}[data.format]
        kind = RMDataset if config.task == "reward_model" else kind
        stop_token_ids = declared_stop_token_ids(config.actor_rollout_ref.model.path)
        options = {"processor": build_processor(config), "stop_token_ids": stop_token_ids}
        options["vocabulary_size"] = context.vocabulary_size
        return kind(files, tokenizer, data, is_train=is_train, **options)
    if config.reward_model.enable:
        # A reward model may read the chats.
        data = data.model_copy(update={"return_raw_chat": True})
    size, processor = (
        data.train_max_samples if is_train else data.val_max_samples,
        build_processor(config),
    )
    options = {"is_train": is_train, "max_samples": size, "context": context}
    return create_rl_dataset(files, data, tokenizer, processor, **options)


def build_train_loader(
    config: Config, tokenizer: Any, context: PromptContext, parts: Parts = NO_PARTS
) -> Any:
    """A loader of training rows, whole batches only."""
    data = config.data
    rows = (
        parts.train
        if parts.train is not None
        else _dataset(config, tokenizer, context, is_train=True)
    )
    if config.distillation.enable and isinstance(rows, RLHFDataset):
        require_teachers(config, rows.column(data.reward_fn_key))
    size = data.train_batch_size
    if data.gen_batch_size is not None and config.algorithm.filter_groups.enable:
        size = data.gen_batch_size
    if config.task != "rl" and len(rows) < size:
        size = len(rows)
        print(f"data.train_batch_size: there are {size} rows; a batch has all of them.")
    elif len(rows) > size and (rest := len(rows) % size) and not (data.mixture or data.streaming):
        print(
            f"data.train_batch_size: {len(rows)} rows in batches of {size}: each epoch leaves {rest} of them out."
        )
    sampler = parts.sampler if parts.sampler is not None else create_rl_sampler(data, rows)
    return create_dataloader(
        rows, data, batch_size=size, sampler=sampler, drop_last=True, collate=parts.collate
    )


def build_val_loader(
    config: Config, tokenizer: Any, context: PromptContext, parts: Parts = NO_PARTS
) -> Any:
    """A loader of all validation rows, in the order of their files unless `data.validation_shuffle`."""
    data = config.data
    rows = (
        parts.val if parts.val is not None else _dataset(config, tokenizer, context, is_train=False)
    )
    sampler, size = create_rl_sampler(data, rows, is_train=False), data.val_batch_size
    return create_dataloader(
        rows, data, batch_size=size, sampler=sampler, drop_last=False, collate=parts.collate
    )
