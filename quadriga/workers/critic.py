# SPDX-License-Identifier: Apache-2.0
"""The value function: what return to expect before each token of a response."""

from functools import cached_property
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from quadriga.config import Config
from quadriga.engines import process_group
from quadriga.engines.micro_batches import MicroBatching
from quadriga.engines.objectives import ValueObjective
from quadriga.engines.schedule import lr_at
from quadriga.engines.step import infer, update
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.workers.checkpoints import RoleCheckpoint
from quadriga.workers.roles import (
    BY_REPLICA,
    MESH,
    Stopwatch,
    Utilisation,
    choose_device,
    compute_dtype,
    join,
    load_value_function,
    make_engine,
    passes,
)


class CriticWorker(Worker):
    """See the module.

    Args:
        config: of the run.
        tokenizer: of the model; saved beside it.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.config, self.tokenizer = config, tokenizer
        self.critic_config = config.critic
        self.share_prompts = config.actor_rollout_ref.actor.use_prefix_sharing

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> dict[str, str]:
        """Load the model and make the engine. Returns what was chosen, with reasons, for people to read."""
        device = choose_device(self.config.trainer.device, self.local_rank)
        self.processes = join(self.place, device, self.critic_config, "critic")
        self.register_mesh(MESH, self.processes.place.dp_rank, self.processes.place.is_collected)
        dtype = compute_dtype(self.critic_config.fsdp_config, device)
        self.critic = make_engine(
            load_value_function(self.config, self.processes),
            self.critic_config,
            dtype.value,
            self.processes,
            name="critic",
            model=self.critic_config.model,
        )
        self.objective = ValueObjective(self.critic_config)
        self.utilisation = Utilisation(device, dtype.value)
        return {"critic": f"{self.critic.describe()['parameters'] / 1e6:.1f} M parameters, with a value head"}

    @register(dispatch_mode=BY_REPLICA)
    def compute_values(self, data: DataProto) -> DataProto:
        """`values` [B, T]"""
        micro = MicroBatching(None, self.critic_config.ppo_max_token_len_per_gpu, self.share_prompts)
        return DataProto.from_dict(tensors={"values": infer(self.critic, data, micro)["values"]})

    @register(dispatch_mode=BY_REPLICA)
    def update_critic(self, data: DataProto) -> DataProto:
        """Learn from a batch with returns. Returns metrics."""
        watch = Stopwatch()
        step = data.meta_info["global_steps"]
        metrics = update(
            self.critic,
            data,
            self.objective,
            passes(
                self.critic_config,
                self.config.actor_rollout_ref.rollout.n,
                share_prompts=self.share_prompts,
                global_step=step,
            ),
            lr=lr_at(step, self.critic_config.optim, data.meta_info["total_training_steps"]),
        )
        return DataProto(meta_info={"metrics": self.utilisation.measure(metrics, "critic", watch.seconds)})

    @cached_property
    def checkpoint(self) -> RoleCheckpoint:
        """Writes and reads this worker's part of a checkpoint."""
        return RoleCheckpoint(self.critic, self.critic.model, self.tokenizer)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, directory: Path) -> None:
        """Copy the critic, and begin to write it below `directory`."""
        self.checkpoint.start(directory / "critic", frozenset(self.critic_config.checkpoint.save_contents))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool = False) -> bool:
        """Whether what `save_checkpoint` began is on disk; with `wait`, it is when this returns."""
        return self.checkpoint.is_written(wait=wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: Path) -> None:
        """Read the critic from below `directory`."""
        self.checkpoint.load(directory / "critic", frozenset(self.critic_config.checkpoint.load_contents))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Leave the other processes of the role."""
        process_group.leave(self.processes.world)
