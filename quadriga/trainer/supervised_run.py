# SPDX-License-Identifier: Apache-2.0
"""A run of `quadriga sft` from its configuration to its last step: where it runs, what it is made of, how it ends."""

from importlib import import_module
from typing import Any

from quadriga.config import Config, place_roles
from quadriga.config.sft import SFTConfig
from quadriga.config.yaml_text import to_yaml
from quadriga.data.loading import create_dataloader, create_rl_sampler
from quadriga.data.rm_dataset import RMDataset
from quadriga.data.sft_dataset import MultiTurnSFTDataset, SFTDataset, TokenizedRows
from quadriga.observe.machine import describe_machine
from quadriga.observe.stopping import heeding_sigterm
from quadriga.observe.timing import Timeline
from quadriga.single_controller import ClassWithInitArgs
from quadriga.single_controller.team import Team
from quadriga.trainer.build import TEAMS, build_tokenizer, load_models
from quadriga.trainer.checkpoint import write_configuration
from quadriga.trainer.reward_modeling import RewardModelTrainer
from quadriga.trainer.sft import Loaders, SFTTrainer, SupervisedTrainer
from quadriga.workers.models import check_models, layout_tables, require_text
from quadriga.workers.sft import RewardModelTrainingWorker, SFTWorker, SupervisedWorker

ROLE = "actor_rollout"
DATASETS: dict[str, type[TokenizedRows]] = {"messages": MultiTurnSFTDataset, "prompt_response": SFTDataset}


def run(config: SFTConfig, start_up: Any = ()) -> None:
    """Train in this process, or beside it as `trainer.backend` says, and write the model.

    Args:
        config: of the run.
        start_up: what happened before, each part with the time of the wall clock at which it began.

    Raises:
        QuadrigaError: what is wrong with the data or the model is said before the first step.
    """
    timeline = Timeline(earlier=start_up)
    settings = config.as_run()
    write_configuration(settings.trainer.directory, to_yaml(config.model_dump(mode="json")))
    print(describe_machine())
    require_text(settings, "quadriga sft")
    check_models(settings)
    with timeline.part("tokenizer"):
        tokenizer = build_tokenizer(settings)
    with timeline.part("data"):
        loaders = build_loaders(config, settings, tokenizer)
    team = build_team(config, settings, tokenizer)
    try:
        choices = load_models(team, timeline)
        trainer = build_trainer(config, team, loaders)
        _tell(choices, settings, timeline)
        _train(trainer)
    except BaseException:
        team.end()
        raise
    team.close()


def _train(trainer: SupervisedTrainer) -> None:
    is_over = False
    try:
        with heeding_sigterm():
            trainer.fit()
        is_over = True
    except KeyboardInterrupt:
        trainer.saver.settle(can_ask=True)
        newest = trainer.checkpoints.newest()
        way = "trainer.save_freq=N writes checkpoints." if newest is None else f"It goes on from step {newest}."
        print(f"\ninterrupted in step {trainer.global_steps}. {way}")
        raise
    finally:
        if not is_over:
            trainer.saver.settle(can_ask=False)


def build_loaders(config: SFTConfig, settings: Config, tokenizer: Any) -> Loaders:
    """Loaders of the rows of training, whole batches only, and of validation."""
    kind = RMDataset if config.objective == "reward_model" else DATASETS[config.data.format]
    train = kind(config.data.train_files, tokenizer, config.data)
    data = settings.data.model_copy(update={"shuffle": config.data.shuffle, "train_batch_size": 0})
    sampler = create_rl_sampler(data, train)
    size = min(config.data.train_batch_size, len(train))
    if size < config.data.train_batch_size:
        print(f"data.train_batch_size: there are {size} rows; a batch has all of them.")
    train_loader = create_dataloader(train, data, batch_size=size, sampler=sampler, drop_last=True)
    if not config.data.val_files:
        return Loaders(train_loader, None)
    val = kind(config.data.val_files, tokenizer, config.data, is_train=False)
    in_order = create_rl_sampler(data.model_copy(update={"shuffle": False}), val)
    size = config.data.val_batch_size
    return Loaders(train_loader, create_dataloader(val, data, batch_size=size, sampler=in_order, drop_last=False))


def build_team(config: SFTConfig, settings: Config, tokenizer: Any) -> Team:
    """The worker group that holds the model, on the backend of the run."""
    learner: type[SupervisedWorker] = RewardModelTrainingWorker if config.objective == "reward_model" else SFTWorker
    placement = place_roles(settings.trainer, has_reference=False, has_critic=False, has_reward_model=False)
    classes = {ROLE: ClassWithInitArgs(learner, settings, tokenizer)}
    module, _, name = TEAMS[settings.trainer.backend].partition(":")
    team = getattr(import_module(module), name)
    return team(classes, placement.roles, placement.pools, settings.trainer.device)


def build_trainer(config: SFTConfig, team: Team, loaders: Loaders) -> SupervisedTrainer:
    """The loop of the objective."""
    trainer = RewardModelTrainer if config.objective == "reward_model" else SFTTrainer
    return trainer(config, team.groups[ROLE].as_worker(), loaders)


def _tell(choices: dict[str, str], settings: Config, timeline: Timeline) -> None:
    width = max(map(len, choices))
    for name, choice in choices.items():
        print(f"  {name:<{width}}  {choice}")
    for table in layout_tables(settings):
        print(table)
    print(timeline.render())
