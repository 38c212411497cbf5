# SPDX-License-Identifier: Apache-2.0
"""Workers for supervised training.

SupervisedWorker              engine, update, checkpoints
  SFTWorker                   learns the likelihood of given responses     `predict`: their log-probs
  RewardModelTrainingWorker   learns to order responses by their score     `predict`: their scores
"""

from abc import abstractmethod

import torch

from quadriga.config.placement import ACTOR
from quadriga.engines.batches import Passes
from quadriga.engines.objectives import LikelihoodObjective, Objective, ScoreObjective
from quadriga.engines.step import infer
from quadriga.models.reward_model import fresh_reward_model
from quadriga.models.scorers import RewardScorer
from quadriga.observe.machine import release_free_memory
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, register
from quadriga.workers.base import BY_REPLICA, Learner
from quadriga.workers.models import LoadedModel, load_policy


class SupervisedWorker(Learner):
    """A model that learns from given responses; `predict` returns its `output` as `column`."""

    output: str
    column: str

    @abstractmethod
    def prepare(self) -> tuple[LoadedModel, Objective]:
        """The model that learns, with its head, and its loss."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> dict[str, str]:
        """Load the model and make the engine. Returns what was chosen, with reasons, for people to read."""
        self.join(self.section, self.section.fsdp_config, ACTOR)
        model = self.config.actor_rollout_ref.model
        loaded, self.objective = self.prepare()
        self.make_engine(loaded, model, "model")
        choices = self.describe("model", has_adapter=model.has_adapter)
        choices["weights"] += self.offload_training()
        return choices

    @register(dispatch_mode=BY_REPLICA)
    def update(self, data: DataProto) -> DataProto:
        """One optimizer step on a whole batch. Returns metrics."""
        return self.learn(data, 2)

    @register(dispatch_mode=BY_REPLICA)
    def predict(self, data: DataProto) -> DataProto:
        """`column` [B, T] of given responses: the log-prob of each token, or the score behind the last one."""
        micro = Passes.of(self.section, 1, 0, share_prompts=self.share_prompts).micro
        values = infer(self.engine, data, micro)[self.output]
        release_free_memory()
        return DataProto.from_dict(tensors={self.column: values})


class SFTWorker(SupervisedWorker):
    """A policy that learns the likelihood of given responses."""

    output, column = "log_probs", "old_log_probs"

    def prepare(self) -> tuple[LoadedModel, Objective]:
        has_adapter = self.config.actor_rollout_ref.model.has_adapter
        # The weights below an adapter are frozen: they need no float32 masters.
        dtype = self.dtype.value if has_adapter else torch.float32
        loaded = load_policy(self.config, dtype, self.processes, has_adapter=has_adapter)
        return loaded, LikelihoodObjective(self.config.actor_rollout_ref.actor)


class RewardModelTrainingWorker(SupervisedWorker):
    """A reward model that learns to order responses by their score."""

    output, column = "scores", "rm_scores"

    def prepare(self) -> tuple[LoadedModel, Objective]:
        # Every rank loads the full model, and keeps its shard.
        section = self.config.actor_rollout_ref.model
        model = fresh_reward_model(
            str(section.path),
            pad_token_id=int(self.tokenizer.pad_token_id),
            device=self.device,
            trust_remote_code=section.trust_remote_code,
            override_config=section.override_config,
        )
        return LoadedModel(RewardScorer(model), None), ScoreObjective()
