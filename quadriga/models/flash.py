# SPDX-License-Identifier: Apache-2.0
"""Flash attention of queries to a run of keys, forward and backward. What is returned beside the results, their
log-sum-exps, merges those of several runs; grouped heads need no copies of their keys.

On a CPU, and on CUDA in half precision (compute capability 8 and more), by torch's kernels; elsewhere in operators.
Scores that are capped are computed in operators everywhere, a bias on all devices but a CPU.

Legend: b rows, L queries, S keys, H query heads, K key-value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_aten = torch.ops.aten
# cuDNN's attention builds a plan for each new shape, tens of milliseconds; here nearly every call has its own.
torch.backends.cuda.enable_cudnn_sdp(False)
_capability = cache(torch.cuda.get_device_capability)


@dataclass(frozen=True)
class Scores:
    """How a score is made of the product of query i and key j: times `scale`, capped, plus a bias.

    Attributes:
        is_causal: whether query i sees the keys up to i, else all; not with a bias.
        softcap: c of c * tanh(score / c); None: it is not capped.
        bias: [L, S] float32, very negative where a query does not see a key; None: nothing is added.
    """

    scale: float
    is_causal: bool = False
    softcap: float | None = None
    bias: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is neither a cap nor a bias."""
        return self.softcap is None and self.bias is None


def flash_forward(inputs: Sequence[Tensor], how: Scores) -> tuple[Tensor, Tensor]:
    """Query [b, L, H, D], key and value [b, S, K, D] -> [b, L, H, D] and log-sum-exps [b, L, H]."""
    query, key, _ = inputs
    if _has_cuda_kernel(query) and how.is_plain:
        call = (*inputs, None, None, query.shape[1], key.shape[1], 0.0, how.is_causal, False)
        out, log_sums, *_ = _aten._flash_attention_forward(*call, scale=how.scale)
        return out, log_sums.transpose(1, 2)
    turned = [one.transpose(1, 2) for one in inputs]
    if query.device.type == "cpu" and how.softcap is None:
        call, more = (*turned, 0.0, how.is_causal), {"attn_mask": how.bias, "scale": how.scale}
        found = _aten._scaled_dot_product_flash_attention_for_cpu(*call, **more)
    else:
        found = plain_forward(turned, how)
    return found[0].transpose(1, 2), found[1].transpose(1, 2)


def flash_backward(results: Sequence[Tensor], inputs: Sequence[Tensor], how: Scores) -> Sequence[Tensor]:
    """Gradients of the inputs: the share of these keys in those of all that the queries see.

    Args:
        results: gradient and value of the merged result [b, L, H, D], and its log-sum-exps [b, L, H]; inf where a query
            has no gradient.
        inputs: as for `flash_forward`.
    """
    (grad, out, log_sums), (query, key, _) = results, inputs
    if _has_cuda_kernel(query) and how.is_plain:
        rng = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)  # without dropout unread
        sums, sizes = log_sums.transpose(1, 2).contiguous(), (query.shape[1], key.shape[1])
        call = (grad, *inputs, out, sums, None, None, *sizes, 0.0, how.is_causal, *rng)
        return _aten._flash_attention_backward(*call, scale=how.scale)
    grad, *turned, out, log_sums = (one.transpose(1, 2) for one in (grad, *inputs, out, log_sums))
    if query.device.type == "cpu" and how.softcap is None:
        call = (grad, *turned, out, log_sums, 0.0, how.is_causal)
        more = {"attn_mask": how.bias, "scale": how.scale}
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*call, **more)
    else:
        grads = plain_backward((grad, out, log_sums), turned, how)
    return [one.transpose(1, 2) for one in grads]


def plain_forward(inputs: Sequence[Tensor], how: Scores) -> tuple[Tensor, Tensor]:
    """In operators: query [b, H, L, D], key and value [b, K, S, D] -> [b, H, L, D] and log-sum-exps [b, H, L]."""
    scores, values = _scores(inputs, how)
    log_sums = scores.logsumexp(-1)
    return ((scores - log_sums[..., None]).exp() @ values).to(inputs[0].dtype), log_sums


def plain_backward(results: Sequence[Tensor], inputs: Sequence[Tensor], how: Scores) -> Sequence[Tensor]:
    """Gradients of the inputs of `plain_forward`, given the merged results."""
    grad, out, log_sums = (one.float() for one in results)
    rest = (grad * out).sum(-1, keepdim=True)
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in inputs]
        scores, values = _scores(leaves, how)
        # With p = exp(z - log-sum-exp) of all keys, dz = p (grad v - rest): what this sum gives, the log-sum-exp fixed.
        weights = (scores - log_sums[..., None]).exp()
        return torch.autograd.grad((weights * (grad @ values.transpose(2, 3) - rest)).sum(), leaves)


def _scores(inputs: Sequence[Tensor], how: Scores) -> tuple[Tensor, Tensor]:
    """Scores [b, H, L, S] and values [b, H, S, D] in float32."""
    query, *others = (one.float() for one in inputs)
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in others)
    scores = query @ key.transpose(2, 3) * how.scale
    if how.softcap is not None:
        scores = (scores / how.softcap).tanh() * how.softcap
    if how.bias is not None:
        scores = scores + how.bias
    if how.is_causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores, value


def _has_cuda_kernel(query: Tensor) -> bool:
    """Whether torch's flash kernels for CUDA take such queries."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and is_half and query.shape[-1] in range(8, 257, 8) and _capability(query.device) >= (8, 0)
