# SPDX-License-Identifier: Apache-2.0
"""From a configuration to the objects of a run: the one place where a name becomes a class."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from quadriga.background import in_background
from quadriga.config import Config, DataConfig, Placement, place_roles
from quadriga.data import (
    create_dataloader,
    create_rl_dataset,
    create_rl_sampler,
    load_processor,
    load_tokenizer,
)
from quadriga.data.rm_dataset import RMDataset
from quadriga.data.sft_dataset import MultiTurnSFTDataset, SFTDataset, TokenizedRows
from quadriga.observe.timing import Timeline
from quadriga.rewards import RewardManager, load_reward_manager
from quadriga.single_controller import ClassWithInitArgs, LocalWorkerGroup, WorkerGroups
from quadriga.trainer.ray_trainer import RayPPOTrainer, WeightPublisher, Workers
from quadriga.trainer.rewards import ModelReward
from quadriga.trainer.roles import Needs, Role
from quadriga.trainer.sft import Loaders, RewardModelTrainer, SFTTrainer, SupervisedTrainer
from quadriga.workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker, RolloutWorker
from quadriga.workers.base import UpdateInputs
from quadriga.workers.models import check_models, layout_tables, require_text
from quadriga.workers.rollout_engines import rollout_engine_class
from quadriga.workers.sft import RewardModelTrainingWorker, SFTWorker

# Import strings: Ray is imported only where the configuration names it.
TEAMS = {
    "local": "quadriga.single_controller.worker_group:LocalWorkerGroups",
    "ray": "quadriga.single_controller.ray:RayWorkerGroups",
}
SFT_DATASETS: dict[str, type[TokenizedRows]] = {"messages": MultiTurnSFTDataset, "prompt_response": SFTDataset}


@dataclass(frozen=True)
class Run:
    """The objects of a run: the trainer on the driver, and the workers that it calls."""

    trainer: RayPPOTrainer | SupervisedTrainer
    team: WorkerGroups

    def close(self, *, is_cut_short: bool = False) -> None:
        """Stop and end everything.

        Args:
            is_cut_short: the loop did not come to its end: workers beside it may be dead, or in the midst of a call.
        """
        try:
            self.trainer.close()
        finally:
            if is_cut_short and self.team.is_remote:
                self.team.end()
            else:
                self.team.close()


def build_run(config: Config, timeline: Timeline) -> Run:
    """Everything a run needs, loaded and checked, whatever its `task`.

    Args:
        config: the resolved configuration.
        timeline: records where the start-up spends its time.
    """
    return _build_rl_run(config, timeline) if config.task == "rl" else _build_supervised_run(config, timeline)


def _build_rl_run(config: Config, timeline: Timeline) -> Run:
    """Reinforcement learning: workers that are other processes load their models while this one prepares the data."""
    needs = Needs.of(config)
    UpdateInputs(config)  # refuses a loss or an option that does not exist, before a process starts
    rollout_engine_class(config)  # likewise an engine
    check_models(config, has_critic=needs.critic)
    with timeline.part("tokenizer"):
        tokenizer = build_tokenizer(config)
    team = build_team(config, tokenizer, needs)
    try:
        models: Callable[[], dict[str, str]] = partial(load_models, team, timeline)
        if team.is_remote:
            models = in_background(models, "loading models").result
        with timeline.part("data"):
            train, val = build_dataloaders(config, tokenizer)
        choices = models()
        workers = handles(team)
        with timeline.part("rewards"):
            reward = build_reward(config, tokenizer, workers.reward_model)
        total = config.trainer.total_training_steps or config.trainer.total_epochs * len(train)
        trainer = RayPPOTrainer(config, tokenizer, workers, reward, train, val, total)
    except BaseException:
        team.end()
        raise
    print_choices(choices | needs.describe(), config, has_critic=needs.critic)
    return Run(trainer, team)


def _build_supervised_run(config: Config, timeline: Timeline) -> Run:
    """SFT, or the training of a reward model."""
    require_text(config, "quadriga sft")
    check_models(config, has_critic=False)
    with timeline.part("tokenizer"):
        tokenizer = build_tokenizer(config)
    with timeline.part("data"):
        loaders = build_supervised_loaders(config, tokenizer)
    is_reward_model = config.task == "reward_model"
    role, learner = Role.ActorRollout, RewardModelTrainingWorker if is_reward_model else SFTWorker
    placement = place_roles(config.trainer, has_reference=False, has_critic=False, has_reward_model=False)
    team = start_team(config, placement, {role: ClassWithInitArgs(learner, config, tokenizer)})
    try:
        choices = load_models(team, timeline)
        trainer = RewardModelTrainer if is_reward_model else SFTTrainer
        run = Run(trainer(config, team.groups[role].as_worker(), loaders), team)
    except BaseException:
        team.end()
        raise
    print_choices(choices, config, has_critic=False)
    return run


def print_choices(choices: dict[str, str], config: Config, *, has_critic: bool) -> None:
    """Tell what was chosen, and how the ranks of each role are arranged."""
    width = max(map(len, choices))
    for name, choice in choices.items():
        print(f"  {name:<{width}}  {choice}")
    for table in layout_tables(config, has_critic=has_critic):
        print(table)


def build_team(config: Config, tokenizer: Any, needs: Needs) -> WorkerGroups:
    """A worker group for each role of the run, on the pools of `trainer.placement`."""
    placement = place_roles(
        config.trainer,
        has_reference=needs.reference,
        has_critic=needs.critic,
        has_reward_model=needs.reward_model,
    )
    return start_team(
        config, placement, {role: _worker_class(Role(role), config, tokenizer) for role in placement.roles}
    )


def start_team(config: Config, placement: Placement, classes: Mapping[str, ClassWithInitArgs[Any]]) -> WorkerGroups:
    """A worker group of each of these classes, by role, on the backend that `trainer.backend` names."""
    module, _, name = TEAMS[config.trainer.backend].partition(":")
    return getattr(import_module(module), name)(classes, placement.roles, placement.pools, config.trainer.device)


def _worker_class(role: Role, config: Config, tokenizer: Any) -> ClassWithInitArgs[Any]:
    match role:
        case Role.Critic:
            return ClassWithInitArgs(CriticWorker, config, tokenizer)
        case Role.RewardModel:
            return ClassWithInitArgs(RewardModelWorker, config, tokenizer)
        case Role.Rollout:
            return ClassWithInitArgs(RolloutWorker, config, tokenizer)
        case _:
            return ClassWithInitArgs(ActorRolloutRefWorker, config, tokenizer, role)


def load_models(team: WorkerGroups, timeline: Timeline) -> dict[str, str]:
    """Have all workers load their models, all at once where they can. Returns what was chosen, to be printed."""
    with timeline.part("models"):
        futures = [group.method("init_model")() for group in team.groups.values()]
        chosen = [_of_all_ranks(future.get()) for future in futures]
    return {name: choice for choices in [team.describe(), *chosen] for name, choice in choices.items()}


def _of_all_ranks(chosen: Sequence[dict[str, str]]) -> dict[str, str]:
    """Rank 0's choices; a rank that chose otherwise is named beside them."""
    merged = dict(chosen[0])
    for rank, choices in enumerate(chosen):
        for name, choice in choices.items():
            if choice != chosen[0].get(name):
                merged[name] = f"{merged.get(name, 'none')}; rank {rank}: {choice}"
    return merged


def handles(team: WorkerGroups) -> Workers:
    """The team's groups as the loop calls them. A rollout on processes of its own has the actor's weights then."""
    groups = {Role(role): group for role, group in team.groups.items()}
    workers = {role: group.as_worker() for role, group in groups.items()}
    policy = next(role for role in (Role.ActorRolloutRef, Role.ActorRollout, Role.Actor) if role in groups)
    rollout = Role.Rollout if policy == Role.Actor else policy
    apart = None if rollout == policy else groups[rollout]
    return Workers(
        actor=workers[policy],
        rollout=workers[rollout],
        weights=WeightPublisher(groups[policy], apart),
        reference=workers.get(Role.ActorRolloutRef) or workers.get(Role.RefPolicy),
        critic=workers.get(Role.Critic),
        reward_model=workers.get(Role.RewardModel),
    )


def build_reward(config: Config, tokenizer: Any, model: RewardModelWorker | None) -> RewardManager:
    """The reward manager of a run, with the reward model beside it where there is one."""
    manager = load_reward_manager(config, tokenizer)
    return manager if model is None else ModelReward(model, manager)


def build_reward_model(config: Config, tokenizer: Any) -> RewardModelWorker | None:
    """A reward model in this process, where the configuration enables one."""
    if not config.reward_model.enable:
        return None
    group = LocalWorkerGroup(ClassWithInitArgs(RewardModelWorker, config, tokenizer), name=Role.RewardModel)
    group.method("init_model")().get()
    return group.as_worker()


def build_tokenizer(config: Config) -> Any:
    """The tokenizer of `data.tokenizer`, or of the model."""
    model = config.actor_rollout_ref.model
    return load_tokenizer(
        config.data.tokenizer or model.path,
        trust_remote_code=config.data.trust_remote_code or model.trust_remote_code,
        chat_template=model.custom_chat_template,
    )


def build_processor(config: Config) -> Any:
    """The image processor of a vision-language model; None for a language model."""
    model = config.actor_rollout_ref.model
    trusts = config.data.trust_remote_code or model.trust_remote_code
    sizes = config.data.mm_processor_kwargs.model_dump(exclude_none=True)
    return load_processor(model.path, trust_remote_code=trusts, options=sizes)


def build_dataloaders(config: Config, tokenizer: Any) -> tuple[Any, Any]:
    """Loaders of training prompts (whole batches only) and of validation prompts (all of them, or None)."""
    data, processor = _data_config(config), build_processor(config)
    train = create_rl_dataset(
        data.train_files, data, tokenizer, processor, is_train=True, max_samples=data.train_max_samples
    )
    sampler = create_rl_sampler(data, train)
    train_loader = create_dataloader(train, data, batch_size=data.train_batch_size, sampler=sampler, drop_last=True)
    return train_loader, build_val_dataloader(config, tokenizer) if data.val_files else None


def build_supervised_loaders(config: Config, tokenizer: Any) -> Loaders:
    """Loaders of the rows of training, whole batches only, and of validation."""
    data = config.data
    kind = RMDataset if config.task == "reward_model" else SFT_DATASETS[data.format]
    train = kind(data.train_files, tokenizer, data)
    size = min(data.train_batch_size, len(train))
    if size < data.train_batch_size:
        print(f"data.train_batch_size: there are {size} rows; a batch has all of them.")
    sampler = create_rl_sampler(data, train)
    train_loader = create_dataloader(train, data, batch_size=size, sampler=sampler, drop_last=True)
    if not data.val_files:
        return Loaders(train_loader, None)
    val = kind(data.val_files, tokenizer, data, is_train=False)
    in_order = create_rl_sampler(data.model_copy(update={"shuffle": False}), val)
    val_loader = create_dataloader(val, data, batch_size=data.val_batch_size, sampler=in_order, drop_last=False)
    return Loaders(train_loader, val_loader)


def _data_config(config: Config) -> DataConfig:
    """A reward model may read the chats."""
    return config.data.model_copy(update={"return_raw_chat": True}) if config.reward_model.enable else config.data


def build_val_dataloader(config: Config, tokenizer: Any) -> Any:
    """A loader of all validation prompts, in the order of their files unless `data.validation_shuffle`."""
    data, processor = _data_config(config), build_processor(config)
    val = create_rl_dataset(
        data.val_files, data, tokenizer, processor, is_train=False, max_samples=data.val_max_samples
    )
    sampler = create_rl_sampler(data, val, is_train=False)
    return create_dataloader(val, data, batch_size=data.val_batch_size, sampler=sampler, drop_last=False)


def build_policy(config: Config, tokenizer: Any) -> ActorRolloutRefWorker:
    """A policy that generates and does not learn."""
    policy_class = ClassWithInitArgs(ActorRolloutRefWorker, config, tokenizer, Role.ActorRollout, is_trained=False)
    group = LocalWorkerGroup(policy_class)
    group.method("init_model")().get()
    return group.as_worker()
