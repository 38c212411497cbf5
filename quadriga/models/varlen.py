# SPDX-License-Identifier: Apache-2.0
"""Packed attention on CUDA in at most two kernel calls per layer, for any number of segments.

The flash kernels take consecutive runs of any lengths. The first call computes the causal attention
within each segment. In the second call, segments that continue a prefix attend to it in full. The
two results are merged by their log-sum-exps, and the backward pass of each call uses the merged
result.

Legend: N packed tokens, of which R continue a prefix and P are in such a prefix, H query heads, K
key-value heads, D head size.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from quadriga.models.flash import Segment, random_state

_aten = torch.ops.aten


class RunOffsets:
    """Consecutive runs of tokens, in the form that the flash kernels take.

    Args:
        lengths: length of each run.
        device: device of the tokens.

    Attributes:
        offsets: int32, start of each run, and the end of the last run.
        longest: length of the longest run.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        offsets = np.cumsum([0, *lengths], dtype=np.int32)
        self.offsets = torch.from_numpy(offsets).to(device)
        self.longest = max(lengths)


class PackedRuns:
    """Runs of the two kernel calls for a packed batch.

    Args:
        segments: in order of `start`; each packed token is in exactly one.
        device: device of the batch.

    Attributes:
        causal: the segments, for the first call.
        longest: length of the longest segment together with its prefix.
        has_prefixes: whether there is a second call. If not, the attributes below are not set.
        continuing_tokens: [R] packed indices of the tokens that continue a prefix.
        prefix_tokens: [P] packed indices of the tokens of these prefixes.
        continuations: a run for each prefix, of the tokens that continue it.
        prefixes: a run for each prefix, of its own tokens.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.causal = RunOffsets([segment.length for segment in segments], device)
        self.longest = 0
        # Segments with the same prefix are a single run of queries in the second call.
        groups = {}
        for segment in segments:
            length = segment.length
            if segment.prefix is not None:
                length += segment.prefix.length
                groups.setdefault(segment.prefix, []).append(segment)
            self.longest = max(self.longest, length)
        self.has_prefixes = bool(groups)
        if self.has_prefixes:
            # The same order of groups for queries and keys: run i of the queries sees prefix i.
            self.continuing_tokens = _token_indices(chain(*groups.values()), device)
            self.prefix_tokens = _token_indices(groups, device)
            lengths = [sum(segment.length for segment in group) for group in groups.values()]
            self.continuations = RunOffsets(lengths, device)
            self.prefixes = RunOffsets([prefix.length for prefix in groups], device)

    def select_prefix_inputs(self, query: Tensor, *keys: Tensor) -> list[Tensor]:
        """Select the tokens of the second call.

        Args:
            query: [N, H, D].
            *keys: key and value, [N, K, D] each.

        Returns:
            Queries [R, H, D] that see a prefix; key and value [P, K, D] of the prefixes.
        """
        queries = query.index_select(0, self.continuing_tokens)
        return [queries, *(tensor.index_select(0, self.prefix_tokens) for tensor in keys)]


def _token_indices(segments: Iterable[Segment], device: torch.device) -> Tensor:
    """Find the packed indices of the tokens of some segments."""
    ranges = [np.arange(segment.start, segment.start + segment.length) for segment in segments]
    return torch.from_numpy(np.concatenate(ranges)).to(device)


class VarlenAttention(torch.autograd.Function):
    """Attention of query [N, H, D] to key and value [N, K, D] in half precision.

    Sinks are [H] or None, the result is [N, H, D]. A window is only supported if no segment has a
    prefix.
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, runs: PackedRuns, scale: float, window: int | None):
        # The kernel's window counts only the keys before a query. Ours includes the query's own
        # key.
        num_left = None if window is None else window - 1
        inputs = (query, key, value)
        # The first call: causal within each segment.
        out, log_sums = _forward(inputs, runs.causal, runs.causal, True, scale, num_left)
        if runs.has_prefixes:
            # The second call: all of a prefix, for the tokens that continue it.
            prefix_inputs = runs.select_prefix_inputs(query, key, value)
            prefix_out, prefix_log_sums = _forward(
                prefix_inputs, runs.continuations, runs.prefixes, False, scale
            )
            causal_out = out.index_select(0, runs.continuing_tokens)  # [R, H, D]
            causal_log_sums = log_sums.index_select(1, runs.continuing_tokens)  # [H, R]
            # The prefix's share of the attention: exp(a) / (exp(a) + exp(b)) = sigmoid(a - b).
            share = (prefix_log_sums - causal_log_sums).sigmoid_().t()[..., None]  # [R, H, 1]
            merged = causal_out.float().lerp_(prefix_out.float(), share).to(out.dtype)
            out.index_copy_(0, runs.continuing_tokens, merged)
            log_sums.index_copy_(
                1, runs.continuing_tokens, torch.logaddexp(prefix_log_sums, causal_log_sums)
            )
        if sinks is not None:
            # The sink takes a share of the attention and adds nothing to the result.
            with_sinks = torch.logaddexp(log_sums, sinks.float()[:, None])  # [H, N]
            share = (log_sums - with_sinks).exp_().t()[..., None]
            out = (out * share).to(out.dtype)
            log_sums = with_sinks
        ctx.save_for_backward(query, key, value, sinks, out, log_sums)
        ctx.runs = runs
        ctx.scale = scale
        ctx.num_left = num_left
        return out

    @staticmethod
    def backward(ctx, out_grad):
        *inputs, sinks, out, log_sums = ctx.saved_tensors
        runs = ctx.runs
        scale = ctx.scale
        if out_grad.stride(-1) != 1:
            out_grad = out_grad.contiguous()  # kernels take heads without gaps
        results = (out_grad, out, log_sums)
        grads = _backward(results, inputs, runs.causal, runs.causal, True, scale, ctx.num_left)
        if runs.has_prefixes:
            prefix_results = [
                tensor.index_select(0, runs.continuing_tokens) for tensor in (out_grad, out)
            ]
            prefix_results.append(log_sums.index_select(1, runs.continuing_tokens))
            prefix_grads = _backward(
                prefix_results,
                runs.select_prefix_inputs(*inputs),
                runs.continuations,
                runs.prefixes,
                False,
                scale,
            )
            # Add the second call's gradients where a token took part in both calls.
            indices = (runs.continuing_tokens, runs.prefix_tokens, runs.prefix_tokens)
            for grad, prefix_grad, tokens in zip(grads, prefix_grads, indices, strict=True):
                grad.index_copy_(0, tokens, prefix_grad.add_(grad.index_select(0, tokens)))
        grad_sinks = None
        if sinks is not None:
            # A sink has no value, so a larger share of it shrinks the result.
            shares = (sinks.float()[:, None] - log_sums).exp_()
            projections = (out_grad.float() * out.float()).sum(-1).t()  # [H, N]
            grad_sinks = -(shares * projections).sum(1).to(sinks.dtype)
        return *grads, grad_sinks, None, None, None


def _forward(
    inputs: Sequence[Tensor],
    queries: RunOffsets,
    keys: RunOffsets,
    is_causal: bool,
    scale: float,
    num_left: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Call the kernel.

    Args:
        inputs: query [tokens, H, D], key and value [tokens, K, D].
        queries: runs of queries.
        keys: runs of keys. Run i of the queries sees run i of the keys.
        is_causal: whether attention within a run is causal.
        scale: factor of the scores.
        num_left: number of keys before its own that a query sees. None: all.

    Returns:
        The result [tokens, H, D], and its log-sum-exps [H, tokens].
    """
    out, log_sums, *_ = _aten._flash_attention_forward(
        *inputs,
        queries.offsets,
        keys.offsets,
        queries.longest,
        keys.longest,
        0.0,  # no dropout
        is_causal,
        False,  # no mask for debugging
        scale=scale,
        **_window_options(num_left),
    )
    return out, log_sums


def _backward(
    results: Sequence[Tensor],
    inputs: Sequence[Tensor],
    queries: RunOffsets,
    keys: RunOffsets,
    is_causal: bool,
    scale: float,
    num_left: int | None = None,
) -> list[Tensor]:
    """Call the kernel of the backward pass.

    Args:
        results: gradient and value [tokens, H, D] of the merged result, and its log-sum-exps
            [H, tokens].
        inputs: query [tokens, H, D], key and value [tokens, K, D].
        queries: runs of queries.
        keys: runs of keys.
        is_causal: whether attention within a run is causal.
        scale: factor of the scores.
        num_left: number of keys before its own that a query sees. None: all.

    Returns:
        The gradients of the inputs.
    """
    grad, out, log_sums = results
    grads = _aten._flash_attention_backward(
        grad,
        *inputs,
        out,
        log_sums,
        queries.offsets,
        keys.offsets,
        queries.longest,
        keys.longest,
        0.0,  # no dropout
        is_causal,
        *random_state(out.device),
        scale=scale,
        **_window_options(num_left),
    )
    return list(grads)


def _window_options(num_left: int | None) -> dict[str, int]:
    """Options of the kernels for a window; see `num_left` of `_forward`."""
    if num_left is None:
        return {}
    return {"window_size_left": num_left, "window_size_right": 0}
