# SPDX-License-Identifier: Apache-2.0
"""What a run of SFT or of a reward model is made of, as `build.py` says it for reinforcement learning."""

from importlib import import_module
from typing import Any

from quadriga.config import Config, place_roles
from quadriga.data.loading import create_dataloader, create_rl_sampler
from quadriga.data.rm_dataset import RMDataset
from quadriga.data.sft_dataset import MultiTurnSFTDataset, SFTDataset, TokenizedRows
from quadriga.observe.timing import Timeline
from quadriga.single_controller import ClassWithInitArgs, WorkerGroups
from quadriga.trainer.build import TEAMS, Run, build_tokenizer, load_models, print_choices
from quadriga.trainer.sft import Loaders, RewardModelTrainer, SFTTrainer
from quadriga.workers.models import check_models, require_text
from quadriga.workers.sft import RewardModelTrainingWorker, SFTWorker, SupervisedWorker

ROLE = "actor_rollout"
DATASETS: dict[str, type[TokenizedRows]] = {"messages": MultiTurnSFTDataset, "prompt_response": SFTDataset}


def build_supervised_run(config: Config, timeline: Timeline) -> Run:
    """Everything a run needs, loaded and checked.

    Args:
        config: with a supervised `task`.
        timeline: records where the start-up spends its time.
    """
    require_text(config, "quadriga sft")
    check_models(config, has_critic=False)
    with timeline.part("tokenizer"):
        tokenizer = build_tokenizer(config)
    with timeline.part("data"):
        loaders = build_loaders(config, tokenizer)
    team = build_team(config, tokenizer)
    try:
        choices = load_models(team, timeline)
        trainer = RewardModelTrainer if config.task == "reward_model" else SFTTrainer
        run = Run(trainer(config, team.groups[ROLE].as_worker(), loaders), team)
    except BaseException:
        team.end()
        raise
    print_choices(choices, config, has_critic=False)
    return run


def build_loaders(config: Config, tokenizer: Any) -> Loaders:
    """Loaders of the rows of training, whole batches only, and of validation."""
    data = config.data
    kind = RMDataset if config.task == "reward_model" else DATASETS[data.format]
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


def build_team(config: Config, tokenizer: Any) -> WorkerGroups:
    """The worker group that holds the model, on the backend that `trainer.backend` names."""
    learner: type[SupervisedWorker] = RewardModelTrainingWorker if config.task == "reward_model" else SFTWorker
    placement = place_roles(config.trainer, has_reference=False, has_critic=False, has_reward_model=False)
    classes = {ROLE: ClassWithInitArgs(learner, config, tokenizer)}
    module, _, name = TEAMS[config.trainer.backend].partition(":")
    team = getattr(import_module(module), name)
    return team(classes, placement.roles, placement.pools, config.trainer.device)
