# SPDX-License-Identifier: Apache-2.0
"""A rollout on its own processes: an engine in each, and the receiving end of the actor's weights.

actor                          driver                         rollout
offer_weights     ── address ──>   ── address ──>             expect_weights       once
send_weights(v)   <── v ─────────────── v ──>                 receive_weights(v)   both at a time
                  ── buckets of weights ────────>
"""

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
from quadriga.rollout.group import RolloutGroup
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.user_file import import_external
from quadriga.weight_sync import Address, ReshardedWeights, StreamedWeights, WeightReceiver, meet
from quadriga.workers.base import choose_device
from quadriga.workers.generation import Generation
from quadriga.workers.stream import ServedStream


class RolloutWorker(Worker):
    """Generates, and gets the weights of an actor in other processes."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        import_external(config.actor_rollout_ref.model.external_lib)
        self.config, self.tokenizer = config, tokenizer
        self.weight_version = 0
        self._receiver: WeightReceiver | ReshardedWeights | None = None
        self.stream: ServedStream | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> dict[str, str]:
        """Make the engine; with `async_training` that of the stream. Returns what was chosen, with reasons."""
        first = 0 if rollout_devices(self.config) > 1 else self.local_rank  # of those that it sees
        self.device = choose_device(self.config.trainer.device, first)
        check_tool(self.config.global_profiler.tool, self.device)
        if rollout_group_size(self.config) > 1:
            self.world = process_group.join(self.place, self.device)
        if (settings := self.config.async_training).enable:
            self.stream = ServedStream(self._make(), waits=settings.deterministic)
        choices = (
            self.stream.generation.choices if self.stream is not None else self.generation.choices
        )
        return choices | {"rollout": f"{choices['rollout']}; on processes of its own"}

    @cached_property
    def generation(self) -> Generation:
        """What `generate_sequences` uses: beside a stream it validates, with weights of its own."""
        return self._make()

    def _make(self) -> Generation:
        dtype = choose_dtype(
            self.config.actor_rollout_ref.actor.fsdp_config.model_dtype, self.device
        ).value
        own: dict[str, Any] = {"is_beside_training": False, "num_processes": self.world_size}
        if (
            size := rollout_group_size(self.config)
        ) > 1:  # each engine has its own, for they compute at the same time
            own["group"] = RolloutGroup(self.rank, self.world_size, size, self.device)
        return Generation(self.config, self.tokenizer, self.device, dtype, **own)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, materialize_futures=False)
    def call_stream(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the stream (`ServedStream`)."""
        getattr(self.stream, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, beside=True)
    def stream_events(self) -> list[tuple[str, int, Any]]:
        """What has happened in the stream; see `ServedStream.events`."""
        assert self.stream is not None
        return self.stream.events()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def expect_weights(self, address: Address) -> None:
        """Take the address that weights will come from, and leave an earlier one."""
        if sends_parts(self.config):
            rank, size = address.num_senders + self.rank, address.num_senders + self.world_size
            bucket_bytes = (
                self.config.actor_rollout_ref.rollout.update_weights_bucket_megabytes << 20
            )
            meeting = partial(meet, address, rank, self.device)
            kind = ReshardedWeights if has_shards(self.config) else StreamedWeights
            self._receiver = kind(rank, size, self.device, bucket_bytes, meeting)
            self.generation.engine.is_load_stable = True  # no tensor is written to again
            return
        if isinstance(self._receiver, WeightReceiver):
            self._receiver.close()
        self._receiver = WeightReceiver(address, self.rank, self.device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, version: int) -> bool:
        """Load what the actor sends meanwhile; the engine refuses to generate with any other weights. Returns whether
        the next time an adapter may come alone."""
        if isinstance(self.receiver, ReshardedWeights):
            self.receiver.publish({}, self.generation.engine, version)
        else:
            self.receiver.receive(self.generation.engine, version)
        self.weight_version = version
        return self.generation.engine.has_frozen_weights

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Responses to prompts; see `rollout.generate_sequences`."""
        self.receiver.verify(self.generation.engine, self.weight_version)
        return self.generation.generate(prompts, self.weight_version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Release the engines and the connection to the actor."""
        if self.stream is not None:
            self.stream.close()
        if "generation" in vars(self):
            self.generation.close()
        if isinstance(self._receiver, WeightReceiver):
            self._receiver.close()
        if rollout_group_size(self.config) > 1:
            process_group.leave(self.world)

    @property
    def receiver(self) -> WeightReceiver | ReshardedWeights:
        """The receiving end of the actor's weights. Raises WeightSyncError: there is none."""
        if self._receiver is None:
            got = "no connection to the actor's weights (expect_weights was not called)"
            fix = "Publish the weights before the first generation."
            raise WeightSyncError(
                "rollout", got, "expect_weights, and weights that were published", fix
            )
        return self._receiver
