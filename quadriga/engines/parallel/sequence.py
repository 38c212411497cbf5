# SPDX-License-Identifier: Apache-2.0
"""Ulysses sequence parallelism, arXiv:2309.14509: a process has some tokens of all heads, but for attention, where it
has all tokens of some heads.

    all but attention   [N/S tokens, H heads]
    attention           [N tokens, H/S heads]      one all-to-all before, for queries, keys and values; one after

Legend: S processes, N packed tokens (of all of them), H query heads, K key-value heads, D head size.
"""

import math

import torch
import torch.distributed as dist

from quadriga.engines.parallel.collectives import all_to_all
from quadriga.models.attention import AttentionPlan


class UlyssesAttention:
    """An attention plan for the tokens of all processes, called with those of one.

    Args:
        plan: of all N tokens.
        group: the S processes.
    """

    def __init__(self, plan: AttentionPlan, group: dist.ProcessGroup) -> None:
        self.plan, self.group = plan, group
        self.size = dist.get_world_size(group)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `AttentionPlan.attend`, with N/S tokens of H heads: [1, H, N/S, D] -> [1, N/S, H, D]."""
        copies = copies_of_kv_heads(query.shape[1], key.shape[1], self.size)
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        heads = [part.shape[1] // self.size for part in (query, key, value)]
        # [1, H, n, D] -> [S, H/S, n, D]: the heads of process s in part s; queries, keys and values in one exchange.
        parts = torch.cat([part[0].unflatten(0, (self.size, -1)) for part in (query, key, value)], 1)
        all_tokens = all_to_all(parts, self.group).transpose(0, 1).flatten(1, 2)  # [heads, N, D]
        queries, keys, values = (part[None] for part in all_tokens.split(heads))
        mixed = self.plan.attend(layer, queries, keys, values, scale)  # [1, N, H/S, D]
        back = all_to_all(mixed[0].unflatten(0, (self.size, -1)), self.group)  # [S, n, H/S, D]
        return back.transpose(0, 1).flatten(1, 2)[None]


def copies_of_kv_heads(num_heads: int, num_kv_heads: int, num_processes: int) -> int:
    """How often each key-value head is repeated, so that every process gets as many, next to the queries they serve."""
    copies = num_processes // math.gcd(num_kv_heads, num_processes)
    per_kv_head = num_heads // num_kv_heads
    return copies if per_kv_head % copies == 0 else per_kv_head
