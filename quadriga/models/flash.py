# SPDX-License-Identifier: Apache-2.0
"""Flash attention of queries to one run of keys, and the rows of packed tokens that it takes.

Each result comes with log-sum-exps, by which the results of several runs can be merged. Grouped
heads need no copies of keys.

torch's kernels compute it on a CPU, and on CUDA in half precision (compute capability 8 or higher);
elsewhere it is computed in plain operators. Plain operators also compute capped scores on all
devices, and scores with a bias on all devices except CPUs.

Legend: N packed tokens, b rows, L queries, S keys, H query heads, K key-value heads, D head size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

_aten = torch.ops.aten
# cuDNN's attention builds a plan for each new shape, which takes tens of milliseconds. Here, nearly
# every call has a new shape.
torch.backends.cuda.enable_cudnn_sdp(False)
_capability = cache(torch.cuda.get_device_capability)


@dataclass(frozen=True)
class ScoreRule:
    """Scores of attention: the products of query and key times `scale`, capped, plus a bias.

    Attributes:
        scale: factor of the products.
        is_causal: whether query i sees only the keys up to i. Cannot be combined with a bias.
        softcap: c of c * tanh(score / c). None: scores are not capped.
        bias: [L, S] float32, very negative where a query does not see a key.
    """

    scale: float
    is_causal: bool = False
    softcap: float | None = None
    bias: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is neither a cap nor a bias."""
        return self.softcap is None and self.bias is None


def flash_forward(inputs: Sequence[Tensor], rule: ScoreRule) -> tuple[Tensor, Tensor]:
    """Compute the attention of queries to one run of keys.

    Args:
        inputs: query [b, L, H, D], key and value [b, S, K, D].
        rule: how scores are computed.

    Returns:
        The result [b, L, H, D] and log-sum-exps [b, L, H].
    """
    query, key, _ = inputs
    if has_cuda_kernel(query) and rule.is_plain:
        out, log_sums, *_ = _aten._flash_attention_forward(
            *inputs,
            None,  # no runs of different lengths
            None,
            query.shape[1],
            key.shape[1],
            0.0,  # no dropout
            rule.is_causal,
            False,  # no mask for debugging
            scale=rule.scale,
        )
        return out, log_sums.transpose(1, 2)
    by_head = [tensor.transpose(1, 2) for tensor in inputs]  # [b, heads, tokens, D]
    if query.device.type == "cpu" and rule.softcap is None:
        out, log_sums = _aten._scaled_dot_product_flash_attention_for_cpu(
            *by_head, 0.0, rule.is_causal, attn_mask=rule.bias, scale=rule.scale
        )
    else:
        out, log_sums = plain_forward(by_head, rule)
    return out.transpose(1, 2), log_sums.transpose(1, 2)


def flash_backward(
    results: Sequence[Tensor], inputs: Sequence[Tensor], rule: ScoreRule
) -> Sequence[Tensor]:
    """Compute the gradients of `flash_forward`, for one run of the keys that the queries see.

    Args:
        results: gradient and value [b, L, H, D] of the result merged over all runs, and its
            log-sum-exps [b, L, H]; inf for padded queries, whose gradients are then 0.
        inputs: query [b, L, H, D], key and value [b, S, K, D] of this run.
        rule: how scores are computed.

    Returns:
        This run's gradients of the inputs, in their shapes.
    """
    grad, out, log_sums = results
    query, key, _ = inputs
    if has_cuda_kernel(query) and rule.is_plain:
        return _aten._flash_attention_backward(
            grad,
            *inputs,
            out,
            log_sums.transpose(1, 2).contiguous(),
            None,  # no runs of different lengths
            None,
            query.shape[1],
            key.shape[1],
            0.0,  # no dropout
            rule.is_causal,
            *random_state(query.device),
            scale=rule.scale,
        )
    grad, out, log_sums = (tensor.transpose(1, 2) for tensor in results)
    by_head = [tensor.transpose(1, 2) for tensor in inputs]
    if query.device.type == "cpu" and rule.softcap is None:
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad,
            *by_head,
            out,
            log_sums,
            0.0,  # no dropout
            rule.is_causal,
            attn_mask=rule.bias,
            scale=rule.scale,
        )
    else:
        grads = plain_backward((grad, out, log_sums), by_head, rule)
    return [tensor.transpose(1, 2) for tensor in grads]


def random_state(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two arguments of the backward kernels, seed and offset, which only dropout would read."""
    options = {"dtype": torch.uint64, "device": device}
    return torch.empty(2, **options), torch.empty((), **options)


def plain_forward(inputs: Sequence[Tensor], rule: ScoreRule) -> tuple[Tensor, Tensor]:
    """Compute `flash_forward` in plain operators.

    Args:
        inputs: query [b, H, L, D], key and value [b, K, S, D].
        rule: how scores are computed.

    Returns:
        The result [b, H, L, D] and log-sum-exps [b, H, L].
    """
    scores, value = _scores(inputs, rule)
    log_sums = scores.logsumexp(-1)
    weights = (scores - log_sums[..., None]).exp()
    return (weights @ value).to(inputs[0].dtype), log_sums


def plain_backward(
    results: Sequence[Tensor], inputs: Sequence[Tensor], rule: ScoreRule
) -> Sequence[Tensor]:
    """Compute `flash_backward` in plain operators.

    Args:
        results: gradient and value [b, H, L, D] of the result merged over all runs, and its
            log-sum-exps [b, H, L].
        inputs: query [b, H, L, D], key and value [b, K, S, D] of this run.
        rule: how scores are computed.

    Returns:
        This run's gradients of the inputs, in their shapes.
    """
    grad, out, log_sums = (tensor.float() for tensor in results)
    projection = (grad * out).sum(-1, keepdim=True)  # [b, H, L, 1]
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        scores, value = _scores(leaves, rule)
        # With scores z and p = exp(z - log-sum-exp over all runs), the gradient of z is
        # p (grad v - projection). It is also the gradient of `total`, in which the log-sum-exp is a
        # constant.
        weights = (scores - log_sums[..., None]).exp()
        total = (weights * (grad @ value.transpose(2, 3) - projection)).sum()
        return torch.autograd.grad(total, leaves)


def _scores(inputs: Sequence[Tensor], rule: ScoreRule) -> tuple[Tensor, Tensor]:
    """Compute scores [b, H, L, S] and repeat values to [b, H, S, D], in float32."""
    query, key, value = (tensor.float() for tensor in inputs)
    # Each key-value head serves a group of query heads.
    group_size = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group_size, 1)
    value = value.repeat_interleave(group_size, 1)
    scores = query @ key.transpose(2, 3) * rule.scale  # [b, H, L, S]
    if rule.softcap is not None:
        scores = (scores / rule.softcap).tanh() * rule.softcap
    if rule.bias is not None:
        scores = scores + rule.bias
    if rule.is_causal:
        is_later = scores.new_ones(scores.shape[2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(is_later, -torch.inf)
    return scores, value


def has_cuda_kernel(query: Tensor) -> bool:
    """Whether CUDA's flash kernels support these queries."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    # The kernels need head sizes that are multiples of 8, up to 256.
    return query.shape[-1] in range(8, 257, 8) and _capability(query.device) >= (8, 0)


@dataclass(frozen=True)
class Segment:
    """Packed tokens [start, start + length), which see themselves causally and all of `prefix`."""

    start: int
    length: int
    prefix: "Segment | None" = None


class PaddedRows:
    """Runs of packed tokens as rows [b, L], padded on the right.

    Padding repeats the first token of a row. No real query sees it, and its gradient is dropped.

    Args:
        runs: start and length of each run.
        device: device of the tokens.

    Attributes:
        shape: (b, L).
        start: packed index of the first token if the rows are a view of the packed tokens, which
            they are if they are consecutive and need no padding. Otherwise None.
        padding: [b, L] bool, where a row has padding; None if the rows are a view.
        indices: [b * L] packed indices of the tokens of all rows. This attribute and the next two
            are not set if the rows are a view.
        tokens: packed indices of the tokens that are not padding.
        slots: indices of the same tokens in [b * L].
    """

    def __init__(self, runs: Sequence[tuple[int, int]], device: torch.device) -> None:
        num_rows = len(runs)
        width = max(length for _, length in runs)
        self.shape = (num_rows, width)
        self.start: int | None = None
        self.padding: Tensor | None = None
        # Consecutive rows without padding are a view.
        first = runs[0][0]
        if all(run == (first + row * width, width) for row, run in enumerate(runs)):
            self.start = first
            return
        starts, lengths = np.array(runs).T[:, :, None]  # [b, 1] each
        columns = np.arange(width)
        is_real = columns < lengths  # [b, L], False where there is padding
        indices = starts + np.where(is_real, columns, 0)
        self.padding = torch.from_numpy(~is_real).to(device)
        self.indices = torch.from_numpy(indices.ravel()).to(device)
        self.tokens = torch.from_numpy(indices[is_real]).to(device)
        self.slots = torch.from_numpy(np.flatnonzero(is_real)).to(device)

    def gather(self, tokens: Tensor) -> Tensor:
        """Read the rows [b, L, ...] from packed tokens [N, ...]; on a CPU, in float32."""
        if self.start is None:
            rows = tokens.index_select(0, self.indices)
        else:
            num_rows, width = self.shape
            rows = tokens.narrow(0, self.start, num_rows * width)
        rows = rows.unflatten(0, self.shape)
        # Attention's backward pass on a CPU is twice as fast in float32 as in bfloat16.
        return rows.float() if rows.device.type == "cpu" else rows

    def scatter(self, rows: Tensor, tokens: Tensor, *, add: bool = False) -> None:
        """Write rows to packed tokens, without their padding.

        Args:
            rows: [b, L, ...].
            tokens: [N, ...], changed in place.
            add: whether to add to the tokens. Only rows that are a view can be added.
        """
        rows = rows.flatten(0, 1)
        if self.start is None:
            assert not add
            tokens.index_copy_(0, self.tokens, rows.index_select(0, self.slots).to(tokens.dtype))
            return
        target = tokens.narrow(0, self.start, len(rows))
        if add:
            target.add_(rows)
        else:
            target.copy_(rows)


class KeyGradientSums(dict[PaddedRows, Sequence[Tensor]]):
    """Float32 sums, over blocks, of the gradients of key and value [1, S, K, D], by rows of keys.

    Attributes:
        memory: [N, H + 2K, D] memory of the gradients of query, key and value. Until the gradients
            of a token are written, its part of the memory holds its sums. None: sums have their own
            memory.
    """

    memory: Tensor | None = None

    @classmethod
    def with_gradients(
        cls, inputs: Sequence[Tensor], *, shares_memory: bool
    ) -> tuple["KeyGradientSums", list[Tensor]]:
        """Allocate the gradients of packed inputs.

        Args:
            inputs: query [N, H, D], key and value [N, K, D].
            shares_memory: whether the sums may use the memory of the gradients.

        Returns:
            Empty sums, and uninitialized gradients in the shapes of the inputs.
        """
        query, key, _ = inputs
        num_tokens, num_heads, size = query.shape
        num_keys = key.shape[1]
        sums = cls()
        # Float32 sums of key and value fit into the half-precision gradients of query, key and
        # value: 4 * 2K <= 2 * (H + 2K). An even head size keeps each token's part aligned.
        sums_fit = query.dtype != torch.float32 and num_heads >= 2 * num_keys and size % 2 == 0
        if not (shares_memory and sums_fit):
            return sums, [tensor.new_empty(tensor.shape) for tensor in inputs]
        # A single allocation, so that all gradients of a token are contiguous.
        sums.memory = query.new_empty(num_tokens, num_heads + 2 * num_keys, size)
        return sums, list(sums.memory.split([num_heads, num_keys, num_keys], 1))

    def add(self, keys: PaddedRows, gradients: Sequence[Tensor]) -> None:
        """Add a block's gradients.

        Args:
            keys: rows of the keys.
            gradients: gradients of key and value, [1, S, K, D] each.
        """
        if keys in self:
            for total, gradient in zip(self[keys], gradients, strict=True):
                total.add_(gradient)
            return
        if self.memory is None or keys.start is None:
            self[keys] = [gradient.float() for gradient in gradients]
            return
        # Use the gradients' memory of these tokens as float32. Gradients are written later.
        memory = self.memory.narrow(0, keys.start, keys.shape[1]).flatten().view(torch.float32)
        totals = []
        # Not strict: the memory may have more room than for key and value.
        for gradient, room in zip(gradients, memory.split(gradients[0].numel()), strict=False):
            totals.append(room.view(gradient.shape).copy_(gradient))
        self[keys] = totals

    def pop_copies(self, runs: Iterable[PaddedRows]) -> list[tuple[PaddedRows, list[Tensor]]]:
        """Remove and return the sums of some rows, if they have any.

        The sums are copied, because their memory is about to be overwritten by gradients.
        """
        removed = [(keys, self.pop(keys)) for keys in runs if keys in self]
        return [(keys, [total.clone() for total in totals]) for keys, totals in removed]
