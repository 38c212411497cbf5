# SPDX-License-Identifier: Apache-2.0
"""From hidden states to log-probabilities, entropies and values, without the [tokens, vocabulary] logits.

Logits are float32 whatever the model computes in: a bfloat16 logit of 30 is off by up to 0.06, which is more than
the difference between two policies. The vocabulary is projected in chunks of tokens, forward and backward; the
last chunk's probabilities are the workspace that exists anyway, so they are kept and not computed again.

Legend: M tokens to predict, D hidden size, V vocabulary, C tokens in a chunk.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear

CHUNK_TOKENS = 512
_VOCABULARY_BLOCK = 4096  # rows of the weight that are widened at a time
_TOKEN_BLOCK = 32  # tokens whose probabilities are handled while they are in the cache


def head_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Float32 logits.

    Args:
        hidden: [C, D]
        weight: [V, D], in the dtype of `hidden` or already widened to float32.
        bias: [V] or None.

    Returns:
        [C, V] float32
    """
    if hidden.is_cuda and hidden.dtype == weight.dtype != torch.float32:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    elif weight.dtype == torch.float32:
        logits = hidden.float() @ weight.t()
    else:
        wide = hidden.float()
        logits = wide.new_empty(hidden.shape[0], weight.shape[0])
        with _exact_in_bfloat16() if weight.dtype == torch.bfloat16 == hidden.dtype else nullcontext():
            for start in range(0, weight.shape[0], _VOCABULARY_BLOCK):
                block = slice(start, start + _VOCABULARY_BLOCK)
                torch.mm(wide, weight[block].float().t(), out=logits[:, block])
    return logits if bias is None else logits.add_(bias)


@contextmanager
def _exact_in_bfloat16() -> Iterator[None]:
    """Let oneDNN round the factors of float32 products to bfloat16, which these factors are; sums stay float32.

    Where a CPU multiplies bfloat16 in hardware this is the one way to a product of bfloat16 factors whose result
    is not rounded to bfloat16.
    """
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


@dataclass(frozen=True)
class TokenScores:
    """What the policy says of given tokens: `log_probs` [M] and, where asked for, `entropy` [M], both float32."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None


def token_scores(
    hidden: torch.Tensor,
    head: nn.Module,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
) -> TokenScores:
    """Log-probabilities of `targets` and entropies of the distributions that they were drawn from.

    Args:
        hidden: [M, D], the states that predict the targets.
        head: module with `weight` [V, D] and perhaps `bias` [V].
        targets: [M] token ids.
        temperature: the logits are divided by it.
        with_entropy: whether to compute entropies too, in nats.
        chunk_tokens: C.
    """
    bias = getattr(head, "bias", None)
    log_probs, entropy = _TokenScores.apply(
        hidden, head.weight, bias, targets, (temperature, with_entropy, chunk_tokens)
    )
    return TokenScores(log_probs, entropy if with_entropy else None)


class _TokenScores(torch.autograd.Function):
    """With z the logits over the temperature, p their softmax and H its entropy: d log p_t / dz = onehot_t - p, and
    dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, options):
        temperature, with_entropy, chunk_tokens = options
        num_tokens = hidden.shape[0]
        log_probs = hidden.new_empty(num_tokens, dtype=torch.float32)
        normalizer, entropy = torch.empty_like(log_probs), torch.zeros_like(log_probs)
        ctx.kept = None
        for rows in _chunks(num_tokens, chunk_tokens):
            logits = head_logits(hidden[rows], weight, bias)
            chosen = logits.gather(-1, targets[rows, None])[:, 0] / temperature
            normalizer[rows], entropy[rows] = _softmax_(logits, temperature, with_entropy)
            log_probs[rows] = chosen - normalizer[rows]
            if any(ctx.needs_input_grad[:3]) and rows.stop == num_tokens:
                ctx.kept = logits
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        temperature, _, chunk_tokens = ctx.options
        grad_log_probs = torch.zeros_like(normalizer) if grad_log_probs is None else grad_log_probs
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for rows in _chunks(hidden.shape[0], chunk_tokens):
            if rows.stop == hidden.shape[0] and ctx.kept is not None:
                grad, ctx.kept = ctx.kept, None
            else:
                grad = head_logits(hidden[rows], weight, bias)
                grad = grad.div_(temperature).sub_(normalizer[rows, None]).exp_()
            if grad_entropy is None:
                grad.mul_(-grad_log_probs[rows, None])
            else:
                for block in _blocks(grad, normalizer[rows], entropy[rows], grad_log_probs[rows], grad_entropy[rows]):
                    _with_entropy_gradient(*block)
            grad[torch.arange(grad.shape[0], device=grad.device), targets[rows]] += grad_log_probs[rows]
            if temperature != 1.0:
                grad /= temperature
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), hidden[rows])
        return grad_hidden, grad_weight, grad_bias, None, None


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens)]


def _blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(tensor.split(_TOKEN_BLOCK) for tensor in tensors), strict=True)


def _softmax_(logits: torch.Tensor, temperature: float, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace logits [C, V] by the probabilities at a temperature.

    Returns:
        the logarithm of the sum of exponentials, and the entropy (zero where it is not asked for): [C] each.
    """
    normalizer, entropy = (logits.new_zeros(logits.shape[0]) for _ in range(2))
    for block, log_total, spread in _blocks(logits, normalizer, entropy):
        block.div_(temperature)
        peak = block.amax(-1)
        block.sub_(peak[:, None])
        shifted = block.clone() if with_entropy else None
        total = block.exp_().sum(-1)
        if shifted is not None:
            spread.copy_(total.log() - torch.linalg.vecdot(block, shifted) / total)
        log_total.copy_(peak + total.log())
        block.div_(total[:, None])
    return normalizer, entropy


def _with_entropy_gradient(
    probabilities: torch.Tensor,
    normalizer: torch.Tensor,
    entropy: torch.Tensor,
    grad_log_probs: torch.Tensor,
    grad_entropy: torch.Tensor,
) -> None:
    """Replace p [C, V] by -p (g + h (log p + H)), with g and h the gradients of log-prob and entropy. p log p is 0
    where p is 0."""
    weights = probabilities.log().nan_to_num_(neginf=0.0).add_(entropy[:, None])
    probabilities.mul_(weights.mul_(grad_entropy[:, None]).add_(grad_log_probs[:, None]).neg_())


class ValueHead(nn.Module):
    """One number per hidden state, in float32: [..., D] -> [...]. It starts at zero, so the first values are zero."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=dtype)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden.float(), self.linear.weight.float(), self.linear.bias.float())[..., 0]
