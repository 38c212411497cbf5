# SPDX-License-Identifier: Apache-2.0
"""The traits that a rollout engine can declare."""

from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """A package that an engine needs.

    Attributes:
        module: module that is imported.
        title: name of the library in messages.
        least_version: oldest version that works.
        install: how to install it.
        share_without_training: share of a GPU that it takes where nothing is trained, unless
            `gpu_memory_utilization` is given; None: that key's default.
    """

    module: str
    title: str
    least_version: str
    install: str
    share_without_training: float | None = None


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class EngineTraits:
    """Abilities of a rollout engine. The defaults describe a plain engine in the calling process.

    Attributes:
        takes_weights: when the engine loads new weights. "between_tokens" is needed for
            asynchronous training; such an engine has `begin` and `between_steps`. "never": it is
            only for generate and eval.
        continues_unfinished: whether it hands over unfinished responses (`unfinished`) for another
            engine with the same weights to continue.
        is_deterministic: whether a response depends on its request and the weights alone. Such an
            engine calls `before_step` before each of its steps.
        reports_routes: whether it reports the experts that each token was routed to.
        computes_in: the processes that compute: the "caller"; "own" ones, which can be several
            engines (`data_parallel_size`); "own_if_async", with `mode=async`, in asynchronous
            training, or on several devices without Ray; running "servers" with settings of their
            own.
        spans_ranks: whether the ranks of a rollout group on Ray hold one engine together.
        takes_shards: whether each of these ranks loads its shards of the weights, not whole tensors.
        expert_parallel_devices: types of the devices on which its ranks can divide experts; ():
            expert parallelism is not supported.
        max_adapter_rank: largest rank of a LoRA adapter that it applies beside the weights, on an
            accelerator to 16-bit weights only. 0: it needs merged weights.
        ignores_lora_merge: why `lora_merge` has no effect on the engine; "" if it has an effect.
        server_options: options in `engine_kwargs` that name running servers, the last one several;
            with one of them the engine starts no processes.
        packs_weights: whether on a CPU it computes with copies of the weights in another order.
        file_options: options in `engine_kwargs` that must name existing files.
        reads_keys: keys of `rollout` that it reads, out of those listed here, which other engines
            may not read.
        lacks: sampling that it does not support. "unfiltered_log_probs": log-probabilities after
            the temperature and before top_p, top_k and min_p; "min_p": min_p with a seed;
            "stop_token_ids": `stop_token_ids` with `ignore_eos`.
        package: the package that it needs.
    """

    takes_weights: Literal["between_batches", "between_tokens", "never"] = "between_batches"
    continues_unfinished: bool = False
    is_deterministic: bool = False
    reports_routes: bool = False
    computes_in: Literal["caller", "own", "own_if_async", "servers"] = "caller"
    spans_ranks: bool = False
    takes_shards: bool = False
    expert_parallel_devices: tuple[str, ...] = ()
    max_adapter_rank: int = 0
    ignores_lora_merge: str = ""
    server_options: tuple[str, ...] = ()
    file_options: tuple[str, ...] = ()
    packs_weights: bool = False
    reads_keys: tuple[Literal["enforce_eager", "gpu_memory_utilization", "request_seeds"], ...] = ()
    lacks: tuple[Literal["unfiltered_log_probs", "min_p", "stop_token_ids"], ...] = ()
    package: Package | None = None

    @property
    def streams(self) -> bool:
        """Whether it takes weights between two tokens."""
        return self.takes_weights == "between_tokens"

    @property
    def supports_tensor_parallel(self) -> bool:
        """Whether several ranks, processes or servers can compute it together."""
        return self.spans_ranks or self.computes_in != "caller"
