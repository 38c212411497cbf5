# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism (arXiv:2006.16668): each rank holds some experts, to which tokens are sent.

    rank 0   tokens a b c ─┐            ┌─ experts 0-3, on received tokens ─┐            ┌─ a b c
                           ├ all-to-all ┤                                   ├ all-to-all ┤
    rank 1   tokens d e   ─┘            └─ experts 4-7                     ─┘            └─ d e

A token is sent once to each expert that its router chose. Gradients return the same way, so the
gradient of an expert is complete on its rank. If several ranks hold the same experts, FSDP sums
their gradients.

Legend: n tokens of this rank, k experts for each, S ranks, E experts of a layer, of which this rank
has E/S, D hidden size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quadriga.engines.parallel.tensor import shard_parameter
from quadriga.models.experts import is_mixture


def shard_experts(model: nn.Module, group: dist.ProcessGroup) -> set[str]:
    """Shard the experts [E, ...] of a model over the ranks of a group.

    Args:
        model: the model, with values or on "meta"; changed in place.
        group: the expert-parallel ranks.

    Returns:
        Names of the sharded parameters.
    """
    names = set()
    for path, module in list(model.named_modules()):
        if not is_mixture(module):
            continue
        experts: Any = module.experts
        for name, _ in list(experts.named_parameters()):
            shard_parameter(experts, name, 0, group)
            names.add(f"{path}.experts.{name}")
        experts.num_experts //= dist.get_world_size(group)
        experts.forward = partial(_forward_experts, experts.forward, experts.num_experts, group)
    return names


def _forward_experts(
    compute: Callable[..., Tensor],
    num_local: int,
    group: dist.ProcessGroup,
    hidden: Tensor,
    chosen: Tensor,
    scores: Tensor,
) -> Tensor:
    """Forward pass of sharded experts.

    Args:
        compute: forward pass of the local experts.
        num_local: E/S.
        group: the expert-parallel ranks.
        hidden: [n, D].
        chosen: [n, k] int64, experts of each token.
        scores: [n, k], weights of the experts' outputs.

    Returns:
        [n, D], weighted sums of the experts' outputs.
    """
    size = dist.get_world_size(group)
    # Sort the n k choices by expert, and so by rank, because a rank's experts are consecutive.
    order = chosen.flatten().argsort(stable=True)
    # Exchange how many tokens go to each expert: [S, E/S].
    sent_counts = chosen.flatten().bincount(minlength=size * num_local).view(size, num_local)
    received_counts = torch.empty_like(sent_counts)
    dist.all_to_all_single(received_counts, sent_counts, group=group)
    num_sent = sent_counts.sum(1).tolist()
    num_received = received_counts.sum(1).tolist()

    # Send the tokens, compute, and send the outputs back. Choice i is one of token i // k.
    states = hidden[order // chosen.shape[1]]
    states = _Exchange.apply(states, num_sent, num_received, group)
    # Local expert of each received token: from each rank, tokens arrive in the order of experts.
    experts = torch.arange(num_local, device=chosen.device).repeat(size)
    experts = experts.repeat_interleave(received_counts.flatten())
    if len(experts) == 0:
        # Compute a zero token, so that this rank takes part when FSDP sums the experts' gradients.
        # `states.sum()`, which is 0, connects it to the exchange, which runs backward on all ranks.
        states = states.new_zeros(1, states.shape[1]) + states.sum()
        experts = experts.new_zeros(1)
    # One expert per token, with weight 1: the sender applies the scores.
    outputs = compute(states, experts[:, None], scores.new_ones(len(experts), 1))
    outputs = outputs[: sum(num_received)]  # without the zero token
    outputs = _Exchange.apply(outputs, num_received, num_sent, group)

    # Restore the order of tokens and choices.
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    outputs = outputs[inverse].view(*chosen.shape, -1)
    return (outputs * scores[..., None]).sum(1).to(hidden.dtype)


class _Exchange(torch.autograd.Function):
    """All-to-all of rows [sum(num_sent), D] to [sum(num_received), D], both in the order of ranks.

    The backward pass sends the gradients of the rows back.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        num_sent: list[int],
        num_received: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.num_sent = num_sent
        ctx.num_received = num_received
        ctx.group = group
        return _exchange(rows, num_sent, num_received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        returned = _exchange(gradient, ctx.num_received, ctx.num_sent, ctx.group)
        return returned, None, None, None


def _exchange(
    rows: Tensor, num_sent: list[int], num_received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """All-to-all of `_Exchange`, without its backward pass."""
    received = rows.new_empty(sum(num_received), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), num_received, num_sent, group=group)
    return received
