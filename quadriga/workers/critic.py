# SPDX-License-Identifier: Apache-2.0
"""Critic worker: a value function that predicts the return before each token of a response.

Legend: B rows, T response positions.
"""

import torch

from quadriga.engines.batches import MicroBatching
from quadriga.engines.objectives import ValueObjective
from quadriga.engines.step import infer
from quadriga.models.scorers import ValueScorer
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, register
from quadriga.workers.base import BY_REPLICA, Learner, timed
from quadriga.workers.models import load_model


class CriticWorker(Learner):
    """The critic of PPO."""

    part = "critic"

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> dict[str, str]:
        """Load the model and build the engine. Returns the choices, with reasons, to be printed."""
        self.join(self.section, self.section.fsdp_config, "critic")
        model = self.config.critic.model
        # Without a path of its own the critic starts from the policy.
        path = model.path or self.config.actor_rollout_ref.model.path
        loaded = load_model(self.config, path, ValueScorer, torch.float32, self.processes)
        choices = self.make_engine(loaded, model, "critic")
        self.objective = ValueObjective(self.config.critic)
        about = f"{self.engine.describe()['parameters'] / 1e6:.1f} M parameters, with a value head"
        # The description of the offload begins with a semicolon, or is "".
        return {"critic": about + self.offload_training(), **choices}

    @register(BY_REPLICA, blocking=False)
    @timed("values")
    def compute_values(self, data: DataProto) -> DataProto:
        """Predict `values` [B, T], the return before each response token."""
        # None: micro-batches are limited by their tokens, not by a number of rows.
        micro = MicroBatching(None, self.section.ppo_max_token_len_per_gpu, self.share_prompts)
        values = infer(self.engine, data, micro)["values"]
        return DataProto.from_dict(tensors={"values": values})

    @register(BY_REPLICA)
    def update_critic(self, data: DataProto) -> DataProto:
        """Learn from a batch with returns [B, T]. Returns metrics."""
        return self.learn(data, self.config.actor_rollout_ref.rollout.n)
