# SPDX-License-Identifier: Apache-2.0
"""Flash attention of queries to a run of keys, forward and backward, and the rows of packed tokens that it takes. What
is returned beside the results, their log-sum-exps, merges those of several runs; grouped heads need no copies of keys.

On a CPU, and on CUDA in half precision (compute capability 8 and more), by torch's kernels; elsewhere in operators.
Scores that are capped are computed in operators everywhere, a bias on all devices but a CPU.

Legend: N packed tokens, b rows, L queries, S keys, H query heads, K key-value heads, D head size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

_aten = torch.ops.aten
# cuDNN's attention builds a plan for each new shape, tens of milliseconds; here nearly every call has its own.
torch.backends.cuda.enable_cudnn_sdp(False)
_capability = cache(torch.cuda.get_device_capability)


@dataclass(frozen=True)
class Scores:
    """How a score is made of the product of query i and key j: times `scale`, capped, plus a bias."""

    scale: float
    is_causal: bool = False  # whether query i sees the keys up to i, else all; not with a bias
    softcap: float | None = None  # c of c * tanh(score / c); None: it is not capped
    bias: Tensor | None = None  # [L, S] float32, very negative where a query does not see a key

    @property
    def is_plain(self) -> bool:
        """Whether there is neither a cap nor a bias."""
        return self.softcap is None and self.bias is None


def flash_forward(inputs: Sequence[Tensor], how: Scores) -> tuple[Tensor, Tensor]:
    """Query [b, L, H, D], key and value [b, S, K, D] -> [b, L, H, D] and log-sum-exps [b, L, H]."""
    query, key, _ = inputs
    if has_cuda_kernel(query) and how.is_plain:
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


def flash_backward(
    results: Sequence[Tensor], inputs: Sequence[Tensor], how: Scores
) -> Sequence[Tensor]:
    """Gradients of the inputs of `flash_forward`: the share of these keys in those of all that the queries see.
    `results`: gradient and value of the merged result [b, L, H, D], and its log-sum-exps [b, L, H]; inf where a query
    has none."""
    (grad, out, log_sums), (query, key, _) = results, inputs
    if has_cuda_kernel(query) and how.is_plain:
        rng = (
            query.new_empty(2, dtype=torch.uint64),
            query.new_empty((), dtype=torch.uint64),
        )  # without dropout unread
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


def plain_backward(
    results: Sequence[Tensor], inputs: Sequence[Tensor], how: Scores
) -> Sequence[Tensor]:
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
        scores = scores.masked_fill(
            scores.new_ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf
        )
    return scores, value


def has_cuda_kernel(query: Tensor) -> bool:
    """Whether CUDA's flash kernels take these queries."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return (
        query.is_cuda
        and is_half
        and query.shape[-1] in range(8, 257, 8)
        and _capability(query.device) >= (8, 0)
    )


@dataclass(frozen=True)
class Segment:
    """A run of packed tokens: [start, start + length), seeing itself causally and all of `prefix`."""

    start: int
    length: int
    prefix: "Segment | None" = None


class Rows:
    """Runs of packed tokens (start, length), each a row that is padded on the right: [b, L]. The padding repeats a
    row's first token: no real query sees it, and its gradient is dropped."""

    def __init__(self, runs: Sequence[tuple[int, int]], device: torch.device) -> None:
        width = max(length for _, length in runs)
        self.shape = len(runs), width
        self.padding: Tensor | None = None
        # Rows that stand one after the other without padding are a view.
        is_view = all(run == (runs[0][0] + row * width, width) for row, run in enumerate(runs))
        self.start = runs[0][0] if is_view else None
        if not is_view:
            starts, lengths = np.array(runs).T[:, :, None]
            real = np.arange(width) < lengths
            indices = starts + np.where(real, np.arange(width), 0)
            # [b, L]; places in the packed tokens; those of all rows, one after the other; their places in padded rows
            host = (~real, indices.ravel(), indices[real], np.flatnonzero(real))
            self.padding, self.indices, self.tokens, self.slots = (
                torch.from_numpy(one).to(device) for one in host
            )

    def take(self, tokens: Tensor) -> Tensor:
        """[N, ...] -> [b, L, ...]. Attention on CPUs is twice as fast backward in float32 as in bfloat16."""
        if self.start is None:
            rows = tokens.index_select(0, self.indices)
        else:
            rows = tokens.narrow(0, self.start, self.shape[0] * self.shape[1])
        rows = rows.unflatten(0, self.shape)
        return rows.float() if rows.device.type == "cpu" else rows

    def put(self, rows: Tensor, tokens: Tensor, *, add: bool = False) -> None:
        """Writes [b, L, ...] to its places in [N, ...], or if they are a view, adds it to what is there."""
        rows = rows.flatten(0, 1)
        if self.start is None:
            assert not add
            tokens.index_copy_(0, self.tokens, rows.index_select(0, self.slots).to(tokens.dtype))
        else:
            places = tokens.narrow(0, self.start, len(rows))
            places.add_(rows) if add else places.copy_(rows)


class Sums(dict[Rows, Sequence[Tensor]]):
    """Gradients of key and value [1, S, K, D] in float32 that several blocks add to, where the model is narrower."""

    # That of all gradients [N, H + 2K, D], in which the sums of some tokens lie where their gradients will.
    memory: Tensor | None = None

    @classmethod
    def with_gradients(
        cls, inputs: Sequence[Tensor], *, shares_memory: bool
    ) -> tuple["Sums", list[Tensor]]:
        """No sums yet, and room for the gradients of query [N, H, D], key and value [N, K, D].
        `shares_memory`: the sums lie in it, if it is enough for them."""
        (num_tokens, num_heads, size), num_keys, sums = inputs[0].shape, inputs[1].shape[1], cls()
        # Four bytes for each number of key and value, in the room of two for these and for those of the query.
        is_enough = inputs[0].dtype != torch.float32 and num_heads >= 2 * num_keys and size % 2 == 0
        if not (shares_memory and is_enough):
            return sums, [one.new_empty(one.shape) for one in inputs]
        sums.memory = inputs[0].new_empty(num_tokens, num_heads + 2 * num_keys, size)
        return sums, list(sums.memory.split([num_heads, num_keys, num_keys], 1))

    def add(self, keys: Rows, found: Sequence[Tensor]) -> None:
        """Adds what a block has found of the gradients of key and value [1, S, K, D]."""
        if keys in self:
            for one, whole in zip(found, self[keys], strict=True):
                whole.add_(one)
        elif self.memory is None or keys.start is None:
            self[keys] = [one.float() for one in found]
        else:
            room = self.memory.narrow(0, keys.start, keys.shape[1]).flatten().view(torch.float32)
            parts = room.split(found[0].numel())
            self[keys] = [
                part.view(one.shape).copy_(one) for part, one in zip(parts, found, strict=False)
            ]

    def taken(self, runs: Iterable[Rows]) -> list[tuple[Rows, list[Tensor]]]:
        """Those of these runs, which end here: what is written next may lie in their memory."""
        return [(keys, [one.clone() for one in self.pop(keys)]) for keys in runs if keys in self]
