# SPDX-License-Identifier: Apache-2.0
"""From hidden states to log-probabilities, entropies and values, without the [tokens, vocabulary] logits.

Logits are float32 whatever the model computes in: a bfloat16 logit of 30 is off by up to 0.06, which is more than
the difference between two policies. The vocabulary is projected in chunks of tokens, forward and backward, into one
workspace; the last chunk's logits are in it when the backward pass begins, which therefore starts with that chunk.

A part of the vocabulary (a block of a GPU kernel, heads_triton.py, or the rows that another rank holds,
`VocabularyShard`) has four numbers for a token: the logarithm of its sum of exponentials, the entropy within the part,
the target's logit, and the sum of squared probabilities within the part; then the logits of further targets. Parts are
put together by the chain rule of the entropy and by squared shares; all terms are positive, so nothing cancels.

Legend: M tokens to predict, D hidden size, V vocabulary, V' rows of it in this rank, C tokens in a chunk,
P parts, k likeliest tokens, K targets of a token.
"""

import logging
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    from quadriga.models import heads_triton

# Versions of torch before 2.13 have it under a name that later ones warn of.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
logger = logging.getLogger(__name__)
HALF_DTYPES = (torch.bfloat16, torch.float16)
CHUNK_TOKENS = 512  # on a CPU
_CHUNK_TOKENS_ELSEWHERE = 2048  # a GPU reads and writes the gradient of the weight for each chunk
_TOKEN_BLOCK = {
    "cpu": 16
}  # tokens whose logits are handled while they are in the cache, by the device
_TOKEN_BLOCK_ELSEWHERE = 128
_VOCABULARY_BLOCK = 4096  # rows of the weight that are widened at a time


@dataclass(frozen=True)
class VocabularyShard:
    """This rank holds the rows [start, start + V') of the weight, the others of `group`, who call with the same tokens,
    hold the rest. V' may differ between ranks, and be 0."""

    group: dist.ProcessGroup
    start: int


@dataclass(frozen=True)
class LogitRule:
    """What a model makes of its head's products: times `scale`, then c * tanh(logit / c), where c is `softcap`."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> "LogitRule":
        """The rule of a configuration. Which models it holds for is tried, not known: see `models/probe.py`."""
        text = config.get_text_config()
        scales = [
            getattr(text, name, None) or 1.0 for name in ("logit_scale", "lm_head_multiplier")
        ]
        divisor = getattr(text, "logits_scaling", None) or 1.0
        if text.model_type in _MULTIPLIED:
            divisor = 1.0 / divisor
        if text.model_type in _UNUSED_SCALE:
            scales = []
        caps = [
            getattr(text, name, None) for name in ("final_logit_softcapping", "logits_soft_cap")
        ]
        return cls(math.prod(scales) / divisor, next((cap for cap in caps if cap), None))

    def apply(self, logits: Tensor) -> Tensor:
        """[..., V] float32, changed in place."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        return (
            logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)
        )


PLAIN_LOGITS = LogitRule()
_MULTIPLIED = ("hyperclovax",)  # by what others divide by
_UNUSED_SCALE = ("mpt",)


@dataclass(frozen=True)
class TokenScores:
    """Scores of given tokens under the policy; None for what was not wanted, gradients for the first two."""

    log_probs: Tensor  # [M] float32, or [M, K]
    entropy: Tensor | None  # [M] float32 in nats
    top_log_probs: Tensor | None = None  # [M, k] float32, the largest ones in descending order
    top_ids: Tensor | None = None  # [M, k] int64, their tokens
    sum_pi_squared: Tensor | None = (
        None  # [M] float32, the probability of drawing the same token twice
    )


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
    top_k: int | None = None,
    chunk_tokens: int | None = None,
    shard: VocabularyShard | None = None,
    rule: LogitRule = PLAIN_LOGITS,
) -> TokenScores:
    """Log-probabilities of `targets` and entropies of the distributions that they were drawn from.

    On CUDA, half-precision states and weights go through the kernels of heads_triton.py where Triton and a C compiler
    are installed: they never write the logits. All else goes through chunks in plain torch: CPUs; float32, which
    tensor cores would round; and `top_k`, several targets and soft-capping, which need the logits.

    With a shard, all outputs are the same on all ranks; the gradient of `hidden` is this rank's part, which the
    caller sums over the group, and those of `weight` and `bias` are complete. One collective per call (three with
    `top_k`), of a few numbers for each token. The backward pass has none.

    Args:
        hidden: [M, D], the states that predict the targets.
        weight: [V, D], or with a shard [V', D].
        bias: [V] or [V'], or None.
        targets: [M] token ids, or [M, K]. With a shard, one that no rank holds has log-probability -inf.
        temperature: divides the logits.
        top_k: how many of the likeliest tokens to return. Where the vocabulary has fewer, the rest is -inf with id -1.
        chunk_tokens: C; None: what fits the device.
        shard: the rows of the vocabulary on this rank; None: all.
        rule: what the model makes of the products of states and weight before they are logits.
    """
    is_half = hidden.dtype == weight.dtype and hidden.dtype in HALF_DTYPES
    needs_logits = top_k is not None or targets.dim() > 1 or rule.softcap is not None
    use_triton = is_half and not needs_logits and launches_triton(hidden.device)
    chunk_tokens = chunk_tokens or (
        CHUNK_TOKENS if hidden.device.type == "cpu" else _CHUNK_TOKENS_ELSEWHERE
    )
    if rule.softcap is None:
        temperature, rule = temperature / rule.scale, PLAIN_LOGITS
    call = _Call(
        temperature, rule, with_entropy, with_sum_pi_squared, top_k, chunk_tokens, shard, use_triton
    )
    log_probs, entropy, squares, *top = _TokenScores.apply(hidden, weight, bias, targets, call)
    entropy, squares = entropy if with_entropy else None, squares if with_sum_pi_squared else None
    return TokenScores(log_probs, entropy, *top, sum_pi_squared=squares)


def launches_triton(device: torch.device) -> bool:
    """Whether Triton's kernels can be launched on a device."""
    return HAS_TRITON and device.type == "cuda" and has_compiler()


@cache
def has_compiler() -> bool:
    """Whether there is the C compiler that Triton builds its launchers with, as it looks for one; told once if not."""
    if found := bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return found
    logger.warning(
        "CUDA: got no C compiler for Triton's kernels, so plain torch computes log-probs, with the logits of %s tokens "
        "in memory, and decode steps in many small kernels. Install gcc or clang, or set CC.",
        _CHUNK_TOKENS_ELSEWHERE,
    )
    return found


@dataclass(frozen=True)
class _Call:
    """How `token_scores` was called, and whether by Triton; a scale without a cap is in the temperature."""

    temperature: float
    rule: LogitRule
    with_entropy: bool
    with_sum_pi_squared: bool
    top_k: int | None
    chunk_tokens: int
    shard: VocabularyShard | None
    use_triton: bool


def head_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None
) -> Tensor:
    """Float32 logits [C, V] of hidden [C, D], weight [V, D], in the dtype of `hidden` or widened to float32, and bias
    [V]. They may be written to the workspace [C, V]: a CPU would map memory of this size anew each time."""
    if hidden.is_cuda and hidden.dtype == weight.dtype != torch.float32:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=workspace)
    elif weight.dtype == torch.float32:
        logits = torch.mm(hidden.float(), weight.t(), out=workspace)
    else:
        wide = hidden.float()
        logits = (
            wide.new_empty(hidden.shape[0], weight.shape[0]) if workspace is None else workspace
        )
        with (
            exact_in_bfloat16() if weight.dtype == torch.bfloat16 == hidden.dtype else nullcontext()
        ):
            for start in range(0, weight.shape[0], _VOCABULARY_BLOCK):
                block = slice(start, start + _VOCABULARY_BLOCK)
                torch.mm(wide, weight[block].float().t(), out=logits[:, block])
    return logits if bias is None else logits.add_(bias)


@contextmanager
def exact_in_bfloat16() -> Iterator[None]:
    """Let oneDNN round the factors of float32 products to bfloat16, which these factors are; sums stay float32."""
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


# Gradients of log-probs ([M] or [M, K]) and of entropies (or None), normalisers, entropies: [M] each.
_Outer = tuple[Tensor, Tensor | None, Tensor, Tensor]
# The likeliest tokens' numbers and their ids: [M, k] each, or None twice.
_Top = tuple[Tensor, Tensor] | tuple[None, None]


class _TokenScores(torch.autograd.Function):
    """With z the logits over the temperature, p their softmax and H its entropy: d log p_t / dz = onehot_t - p, and
    dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, call):
        places = targets.contiguous()  # rows of this rank's weight; -1: another rank's
        if call.shard is not None:
            places = targets - call.shard.start
            places = torch.where((places >= 0) & (places < weight.shape[0]), places, -1)
        ctx.kept, top = None, (None, None)
        if call.use_triton:
            wanted = (call.with_entropy, call.with_sum_pi_squared)
            parts = heads_triton.statistics(hidden, weight, bias, places, call.temperature, *wanted)
        else:
            parts, ctx.kept, top = _statistics(
                hidden, weight, bias, places, call, keep=any(ctx.needs_input_grad[:3])
            )
        whole = parts[0] if len(parts) == 1 else _combine(parts)
        if call.shard is not None and len(targets):
            whole = _combine(_gather(whole, call.shard.group))
            if top[0] is not None:
                # The likeliest tokens over all ranks: [M, k] each, out of every rank's.
                values, ids = (
                    _gather(one, call.shard.group).transpose(0, 1).flatten(1) for one in top
                )
                values, order = values.topk(call.top_k, dim=-1)
                top = values, ids.gather(-1, order)
        normalizer, entropy, chosen, squares, *others = whole
        log_probs = chosen - normalizer
        if targets.dim() > 1:
            log_probs = torch.stack([log_probs, *(one - normalizer for one in others)], 1)
        without_gradient = [squares.clone()]
        if top[0] is not None:
            top[0].sub_(normalizer[:, None])
            without_gradient += top
        ctx.mark_non_differentiable(*without_gradient)
        ctx.save_for_backward(hidden, weight, bias, places, normalizer, entropy)
        ctx.call = call
        ctx.set_materialize_grads(False)
        # What is saved for the backward pass must not be changed by the caller.
        return log_probs, entropy.clone(), without_gradient[0], *top

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy, *_):
        hidden, weight, bias, places, normalizer, entropy = ctx.saved_tensors
        grad_log_probs = (
            normalizer.new_zeros(places.shape) if grad_log_probs is None else grad_log_probs
        )
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(
                weight, dtype=torch.float32 if weight.is_cuda else weight.dtype
            )
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        outer = (grad_log_probs, grad_entropy, normalizer, entropy)
        chunks = _gradients(hidden, weight, bias, places, outer, ctx.call, ctx.kept)
        ctx.kept = None
        for rows, grad in chunks:
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                factors = grad.t(), hidden[rows].to(weight.dtype)
                if grad_weight.dtype == weight.dtype:
                    grad_weight.addmm_(*factors)
                else:
                    torch.addmm(grad_weight, *factors, out_dtype=torch.float32, out=grad_weight)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


def _combine(parts: Tensor) -> Tensor:
    """Normaliser, entropy, target's logit and sum of squared probabilities, and logits of other targets: parts
    [P, 3 + K, M] -> the whole [3 + K, M]. With w the share of a part: H = sum of w H_part - w log w, and the squares
    are the sum of w^2 squares_part. An empty part's normaliser, and the logit of a target not in it, are -inf."""
    normalizers, entropies, chosen, squares, *others = parts.unbind(1)
    normalizer = normalizers.logsumexp(0)
    shares = (normalizers - normalizer).exp()
    entropy = (shares * entropies + torch.special.entr(shares)).sum(0)
    squares = (shares.square() * squares).sum(0)
    return torch.stack(
        [normalizer, entropy, chosen.amax(0), squares, *(one.amax(0) for one in others)]
    )


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[...] of every rank -> [ranks, ...]: everyone then does the same arithmetic, so results are equal."""
    gathered = tensor.new_empty(group.size() * len(tensor), *tensor.shape[1:])
    all_gather_single(gathered, tensor.contiguous(), group=group)
    return gathered.view(group.size(), *tensor.shape)


def _cut(size: int, first: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Tensors cut into so many tokens each; None stays None."""
    for start in range(0, len(first), size):
        yield tuple(None if one is None else one[start : start + size] for one in (first, *others))


def _statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, places: Tensor, call: _Call, keep: bool
) -> tuple[Tensor, Tensor | None, _Top]:
    """The numbers of this rank's vocabulary [1, 3 + K, M]; the workspace with the last chunk's logits where it is to
    be kept; and the top tokens with their logits, [M, k] each, or None twice."""
    num_tokens, num_rows = hidden.shape[0], weight.shape[0]
    step = _TOKEN_BLOCK.get(hidden.device.type, _TOKEN_BLOCK_ELSEWHERE)
    places = places if places.dim() > 1 else places[:, None]
    result = hidden.new_zeros(3 + places.shape[1], num_tokens, dtype=torch.float32)
    workspace = hidden.new_empty(min(call.chunk_tokens, num_tokens), num_rows, dtype=torch.float32)
    top: _Top = (None, None)
    if call.top_k is not None:
        shape = (num_tokens, call.top_k)
        top = result.new_full(shape, -torch.inf), places.new_full(shape, -1)
    for start in range(0, num_tokens, call.chunk_tokens):
        rows = slice(start, min(start + call.chunk_tokens, num_tokens))
        logits = head_logits(hidden[rows], weight, bias, workspace[: rows.stop - start])
        for block, normalizer, entropy, chosen, squares, *others, place in _cut(
            step, logits, *result[:, rows], places[rows]
        ):
            if call.rule.softcap is not None:
                call.rule.apply(block)
            if call.temperature != 1.0:
                block.div_(call.temperature)
            wanted = (
                entropy if call.with_entropy else None,
                squares if call.with_sum_pi_squared else None,
            )
            _block_statistics(block, normalizer, *wanted)
            found = block.new_full(place.shape, -torch.inf)
            if num_rows:
                found = block.gather(-1, place.clamp(min=0)).masked_fill_(place < 0, -torch.inf)
            for logit, column in zip((chosen, *others), found.unbind(1), strict=True):
                logit.copy_(column)
        if top[0] is not None:
            best = logits.topk(min(top[0].shape[1], num_rows), dim=-1)
            top[0][rows, : best.values.shape[1]] = best.values
            top[1][rows, : best.values.shape[1]] = best.indices + (
                call.shard.start if call.shard else 0
            )
    return result[None], workspace if keep else None, top


def _block_statistics(
    logits: Tensor, normalizer: Tensor, entropy: Tensor | None, squares: Tensor | None
) -> None:
    """Write normalisers [C], entropies [C] and sums of squared probabilities [C] of logits [C, V']."""
    if not logits.shape[1]:
        normalizer.fill_(-torch.inf)
        return
    peak = logits.amax(-1)
    shifted = logits - peak[:, None]
    weights = shifted.exp_() if entropy is None else shifted.exp()
    total = weights.sum(-1)
    log_total = total.log()
    torch.add(peak, log_total, out=normalizer)
    if entropy is not None:
        torch.sub(log_total, torch.linalg.vecdot(weights, shifted) / total, out=entropy)
    if squares is not None:
        torch.div(torch.linalg.vecdot(weights, weights), total.square(), out=squares)


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    places: Tensor,
    outer: _Outer,
    call: _Call,
    kept: Tensor | None,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows and the gradient of their logits [C, V'] in the weight's dtype; without Triton the last chunk first:
    `kept`, if not None, is the workspace with its logits over the temperature."""
    size, step = call.chunk_tokens, _TOKEN_BLOCK.get(hidden.device.type, _TOKEN_BLOCK_ELSEWHERE)
    cuts = enumerate(_cut(size, hidden, places, *outer))
    chunks = [
        (slice(number * size, number * size + len(parts[0])), parts) for number, parts in cuts
    ]
    if call.use_triton:
        for rows, (states, place, *numbers) in chunks:
            yield (
                rows,
                heads_triton.logit_gradients(
                    call.temperature, states, weight, bias, place, tuple(numbers)
                ),
            )
        return
    shape = min(size, len(hidden)), weight.shape[0]
    workspace = hidden.new_empty(shape, dtype=torch.float32) if kept is None else kept
    is_narrow = weight.dtype != torch.float32
    narrow = torch.empty_like(workspace, dtype=weight.dtype) if is_narrow else workspace
    for rows, (states, *parts) in reversed(chunks):
        logits, results = workspace[: len(states)], narrow[: len(states)]
        if kept is None:
            logits = head_logits(states, weight, bias, logits)
        for block, result, *numbers in _cut(step, logits, results, *parts):
            if kept is None and call.rule.softcap is not None:
                call.rule.apply(block)
            if kept is None and call.temperature != 1.0:
                block.div_(call.temperature)
            slope = None
            if call.rule.softcap is not None:
                # Of c * tanh(s * x / c): s * (1 - tanh^2).
                tanh = block * (call.temperature / call.rule.softcap)
                slope = tanh.square_().neg_().add_(1.0).mul_(call.rule.scale)
            _block_gradients(call.temperature, block, *numbers)
            if slope is not None:
                block.mul_(slope)
            if is_narrow:
                result.copy_(block)
        kept = None
        yield rows, results


def _block_gradients(
    temperature: float,
    logits: Tensor,
    places: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    normalizer: Tensor,
    entropy: Tensor,
) -> None:
    """Replace logits z [C, V'] by (g onehot_t - p (g + h (log p + H))) / temperature, with g and h the gradients of
    log-prob and entropy; of several targets the first g stands for each in its place, the second for their sum."""
    log_p = logits.sub_(normalizer[:, None])
    places, of_targets = (
        one if one.dim() > 1 else one[:, None] for one in (places, grad_log_probs / temperature)
    )
    outer = of_targets.sum(1)
    if grad_entropy is None:
        log_p.exp_().mul_(-outer[:, None])
    else:
        slope = grad_entropy / temperature
        p = log_p.exp()
        log_p.mul_(-slope[:, None]).sub_((outer + slope * entropy)[:, None]).mul_(p)
    if logits.shape[1]:
        logits.scatter_add_(1, places.clamp(min=0), torch.where(places >= 0, of_targets, 0.0))
