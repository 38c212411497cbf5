# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropies from hidden states, without the [tokens, vocabulary] logits.

Logits are always float32, because a bfloat16 logit of 30 is off by up to 0.06, which is more than
the difference between two policies. The vocabulary is projected in chunks of tokens, forward and
backward, into one workspace. When the backward pass begins, the workspace still has the logits of
the last chunk, so the backward pass starts with that chunk.

Each part of the vocabulary (a block of a GPU kernel in heads_triton.py, or the rows of a rank,
`VocabularyShard`) has four statistics per token: the logarithm of its sum of exponentials, the
entropy within the part, the target's logit, and the sum of squared probabilities within the part;
then the logits of the K - 1 further targets, which makes 3 + K numbers. Parts are combined by the
chain rule of the entropy and by squared shares. All terms are positive, so nothing cancels.

Legend: M tokens to predict, D hidden size, V vocabulary, V' rows of it on this rank, C tokens in a
chunk, P parts, k likeliest tokens, K targets of a token.
"""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    from quadriga.models import heads_triton

# torch before 2.13 only has it as all_gather_into_tensor, for which later versions print a warning.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
logger = logging.getLogger(__name__)
HALF_DTYPES = (torch.bfloat16, torch.float16)
CHUNK_TOKENS = 512  # default number of tokens of a chunk on a CPU
_CHUNK_TOKENS_GPU = 2048  # a GPU reads and writes the weight's gradient for each chunk
# Number of tokens whose logits are processed together, so that they stay in the cache.
_BLOCK_TOKENS = 16  # on a CPU
_BLOCK_TOKENS_GPU = 128
_VOCABULARY_BLOCK = 4096  # rows of the weight that are converted to float32 at a time


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's rows [start, start + V') of the head's weight.

    V' may differ between ranks, and may be 0.

    Attributes:
        group: the ranks with all rows, which must make the same calls with the same tokens.
        start: index of the first row.
    """

    group: dist.ProcessGroup
    start: int


@dataclass(frozen=True)
class LogitRule:
    """Scale and cap by which a model turns its head's products into logits.

    Attributes:
        scale: factor of the products.
        softcap: c of c * tanh(logit / c), which is applied to the scaled products. None: no cap.
    """

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> "LogitRule":
        """Find the rule of a model. The trial in `models/architecture.py` checks that it holds.

        Args:
            config: configuration of a model.
        """
        text = config.get_text_config()
        scale = 1.0
        if text.model_type not in _UNUSED_SCALE:
            for name in ("logit_scale", "lm_head_multiplier"):
                scale *= getattr(text, name, None) or 1.0
        # Most models divide by this entry.
        divisor = getattr(text, "logits_scaling", None) or 1.0
        if text.model_type in _MULTIPLIED:
            divisor = 1.0 / divisor
        # Two names of the same entry. None and 0 mean no cap.
        softcap = getattr(text, "final_logit_softcapping", None)
        softcap = softcap or getattr(text, "logits_soft_cap", None) or None
        return cls(scale / divisor, softcap)

    def apply(self, logits: Tensor) -> Tensor:
        """Scale and cap float32 logits [..., V] in place."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


PLAIN_LOGITS = LogitRule()
_MULTIPLIED = ("hyperclovax",)  # models that multiply by `logits_scaling` instead of dividing
_UNUSED_SCALE = ("mpt",)  # models that ignore their `logit_scale`


@dataclass(frozen=True)
class TokenScores:
    """Scores of tokens under the policy; None if not requested.

    Only `log_probs` and `entropy` have gradients.

    Attributes:
        log_probs: [M] float32, or [M, K].
        entropy: [M] float32, in nats.
        top_log_probs: [M, k] float32, the largest ones in descending order.
        top_ids: [M, k] int64, their tokens.
        sum_pi_squared: [M] float32, the probability of drawing the same token twice.
    """

    log_probs: Tensor
    entropy: Tensor | None
    top_log_probs: Tensor | None = None
    top_ids: Tensor | None = None
    sum_pi_squared: Tensor | None = None


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
    """Compute log-probabilities of `targets`, and entropies of the distributions at these tokens.

    On CUDA, half-precision states and weights go through the kernels of heads_triton.py, which
    never write the logits, if Triton and a C compiler are installed. All other cases are computed
    in chunks in plain torch: CPUs; float32, which tensor cores would round; and `top_k`, several
    targets and soft-capping, which need the logits.

    With a shard, all outputs are the same on all ranks. The gradient of `hidden` is this rank's
    part, which the caller must sum over the group; those of `weight` and `bias` are complete. A
    call needs one collective (three with `top_k`) of a few numbers per token, its backward pass
    none.

    Args:
        hidden: [M, D] states that predict the targets.
        weight: [V, D], or with a shard [V', D].
        bias: [V] or [V'], or None.
        targets: [M] token ids, or [M, K]. With a shard, a token on no rank has log-prob -inf.
        temperature: divides the logits.
        with_entropy: whether to return entropies.
        with_sum_pi_squared: whether to return sums of squared probabilities.
        top_k: how many of the likeliest tokens to return. If the vocabulary has fewer, the missing
            ones have log-prob -inf and id -1.
        chunk_tokens: C. None: chosen by the device.
        shard: the rows of the vocabulary on this rank. None: all.
        rule: scale and cap of the logits.

    Returns:
        The requested scores.
    """
    is_half = hidden.dtype == weight.dtype and hidden.dtype in HALF_DTYPES
    needs_logits = top_k is not None or targets.dim() > 1 or rule.softcap is not None
    is_on_cpu = hidden.device.type == "cpu"
    if rule.softcap is None:
        # Without a cap, the scale can be part of the temperature, which the kernels support.
        temperature = temperature / rule.scale
        rule = PLAIN_LOGITS
    options = _ScoreOptions(
        temperature=temperature,
        rule=rule,
        with_entropy=with_entropy,
        with_sum_pi_squared=with_sum_pi_squared,
        top_k=top_k,
        chunk_tokens=chunk_tokens or (CHUNK_TOKENS if is_on_cpu else _CHUNK_TOKENS_GPU),
        block_tokens=_BLOCK_TOKENS if is_on_cpu else _BLOCK_TOKENS_GPU,
        shard=shard,
        use_triton=is_half and not needs_logits and can_launch_triton(hidden.device),
    )
    log_probs, entropy, squares, top_log_probs, top_ids = _TokenScoresFunction.apply(
        hidden, weight, bias, targets, options
    )
    return TokenScores(
        log_probs=log_probs,
        entropy=entropy if with_entropy else None,
        top_log_probs=top_log_probs,
        top_ids=top_ids,
        sum_pi_squared=squares if with_sum_pi_squared else None,
    )


def can_launch_triton(device: torch.device) -> bool:
    """Whether Triton's kernels can be launched on a device."""
    return HAS_TRITON and device.type == "cuda" and has_compiler()


@cache
def has_compiler() -> bool:
    """Whether the C compiler that Triton needs is installed. Logs a warning once if it is not."""
    # Triton itself looks for a compiler in this way.
    if os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"):
        return True
    logger.warning(
        "CUDA: got no C compiler for Triton's kernels, so plain torch computes log-probs, with the "
        "logits of %s tokens in memory, and decode steps in many small kernels. "
        "Install gcc or clang, or set CC.",
        _CHUNK_TOKENS_GPU,
    )
    return False


@dataclass(frozen=True)
class _ScoreOptions:
    """Options of `token_scores`. The rule is plain unless it has a cap."""

    temperature: float
    rule: LogitRule
    with_entropy: bool
    with_sum_pi_squared: bool
    top_k: int | None
    chunk_tokens: int
    block_tokens: int
    shard: VocabularyShard | None
    use_triton: bool

    def prepare_logits(self, logits: Tensor) -> None:
        """Turn a head's products [..., V'] into logits over the temperature, in place."""
        self.rule.apply(logits)
        if self.temperature != 1.0:
            logits.div_(self.temperature)


def head_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None
) -> Tensor:
    """Compute float32 logits of hidden states.

    Args:
        hidden: [C, D].
        weight: [V, D] in the dtype of `hidden`, or in float32.
        bias: [V] or None.
        workspace: [C, V] float32 memory for the logits, so that a CPU does not have to map memory
            of this size in each call.

    Returns:
        [C, V] float32.
    """
    if hidden.is_cuda and hidden.dtype == weight.dtype != torch.float32:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=workspace)
    elif weight.dtype == torch.float32:
        logits = torch.mm(hidden.float(), weight.t(), out=workspace)
    else:
        wide = hidden.float()
        logits = workspace
        if logits is None:
            logits = wide.new_empty(hidden.shape[0], weight.shape[0])
        # A float32 copy of the weight would be twice as large as the weight itself.
        is_bfloat16 = weight.dtype == torch.bfloat16 == hidden.dtype
        with exact_in_bfloat16() if is_bfloat16 else nullcontext():
            for rows in _slices(weight.shape[0], _VOCABULARY_BLOCK):
                torch.mm(wide, weight[rows].float().t(), out=logits[:, rows])
    return logits if bias is None else logits.add_(bias)


@contextmanager
def exact_in_bfloat16() -> Iterator[None]:
    """Context manager: faster matrix products of bfloat16 values that are stored in float32.

    oneDNN rounds the factors to bfloat16, which does not change such values. Sums stay float32.
    """
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


class _TokenInputs(NamedTuple):
    """Inputs of the logits' gradient: gradients of the outputs, and statistics of the vocabulary.

    Attributes:
        grad_log_probs: [M] or [M, K].
        grad_entropy: [M], or None if the entropy has no gradient.
        normalizer: [M] logarithm of the sum of exponentials.
        entropy: [M].
    """

    grad_log_probs: Tensor
    grad_entropy: Tensor | None
    normalizer: Tensor
    entropy: Tensor

    def select(self, tokens: slice) -> "_TokenInputs":
        """Select some of the tokens."""
        return self._make(None if part is None else part[tokens] for part in self)


class _TokenScoresFunction(torch.autograd.Function):
    """Scores of tokens from hidden states.

    With z the logits over the temperature, p their softmax and H its entropy:
    d log p_t / dz = onehot_t - p, and dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, options):
        # Row of each target in this rank's weight; -1 for a target in the weight of another rank.
        target_rows = targets.contiguous()
        if options.shard is not None:
            target_rows = targets - options.shard.start
            is_local = (target_rows >= 0) & (target_rows < weight.shape[0])
            target_rows = torch.where(is_local, target_rows, -1)
        ctx.workspace = None
        top = None  # logits and ids of the likeliest tokens, [M, k] each
        if options.use_triton:
            parts = heads_triton.statistics(
                hidden,
                weight,
                bias,
                target_rows,
                options.temperature,
                options.with_entropy,
                options.with_sum_pi_squared,
            )
        else:
            needs_gradients = any(ctx.needs_input_grad[:3])
            parts, workspace, top = _chunked_statistics(hidden, weight, bias, target_rows, options)
            ctx.workspace = workspace if needs_gradients else None

        # Combine the parts of this rank, then those of all ranks.
        statistics = parts[0] if len(parts) == 1 else _combine_parts(parts)  # [3 + K, M]
        if options.shard is not None and len(targets):
            group = options.shard.group
            statistics = _combine_parts(_gather_ranks(statistics, group))
            if top is not None:
                # The likeliest among those of all ranks: [ranks, M, k] -> [M, ranks * k].
                values, ids = (
                    _gather_ranks(part, group).transpose(0, 1).flatten(1) for part in top
                )
                top_values, order = values.topk(options.top_k, dim=-1)
                top = (top_values, ids.gather(-1, order))

        normalizer, entropy, target_logit, squares, *other_target_logits = statistics
        log_probs = target_logit - normalizer
        if targets.dim() > 1:
            # Column 0 is the row's own target.
            columns = [log_probs, *(logits - normalizer for logits in other_target_logits)]
            log_probs = torch.stack(columns, 1)
        # The caller gets copies of squares and entropy. By changing them, it cannot change the
        # statistics, which are saved for the backward pass.
        squares = squares.clone()
        ctx.mark_non_differentiable(squares, *(top or ()))
        if top is not None:
            top[0].sub_(normalizer[:, None])  # from logits to log-probs
        ctx.save_for_backward(hidden, weight, bias, target_rows, normalizer, entropy)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return log_probs, entropy.clone(), squares, *(top or (None, None))

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy, *_):
        hidden, weight, bias, target_rows, normalizer, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if grad_log_probs is None:
            # Only the entropy has a gradient.
            grad_log_probs = normalizer.new_zeros(target_rows.shape)

        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = None
        if needs_weight:
            # On a GPU, the chunks are summed in float32.
            dtype = torch.float32 if weight.is_cuda else weight.dtype
            grad_weight = torch.zeros_like(weight, dtype=dtype)
        grad_bias = torch.zeros_like(bias) if needs_bias else None

        # Each chunk's gradient of the logits contributes to all three gradients.
        inputs = _TokenInputs(grad_log_probs, grad_entropy, normalizer, entropy)
        chunks = _chunked_gradients(
            hidden, weight, bias, target_rows, inputs, ctx.options, ctx.workspace
        )
        ctx.workspace = None
        for tokens, grad_logits in chunks:
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
            if grad_hidden is not None:
                grad_hidden[tokens] = grad_logits @ weight
            if grad_weight is not None:
                states = hidden[tokens].to(weight.dtype)
                grads = grad_logits.t()
                if grad_weight.dtype == weight.dtype:
                    grad_weight.addmm_(grads, states)
                else:
                    torch.addmm(
                        grad_weight, grads, states, out_dtype=torch.float32, out=grad_weight
                    )
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


def _combine_parts(parts: Tensor) -> Tensor:
    """Combine the statistics of P parts of a vocabulary: [P, 3 + K, M] to [3 + K, M].

    With w the share of a part, H = sum of (w H_part - w log w), and the squares are the sum of
    w^2 squares_part. The normalizer of an empty part is -inf, and so is the logit of a target that
    is not in a part.
    """
    normalizers, entropies, target_logits, squares, *other_target_logits = parts.unbind(1)
    normalizer = normalizers.logsumexp(0)  # [M]
    shares = (normalizers - normalizer).exp()  # [P, M]
    entropy = (shares * entropies + torch.special.entr(shares)).sum(0)
    squares = (shares.square() * squares).sum(0)
    # Only the part that has a target has its logit; all other parts have -inf.
    other_target_logits = [logits.amax(0) for logits in other_target_logits]
    target_logit = target_logits.amax(0)
    return torch.stack([normalizer, entropy, target_logit, squares, *other_target_logits])


def _gather_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather tensors [...] from all ranks to [ranks, ...], the same on all ranks."""
    gathered = tensor.new_empty(group.size() * len(tensor), *tensor.shape[1:])
    all_gather_single(gathered, tensor.contiguous(), group=group)
    return gathered.view(group.size(), *tensor.shape)


def _slices(length: int, size: int) -> list[slice]:
    """Divide `length` elements into slices of at most `size` elements."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _chunked_statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target_rows: Tensor, options: _ScoreOptions
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Compute the statistics of this rank's vocabulary, in plain torch.

    Args:
        hidden: [M, D].
        weight: [V', D].
        bias: [V'] or None.
        target_rows: [M] or [M, K], rows of the targets in `weight`; -1 if the target is not there.
        options: options of `token_scores`.

    Returns:
        Statistics [1, 3 + K, M], the workspace with the last chunk's logits, and logits and ids
        [M, k] of the likeliest tokens; None without `top_k`.
    """
    num_tokens = len(hidden)
    num_rows = len(weight)
    if target_rows.dim() == 1:
        target_rows = target_rows[:, None]
    statistics = hidden.new_zeros(3 + target_rows.shape[1], num_tokens, dtype=torch.float32)
    workspace = hidden.new_empty(
        min(options.chunk_tokens, num_tokens), num_rows, dtype=torch.float32
    )
    top = None
    if options.top_k is not None:
        shape = (num_tokens, options.top_k)
        top = (statistics.new_full(shape, -torch.inf), target_rows.new_full(shape, -1))

    for tokens in _slices(num_tokens, options.chunk_tokens):
        length = tokens.stop - tokens.start
        logits = head_logits(hidden[tokens], weight, bias, workspace[:length])
        chunk_target_rows = target_rows[tokens]
        chunk_statistics = statistics[:, tokens]
        for block in _slices(length, options.block_tokens):
            _block_statistics(
                logits[block], chunk_target_rows[block], chunk_statistics[:, block], options
            )
        if top is not None:
            # A shard may have fewer than k rows.
            num_best = min(top[0].shape[1], num_rows)
            best = logits.topk(num_best, dim=-1)
            first_row = 0 if options.shard is None else options.shard.start
            top[0][tokens, :num_best] = best.values
            top[1][tokens, :num_best] = best.indices + first_row
    return statistics[None], workspace, top  # the whole vocabulary of this rank is one part


def _block_statistics(
    logits: Tensor, target_rows: Tensor, result: Tensor, options: _ScoreOptions
) -> None:
    """Turn a head's products into logits over the temperature, and write their statistics.

    Args:
        logits: [C, V'] products of states and weight, changed in place.
        target_rows: [C, K] rows of the targets; -1 for targets of other ranks.
        result: [3 + K, C] zeros, changed in place.
        options: options of `token_scores`.
    """
    options.prepare_logits(logits)
    normalizer, entropy, target_logit, squares, *other_target_logits = result
    if not logits.shape[1]:
        # This rank has no rows of the vocabulary. -inf adds nothing when parts are combined.
        for row in (normalizer, target_logit, *other_target_logits):
            row.fill_(-torch.inf)
        return
    target_logits = logits.gather(-1, target_rows.clamp(min=0))
    target_logits.masked_fill_(target_rows < 0, -torch.inf)
    for number, row in enumerate((target_logit, *other_target_logits)):
        row.copy_(target_logits[:, number])
    # Relative to the largest logit, so that exponentials do not overflow.
    peak = logits.amax(-1)  # [C]
    shifted = logits - peak[:, None]
    # Only the entropy needs the shifted logits again. Without it, their memory is reused.
    weights = shifted.exp() if options.with_entropy else shifted.exp_()
    total = weights.sum(-1)
    log_total = total.log()
    torch.add(peak, log_total, out=normalizer)
    if options.with_entropy:
        mean = torch.linalg.vecdot(weights, shifted) / total
        torch.sub(log_total, mean, out=entropy)
    if options.with_sum_pi_squared:
        torch.div(torch.linalg.vecdot(weights, weights), total.square(), out=squares)


def _chunked_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_rows: Tensor,
    inputs: _TokenInputs,
    options: _ScoreOptions,
    workspace: Tensor | None,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the tokens of each chunk, and the gradient [C, V'] of the head's products for them.

    Gradients are in the dtype of the weight. Their memory is reused for the next chunk.

    Args:
        hidden: [M, D].
        weight: [V', D].
        bias: [V'] or None.
        target_rows: [M] or [M, K], rows of the targets in `weight`; -1 if the target is not there.
        inputs: gradients of the outputs, and statistics.
        options: options of `token_scores`.
        workspace: the last chunk's logits over the temperature, from the forward pass; None with
            Triton, and in a second backward pass.
    """
    chunks = _slices(len(hidden), options.chunk_tokens)
    if options.use_triton:
        for tokens in chunks:
            grad_logits = heads_triton.logit_gradients(
                options.temperature,
                hidden[tokens],
                weight,
                bias,
                target_rows[tokens],
                inputs.select(tokens),
            )
            yield tokens, grad_logits
        return

    has_logits = workspace is not None
    if workspace is None:
        shape = (min(options.chunk_tokens, len(hidden)), len(weight))
        workspace = hidden.new_empty(shape, dtype=torch.float32)
    # The caller multiplies gradients in the dtype of the weight.
    is_half = weight.dtype != torch.float32
    results = torch.empty_like(workspace, dtype=weight.dtype) if is_half else workspace

    # The last chunk first, whose logits are in the workspace.
    for tokens in reversed(chunks):
        length = tokens.stop - tokens.start
        logits = workspace[:length]
        if not has_logits:
            logits = head_logits(hidden[tokens], weight, bias, logits)
        chunk_target_rows = target_rows[tokens]
        chunk_inputs = inputs.select(tokens)
        for block in _slices(length, options.block_tokens):
            block_logits = logits[block]
            if not has_logits:
                options.prepare_logits(block_logits)
            _block_gradients(
                block_logits, chunk_target_rows[block], chunk_inputs.select(block), options
            )
            if is_half:
                results[block].copy_(block_logits)
        has_logits = False
        yield tokens, results[:length]


def _block_gradients(
    logits: Tensor, target_rows: Tensor, inputs: _TokenInputs, options: _ScoreOptions
) -> None:
    """Replace logits z over the temperature by the gradient of the head's products.

    Without a cap it is (g onehot_t - p (g + h (log p + H))) / temperature, with g and h the
    gradients of log-prob and entropy. With several targets, it is (sum of g_k onehot_k - p (sum of
    g_k + h (log p + H))) / temperature.

    Args:
        logits: [C, V'], changed in place.
        target_rows: [C] or [C, K] rows of the targets; -1 for targets of other ranks.
        inputs: gradients of the outputs, and statistics.
        options: options of `token_scores`.
    """
    temperature = options.temperature
    softcap = options.rule.softcap
    cap_slope = None
    if softcap is not None:
        # Logits are c * tanh(s * x / c) / temperature, with x the product, s the scale and c the
        # cap. The derivative of c * tanh(s * x / c) by x is s * (1 - tanh^2).
        tanh = logits * (temperature / softcap)
        cap_slope = tanh.square_().neg_().add_(1.0).mul_(options.rule.scale)

    target_grads = inputs.grad_log_probs / temperature
    if target_rows.dim() == 1:
        target_rows = target_rows[:, None]
        target_grads = target_grads[:, None]
    sum_of_grads = target_grads.sum(1)  # [C], the sum of g_k in the formula

    # In place from here on: the workspace becomes the gradient.
    log_p = logits.sub_(inputs.normalizer[:, None])
    if inputs.grad_entropy is None:
        log_p.exp_().mul_(-sum_of_grads[:, None])
    else:
        entropy_grad = inputs.grad_entropy / temperature
        p = log_p.exp()
        offset = sum_of_grads + entropy_grad * inputs.entropy
        log_p.mul_(-entropy_grad[:, None]).sub_(offset[:, None]).mul_(p)

    if logits.shape[1]:
        # Targets on other ranks have row -1. They add 0 to row 0 here.
        local_grads = torch.where(target_rows >= 0, target_grads, 0.0)
        logits.scatter_add_(1, target_rows.clamp(min=0), local_grads)
    if cap_slope is not None:
        logits.mul_(cap_slope)
