# SPDX-License-Identifier: Apache-2.0
"""Rollout worker in separate processes: an engine, and the receiving side of the weight sync.

actor                          driver                         rollout
offer_weights     ── address ──>   ── address ──>             expect_weights       once
send_weights(v)   <── v ─────────────── v ──>                 receive_weights(v)   at the same time
                  ── buckets of weights ────────>
"""

from collections.abc import Collection, Sequence
from functools import cached_property, partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from quadriga.config import Config
from quadriga.config.placement import has_shards, rollout_devices, rollout_group_size, sends_parts
from quadriga.engines import process_group
from quadriga.errors import WeightSyncError
from quadriga.observe.machine import choose_dtype
from quadriga.observe.profiler import check_tool
from quadriga.protocol import DataProto
from quadriga.rollout.call_queue import QueueReply, ServedCall
from quadriga.rollout.group import RolloutGroup
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.user_file import import_external
from quadriga.weight_sync import Address, ReshardedWeights, StreamedWeights, WeightReceiver, meet
from quadriga.workers.base import choose_device
from quadriga.workers.generation import ResponseGenerator
from quadriga.workers.stream import ServedStream


class RolloutWorker(Worker):
    """Generates responses, with weights of an actor in other processes.

    Args:
        config: the configuration.
        tokenizer: tokenizer of the policy.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        import_external(config.actor_rollout_ref.model.external_lib)
        self.config = config
        self.tokenizer = tokenizer
        self.weight_version = 0
        self._receiver: WeightReceiver | ReshardedWeights | None = None
        self.stream: ServedStream | None = None

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> dict[str, str]:
        """Build the engine, or the stream of `async_training`.

        Returns:
            The choices, with reasons, to be printed.
        """
        # A process with several devices sees no others, so its first one has index 0.
        device_index = 0 if rollout_devices(self.config) > 1 else self.local_rank
        self.device = choose_device(self.config.trainer.device, device_index)
        check_tool(self.config.global_profiler.tool, self.device)
        if rollout_group_size(self.config) > 1:
            self.world = process_group.join(self.place, self.device)
        settings = self.config.async_training
        # With a stream, the generator of `generate_sequences` is built only if it is needed.
        if settings.enable:
            self.stream = ServedStream(self._make_generator(), waits=settings.deterministic)
            choices = self.stream.generation.choices
        else:
            choices = self.generation.choices
        return choices | {"rollout": f"{choices['rollout']}; on processes of its own"}

    @cached_property
    def generation(self) -> ResponseGenerator:
        """Generator of `generate_sequences`, built at first use.

        Beside a stream, it is for validation, and has its own weights.
        """
        return self._make_generator()

    def _make_generator(self) -> ResponseGenerator:
        """Build a generator with an engine that has its own weights."""
        model_dtype = self.config.actor_rollout_ref.actor.fsdp_config.model_dtype
        size = rollout_group_size(self.config)
        group = None
        if size > 1:
            # Each engine has its own process groups: engines may compute at the same time.
            group = RolloutGroup(self.rank, self.world_size, size, self.device)
        return ResponseGenerator(
            self.config,
            self.tokenizer,
            self.device,
            choose_dtype(model_dtype, self.device).value,
            is_beside_training=False,
            num_processes=self.world_size,
            group=group,
        )

    @register(Dispatch.ONE_TO_ALL, blocking=False, materialize_futures=False)
    def call_stream(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the stream (`ServedStream`).

        Args:
            method: name of the method.
            args: positional arguments of the method. Futures among them are passed unresolved, so
                that the method may wait for them itself.
            kwargs: keyword arguments of the method.
        """
        getattr(self.stream, method)(*args, **kwargs)

    @register(Dispatch.ONE_TO_ALL, blocking=False, beside=True)
    def stream_events(self) -> list[tuple[str, int, Any]]:
        """Events of the stream; see `ServedStream.events`."""
        assert self.stream is not None
        return self.stream.events()

    @register(Dispatch.ONE_TO_ALL, beside=True)
    def exchange_calls(self, calls: Sequence[ServedCall], cancelled: Collection[int]) -> QueueReply:
        """Exchange the calls of a server; see `CallQueue.exchange`."""
        generation = self.generation if self.stream is None else self.stream.generation
        return generation.exchange_calls(calls, cancelled)

    @register(Dispatch.ONE_TO_ALL)
    def expect_weights(self, address: Address) -> None:
        """Connect to the sender of the actor's weights, in place of an earlier connection.

        Args:
            address: address from `offer_weights` of the actor.
        """
        # All actor ranks send parts. Their ranks come before those of the rollout in one group.
        if sends_parts(self.config):
            rank = address.num_senders + self.rank
            size = address.num_senders + self.world_size
            rollout = self.config.actor_rollout_ref.rollout
            bucket_bytes = rollout.update_weights_bucket_megabytes << 20
            meeting = partial(meet, address, rank, self.device)
            sync_class = ReshardedWeights if has_shards(self.config) else StreamedWeights
            self._receiver = sync_class(rank, size, self.device, bucket_bytes, meeting)
            # Received tensors are never overwritten during a load, so the engine need not clone them.
            self.generation.engine.is_load_stable = True
            return
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = WeightReceiver(address, self.rank, self.device)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, version: int) -> bool:
        """Load the weights that the actor is sending at the same time with `send_weights`.

        From then on `generate_sequences` refuses to generate with weights of another version.

        Args:
            version: version of the weights.

        Returns:
            Whether the engine has the frozen weights below an adapter, which then need not be sent
            the next time.
        """
        self.receiver.receive(self.generation.engine, version)
        self.weight_version = version
        return self.generation.engine.has_frozen_weights

    @register(Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate responses to prompts; see `rollout.generate_sequences`."""
        # Refuse to generate with weights that were not loaded completely.
        self.receiver.verify(self.generation.engine, self.weight_version)
        return self.generation.generate(prompts, self.weight_version)

    @register(Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Release the engines and the connection to the actor."""
        if self.stream is not None:
            self.stream.close()
        # Look in `vars`: reading the property would build the engine only to close it.
        if "generation" in vars(self):
            self.generation.close()
        if self._receiver is not None:
            self._receiver.close()
        if rollout_group_size(self.config) > 1:
            process_group.leave(self.world)

    @property
    def receiver(self) -> WeightReceiver | ReshardedWeights:
        """The receiving side of the weight sync.

        Raises:
            WeightSyncError: `expect_weights` was not called.
        """
        if self._receiver is None:
            raise WeightSyncError(
                "rollout",
                got="no connection to the actor's weights (expect_weights was not called)",
                expected="expect_weights, and weights that were published",
                fix="Publish the weights before the first generation.",
            )
        return self._receiver
