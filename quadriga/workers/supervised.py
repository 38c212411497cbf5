# SPDX-License-Identifier: Apache-2.0
"""Workers that learn from answers that are given, and say what they think of others.

SupervisedWorker      the engine, its update, its checkpoints
  AnswerLearner       learns to give the answers            `old_log_probs` of others
  ScoreLearner        learns to score answers in order      `rm_scores` of others
"""

from abc import abstractmethod
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from quadriga.config import Config
from quadriga.config.check_layout import ACTOR
from quadriga.engines import process_group
from quadriga.engines.objectives import Objective
from quadriga.engines.objectives_sft import SCORE_SLOPE, LikelihoodObjective, ScoreObjective
from quadriga.engines.schedule import lr_at
from quadriga.engines.step import infer, update
from quadriga.models.fresh_reward_model import fresh_reward_model
from quadriga.models.lora import describe_adapter
from quadriga.models.reward_scorer import RewardScorer
from quadriga.observe.machine import Choice, release_free_memory
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.workers.checkpoints import RoleCheckpoint
from quadriga.workers.roles import (
    BY_REPLICA,
    MESH,
    LoadedModel,
    Stopwatch,
    Utilisation,
    choose_device,
    compute_dtype,
    join,
    load_policy,
    make_engine,
    passes,
)

__all__ = ["SCORE_SLOPE", "AnswerLearner", "ScoreLearner", "SupervisedWorker"]


class SupervisedWorker(Worker):
    """See the module.

    Args:
        config: of the run; the sections `actor_rollout_ref.model`, `actor_rollout_ref.actor` and `trainer` are read.
        tokenizer: of the model; saved beside it.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.config, self.tokenizer = config, tokenizer
        self.settings = config.actor_rollout_ref.actor

    @abstractmethod
    def load(self, dtype: Choice) -> LoadedModel:
        """The model that learns, with its head."""

    @abstractmethod
    def make_objective(self) -> Objective:
        """What it learns from."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> dict[str, str]:
        """Load the model and make the engine. Returns what was chosen, with reasons, for people to read."""
        device = choose_device(self.config.trainer.device, self.local_rank)
        self.processes = join(self.place, device, self.settings, ACTOR)
        self.register_mesh(MESH, self.processes.place.dp_rank, self.processes.place.is_collected)
        dtype = compute_dtype(self.settings.fsdp_config, device)
        model = self.config.actor_rollout_ref.model
        self.engine = make_engine(
            self.load(dtype), self.settings, dtype.value, self.processes, name="model", model=model
        )
        self.objective = self.make_objective()
        self.utilisation = Utilisation(device, dtype.value)
        chosen = self.engine.describe()
        adapter = {"adapter": describe_adapter(self.engine.model)} if model.has_adapter else {}
        return adapter | {
            "model": f"{chosen['parameters'] / 1e6:.1f} M parameters on {chosen['device']}, {chosen['processes']}",
            "weights": f"{chosen['weights']} ({dtype.reason}); masters and optimizer in float32",
        }

    @register(dispatch_mode=BY_REPLICA)
    def update(self, data: DataProto) -> DataProto:
        """One optimizer step on a whole batch. Returns metrics."""
        watch = Stopwatch()
        step = data.meta_info["global_steps"]
        how = passes(self.settings, 2, share_prompts=self.settings.use_prefix_sharing, global_step=step)
        lr = lr_at(step, self.settings.optim, data.meta_info["total_training_steps"])
        metrics = update(self.engine, data, self.objective, how, lr=lr)
        return DataProto(meta_info={"metrics": self.utilisation.measure(metrics, "train", watch.seconds)})

    def _infer(self, data: DataProto, output: str) -> torch.Tensor:
        how = passes(self.settings, 1, share_prompts=self.settings.use_prefix_sharing, global_step=0)
        values = infer(self.engine, data, how.micro)[output]
        release_free_memory()
        return values

    @cached_property
    def checkpoint(self) -> RoleCheckpoint:
        """Writes and reads this worker's part of a checkpoint."""
        return RoleCheckpoint(self.engine, self.engine.model, self.tokenizer)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, directory: Path) -> None:
        """Copy the model, and begin to write it below `directory`."""
        self.checkpoint.start(directory / "actor", frozenset(self.settings.checkpoint.save_contents))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool = False) -> bool:
        """Whether what `save_checkpoint` or `save_model` began is on disk; with `wait`, it is when this returns."""
        return self.checkpoint.is_written(wait=wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model(self, directory: Path) -> None:
        """Begin to write the model as an ordinary Hugging Face folder, below `directory`."""
        self.checkpoint.start(directory, frozenset({"hf_model"}))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: Path) -> None:
        """Read the model from below `directory`."""
        self.checkpoint.load(directory / "actor", frozenset(self.settings.checkpoint.load_contents))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Leave the other processes."""
        process_group.leave(self.processes.world)


class AnswerLearner(SupervisedWorker):
    """A policy that learns to give the answers."""

    def make_objective(self) -> Objective:
        """See `SupervisedWorker.make_objective`."""
        return LikelihoodObjective(self.settings)

    def load(self, dtype: Choice) -> LoadedModel:
        """See `SupervisedWorker.load`."""
        has_adapter = self.config.actor_rollout_ref.model.has_adapter
        # Weights beside an adapter are frozen: they need no float32 truth behind those that compute.
        loaded_dtype = dtype.value if has_adapter else torch.float32
        return load_policy(self.config, loaded_dtype, self.processes, has_adapter=has_adapter)

    @register(dispatch_mode=BY_REPLICA)
    def predict(self, data: DataProto) -> DataProto:
        """`old_log_probs` [B, T] of the answers."""
        return DataProto.from_dict(tensors={"old_log_probs": self._infer(data, "log_probs")})


class ScoreLearner(SupervisedWorker):
    """A reward model that learns to score answers in order."""

    def make_objective(self) -> Objective:
        """See `SupervisedWorker.make_objective`."""
        return ScoreObjective()

    def load(self, dtype: Choice) -> LoadedModel:
        """See `SupervisedWorker.load`. Every process loads the whole model, and keeps its share."""
        section = self.config.actor_rollout_ref.model
        model = fresh_reward_model(
            str(section.path),
            pad_token_id=int(self.tokenizer.pad_token_id),
            device=self.processes.world.device,
            trust_remote_code=section.trust_remote_code,
            override_config=section.override_config,
        )
        return LoadedModel(RewardScorer(model), None)

    @register(dispatch_mode=BY_REPLICA)
    def predict(self, data: DataProto) -> DataProto:
        """`rm_scores` [B, T]: the score behind the last token of each answer, zero elsewhere."""
        return DataProto.from_dict(tensors={"rm_scores": self._infer(data, "scores")})
