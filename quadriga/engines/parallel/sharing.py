# SPDX-License-Identifier: Apache-2.0
"""Which tokens, heads and vocabulary entries of a packed batch each of the processes with the same rows computes.

    tokens of a batch      [ . . . . | . . . . ]     sp parts of the batch
    between the layers     [ . . | . . | . . | . . ] each of these in tp parts: norms and sums compute those alone
    head, vocabulary       gathered over tp; each process has its part of the vocabulary
    head, values           each process computes the values of its own tokens

All of them end with the same outputs of all predicted tokens, and compute the same loss.

Legend: N packed tokens, n of them in this process, M predicted tokens, D hidden size.
"""

from functools import partial

import torch

from quadriga.engines.parallel.collectives import fill, gather
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.parallel.sequence import UlyssesAttention
from quadriga.models.attention import AttentionPlan
from quadriga.models.heads import VocabularyShard
from quadriga.models.scorers import ModelInputs, PackedTokens, Scored


class SharedTokens:
    """See `models.scorers.Sharing`.

    Args:
        processes: of the engine.
        num_vocabulary: entries of the vocabulary of all processes.
    """

    def __init__(self, processes: Processes, num_vocabulary: int) -> None:
        layout, place = processes.layout, processes.place
        self.processes = processes
        self.has_embedding, self.has_head = processes.is_first_stage, processes.is_last_stage
        self.vocabulary: VocabularyShard | None = None
        if layout.tp > 1:
            start = sum(part_sizes(num_vocabulary, layout.tp)[: place.tp])
            self.vocabulary = VocabularyShard(processes.group("tp"), start)

    def inputs(self, batch: PackedTokens) -> ModelInputs:
        """See `Sharing.inputs`; those of all processes in the same tp group, which part them at the embedding."""
        layout, place = self.processes.layout, self.processes.place
        plan: AttentionPlan = batch.plan
        if layout.sp == 1:
            return ModelInputs(batch.input_ids, batch.position_ids, plan)
        start, size = _part(batch.input_ids.shape[1], layout.sp, place.sp)
        return ModelInputs(
            batch.input_ids.narrow(1, start, size),
            batch.position_ids.narrow(1, start, size),
            UlyssesAttention(plan, self.processes.group("sp")),
        )

    def scored(self, hidden: torch.Tensor, batch: PackedTokens, *, is_vocabulary: bool) -> Scored:
        """See `Sharing.scored`."""
        layout, place = self.processes.layout, self.processes.place
        num_tokens = batch.input_ids.shape[1]
        start, size = _part(num_tokens, layout.sp, place.sp)
        if layout.tp > 1 and is_vocabulary:
            hidden = gather(hidden, self.processes.group("tp"))
        elif layout.tp > 1:
            inside, size = _part(size, layout.tp, place.tp)
            start += inside
        here = (batch.predictors >= start) & (batch.predictors < start + size)
        places = here.nonzero()[:, 0]
        # With the vocabulary shared, all processes of a tp group have scored the same tokens.
        is_joined = {"sp": layout.sp > 1, "tp": layout.tp > 1 and not is_vocabulary}
        groups = [self.processes.group(name) for name, is_shared in is_joined.items() if is_shared]
        return Scored(
            hidden.index_select(0, batch.predictors[places] - start),
            batch.targets[places],
            partial(fill, places=places, size=len(batch.targets), groups=groups),
        )


def part_sizes(total: int, parts: int) -> list[int]:
    """Sizes of the parts of a dimension that is shared as `torch.chunk` cuts it: the last may be smaller, or empty."""
    size = -(-total // parts)
    return [max(0, min(size, total - part * size)) for part in range(parts)]


def _part(total: int, parts: int, number: int) -> tuple[int, int]:
    """Start and size of one of the equal parts of a number of tokens."""
    size = total // parts
    return number * size, size
