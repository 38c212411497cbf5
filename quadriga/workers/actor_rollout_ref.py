# SPDX-License-Identifier: Apache-2.0
"""The policy in its three parts: the actor that learns, the rollout that generates, the reference that stays."""

from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from quadriga.config import Config, LogProbConfig
from quadriga.engines import process_group
from quadriga.engines.base import TrainEngine
from quadriga.engines.objectives import PolicyObjective
from quadriga.engines.schedule import lr_at
from quadriga.engines.step import infer, update
from quadriga.models.lora import adapter_off, describe_adapter
from quadriga.observe.machine import Choice, release_free_memory
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Execute, Worker, register
from quadriga.weight_sync import Address, WeightSender, offer
from quadriga.weight_sync.elsewhere import drain
from quadriga.workers.checkpoints import RoleCheckpoint
from quadriga.workers.generation import Generation, make_rollout
from quadriga.workers.outgoing import Outgoing
from quadriga.workers.roles import (
    BY_REPLICA,
    MESH,
    RunFacts,
    Stopwatch,
    Utilisation,
    choose_device,
    compute_dtype,
    inference_pieces,
    join,
    load_policy,
    make_engine,
    passes,
)

ACTOR = "actor_rollout_ref.actor"


class Parts(NamedTuple):
    """What of the policy is in a worker."""

    actor: bool
    rollout: bool
    reference: bool


PARTS = {
    "actor_rollout_ref": Parts(actor=True, rollout=True, reference=True),
    "actor_rollout": Parts(actor=True, rollout=True, reference=False),
    "actor": Parts(actor=True, rollout=False, reference=False),
    "ref": Parts(actor=False, rollout=False, reference=True),
}
"""By role. The rollout beside an `actor` is a role of its own: see `workers.rollout`."""


class ActorRolloutRefWorker(Worker):
    """See the module.

    Args:
        config: of the run.
        tokenizer: of the model.
        facts: what the builder of the run has decided.
        role: which parts are here; see `PARTS`.
    """

    def __init__(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, facts: RunFacts, role: str = "actor_rollout_ref"
    ) -> None:
        super().__init__()
        self.config, self.tokenizer, self.facts, self.role = config, tokenizer, facts, role
        self.parts = PARTS[role]
        self.actor_config = config.actor_rollout_ref.actor
        self.rollout_config = config.actor_rollout_ref.rollout
        self.has_adapter = config.actor_rollout_ref.model.has_adapter
        self.weight_version = 0
        self.sender: WeightSender | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> dict[str, str]:
        """Load the models and make the engines. Returns what was chosen, with reasons, for people to read."""
        device = choose_device(self.config.trainer.device, self.local_rank)
        self.processes = join(self.place, device, self.actor_config, ACTOR)
        self.register_mesh(MESH, self.processes.place.dp_rank, self.processes.place.is_collected)
        dtype = compute_dtype(self.actor_config.fsdp_config, device)
        choices = self._init_actor(device, dtype) if self.parts.actor else {}
        if self.parts.rollout:
            self.rollout = make_rollout(self.facts.rollout_engine, self.config, self.actor, self.tokenizer)
            self.generation = Generation(
                self.config,
                self.tokenizer,
                self.rollout.engine,
                is_beside_training=True,
                num_processes=self.world_size,
            )
            self.outgoing = Outgoing(self.actor, self.config, is_shared=self.rollout.is_shared)
            self.publish_weights(self.weight_version)
            choices |= {"rollout": self.rollout.description, **self.generation.choices}
        elif self.parts.actor:
            self.outgoing = Outgoing(self.actor, self.config)
        if self.parts.actor and self.has_adapter:
            choices["adapter"] += f"; {self.outgoing.describe()}"
        self.reference = None
        if self.parts.reference and self.parts.actor and self.has_adapter:
            choices["reference"] = "the actor with its adapter off"
        elif self.parts.reference:
            self.reference = make_engine(
                load_policy(self.config, dtype.value, self.processes),
                self.actor_config,
                dtype.value,
                self.processes,
                name="reference",
            )
            choices["reference"] = "a frozen copy"
        return choices

    def _init_actor(self, device: torch.device, dtype: Choice) -> dict[str, str]:
        is_trained, has_adapter = self.facts.is_trained, self.has_adapter
        # Weights beside an adapter are frozen: they need no float32 truth behind those that compute.
        loaded_dtype = torch.float32 if is_trained and not has_adapter else dtype.value
        self.actor = make_engine(
            load_policy(self.config, loaded_dtype, self.processes, has_adapter=has_adapter),
            self.actor_config,
            dtype.value,
            self.processes,
            name="actor",
            model=self.config.actor_rollout_ref.model if is_trained else None,
        )
        self.objective = PolicyObjective(self.actor_config, self.config.algorithm.rollout_correction)
        self.utilisation = Utilisation(device, dtype.value)
        chosen = self.actor.describe()
        masters = "masters and optimizer in float32"
        adapter = {"adapter": describe_adapter(self.actor.model)} if has_adapter else {}
        return adapter | {
            "actor": f"{chosen['parameters'] / 1e6:.1f} M parameters on {chosen['device']}, {chosen['processes']}",
            "weights": f"{chosen['weights']} ({dtype.reason}); {masters}" + (", of the adapter" if has_adapter else ""),
        }

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answers to prompts: see `rollout.generate_sequences`."""
        self.rollout.weights.verify(self.rollout.engine, self.weight_version)
        return self.generation.answer(prompts, self.weight_version)

    @register(dispatch_mode=BY_REPLICA)
    def compute_log_prob(self, data: DataProto, with_sum_pi_squared: bool = False) -> DataProto:
        """`old_log_probs`, `entropys` and, where asked for, `sum_pi_squared` [B, T] of the actor as it is."""
        scores = self._infer(
            self.actor, data, self.rollout_config, with_entropy=True, with_sum_pi_squared=with_sum_pi_squared
        )
        found = DataProto.from_dict(tensors={"old_log_probs": scores["log_probs"], "entropys": scores["entropy"]})
        if with_sum_pi_squared:
            found.batch["sum_pi_squared"] = scores["sum_pi_squared"]
        return found

    @register(dispatch_mode=BY_REPLICA)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob` [B, T] of the policy that training started from."""
        config = self.config.actor_rollout_ref.ref
        if self.reference is not None:
            scores = self._infer(self.reference, data, config)
        else:
            with adapter_off(self.actor.model):
                scores = self._infer(self.actor, data, config)
        return DataProto.from_dict(tensors={"ref_log_prob": scores["log_probs"]})

    def _infer(
        self, engine: TrainEngine, data: DataProto, config: LogProbConfig, **wanted: bool
    ) -> dict[str, torch.Tensor]:
        micro = inference_pieces(config, share_prompts=self.actor_config.use_prefix_sharing)
        return infer(engine, data, micro, temperature=self.rollout_config.temperature, **wanted)

    @register(dispatch_mode=BY_REPLICA)
    def update_actor(self, data: DataProto) -> DataProto:
        """Learn from a batch with advantages. Returns metrics. `publish_weights` gives the rollout the new weights."""
        watch = Stopwatch()
        step = data.meta_info["global_steps"]
        metrics = update(
            self.actor,
            data,
            self.objective,
            passes(
                self.actor_config,
                self.rollout_config.n,
                share_prompts=self.actor_config.use_prefix_sharing,
                global_step=step,
            ),
            lr=lr_at(step, self.actor_config.optim, data.meta_info["total_training_steps"]),
            temperature=self.rollout_config.temperature,
        )
        release_free_memory()
        return DataProto(meta_info={"metrics": self.utilisation.measure(metrics, "actor", watch.seconds)})

    @register(dispatch_mode=Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)
    def num_replicas(self) -> int:
        """How many data-parallel ranks share a batch, each with rows of its own."""
        return self.processes.replicas.size

    @register(dispatch_mode=Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)
    def token_costs(self) -> tuple[float, float]:
        """See `ModelCost.relative`, of the actor."""
        return self.actor.cost.relative()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def publish_weights(self, version: int) -> None:
        """Give the rollout the actor's weights; it refuses to generate with any others."""
        self.weight_version = version
        with self.outgoing.publication(has_frozen=self.rollout.engine.has_frozen_weights) as weights:
            self.rollout.weights.publish(weights, self.rollout.engine, version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offer_weights(self, channel: str, num_receivers: int) -> Address | None:
        """Open a channel to a rollout in other processes. Returns, from rank 0, where they find it.

        Args:
            channel: see `weight_sync.channels.offer`.
            num_receivers: processes of the rollout.
        """
        if self.rank != 0:
            return None
        place = str(self.config.trainer.directory / "weights") if channel == "disk" else self.place.master_addr
        end, address = offer(channel, place, num_receivers, self.processes.world.device)
        self.sender = WeightSender(end, self.rollout_config.update_weights_bucket_megabytes << 20)
        return address

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self, version: int, has_frozen: bool = False) -> None:
        """Send the actor's weights to the rollout in other processes, which receives them meanwhile.

        Args:
            version: of the weights.
            has_frozen: whether the rollout took over what was sent last, frozen weights and all.
        """
        with self.outgoing.publication(has_frozen=has_frozen) as weights:
            if self.sender is None:
                drain(weights)
            else:
                self.sender.send(weights, version)

    @cached_property
    def checkpoint(self) -> RoleCheckpoint:
        """Writes and reads this worker's part of a checkpoint."""
        return RoleCheckpoint(self.actor, self.actor.model, self.tokenizer)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, directory: Path) -> None:
        """Copy the actor, and begin to write it below `directory`."""
        self.checkpoint.start(directory / "actor", frozenset(self.actor_config.checkpoint.save_contents))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool = False) -> bool:
        """Whether what `save_checkpoint` began is on disk; with `wait`, it is when this returns."""
        return self.checkpoint.is_written(wait=wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: Path) -> None:
        """Read the actor from below `directory`. The rollout keeps its weights until new ones are published."""
        self.checkpoint.load(directory / "actor", frozenset(self.actor_config.checkpoint.load_contents))
        self.outgoing.frozen_weights_changed()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Release what the rollout or the way to it holds, and leave the other processes of the role."""
        if self.parts.rollout:
            self.generation.close()
        if self.sender is not None:
            self.sender.close()
        process_group.leave(self.processes.world)
