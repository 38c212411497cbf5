# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropies on CUDA without logits in memory: Triton kernels of `models.heads`.

In the forward pass, a program takes a block of tokens and a part of the vocabulary. It multiplies
tile by tile and keeps a few numbers per token, which are rescaled as their maximum grows (online
softmax, arXiv:1805.02867). Parts have a fixed number of rows, so the numbers of a token do not
depend on other tokens.

In the backward pass, a kernel multiplies again and writes the gradient of the logits of one chunk
in half precision; cuBLAS computes the two products with it. A kernel that also summed the gradient
of the weight would need atomic additions, whose order, and so whose rounding, varies between runs.

Legend: M tokens, D hidden size, V' rows of the vocabulary, P parts, C tokens in a chunk.
"""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

_ROWS_OF_PART = 8192
# Size of a tile, and options of its kernel.
_TOKENS = 128
_ROWS = 128
_NUM_WARPS = 8
_NUM_STAGES = 3
_NOTHING = tl.constexpr(-1e30)  # maximum of no numbers: finite, so that differences are not NaN


@triton.jit
def _logits(
    hidden,
    weight,
    bias,
    tokens,
    rows,
    num_tokens,
    num_rows,
    hidden_size,
    hidden_stride,
    weight_stride,
    scale,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute a float32 tile [TOKENS, ROWS] of logits over the temperature.

    Rows past the end of the vocabulary get -inf.
    """
    columns = tl.arange(0, COLUMNS)
    is_token = tokens[:, None] < num_tokens
    is_row = rows[None, :] < num_rows
    # Offsets in 64 bits: a matrix may have more than 2^31 numbers.
    left = hidden + tokens[:, None].to(tl.int64) * hidden_stride + columns[None, :]
    right = weight + rows[None, :].to(tl.int64) * weight_stride + columns[:, None]
    total = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
    # Sum over the hidden size, COLUMNS at a time.
    for start in range(0, hidden_size, COLUMNS):
        is_column = columns < hidden_size - start
        states = tl.load(left, mask=is_token & is_column[None, :], other=0.0)
        factors = tl.load(right, mask=is_row & is_column[:, None], other=0.0)
        total = tl.dot(states, factors, total, input_precision="ieee")
        left += COLUMNS
        right += COLUMNS
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_row, total * scale, -float("inf"))


@triton.jit
def _statistics_kernel(
    hidden,
    weight,
    bias,
    target_rows,
    result,
    num_tokens,
    num_rows,
    hidden_size,
    hidden_stride,
    weight_stride,
    scale,
    rows_of_part,
    HAS_BIAS: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_SQUARES: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the numbers of `statistics` for TOKENS tokens and one part of the vocabulary."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(1)
    is_token = tokens < num_tokens
    target_row = tl.load(target_rows + tokens, mask=is_token, other=-1)  # row of the target
    # Over the rows so far, with z their logits and e = exp(z - peak):
    peak = tl.full((TOKENS,), _NOTHING, dtype=tl.float32)  # largest z
    total = tl.zeros((TOKENS,), dtype=tl.float32)  # sum of e
    weighted = tl.zeros((TOKENS,), dtype=tl.float32)  # sum of e (z - peak)
    squares = tl.zeros((TOKENS,), dtype=tl.float32)  # sum of e^2
    chosen = tl.full((TOKENS,), -float("inf"), dtype=tl.float32)  # the target's logit
    first = part * rows_of_part
    for start in range(first, min(first + rows_of_part, num_rows), ROWS):
        rows = start + tl.arange(0, ROWS)
        is_row = rows[None, :] < num_rows
        z = _logits(
            hidden,
            weight,
            bias,
            tokens,
            rows,
            num_tokens,
            num_rows,
            hidden_size,
            hidden_stride,
            weight_stride,
            scale,
            HAS_BIAS,
            TOKENS,
            ROWS,
            COLUMNS,
        )
        # When the peak rises by -sunk, every e so far shrinks by the factor exp(sunk).
        higher = tl.maximum(peak, tl.max(z, 1))
        sunk = peak - higher
        shrink = tl.exp(sunk)
        shifted = z - higher[:, None]
        exponentials = tl.exp(shifted)
        if WITH_ENTROPY:
            # Every z - peak so far changes by sunk, so the sum of e (z - peak) becomes
            # shrink * (weighted + sunk * total), with the total before this tile.
            # Rows past the end have z = -inf, and 0 * -inf would be NaN.
            products = tl.where(is_row, exponentials * shifted, 0.0)
            weighted = shrink * (weighted + sunk * total) + tl.sum(products, 1)
        if WITH_SQUARES:
            squares = shrink * shrink * squares + tl.sum(exponentials * exponentials, 1)
        total = shrink * total + tl.sum(exponentials, 1)
        peak = higher
        is_chosen = (rows[None, :] == target_row[:, None]) & is_row
        target_logits = tl.where(is_chosen, z, -float("inf"))
        chosen = tl.maximum(chosen, tl.max(target_logits, 1))
    # The results, with p = e / total. What was not requested stays zero.
    log_total = tl.log(total)
    entropy = weighted
    if WITH_ENTROPY:
        entropy = log_total - weighted / total
    sum_p_squared = squares
    if WITH_SQUARES:
        sum_p_squared = squares / (total * total)
    # This part's rows of the result [P, 4, M], in the order of `statistics`.
    addresses = result + part * 4 * num_tokens + tokens
    tl.store(addresses, peak + log_total, mask=is_token)
    tl.store(addresses + num_tokens, entropy, mask=is_token)
    tl.store(addresses + 2 * num_tokens, chosen, mask=is_token)
    tl.store(addresses + 3 * num_tokens, sum_p_squared, mask=is_token)


@triton.jit
def _gradients_kernel(
    hidden,
    weight,
    bias,
    target_rows,
    grad_log_probs,
    grad_entropy,
    normalizer,
    entropy,
    result,
    num_tokens,
    num_rows,
    hidden_size,
    hidden_stride,
    weight_stride,
    scale,
    HAS_BIAS: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute a tile [TOKENS, ROWS] of `logit_gradients`; `scale` is 1 / temperature."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_token = tokens < num_tokens
    target_row = tl.load(target_rows + tokens, mask=is_token, other=-1)
    z = _logits(
        hidden,
        weight,
        bias,
        tokens,
        rows,
        num_tokens,
        num_rows,
        hidden_size,
        hidden_stride,
        weight_stride,
        scale,
        HAS_BIAS,
        TOKENS,
        ROWS,
        COLUMNS,
    )
    log_p = z - tl.load(normalizer + tokens, mask=is_token, other=0.0)[:, None]
    # g onehot_t - p (g + h (log p + H)), with g the gradient of the log-prob, h that of the entropy.
    g = tl.load(grad_log_probs + tokens, mask=is_token, other=0.0)
    factor_of_p = tl.zeros((TOKENS, ROWS), dtype=tl.float32) + g[:, None]
    if WITH_ENTROPY:
        h = tl.load(grad_entropy + tokens, mask=is_token, other=0.0)
        entropies = tl.load(entropy + tokens, mask=is_token, other=0.0)
        factor_of_p += h[:, None] * (log_p + entropies[:, None])
    is_target = rows[None, :] == target_row[:, None]
    grad = tl.where(is_target, g[:, None], 0.0) - tl.exp(log_p) * factor_of_p
    addresses = result + tokens[:, None].to(tl.int64) * num_rows + rows[None, :]
    mask = is_token[:, None] & (rows[None, :] < num_rows)
    tl.store(addresses, (grad * scale).to(result.dtype.element_ty), mask=mask)


def statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_rows: Tensor,
    temperature: float,
    with_entropy: bool,
    with_squares: bool,
) -> Tensor:
    """Compute the statistics of each part of the vocabulary; see `models.heads`.

    Args:
        hidden: states [M, D] in half precision.
        weight: [V', D] in the dtype of `hidden`.
        bias: [V'] or None.
        target_rows: [M] rows of the targets in `weight`; -1 if the target is not there.
        temperature: divides the logits.
        with_entropy: whether to compute the entropies, which are otherwise zero.
        with_squares: whether to compute the squares, which are otherwise zero.

    Returns:
        [P, 4, M] float32: normaliser, entropy within the part, the target's logit (-inf if the part
        does not have the target) and the sum of squared probabilities within the part.
    """
    num_tokens = len(hidden)
    num_rows = len(weight)
    hidden = _make_rows_contiguous(hidden)
    weight = _make_rows_contiguous(weight)
    num_parts = max(1, triton.cdiv(num_rows, _ROWS_OF_PART))
    result = hidden.new_empty(num_parts, 4, num_tokens, dtype=torch.float32)
    if not num_tokens or not num_rows:
        # Without rows, normaliser (row 0) and target's logit (row 2) are -inf, the others zero.
        result[:, 0::2] = -torch.inf
        result[:, 1::2] = 0
        return result
    grid = (triton.cdiv(num_tokens, _TOKENS), num_parts)
    _statistics_kernel[grid](
        hidden,
        weight,
        bias,
        target_rows,
        result,
        num_tokens,
        num_rows,
        hidden.shape[1],
        hidden.stride(0),
        weight.stride(0),
        1 / temperature,
        _ROWS_OF_PART,
        WITH_ENTROPY=with_entropy,
        WITH_SQUARES=with_squares,
        **_tile(hidden, bias),
    )
    return result


def logit_gradients(
    temperature: float,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_rows: Tensor,
    token_inputs: tuple[Tensor, Tensor | None, Tensor, Tensor],
) -> Tensor:
    """Compute the gradient with respect to the logits of one chunk.

    Args:
        temperature: divides the logits.
        hidden: states [C, D] in half precision.
        weight: [V', D] in the dtype of `hidden`.
        bias: [V'] or None.
        target_rows: [C] rows of the targets in `weight`; -1 if the target is not there.
        token_inputs: gradient of the log-probs; gradient of the entropies, or None; normalisers
            and entropies of the whole vocabulary; [C] each. A `_TokenInputs` of `models.heads`.

    Returns:
        [C, V'] in the dtype of `hidden`: the gradient with respect to the logits before they are
        divided by the temperature.
    """
    num_tokens = len(hidden)
    num_rows = len(weight)
    hidden = _make_rows_contiguous(hidden)
    weight = _make_rows_contiguous(weight)
    result = hidden.new_empty(num_tokens, num_rows)
    if not num_tokens or not num_rows:
        return result
    grad_log_probs, grad_entropy, normalizer, entropy = token_inputs
    if grad_entropy is not None:
        grad_entropy = grad_entropy.contiguous()
    grid = (triton.cdiv(num_tokens, _TOKENS), triton.cdiv(num_rows, _ROWS))
    _gradients_kernel[grid](
        hidden,
        weight,
        bias,
        target_rows,
        grad_log_probs.contiguous(),
        grad_entropy,
        normalizer.contiguous(),
        entropy.contiguous(),
        result,
        num_tokens,
        num_rows,
        hidden.shape[1],
        hidden.stride(0),
        weight.stride(0),
        1 / temperature,
        WITH_ENTROPY=grad_entropy is not None,
        **_tile(hidden, bias),
    )
    return result


def _make_rows_contiguous(matrix: Tensor) -> Tensor:
    """Copy a matrix if the numbers of its rows are not contiguous."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def _tile(hidden: Tensor, bias: Tensor | None) -> dict[str, int | bool]:
    """Options of both kernels. Three stages of a tile take 96 KiB of shared memory in any dtype."""
    return {
        "HAS_BIAS": bias is not None,
        "TOKENS": _TOKENS,
        "ROWS": _ROWS,
        "COLUMNS": 128 // hidden.element_size(),
        "num_warps": _NUM_WARPS,
        "num_stages": _NUM_STAGES,
    }
