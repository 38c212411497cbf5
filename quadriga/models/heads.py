# SPDX-License-Identifier: Apache-2.0
"""From hidden states to log-probabilities, entropies and values, without the [tokens, vocabulary] logits.

Logits are float32 whatever the model computes in: a bfloat16 logit of 30 is off by up to 0.06, which is more than
the difference between two policies. The vocabulary is projected in chunks of tokens, forward and backward; the
last chunk's probabilities are the workspace that exists anyway, so they are kept and not computed again.

Legend: M tokens to predict, D hidden size, V vocabulary, C tokens in a chunk.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear

CHUNK_TOKENS = 512


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
        return logits if bias is None else logits.add_(bias)
    return linear(hidden.float(), weight.float(), None if bias is None else bias.float())


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
            logits = _shifted_logits(hidden[rows], weight, bias, temperature)
            chosen = logits.gather(-1, targets[rows, None])[:, 0]
            odds = logits.exp() if with_entropy else logits.exp_()
            total = odds.sum(-1)
            normalizer[rows] = total
            log_probs[rows] = chosen - total.log()
            if with_entropy:
                entropy[rows] = total.log() - torch.linalg.vecdot(odds, logits) / total
            if any(ctx.needs_input_grad[:3]) and rows.stop == num_tokens:
                ctx.kept = odds
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
            odds, ctx.kept = ctx.kept, None
            if odds is None or rows.stop < hidden.shape[0]:
                odds, ctx.kept = _shifted_logits(hidden[rows], weight, bias, temperature).exp_(), odds
            weights = -grad_log_probs[rows] / normalizer[rows]
            if grad_entropy is not None:
                surprise = odds.log().sub_(normalizer[rows, None].log()).add_(entropy[rows, None])
                per_entry = surprise.mul_(-(grad_entropy[rows] / normalizer[rows])[:, None]).add_(weights[:, None])
                grad = odds.mul_(per_entry.nan_to_num_())  # odds that underflow to 0 have no weight
            else:
                grad = odds.mul_(weights[:, None])
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
    return [
        slice(start, min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens)
    ]


def _shifted_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    """Logits [C, V] over the temperature, less their maximum, so that their exponentials are at most 1."""
    logits = head_logits(hidden, weight, bias)
    if temperature != 1.0:
        logits /= temperature
    return logits.sub_(logits.amax(-1, keepdim=True))


class ValueHead(nn.Module):
    """One number per hidden state, in float32: [..., D] -> [...]. It starts at zero, so the first values are zero."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=dtype)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden.float(), self.linear.weight.float(), self.linear.bias.float())[..., 0]
