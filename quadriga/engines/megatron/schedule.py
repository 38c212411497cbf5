# SPDX-License-Identifier: Apache-2.0
"""Micro-batches through Megatron's schedules: one after the other, 1F1B, or interleaved over virtual stages.

A schedule sends tensors of one shape between stages, so the micro-batches of a step are extended to the longest. With
virtual stages their number is a multiple of the stages; the engine adds fillers.

Legend: n packed tokens of a micro-batch in this rank, M predicted tokens, D hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import nn

from quadriga.engines.megatron.cpu import around_megatron
from quadriga.engines.megatron.model import Packed
from quadriga.engines.packing import LossFunction, Outputs
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.parallel.sharing import SharedTokens, all_gather
from quadriga.models.attention import PackedBatch
from quadriga.models.experts import RoutedTokens
from quadriga.models.scorers import Question, Scored, Scorer
from quadriga.partition import part_of

Work = tuple[PackedBatch, LossFunction | None]


class PartsOfTokens(SharedTokens):
    """Routers see the tokens of their rank alone: Megatron with sequence parallelism."""

    def routed(self, batch: PackedBatch, num_tokens: int) -> RoutedTokens:
        routed, processes = super().routed(batch, num_tokens), self.processes
        start, size = part_of(num_tokens, processes.layout.tp, processes.place.tp)
        here = (routed.places >= start) & (routed.places < start + size)
        routed.start, routed.places, routed.rows = routed.start + start, routed.places[here] - start, routed.rows[here]
        of_part = routed.add_up

        def add_up(values: torch.Tensor) -> None:
            of_part(values)
            dist.all_reduce(values, group=processes.group("tp"))

        routed.add_up = add_up
        return routed

    def joined(self, values: torch.Tensor) -> torch.Tensor:
        return super().joined(all_gather(values, self.processes.group("tp")))


class WholeTokens(SharedTokens):
    """Every rank of a tensor-parallel group has all tokens at the end: Megatron without sequence parallelism."""

    def __init__(self, processes: Processes, num_vocabulary: int) -> None:
        super().__init__(processes, num_vocabulary)
        self.num_parts = 1

    def scored(self, hidden: torch.Tensor, batch: PackedBatch, *, in_parts: bool) -> Scored:
        if self.processes.layout.tp > 1 and in_parts:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        return super().scored(hidden, batch, in_parts=in_parts)


class Schedule:
    """This rank's chunks, and how micro-batches go through them."""

    def __init__(self, scorer: Scorer, chunks: Sequence[GPTModel], processes: Processes) -> None:
        self.scorer, self.chunks, self.processes = scorer, list(chunks), processes

    def run(self, work: Sequence[Work], question: Question, *, is_training: bool = False) -> list[Outputs]:
        """One forward pass, and in training one backward pass, over all micro-batches, in multiples of the stages.

        `work`: micro-batches, each with its loss in training.
        Returns the outputs [M] of each micro-batch; none but in the last stage.
        """
        if self.processes.layout.pp > 1:
            longest = max(batch.num_tokens for batch, _ in work)
            work = [(batch.extended(longest), loss) for batch, loss in work]
        found: list[Outputs] = []

        def step(pieces: Iterator[Work], chunk: nn.Module) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
            batch, loss = next(pieces)
            ids, positions, plan = self.scorer.sharing.inputs(batch)
            routed = None if batch.routing is None else self.scorer.sharing.routed(batch, ids.shape[1])
            packed = Packed(positions=positions[0], plan=plan, routed=routed)
            hidden = chunk(ids, positions, None, packed_seq_params=packed)
            if routed is not None:
                self.scorer.keep_routes(routed)

            def score(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
                outputs = self.scorer.score(hidden[:, 0], batch, question)
                found.append({name: values.detach() for name, values in outputs.items()})
                total = next(iter(outputs.values())).sum() * 0.0 if loss is None else loss(outputs)
                return total, torch.zeros((), dtype=torch.int), None

            return hidden, score

        with around_megatron(self.processes.world.device):
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(work) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(work),
                seq_length=work[0][0].num_tokens // self.processes.layout.sp,
                micro_batch_size=1,
                forward_only=not is_training,
            )
        return found
