# SPDX-License-Identifier: Apache-2.0
"""The policy worker: the actor that is trained, the rollout that generates, and the reference.

Legend: B rows, P prompt positions, T response positions, L layers, k experts per token.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from quadriga.config import Config, LogProbConfig
from quadriga.config.adapter import adapter_route
from quadriga.config.placement import ACTOR, has_shards, rollout_group_size, sends_parts
from quadriga.engines.batches import MicroBatching
from quadriga.engines.fsdp.engine import FSDPEngine
from quadriga.engines.objectives import PolicyObjective
from quadriga.engines.step import FirstOutputs, infer
from quadriga.models.adapter_files import base_name
from quadriga.models.lora import disable_adapter
from quadriga.protocol import DataProto
from quadriga.rollout.call_queue import QueueReply, ServedCall
from quadriga.rollout.group import RolloutGroup
from quadriga.rollout.third_party import require_device_memory
from quadriga.single_controller import Dispatch, Execute, register
from quadriga.weight_sync import (
    Address,
    Box,
    CopiedWeights,
    Held,
    ReshardedWeights,
    SharedWeights,
    StreamedWeights,
    WeightSender,
    meet,
    open_store,
)
from quadriga.weight_sync.fingerprint import PendingFingerprints
from quadriga.workers.base import BY_GROUP, BY_REPLICA, GROUPS, Learner, held_memory, timed
from quadriga.workers.generation import ResponseGenerator
from quadriga.workers.models import load_policy
from quadriga.workers.stream import Done, GenerationStream, WeightCopy


class ActorRolloutRefWorker(Learner):
    """Actor, rollout and reference policy, or some of them.

    Args:
        config: the configuration.
        tokenizer: tokenizer of the policy.
        role: `actor_rollout_ref`, `actor_rollout`, `actor` or `ref`: names of the parts, joined by
            underscores. For the role `actor`, other processes generate (`workers.rollout`).
        is_trained: whether the actor is trained. An actor that only generates needs neither float32
            masters nor an optimizer.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        role: str = "actor_rollout_ref",
        *,
        is_trained: bool = True,
    ) -> None:
        super().__init__(config, tokenizer)
        parts = role.split("_")
        self.has_actor = "actor" in parts
        self.has_rollout = "rollout" in parts
        self.has_reference = "ref" in parts
        self.is_trained = is_trained
        self.rollout_config = config.actor_rollout_ref.rollout
        self.reference: FSDPEngine | None = None
        self.weight_version = 0
        # A rollout in this process gets weights by `weight_sync`, which is `resharding` if it takes
        # shards. A rollout in other processes gets them by `resharding` if each actor rank sends a
        # part, else by `sender`, as full weights from rank 0.
        self.resharding: ReshardedWeights | None = None
        self.sender: WeightSender | None = None
        self.stream: GenerationStream | None = None  # generates in this process during training
        self.sends_adapter_alone = False  # whether an adapter is sent without being merged
        self.has_sent_frozen = False  # whether the weights below the adapter were sent

    @property
    def has_adapter(self) -> bool:
        """Whether the actor of this worker has an adapter."""
        return self.has_actor and self.config.actor_rollout_ref.model.has_adapter

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> dict[str, str]:
        """Load the models and build the engines. Returns choices, with reasons, to be printed."""
        self.join(self.section, self.section.fsdp_config, ACTOR)
        choices = self._make_actor() if self.has_actor else {}

        # Whether the rollout engine reserves a share of the GPU's memory when it starts.
        reserves_memory = False
        if self.has_rollout:
            device = self.engine.device
            reads_keys = self.rollout_config.traits.reads_keys
            reserves_memory = device.type == "cuda" and "gpu_memory_utilization" in reads_keys
            if reserves_memory:
                # Free the memory of training first. The actor's weights can be offloaded, because
                # such an engine has its own copy of them. `offload_training` returns a text that
                # begins with a semicolon, or "".
                choices["weights"] += self.offload_training()
                memory = held_memory(device)
                require_device_memory(
                    memory.total_bytes,
                    memory.process_bytes,
                    memory.other_bytes,
                    later_bytes=self.engine.moment_bytes,
                    share=self.rollout_config.gpu_memory_utilization,
                )
            self._make_rollout()
            choices |= self.generation.choices

        # The rollout gets the actor's weights, with the adapter merged into them or separate.
        if self.has_adapter:
            choices["adapter"] += f"; {self._choose_adapter_route()}"
        if self.has_rollout:
            self.publish_weights(self.weight_version)
            if self.resharding is not None:
                # Only the first publication shows which shards both sides can share.
                self.generation.engine.shares_weights = self.resharding.num_shared > 0
                choices["rollout"] += f"; {self.resharding.describe()}"

        # Offload last, because only now it is known whether the rollout shares the weights.
        if self.has_actor and not reserves_memory:
            is_shared = self.has_rollout and self.generation.engine.shares_weights
            choices["weights"] += self.offload_training(keeps_weights=is_shared)
        if self.has_reference:
            choices["reference"] = self._make_reference()
        if self.has_rollout and not self.is_trained and self.generation.calls is not None:
            # Weights that never change can be used at any time.
            self.generation.calls.accept()
        return choices

    def _make_actor(self) -> dict[str, str]:
        """Load the actor, and build its engine and loss. Returns its choices, to be printed."""
        # The weights below an adapter are frozen: they need no float32 masters.
        dtype = torch.float32 if self.is_trained and not self.has_adapter else self.dtype.value
        loaded = load_policy(self.config, dtype, self.processes, has_adapter=self.has_adapter)
        model = self.config.actor_rollout_ref.model if self.is_trained else None
        choices = self.make_engine(loaded, model, "actor")
        self.objective = PolicyObjective(
            self.section, self.config.algorithm.rollout_correction, self.config.distillation
        )
        return choices | self.describe("actor")

    def _make_rollout(self) -> None:
        """Build `generation`, and the weight sync from the actor."""
        device = self.engine.device
        size = rollout_group_size(self.config)
        group = RolloutGroup(self.rank, self.world_size, size, device) if size > 1 else None
        # All ranks of a rollout group get the same prompts; the first rank returns the responses.
        self.register_mesh(GROUPS, self.rank // size, self.rank % size == 0)
        # The rollout may compute in the actor's own modules, if they have all weights.
        lends_modules = self.processes.layout.is_whole and group is None
        self.generation = ResponseGenerator(
            self.config,
            self.tokenizer,
            device,
            self.engine.dtype,
            is_beside_training=self.is_trained,
            num_processes=self.world_size,
            actor=self.engine.model if lends_modules else None,
            group=group,
        )
        engine = self.generation.engine
        if has_shards(self.config):
            bucket_bytes = self.rollout_config.update_weights_bucket_megabytes << 20
            self.resharding = ReshardedWeights(self.rank, self.world_size, device, bucket_bytes)
            self.weight_sync = self.resharding
        else:
            self.weight_sync = SharedWeights() if engine.shares_weights else CopiedWeights()
            # The sender never overwrites a tensor during a load, so the engine need not clone it.
            engine.is_load_stable = True

    def _make_reference(self) -> str:
        """Build the reference: the policy that training starts from. Returns its description."""
        if self.has_adapter:
            return "the actor with its adapter off"
        loaded = load_policy(self.config, self.dtype.value, self.processes)
        self.reference = self.build_engine(loaded, self.section.fsdp_config, name="reference")
        is_offloaded = self.config.actor_rollout_ref.ref.fsdp_config.param_offload
        # By default, a reference on an accelerator leaves the memory to the actor.
        if is_offloaded is None:
            is_offloaded = self.has_actor and self.device.type != "cpu"
        kinds = ["weights"] if is_offloaded else []
        folder = self.config.trainer.offload_directory
        # Text that begins with a semicolon; "" without offload.
        offload_note = self.reference.offload_between_phases(kinds, folder)
        return f"a frozen copy{offload_note}"

    def _choose_adapter_route(self) -> str:
        """Choose how the rollout gets the adapter, for `sends_adapter_alone`.

        Returns:
            Description of the choice, to be printed.
        """
        # Whether the models compute in float32 on an accelerator.
        is_wide = self.engine.device.type != "cpu" and self.engine.dtype == torch.float32
        route = adapter_route(self.config, is_wide_on_accelerator=is_wide)
        if self.has_rollout and self.generation.engine.shares_weights:
            return "the rollout computes in the same modules"
        self.sends_adapter_alone = route.is_alone
        way = "alone, after the weights below it" if route.is_alone else "merged"
        return f"to the rollout it goes {way} ({route.reason})"

    @register(BY_GROUP)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate responses to prompts; see `rollout.generate_sequences`."""
        # An engine that has slept since the last publication may have dropped its weights.
        if self.generation.engine.has_dropped_weights:
            self.publish_weights(self.weight_version)
        self.weight_sync.verify(self.generation.engine, self.weight_version)
        return self.generation.generate(prompts, self.weight_version)

    @register(Dispatch.ONE_TO_ALL, beside=True)
    def exchange_calls(self, calls: Sequence[ServedCall], cancelled: Collection[int]) -> QueueReply:
        """Exchange the calls of a server; see `CallQueue.exchange`."""
        generation = self.generation if self.stream is None else self.stream.generation
        return generation.exchange_calls(calls, cancelled)

    @register(BY_REPLICA, blocking=False)
    @timed("old_log_prob")
    def compute_log_prob(self, data: DataProto, with_sum_pi_squared: bool = False) -> DataProto:
        """Compute the log-probs of the current actor.

        Args:
            data: rows with `MODEL_INPUTS`.
            with_sum_pi_squared: whether to return `sum_pi_squared`.

        Returns:
            `old_log_probs`, `entropys` and, if requested, `sum_pi_squared` [B, T]. If the update is
            to replay the routers' choices, also `routed_experts` [B, P + T, L, k].
        """
        scores = self._infer(
            self.engine,
            data,
            self.rollout_config,
            with_entropy=True,
            with_sum_pi_squared=with_sum_pi_squared,
            with_routes=self.section.router_replay == "old_log_prob",
        )
        # Columns of a batch have these names (docs/batch_fields.md).
        scores["old_log_probs"] = scores.pop("log_probs")
        scores["entropys"] = scores.pop("entropy")
        return DataProto.from_dict(tensors=scores)

    @register(BY_REPLICA, blocking=False)
    @timed("ref")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Compute `ref_log_prob` [B, T], the log-probs of the policy that training started from."""
        config = self.config.actor_rollout_ref.ref
        if self.reference is not None:
            scores = self._infer(self.reference, data, config)
        else:
            # Without its adapter, the actor is the policy that training started from.
            with disable_adapter(self.engine.model):
                scores = self._infer(self.engine, data, config)
        return DataProto.from_dict(tensors={"ref_log_prob": scores["log_probs"]})

    def _infer(
        self, engine: FSDPEngine, data: DataProto, config: LogProbConfig, **outputs: bool
    ) -> dict[str, torch.Tensor]:
        """Run `infer` with the micro-batch settings of a section.

        Args:
            engine: engine of the actor or the reference.
            data: rows with `MODEL_INPUTS`.
            config: section with the settings.
            outputs: which outputs `infer` returns besides log-probs, such as `with_entropy=True`.
        """
        # Rows of a micro-batch; None: only its tokens are limited.
        num_sequences = config.log_prob_micro_batch_size_per_gpu
        if config.log_prob_use_dynamic_bsz:
            num_sequences = None
        micro = MicroBatching(
            num_sequences, config.log_prob_max_token_len_per_gpu, self.share_prompts
        )
        return infer(engine, data, micro, temperature=self.rollout_config.temperature, **outputs)

    @register(BY_REPLICA)
    def update_actor(self, data: DataProto, with_log_probs: bool = False) -> DataProto:
        """Learn from a batch with advantages [B, T]. Does not publish the new weights.

        Args:
            data: rows with `advantages`, and the other columns of `UpdateInputs`.
            with_log_probs: whether to return the outputs of each row's first forward pass, which
                replace those of `compute_log_prob`.

        Returns:
            Metrics, and if requested `update_log_probs`, `update_entropys` [B, T] and `is_computed`
            [B]. It is False for rows that cannot change the gradient, which are not computed.
        """
        outputs = None
        if with_log_probs:
            outputs = FirstOutputs(len(data), data.batch["response_mask"].shape[1])
        result = self.learn(
            data,
            self.rollout_config.n,
            temperature=self.rollout_config.temperature,
            first_outputs=outputs,
        )
        if outputs is None:
            return result
        columns = {
            "update_log_probs": outputs.columns["log_probs"],
            "update_entropys": outputs.columns["entropy"],
            "is_computed": outputs.is_computed,
        }
        return DataProto.from_dict(tensors=columns, meta_info=result.meta_info)

    @register(Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)
    def ranks_and_costs(self) -> tuple[int, float, float, Callable[[torch.Tensor], float]]:
        """Return the number of data-parallel ranks, and the arguments of `SequenceCost`."""
        cost = self.engine.cost
        return self.processes.replicas.size, cost.attention_tokens, cost.head_cost, cost.image_cost

    @contextmanager
    def weights(self, *, has_frozen: bool) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """Context manager: the weights of one sync, as an iterator over names and tensors.

            all weights are trained     all weights
            an adapter, merged          all weights, merged while they are sent
            an adapter, alone           first frozen weights and adapter, later the adapter alone
            rollout on actor's modules  the parameters themselves, which the rollout recognizes

        An end of the block without an error means that the rollout has received the weights.

        Args:
            has_frozen: whether the rollout has kept the frozen weights of the last sync that sent
                them.
        """
        with self.engine.awake("weights"):
            if not self.sends_adapter_alone:
                is_shared = self.has_rollout and self.generation.engine.shares_weights
                yield self.engine.weights(is_merged=not is_shared)
                return
            # The frozen weights are left out if they were sent, and the rollout has not lost them
            # since, as in a restart. Sending weights is collective, so all ranks must agree.
            omits_frozen = all(self.engine.world.gather(self.has_sent_frozen and has_frozen))
            # An error below leaves it unknown whether the frozen weights have arrived.
            self.has_sent_frozen = False
            yield self.engine.adapter_weights(with_frozen=not omits_frozen)
            self.has_sent_frozen = True

    def shards(self) -> Held:
        """Collect the shards of this rank: position in the full weight, and tensor.

        Returns:
            The shards by the names that weights have in a model without an adapter.
        """
        shards = {}
        for name, start, tensor in self.engine.parameters.shards():
            shards[base_name(name)] = (Box(start, tuple(tensor.shape)), tensor.detach())
        return shards

    @register(Dispatch.ONE_TO_ALL)
    def publish_weights(self, version: int) -> None:
        """Publish the actor's weights to the rollout in this process.

        The rollout refuses to generate with weights of another version.

        Args:
            version: version of the weights.
        """
        self.weight_version = version
        rollout = self.generation.engine
        if self.resharding is not None:
            with self.engine.awake("weights"):
                self.resharding.publish(self.shards(), rollout, version)
            return
        with self.weights(has_frozen=rollout.has_frozen_weights) as weights:
            self.weight_sync.publish(weights, rollout, version)

    @register(Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)
    def open_stream(self, done: Done) -> GenerationStream:
        """Open a stream, which generates in this process while the actor is trained.

        `close` ends the stream.

        Args:
            done: see `GenerationStream`.

        Returns:
            The stream. Its engine has its own copy of the weights.
        """
        generation = ResponseGenerator(
            self.config,
            self.tokenizer,
            self.engine.device,
            self.engine.dtype,
            is_beside_training=False,
            # It shares the graders with `generation`, which generates for validation.
            num_processes=2,
        )
        self.stream = GenerationStream(generation, done)
        return self.stream

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def copy_weights(self) -> WeightCopy:
        """Copy the actor's current weights in its compute dtype, with an adapter merged.

        Returns:
            This rank's share of the copy, on the device of a rollout in this process or the CPU;
            see `join_shares`.
        """
        copied = {}
        fingerprints = PendingFingerprints()
        with self.engine.awake("weights"):
            # All ranks take part in gathering each tensor, and take turns in copying one: together
            # they copy from their devices to the host faster than a single one.
            for number, (name, tensor) in enumerate(self.engine.weights(is_merged=True)):
                if number % self.world_size == self.rank:
                    device = tensor.device if self.has_rollout else "cpu"
                    # Convert and compute fingerprints on the device, which is faster than the host.
                    weight = tensor.detach().to(self.engine.dtype)
                    fingerprints.add(name, weight)
                    copied[name] = weight.to(device, copy=True)
        return WeightCopy(copied, fingerprints.read())

    @register(Dispatch.ONE_TO_ALL)
    def offer_weights(self, ranks: Sequence[int]) -> Address | None:
        """Prepare the weight sync with a rollout in other processes.

        Args:
            ranks: ranks of the rollout that receive weights.

        Returns:
            On rank 0 the address for the rollout, else None.
        """
        bucket_bytes = self.rollout_config.update_weights_bucket_megabytes << 20
        device = self.processes.world.device
        # All ranks send parts of the weights, and meet at the store of rank 0.
        if sends_parts(self.config):
            # Rank 0 opens the store and tells its address to the other ranks.
            own_address = None
            store = None
            if self.rank == 0:
                own_address, store = open_store(self.place.master_addr, ranks, self.world_size)
            address = self.engine.world.gather(own_address)[0]
            meeting = partial(meet, address, self.rank, device, store)
            sync_class = ReshardedWeights if has_shards(self.config) else StreamedWeights
            size = self.world_size + len(ranks)
            self.resharding = sync_class(self.rank, size, device, bucket_bytes, meeting)
            return address if self.rank == 0 else None

        # Otherwise rank 0 alone sends, and it sends full weights.
        if self.rank != 0:
            return None
        # This is called again after a restart of the rollout, which needs a new connection.
        if self.sender is not None:
            self.sender.close()
        self.sender = WeightSender(self.place.master_addr, ranks, device, bucket_bytes)
        return self.sender.address

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self, version: int, has_frozen: bool = False) -> None:
        """Send the actor's weights to a rollout in other processes, which must receive them now.

        Args:
            version: version of the weights.
            has_frozen: whether the rollout still has the frozen weights that were sent to it.
        """
        if self.resharding is not None:
            with self.engine.awake("weights"):
                self.resharding.publish(self.shards(), None, version)
            return
        with self.weights(has_frozen=has_frozen) as weights:
            try:
                if self.sender is not None:
                    self.sender.publish(weights, version)
            finally:
                # The iterator gathers each tensor from all ranks, which wait for this one. So go to
                # its end after an error, too, and on a rank without `sender`, which only gathers.
                for _ in weights:
                    pass

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: Path) -> None:
        """Load the actor from below `directory`. Does not publish its weights to the rollout."""
        super().load_checkpoint(directory)
        # Send the frozen weights again with the next sync.
        self.has_sent_frozen = False

    @register(Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Close the rollout and the weight sync, and leave the process group."""
        if self.stream is not None:
            self.stream.close()
        if self.has_rollout:
            self.generation.close()
        if self.sender is not None:
            self.sender.close()
        super().close()
