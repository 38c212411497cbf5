# SPDX-License-Identifier: Apache-2.0
"""Decode steps as CUDA graphs: the host starts one graph in place of some 2,000 kernels.

A graph reads and writes the same memory at each replay, so it is valid as long as the memory of the
KV cache on which it was captured. Everything that changes from step to step is in buffers: tokens,
positions and lengths of the rows, and which rows share a prefix. There are graphs of 1, 2, 4, 8 ...
rows. Rows without a request write to slots without one.

Attention in half precision reads each row up to its length. In float32 it reads all the room of the
responses, under a mask, where a step without a graph reads up to the longest response. Sampling is
not part of the graph, because it may copy to the host.

In a rollout group the graph contains the sums over the ranks, which NCCL does on the stream of the
caller. A capture computes the step once more, so all ranks have to capture at the same step. What
decides about it is therefore the same on all ranks; the addresses of memory are not.

Legend: R rows of a graph, V vocabulary.
"""

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from quadriga.models.architecture import backbone
from quadriga.models.experts import mixtures
from quadriga.rollout.group import RolloutGroup
from quadriga.rollout.native.attention import AnyDecodePlan, compiled_attention
from quadriga.rollout.native.network import Network, is_plain, window_of

# Steps without a graph on new memory: a capture is not worth it if the memory changes within them.
_STEPS_BEFORE = 3
# Rotary embeddings that read the largest position on the host.
_HOST_ROPES = ("dynamic", "longrope")


def obstacle_to_graphs(
    model: PreTrainedModel, device: torch.device, dtype: torch.dtype, group: RolloutGroup | None
) -> str:
    """Say why decode steps of a model cannot be CUDA graphs.

    A step that is captured must neither wait for the device nor compute on the host.

    Args:
        model: the model; it may be on "meta".
        device: device that computes.
        dtype: dtype of the weights.
        group: the ranks that hold the model together; None: this process holds all of it.

    Returns:
        The reason, to be printed in parentheses; "" if steps can be graphs.
    """
    if device.type != "cuda":
        return f"they are for CUDA, not for {device.type}"
    if not is_plain(model):
        return "the model's own module computes"
    if any(mixtures(model)):
        return "a mixture of experts counts tokens on the host"
    if group is not None and not group.is_capturable:
        return "the ranks of a group have to sum with NCCL"
    body = cast(Any, backbone(model))
    if getattr(body.rotary_emb, "rope_type", "default") in _HOST_ROPES:
        return "the rotary embedding reads positions on the host"
    for layer in body.layers:
        attention = layer.self_attn
        has_window = window_of(attention) is not None
        if has_window and compiled_attention(device, dtype, attention.head_dim) is None:
            return "a sliding window in float32 needs a new mask at each step"
    return ""


class Graph:
    """A graph of a step of up to R rows.

    Args:
        network: the model.
        plan: a decode plan on the KV cache that the graph reads and writes.
        num_rows: R.

    Attributes:
        state: [5, R] int64, inputs on the device. For each row: last token, its position, number
            of response tokens in the cache; place of the prefix in the prefix cache, length of the
            prefix.
        host: [3, R], pinned copy of the first three rows of `state`. It may be written again once
            the tokens of the step before are known, because its transfer has then ended.
        arranged: the plan of the slots whose prefixes are in the buffers now.
        logits: [R, V], output of the last replay.
    """

    def __init__(self, network: Network, plan: AnyDecodePlan, num_rows: int) -> None:
        self.network = network
        self.num_rows = num_rows
        self.state = torch.zeros(5, num_rows, dtype=torch.int64, device=plan.device)
        self.host = torch.zeros(3, num_rows, dtype=torch.int64, pin_memory=True)
        self.plan: Any = plan.copy_for_graph(self.state)
        self.arranged: AnyDecodePlan | None = None
        self.graph = torch.cuda.CUDAGraph()
        self.logits = torch.empty(0)

    def load(self, plan: AnyDecodePlan, tokens: Sequence[int], written: Sequence[int]) -> None:
        """Fill the buffers with the inputs of a step.

        Args:
            plan: the plan of the current slots.
            tokens: last token of each slot.
            written: response tokens of each slot in the KV cache.
        """
        # Which rows share a prefix stays the same until a slot starts or ends.
        if plan is not self.arranged:
            self.plan.fill_buffers(plan, self.state)
            self.arranged = plan
        starts = zip(plan.first_positions, written, strict=True)
        positions = [first + count for first, count in starts]
        # Rows without a request compute token 0, and nobody reads their logits.
        self.host.zero_()
        self.host[:, : len(tokens)] = torch.tensor([tokens, positions, written])
        self.state[:3].copy_(self.host, non_blocking=True)

    def capture(self, pool: tuple[int, int] | None) -> None:
        """Record the step whose inputs were loaded.

        Before that, the step is computed once. A replay writes the same numbers to the cache again.

        Args:
            pool: memory pool of another graph, to be shared; None: a pool of its own.
        """
        # Libraries set themselves up at their first call, which must not be captured.
        warmup_stream = torch.cuda.Stream()
        stream = torch.cuda.current_stream()
        warmup_stream.wait_stream(stream)
        with torch.cuda.stream(warmup_stream):
            self._compute()
        stream.wait_stream(warmup_stream)
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.logits = self._compute()

    def _compute(self) -> torch.Tensor:
        """Compute the logits [R, V] of the step whose inputs are in the buffers."""
        tokens, positions, written = self.state[:3]
        self.plan.start_captured_step(written)
        hidden = self.network.hidden(tokens[:, None], positions[:, None], plan=self.plan)
        return self.network.logits(hidden[:, 0])


class GraphedSteps:
    """The graphs of a generation, all on the memory that its KV cache has at present.

    Args:
        network: the model.

    Attributes:
        graphs: the graphs that were captured on `memory`.
        memory: weak references to the tensors of the KV cache at the last step.
        num_steps: number of steps on this memory.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.graphs: list[Graph] = []
        self.memory: list[weakref.ref[torch.Tensor]] = []
        self.num_steps = 0

    def logits(
        self, plan: AnyDecodePlan, tokens: Sequence[int], written: Sequence[int]
    ) -> torch.Tensor | None:
        """Compute a step by a graph, which is captured first if there is none.

        Args:
            plan: the plan of the current slots.
            tokens: last token of each slot.
            written: response tokens of each slot in the KV cache.

        Returns:
            Logits [number of slots, V], valid until the next step; None: compute the step without a
            graph.
        """
        prefixes = plan.prefixes
        responses = plan.responses
        caches = (*prefixes.keys, *prefixes.values, *responses.keys, *responses.values)
        # Compare tensors and not addresses: all ranks of a group must notice new memory, which on
        # some ranks may have the addresses of the old one.
        is_same_memory = len(caches) == len(self.memory) and all(
            memory() is states for memory, states in zip(self.memory, caches, strict=True)
        )
        if not is_same_memory:
            self.graphs = []
            self.memory = [weakref.ref(states) for states in caches]
            self.num_steps = 0
        self.num_steps += 1
        # Memory that soon changes again is not worth a capture.
        if self.num_steps <= _STEPS_BEFORE:
            return None
        graph = self._graph_for(plan, tokens, written)
        graph.graph.replay()
        return graph.logits[: len(tokens)]

    def _graph_for(
        self, plan: AnyDecodePlan, tokens: Sequence[int], written: Sequence[int]
    ) -> Graph:
        """Find or capture the smallest graph that fits a step, and load the inputs of the step.

        Args:
            plan: the plan of the current slots.
            tokens: last token of each slot.
            written: response tokens of each slot in the KV cache.
        """
        # Number of slots, rounded up to a power of two. A graph of more rows would fit, too, but
        # wastes rows.
        max_rows = min(1 << (len(tokens) - 1).bit_length(), plan.responses.capacity)
        fitting = []
        for graph in self.graphs:
            fits = len(tokens) <= graph.num_rows <= max_rows
            # A `DecodePlan` also needs cells for the largest group.
            if fits and graph.plan.group_size >= plan.group_size:
                fitting.append(graph)
        if fitting:
            graph = min(fitting, key=lambda graph: graph.num_rows)
            graph.load(plan, tokens, written)
            return graph
        graph = Graph(self.network, plan, max_rows)
        graph.load(plan, tokens, written)
        # All graphs share memory for what they compute: only one is replayed at a time.
        graph.capture(self.graphs[0].graph.pool() if self.graphs else None)
        self.graphs.append(graph)
        return graph
