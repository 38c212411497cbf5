# SPDX-License-Identifier: Apache-2.0
"""A rollout on its own processes: an engine in each, and the end of the channel by which the actor's weights come.

actor                          driver                         rollout
offer_weights     ── address ──>   ── address ──>             expect_weights       once
send_weights(v)   <── v ─────────────── v ──>                 receive_weights(v)   both at a time
                  ── buckets of weights ────────>
"""

from transformers import PreTrainedTokenizerBase

from quadriga.config import Config
from quadriga.errors import WeightSyncError
from quadriga.observe.machine import choose_dtype
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.weight_sync import Address, WeightReceiver, connect
from quadriga.workers.base import RunFacts, choose_device
from quadriga.workers.elsewhere import ActorElsewhere
from quadriga.workers.generation import Generation, make_rollout


class RolloutWorker(Worker):
    """See the module.

    Args:
        config: of the run.
        tokenizer: of the model.
        facts: what the builder of the run has decided.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, facts: RunFacts) -> None:
        super().__init__()
        self.config, self.tokenizer, self.facts = config, tokenizer, facts
        self.weight_version = 0
        self.receiver: WeightReceiver | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> dict[str, str]:
        """Make the engine. Returns what was chosen, with reasons, for people to read."""
        self.device = choose_device(self.config.trainer.device, self.local_rank)
        dtype = choose_dtype(self.config.actor_rollout_ref.actor.fsdp_config.model_dtype, self.device)
        actor = ActorElsewhere(self.device, dtype.value)
        self.rollout = make_rollout(self.facts.rollout_engine, self.config, actor, self.tokenizer)
        self.generation = Generation(
            self.config,
            self.tokenizer,
            self.rollout.engine,
            is_beside_training=False,
            num_processes=self.world_size,
        )
        return {"rollout": f"{self.rollout.description}; on processes of its own", **self.generation.choices}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def expect_weights(self, address: Address) -> None:
        """Say where weights will come from."""
        self.receiver = WeightReceiver(connect(address, self.rank, self.device))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, version: int) -> None:
        """Take over what the actor sends meanwhile; the engine refuses to generate with any other weights."""
        self._weights().receive(self.rollout.engine, version)
        self.weight_version = version

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answers to prompts: see `rollout.generate_sequences`."""
        self._weights().verify(self.rollout.engine, self.weight_version)
        return self.generation.answer(prompts, self.weight_version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Release what the engine and the channel hold."""
        self.generation.close()
        if self.receiver is not None:
            self.receiver.close()

    def _weights(self) -> WeightReceiver:
        if self.receiver is None:
            raise WeightSyncError(
                "rollout",
                got="no way for the actor's weights to come",
                expected="expect_weights, and weights that were published",
                fix="Publish the weights before the first generation.",
            )
        return self.receiver
