# SPDX-License-Identifier: Apache-2.0
"""Decode steps as CUDA graphs: the host starts one graph in place of some 2,000 kernels.

A graph reads and writes the same memory each time, so it ends with the KV cache that it was captured on, and whatever
changes from step to step lies in buffers: tokens, positions and lengths of the rows, and which rows share a prefix. It
is for 1, 2, 4, 8 ... rows; rows without a request write into slots without one. Attention in half precision goes as far
as each row does; in float32 it goes over all the room of the responses, behind a mask, where a step without a graph
goes up to the longest. Sampling stands outside: it may read.

Legend: R rows of a graph, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch

from quadriga.models.experts import mixtures
from quadriga.rollout.native.attention import AnyDecodePlan, compiled_attention
from quadriga.rollout.native.network import Network, PlainNetwork

_STEPS_BEFORE = 3  # without a graph: memory that is gone after them is not worth a capture
_HOST_ROPES = ("dynamic", "longrope")  # they read the largest position


class Graph:
    """A step of up to R rows on the memory of `plan`."""

    def __init__(self, network: Network, plan: AnyDecodePlan, num_rows: int) -> None:
        self.network, self.num_rows = network, num_rows
        # Rows: tokens, positions, tokens of the response in the cache; place and length of the prefix. The host's copy
        # of the first three is written between two steps.
        self.state = torch.zeros(5, num_rows, dtype=torch.int64, device=plan.device)
        self.host = torch.zeros(3, num_rows, dtype=torch.int64, pin_memory=True)
        self.plan: Any = plan.on_buffers(self.state)
        self.arranged: AnyDecodePlan | None = None
        self.graph, self.logits = torch.cuda.CUDAGraph(), torch.empty(0)

    def load(self, plan: AnyDecodePlan, tokens: Sequence[int], written: Sequence[int]) -> None:
        """Fill the buffers; which rows share a prefix stays until the slots of the batch change."""
        if plan is not self.arranged:
            self.plan.arrange(plan, self.state)
            self.arranged = plan
        self.host.zero_()
        positions = [
            first + count for first, count in zip(plan.first_positions, written, strict=True)
        ]
        self.host[:, : len(tokens)] = torch.tensor([tokens, positions, written])
        self.state[:3].copy_(self.host, non_blocking=True)

    def capture(self, pool: tuple[int, int] | None) -> None:
        """Record the step. It is computed once before, on what was loaded, so the replay writes the same again."""
        # What libraries set up at their first call must not fall into the capture.
        aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            self._compute()
        here.wait_stream(aside)
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.logits = self._compute()

    def _compute(self) -> torch.Tensor:
        tokens, positions, written = self.state[:3]
        self.plan.start_captured(written)
        return self.network.logits(
            self.network.hidden(tokens[:, None], positions[:, None], plan=self.plan)[:, 0]
        )


class GraphedSteps:
    """The graphs of a generation, all on the memory that its KV cache has at present."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.graphs: list[Graph] = []
        self.memory: tuple[int, ...] = ()
        self.num_steps = 0  # on this memory

    @staticmethod
    def can_capture(network: Network) -> bool:
        """Whether nothing in a step of this network waits for the device, or is made by the host: tokens that go to
        experts are counted, and what a sliding window hides is another mask at each step in float32."""
        rope = getattr(getattr(network.body, "rotary_emb", None), "rope_type", "default")
        if (
            not isinstance(network, PlainNetwork)
            or network.group is not None
            or any(mixtures(network.model))
        ):
            return False
        has_masks = any(
            layer.options.window
            and compiled_attention(network.device, network.model.dtype, layer.head_size) is None
            for layer in network.layers
        )
        return network.device.type == "cuda" and not has_masks and rope not in _HOST_ROPES

    def logits(
        self, plan: AnyDecodePlan, tokens: Sequence[int], written: Sequence[int]
    ) -> torch.Tensor | None:
        """Logits [rows, V] of a step, valid until the next one; None: it is computed without a graph."""
        caches = (
            *plan.prefixes.keys,
            *plan.prefixes.values,
            *plan.responses.keys,
            *plan.responses.values,
        )
        memory = (plan.responses.room, *plan.prefixes.lengths, *(one.data_ptr() for one in caches))
        if memory != self.memory:
            self.graphs, self.memory, self.num_steps = [], memory, 0
        self.num_steps += 1
        if self.num_steps <= _STEPS_BEFORE:
            return None
        fitting = [
            one
            for one in self.graphs
            if one.num_rows >= len(tokens) and one.plan.group_size >= plan.group_size
        ]
        found = min(fitting, key=lambda one: one.num_rows, default=None)
        # Half-empty graphs are replaced by smaller ones as responses end.
        num_rows = min(1 << (len(tokens) - 1).bit_length(), plan.responses.capacity)
        if found is not None and found.num_rows <= num_rows:
            found.load(plan, tokens, written)
        else:
            found = Graph(self.network, plan, num_rows)
            found.load(plan, tokens, written)
            # They share the memory for what they compute: only one is replayed at a time.
            found.capture(self.graphs[0].graph.pool() if self.graphs else None)
            self.graphs.append(found)
        found.graph.replay()
        return found.logits[: len(tokens)]
