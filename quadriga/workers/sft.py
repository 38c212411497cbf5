# SPDX-License-Identifier: Apache-2.0
"""Workers for supervised training.

SupervisedWorker              engine, update, checkpoints
  SFTWorker                   maximizes the likelihood of responses     `predict`: log-probs
  RewardModelTrainingWorker   learns to rank responses by score         `predict`: scores

Legend: B rows, T response positions.
"""

from abc import abstractmethod

import torch

from quadriga.config.placement import ACTOR
from quadriga.engines.batches import Passes
from quadriga.engines.objectives import LikelihoodObjective, Objective, ScoreObjective
from quadriga.engines.step import infer
from quadriga.models.reward_model import build_reward_model
from quadriga.models.scorers import RewardScorer
from quadriga.observe.machine import release_free_memory
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, register
from quadriga.workers.base import BY_REPLICA, Learner
from quadriga.workers.models import LoadedModel, load_policy


class SupervisedWorker(Learner):
    """A model that is trained on responses from a data set."""

    output: str  # name of the model's output that `predict` returns
    column: str  # name of the column in which it is returned

    @abstractmethod
    def prepare(self) -> tuple[LoadedModel, Objective]:
        """Load the model with its head, and build the loss. Called once `device` is known."""

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> dict[str, str]:
        """Load the model and build the engine. Returns the choices, with reasons, to be printed."""
        self.join(self.section, self.section.fsdp_config, ACTOR)
        model = self.config.actor_rollout_ref.model
        loaded, self.objective = self.prepare()
        choices = self.make_engine(loaded, model, "model")
        choices |= self.describe("model")
        choices["weights"] += self.offload_training()
        return choices

    @register(BY_REPLICA)
    def update(self, data: DataProto) -> DataProto:
        """Take one optimizer step on a whole batch. Returns metrics."""
        # A batch has `ppo_mini_batch_size` examples, of one row or, for reward models, of two. With
        # room for two rows per example, it is a single mini-batch.
        return self.learn(data, 2)

    @register(BY_REPLICA)
    def predict(self, data: DataProto) -> DataProto:
        """Predict `column` [B, T]: the log-prob of each token, or the score at the last token."""
        # Only the size of micro-batches is read, which rows per prompt and step do not change.
        micro = Passes.of(self.section, 1, 0, share_prompts=self.share_prompts).micro
        values = infer(self.engine, data, micro)[self.output]
        release_free_memory()
        return DataProto.from_dict(tensors={self.column: values})


class SFTWorker(SupervisedWorker):
    """A policy that maximizes the likelihood of responses."""

    output = "log_probs"
    column = "old_log_probs"

    def prepare(self) -> tuple[LoadedModel, Objective]:
        """Load the policy, and build the loss of its responses."""
        has_adapter = self.config.actor_rollout_ref.model.has_adapter
        # The weights below an adapter are frozen: they need no float32 masters.
        dtype = self.dtype.value if has_adapter else torch.float32
        loaded = load_policy(self.config, dtype, self.processes, has_adapter=has_adapter)
        return loaded, LikelihoodObjective(self.config.actor_rollout_ref.actor)


class RewardModelTrainingWorker(SupervisedWorker):
    """A reward model that learns to rank responses by score."""

    output = "scores"
    column = "rm_scores"

    def prepare(self) -> tuple[LoadedModel, Objective]:
        """Load a model with a new score head, and build the ranking loss."""
        # Every rank loads the full model. The engine keeps the rank's shard.
        section = self.config.actor_rollout_ref.model
        model = build_reward_model(
            str(section.path),
            pad_token_id=int(self.tokenizer.pad_token_id),
            device=self.device,
            trust_remote_code=section.trust_remote_code,
            override_config=section.override_config,
        )
        return LoadedModel(RewardScorer(model), None), ScoreObjective()
