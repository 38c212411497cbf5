# SPDX-License-Identifier: Apache-2.0
"""From a configuration to the objects of a run: the one place where a name becomes a class."""

from typing import Any

from quadriga.config import Config
from quadriga.data import (
    create_dataloader,
    create_rl_dataset,
    create_rl_sampler,
    create_validation_sampler,
    load_tokenizer,
)
from quadriga.observe.timing import Timeline
from quadriga.rewards import RewardManager, load_reward_manager
from quadriga.single_controller import ClassWithInitArgs, LocalWorkerGroup, ResourcePool
from quadriga.trainer.needs import Needs
from quadriga.trainer.ray_trainer import RayPPOTrainer, Workers
from quadriga.trainer.roles import Role
from quadriga.workers import ActorRolloutRefWorker, CriticWorker
from quadriga.workers.roles import RunFacts

# Import strings: an engine is imported by the process that generates, never by the driver.
ROLLOUT_ENGINES = {
    "native": "quadriga.workers.rollouts:native",
    "hf": "quadriga.workers.rollouts:hf",
    "scripted": "quadriga.workers.rollouts:scripted",
}


def build_trainer(config: Config, timeline: Timeline) -> RayPPOTrainer:
    """Everything a run needs, loaded and checked.

    Args:
        config: of the run.
        timeline: is told where the start-up spends its time.
    """
    needs = Needs.of(config)
    with timeline.part("tokenizer"):
        tokenizer = build_tokenizer(config)
    with timeline.part("data"):
        train, val = build_dataloaders(config, tokenizer)
    total = config.trainer.total_training_steps or config.trainer.total_epochs * len(train)
    facts = RunFacts(total, needs.reference, ROLLOUT_ENGINES[config.actor_rollout_ref.rollout.name])
    with timeline.part("models"):
        workers, choices = build_workers(config, tokenizer, facts, needs)
    with timeline.part("rewards"):
        reward: RewardManager = load_reward_manager(config, tokenizer)
    trainer = RayPPOTrainer(config, tokenizer, workers, reward, train, val, total)
    for name, choice in {**choices, **needs.describe()}.items():
        print(f"  {name:<14} {choice}")
    return trainer


def build_tokenizer(config: Config) -> Any:
    """The tokenizer of `data.tokenizer`, or of the model."""
    model = config.actor_rollout_ref.model
    return load_tokenizer(
        config.data.tokenizer or model.path,
        trust_remote_code=config.data.trust_remote_code or model.trust_remote_code,
        chat_template=model.custom_chat_template,
    )


def build_dataloaders(config: Config, tokenizer: Any) -> tuple[Any, Any]:
    """Loaders of training prompts (whole batches only) and of validation prompts (all of them, or None)."""
    data = config.data
    train = create_rl_dataset(
        data.train_files, data, tokenizer, None, is_train=True, max_samples=data.train_max_samples
    )
    sampler = create_rl_sampler(data, train)
    train_loader = create_dataloader(train, data, batch_size=data.train_batch_size, sampler=sampler, drop_last=True)
    return train_loader, build_val_dataloader(config, tokenizer) if data.val_files else None


def build_val_dataloader(config: Config, tokenizer: Any) -> Any:
    """A loader of all validation prompts, in the order of their files unless `data.validation_shuffle`."""
    data = config.data
    val = create_rl_dataset(data.val_files, data, tokenizer, None, is_train=False, max_samples=data.val_max_samples)
    sampler = create_validation_sampler(data, val)
    return create_dataloader(val, data, batch_size=data.val_batch_size, sampler=sampler, drop_last=False)


def build_policy(config: Config, tokenizer: Any) -> ActorRolloutRefWorker:
    """A policy that answers and does not learn."""
    engine = ROLLOUT_ENGINES[config.actor_rollout_ref.rollout.name]
    facts = RunFacts(total_training_steps=0, use_reference=False, rollout_engine=engine, is_trained=False)
    policy = LocalWorkerGroup(ClassWithInitArgs(ActorRolloutRefWorker, config, tokenizer, facts)).as_worker()
    policy.init_model()
    return policy


def build_workers(config: Config, tokenizer: Any, facts: RunFacts, needs: Needs) -> tuple[Workers, dict[str, str]]:
    """One worker per role, in this process. Returns their handles and what they chose."""
    pool = ResourcePool([1])
    actor_class = ClassWithInitArgs(ActorRolloutRefWorker, config, tokenizer, facts)
    actor = LocalWorkerGroup(actor_class, pool, Role.ActorRolloutRef).as_worker()
    choices = dict(actor.init_model()[0])
    critic = None
    if needs.critic:
        critic_class = ClassWithInitArgs(CriticWorker, config, tokenizer, facts)
        critic = LocalWorkerGroup(critic_class, pool, Role.Critic).as_worker()
        choices |= critic.init_model()[0]
    return Workers(actor, critic), choices
