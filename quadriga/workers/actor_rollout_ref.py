# SPDX-License-Identifier: Apache-2.0
"""The policy in its three parts: the actor that learns, the rollout that generates, the reference that stays."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from quadriga.config import Config, LogProbConfig
from quadriga.config.adapter import adapter_route
from quadriga.config.placement import ACTOR, has_shards, rollout_group_size, sends_parts
from quadriga.engines.batches import MicroBatching
from quadriga.engines.fsdp.engine import FSDPEngine
from quadriga.engines.objectives import PolicyObjective
from quadriga.engines.step import infer
from quadriga.models.adapter_files import base_name
from quadriga.models.lora import adapter_off
from quadriga.protocol import DataProto
from quadriga.rollout.group import RolloutGroup
from quadriga.rollout.third_party import require_room
from quadriga.single_controller import Dispatch, Execute, register
from quadriga.weight_sync import (
    Address,
    CopiedWeights,
    Held,
    Piece,
    ReshardedWeights,
    SharedWeights,
    StreamedWeights,
    WeightSender,
    meet,
    open_store,
    tensor_fingerprint,
)
from quadriga.workers.base import BY_GROUP, BY_REPLICA, GROUPS, Learner, timed
from quadriga.workers.generation import Generation
from quadriga.workers.models import load_policy
from quadriga.workers.rollout_engines import rollout_engine_class
from quadriga.workers.stream import Done, GenerationStream, WeightCopy


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
"""By role. The rollout beside an `actor` is a role of its own, in `workers.rollout`."""


class ActorRolloutRefWorker(Learner):
    """The actor, the rollout and the reference policy, or the parts of them that `role` has. A policy that is not
    trained, that only generates, needs neither masters nor an optimizer."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        role: str = "actor_rollout_ref",
        *,
        is_trained: bool = True,
    ) -> None:
        super().__init__(config, tokenizer)
        self.parts, self.is_trained = PARTS[role], is_trained
        self.rollout_config = config.actor_rollout_ref.rollout
        self.has_adapter = self.parts.actor and config.actor_rollout_ref.model.has_adapter
        self.reference: FSDPEngine | None = None
        self.weight_version = 0
        self.sender: WeightSender | ReshardedWeights | None = None
        self.stream: GenerationStream | None = None
        # Whether an adapter is sent without being merged; and whether the frozen weights below it were sent.
        self.sends_adapter_alone = self.has_sent_frozen = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> dict[str, str]:
        """Load the models and make the engines. Returns what was chosen, with reasons, for people to read."""
        actor, choices = self.section, {}
        self.join(actor, actor.fsdp_config, ACTOR)
        if self.parts.actor:
            # The weights below an adapter are frozen: they need no float32 masters.
            dtype = torch.float32 if self.is_trained and not self.has_adapter else self.dtype.value
            loaded = load_policy(self.config, dtype, self.processes, has_adapter=self.has_adapter)
            self.make_engine(
                loaded, self.config.actor_rollout_ref.model if self.is_trained else None, "actor"
            )
            correction = self.config.algorithm.rollout_correction
            self.objective = PolicyObjective(actor, correction, self.config.distillation)
            choices = self.describe("actor", has_adapter=self.has_adapter)
        reserves = False
        if self.parts.rollout:
            size, device = rollout_group_size(self.config), self.engine.device
            reserves = device.type == "cuda" and rollout_engine_class(self.config).reserves_memory
            if reserves:
                # It has weights of its own, and takes what rests at its start.
                choices["weights"] += self.offload_training()
                free, total = torch.cuda.mem_get_info(device)
                share = self.rollout_config.gpu_memory_utilization
                require_room(total, total - free, self.engine.moment_bytes, share)
            group = RolloutGroup(self.rank, self.world_size, size, device) if size > 1 else None
            self.register_mesh(GROUPS, self.rank // size, self.rank % size == 0)
            self.generation = Generation(
                self.config,
                self.tokenizer,
                device,
                self.engine.dtype,
                is_beside_training=self.is_trained,
                num_processes=self.world_size,
                actor=self.engine.model
                if self.engine.has_replicated_weights and group is None
                else None,
                group=group,
            )
            if has_shards(self.config):
                bucket_bytes = self.rollout_config.update_weights_bucket_megabytes << 20
                self.weight_sync = ReshardedWeights(
                    self.rank, self.world_size, device, bucket_bytes
                )
            else:
                self.weight_sync = (
                    SharedWeights() if self.generation.engine.shares_weights else CopiedWeights()
                )
                self.generation.engine.is_load_stable = (
                    True  # tensors are gathered one by one, or the actor's own
                )
            choices |= self.generation.choices
        if self.has_adapter:
            choices["adapter"] += f"; {self._choose_route()}"
        if self.parts.rollout:
            self.publish_weights(self.weight_version)
            if isinstance(self.weight_sync, ReshardedWeights):
                self.generation.engine.shares_weights = self.weight_sync.num_shared > 0
                choices["rollout"] += f"; {self.weight_sync.describe()}"
        if self.parts.actor and not reserves:
            is_shared = self.parts.rollout and self.generation.engine.shares_weights
            choices["weights"] += self.offload_training(keeps_weights=is_shared)
        if self.parts.reference:
            choices["reference"] = self._make_reference()
        return choices

    def _make_reference(self) -> str:
        """The policy that training starts from. Returns what it is, and where it rests."""
        if self.has_adapter:
            return "the actor with its adapter off"
        loaded = load_policy(self.config, self.dtype.value, self.processes)
        self.reference = self.build_engine(loaded, self.section.fsdp_config, name="reference")
        rests = self.config.actor_rollout_ref.ref.fsdp_config.param_offload
        if rests is None:
            rests = self.parts.actor and self.device.type != "cpu"
        folder = self.config.trainer.offload_directory
        return f"a frozen copy{self.reference.rest_between_phases(['weights'] if rests else [], folder)}"

    def _choose_route(self) -> str:
        """How an adapter gets to the rollout: decided, and said."""
        is_wide = self.engine.device.type != "cpu" and self.engine.dtype == torch.float32
        route = adapter_route(self.config, is_wide_on_accelerator=is_wide)
        if self.parts.rollout and self.generation.engine.shares_weights:
            return "the rollout computes in the same modules"
        self.sends_adapter_alone = route.is_alone
        way = "alone, after the weights below it" if route.is_alone else "merged"
        return f"to the rollout it goes {way} ({route.reason})"

    @register(dispatch_mode=BY_GROUP)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Responses to prompts; see `rollout.generate_sequences`."""
        if self.generation.engine.has_dropped_weights:  # it slept since the last publication
            self.publish_weights(self.weight_version)
        self.weight_sync.verify(self.generation.engine, self.weight_version)
        return self.generation.generate(prompts, self.weight_version)

    @register(dispatch_mode=BY_REPLICA, blocking=False)
    @timed("old_log_prob")
    def compute_log_prob(self, data: DataProto, with_sum_pi_squared: bool = False) -> DataProto:
        """`old_log_probs`, `entropys` and, where wanted, `sum_pi_squared` [B, T] of the actor as it is; and the experts
        that the update repeats, `routed_experts` [B, P + T, L, k]."""
        with_routes = self.section.router_replay == "old_log_prob"
        wanted = {
            "with_entropy": True,
            "with_sum_pi_squared": with_sum_pi_squared,
            "with_routes": with_routes,
        }
        scores = self._infer(self.engine, data, self.rollout_config, **wanted)
        found = DataProto.from_dict(
            tensors={"old_log_probs": scores["log_probs"], "entropys": scores["entropy"]}
        )
        for name in scores.keys() - {"log_probs", "entropy"}:
            found.batch[name] = scores[name]
        return found

    @register(dispatch_mode=BY_REPLICA, blocking=False)
    @timed("ref")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob` [B, T] of the policy that training started from."""
        config = self.config.actor_rollout_ref.ref
        if self.reference is not None:
            scores = self._infer(self.reference, data, config)
        else:
            with adapter_off(self.engine.model):
                scores = self._infer(self.engine, data, config)
        return DataProto.from_dict(tensors={"ref_log_prob": scores["log_probs"]})

    def _infer(
        self, engine: FSDPEngine, data: DataProto, config: LogProbConfig, **wanted: bool
    ) -> dict[str, torch.Tensor]:
        num_sequences = (
            None if config.log_prob_use_dynamic_bsz else config.log_prob_micro_batch_size_per_gpu
        )
        micro = MicroBatching(
            num_sequences, config.log_prob_max_token_len_per_gpu, self.share_prompts
        )
        return infer(engine, data, micro, temperature=self.rollout_config.temperature, **wanted)

    @register(dispatch_mode=BY_REPLICA)
    def update_actor(self, data: DataProto) -> DataProto:
        """Learn from a batch with advantages [B, T]. Returns metrics. The rollout's weights stay as they are."""
        return self.learn(data, self.rollout_config.n, temperature=self.rollout_config.temperature)

    @register(dispatch_mode=Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)
    def ranks_and_costs(self) -> tuple[int, float, float, Callable[[torch.Tensor], float]]:
        """How many data-parallel ranks share a batch; of the actor's `ModelCost` what `SequenceCost` takes."""
        cost = self.engine.cost
        return self.processes.replicas.size, cost.attention_tokens, cost.head, cost.images

    @contextmanager
    def weights(self, *, has_frozen: bool) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """What one weight sync sends; it has arrived when the context ends without an error.

            all weights trained         all of them
            an adapter, merged          all of them, the adapter merged on the way
            an adapter, alone           the frozen weights and the adapter; once the frozen ones are there, the adapter
            on the actor's own modules  the parameters as they are, for the rollout to see that they are its own

        `has_frozen`: whether the rollout still has frozen weights that were sent to it.
        """
        with self.engine.awake("weights"):
            if not self.sends_adapter_alone:
                is_shared = self.parts.rollout and self.generation.engine.shares_weights
                yield self.engine.weights(is_merged=not is_shared)
                return
            # All ranks gather the same tensors, so all decide alike.
            are_there = all(self.engine.world.gather(self.has_sent_frozen and has_frozen))
            self.has_sent_frozen = False
            yield self.engine.adapter_weights(with_frozen=not are_there)
            self.has_sent_frozen = True

    def pieces(self) -> Held:
        """The parts of the weights that this rank has, an adapter's beside them; names are those without an adapter."""
        parts = self.engine.parameters.pieces()
        return {
            base_name(name): (Piece(start, tuple(tensor.shape)), tensor.detach())
            for name, start, tensor in parts
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def publish_weights(self, version: int) -> None:
        """Give the rollout the actor's weights; it refuses to generate with any others."""
        self.weight_version = version
        rollout = self.generation.engine
        if isinstance(self.weight_sync, ReshardedWeights):
            with self.engine.awake("weights"):
                self.weight_sync.publish(self.pieces(), rollout, version)
            return
        with self.weights(has_frozen=rollout.has_frozen_weights) as weights:
            self.weight_sync.publish(weights, rollout, version)

    @register(dispatch_mode=Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)
    def open_stream(self, done: Done) -> GenerationStream:
        """Generation beside training, in this process and by an engine with a copy of the weights; `close` ends it."""
        device, dtype = self.engine.device, self.engine.dtype
        own = Generation(
            self.config, self.tokenizer, device, dtype, is_beside_training=False, num_processes=2
        )
        self.stream = GenerationStream(own, done)
        return self.stream

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def copy_weights(self) -> WeightCopy | None:
        """From rank 0 the actor's weights as they are, in the dtype of the rollout, an adapter merged. They stay so, on
        the rollout's device if that is here."""
        copied: dict[str, torch.Tensor] = {}
        with self.engine.awake("weights"):
            for name, tensor in self.engine.weights(is_merged=True):
                if self.rank == 0:
                    device = tensor.device if self.parts.rollout else "cpu"
                    copied[name] = tensor.detach().to(device, self.engine.dtype, copy=True)
        marks = {name: tensor_fingerprint(tensor) for name, tensor in copied.items()}
        return WeightCopy(copied, marks) if self.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offer_weights(self, ranks: Sequence[int]) -> Address | None:
        """Prepare weight sync with these ranks of a rollout elsewhere alone. Returns, from rank 0, the address."""
        bucket_bytes, device = (
            self.rollout_config.update_weights_bucket_megabytes << 20,
            self.processes.world.device,
        )
        if sends_parts(self.config):
            first = (
                open_store(self.place.master_addr, ranks, self.world_size)
                if self.rank == 0
                else None
            )
            address = self.engine.world.gather(first and first[0])[0]
            meeting = partial(meet, address, self.rank, device, first and first[1])
            kind = ReshardedWeights if has_shards(self.config) else StreamedWeights
            self.sender = kind(
                self.rank, self.world_size + len(ranks), device, bucket_bytes, meeting
            )
            return address if self.rank == 0 else None
        if self.rank != 0:
            return None
        if isinstance(self.sender, WeightSender):
            self.sender.close()
        self.sender = WeightSender(self.place.master_addr, ranks, device, bucket_bytes)
        return self.sender.address

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self, version: int, has_frozen: bool = False) -> None:
        """Send the actor's weights to the rollout in other processes, which receives them meanwhile. `has_frozen`: it
        loaded what was sent last, frozen weights included."""
        if isinstance(self.sender, ReshardedWeights):
            with self.engine.awake("weights"):
                self.sender.publish(self.pieces(), None, version)
            return
        with self.weights(has_frozen=has_frozen) as weights:
            try:
                if self.sender is not None:
                    self.sender.publish(weights, version)
            finally:
                for _ in (
                    weights
                ):  # all ranks take part in gathering each tensor, even where it could not be sent
                    pass

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: Path) -> None:
        """Read the actor from below `directory`. The rollout keeps its weights until new ones are published."""
        super().load_checkpoint(directory)
        self.has_sent_frozen = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Release what the rollout or the weight sync holds, and leave the process group."""
        if self.stream is not None:
            self.stream.close()
        if self.parts.rollout:
            self.generation.close()
        if isinstance(self.sender, WeightSender):
            self.sender.close()
        super().close()
