# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropies on CUDA without logits in memory: Triton kernels behind `quadriga.models.heads`.

Forward, a program takes a block of tokens and a part of the vocabulary, multiplies tile by tile and keeps a few numbers
for each token, rescaled as its maximum grows (online softmax, arXiv:1805.02867). Parts have a fixed number of rows,
so a token's numbers do not depend on the tokens beside it. Backward, a kernel multiplies again and writes the
gradient of the logits of one chunk, in half precision; the two products with it are cuBLAS's. A kernel that added up
the gradient of the weight itself would need atomic sums, whose order, and so whose rounding, changes from run to run.

Legend: M tokens, D hidden size, V' rows of the vocabulary, P parts, C tokens in a chunk.
"""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

_ROWS_OF_PART = 8192
_TOKENS, _ROWS = 128, 128  # of a tile
_NUM_WARPS = 8
_NUM_STAGES = 3
_NOTHING = tl.constexpr(-1e30)  # a maximum before the first number: finite, so that differences are


@triton.jit
def _logits(
    hidden, weight, bias, tokens, rows, num_tokens, num_rows, hidden_size, hidden_stride, weight_stride, scale,
    HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of logits [TOKENS, ROWS] over the temperature, in float32; rows that do not exist are -inf."""
    columns = tl.arange(0, COLUMNS)
    left = hidden + tokens[:, None].to(tl.int64) * hidden_stride + columns[None, :]
    right = weight + rows[None, :].to(tl.int64) * weight_stride + columns[:, None]
    total = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
    for start in range(0, hidden_size, COLUMNS):
        exists = columns < hidden_size - start
        states = tl.load(left, mask=(tokens[:, None] < num_tokens) & exists[None, :], other=0.0)
        factors = tl.load(right, mask=(rows[None, :] < num_rows) & exists[:, None], other=0.0)
        total = tl.dot(states, factors, total, input_precision="ieee")
        left += COLUMNS
        right += COLUMNS
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[None, :]
    return tl.where(rows[None, :] < num_rows, total * scale, -float("inf"))


@triton.jit
def _statistics_kernel(
    hidden, weight, bias, places, result, num_tokens, num_rows, hidden_size, hidden_stride, weight_stride, scale,
    rows_of_part, HAS_BIAS: tl.constexpr, WITH_ENTROPY: tl.constexpr, WITH_SQUARES: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(1)
    place = tl.load(places + tokens, mask=tokens < num_tokens, other=-1)
    peak = tl.full((TOKENS,), _NOTHING, dtype=tl.float32)
    total = tl.zeros((TOKENS,), dtype=tl.float32)  # of exp(z - peak)
    mean = tl.zeros(
        (TOKENS,), dtype=tl.float32
    )  # of exp(z - peak) (z - peak), not yet divided by the total
    squares = tl.zeros(
        (TOKENS,), dtype=tl.float32
    )  # of exp(z - peak)^2, not yet divided by the total's square
    chosen = tl.full((TOKENS,), -float("inf"), dtype=tl.float32)
    first = part * rows_of_part
    for start in range(first, min(first + rows_of_part, num_rows), ROWS):
        rows = start + tl.arange(0, ROWS)
        z = _logits(
            hidden, weight, bias, tokens, rows, num_tokens, num_rows, hidden_size, hidden_stride, weight_stride, scale,
            HAS_BIAS, TOKENS, ROWS, COLUMNS,
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(z, 1))
        sunk = peak - higher
        shrink = tl.exp(sunk)
        shifted = z - higher[:, None]
        exponentials = tl.exp(shifted)
        if WITH_ENTROPY:
            weighted = tl.where(rows[None, :] < num_rows, exponentials * shifted, 0.0)
            mean = shrink * (mean + sunk * total) + tl.sum(weighted, 1)
        if WITH_SQUARES:
            squares = shrink * shrink * squares + tl.sum(exponentials * exponentials, 1)
        total = shrink * total + tl.sum(exponentials, 1)
        peak = higher
        is_chosen = (rows[None, :] == place[:, None]) & (rows[None, :] < num_rows)
        chosen = tl.maximum(chosen, tl.max(tl.where(is_chosen, z, -float("inf")), 1))
    log_total = tl.log(total)
    to = result + part * 4 * num_tokens + tokens
    tl.store(to, peak + log_total, mask=tokens < num_tokens)
    tl.store(
        to + num_tokens,
        log_total - mean / total if WITH_ENTROPY else mean,
        mask=tokens < num_tokens,
    )
    tl.store(to + 2 * num_tokens, chosen, mask=tokens < num_tokens)
    tl.store(
        to + 3 * num_tokens,
        squares / (total * total) if WITH_SQUARES else squares,
        mask=tokens < num_tokens,
    )


@triton.jit
def _gradients_kernel(
    hidden, weight, bias, places, grad_log_probs, grad_entropy, normalizer, entropy, result, num_tokens, num_rows,
    hidden_size, hidden_stride, weight_stride, scale, HAS_BIAS: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists = tokens < num_tokens
    place = tl.load(places + tokens, mask=exists, other=-1)
    outer = tl.load(grad_log_probs + tokens, mask=exists, other=0.0)
    z = _logits(
        hidden, weight, bias, tokens, rows, num_tokens, num_rows, hidden_size, hidden_stride, weight_stride, scale,
        HAS_BIAS, TOKENS, ROWS, COLUMNS,
    )  # fmt: skip
    log_p = z - tl.load(normalizer + tokens, mask=exists, other=0.0)[:, None]
    slope = tl.zeros((TOKENS, ROWS), dtype=tl.float32) + outer[:, None]
    if WITH_ENTROPY:
        height = tl.load(grad_entropy + tokens, mask=exists, other=0.0)
        slope += height[:, None] * (
            log_p + tl.load(entropy + tokens, mask=exists, other=0.0)[:, None]
        )
    grad = tl.where(rows[None, :] == place[:, None], outer[:, None], 0.0) - tl.exp(log_p) * slope
    to = result + tokens[:, None].to(tl.int64) * num_rows + rows[None, :]
    tl.store(
        to,
        (grad * scale).to(result.dtype.element_ty),
        mask=exists[:, None] & (rows[None, :] < num_rows),
    )


def statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    places: torch.Tensor,
    temperature: float,
    with_entropy: bool,
    with_squares: bool,
) -> torch.Tensor:
    """Four numbers of each token in each part of the vocabulary, [P, 4, M] float32: normaliser, entropy within the
    part, the target's logit (-inf where the part lacks it), and the sum of squared probabilities within the part; zero
    where they are not wanted. `hidden` is [M, D], weight [V', D] of the same dtype, bias [V'] or None, `places` [M] are
    the rows of the targets (-1: not here); the temperature divides the logits."""
    num_tokens, num_rows = len(hidden), len(weight)
    hidden, weight = _dense(hidden), _dense(weight)
    parts = max(1, triton.cdiv(num_rows, _ROWS_OF_PART))
    if not num_tokens or not num_rows:
        empty = hidden.new_full((parts, 4, num_tokens), -torch.inf, dtype=torch.float32)
        empty[:, 1] = empty[:, 3] = 0
        return empty
    result = hidden.new_empty(parts, 4, num_tokens, dtype=torch.float32)
    _statistics_kernel[(triton.cdiv(num_tokens, _TOKENS), parts)](
        hidden, weight, bias, places, result, num_tokens, num_rows, hidden.shape[1], hidden.stride(0), weight.stride(0),
        1 / temperature, _ROWS_OF_PART, WITH_ENTROPY=with_entropy, WITH_SQUARES=with_squares, **_shape(hidden, bias),
    )  # fmt: skip
    return result


def logit_gradients(
    temperature: float,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    places: torch.Tensor,
    outer: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The gradient [C, V'] of the logits before the temperature; arguments as for `statistics`, of C tokens.
    `outer`: gradients of log-probs and of entropies (or None), then normalisers and entropies of the whole vocabulary:
    [C] each.
    """
    num_tokens, num_rows = len(hidden), len(weight)
    hidden, weight = _dense(hidden), _dense(weight)
    result = hidden.new_empty(num_tokens, num_rows)
    if num_tokens and num_rows:
        grad_log_probs, grad_entropy, normalizer, entropy = (
            None if one is None else one.contiguous() for one in outer
        )
        _gradients_kernel[(triton.cdiv(num_tokens, _TOKENS), triton.cdiv(num_rows, _ROWS))](
            hidden, weight, bias, places, grad_log_probs, grad_entropy, normalizer, entropy, result, num_tokens,
            num_rows, hidden.shape[1], hidden.stride(0), weight.stride(0), 1 / temperature,
            WITH_ENTROPY=grad_entropy is not None, **_shape(hidden, bias),
        )  # fmt: skip
    return result


def _dense(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows are without gaps."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def _shape(hidden: torch.Tensor, bias: torch.Tensor | None) -> dict[str, int | bool]:
    """The tile, whose three stages take 96 KiB of shared memory whatever the dtype."""
    return {
        "HAS_BIAS": bias is not None,
        "TOKENS": _TOKENS,
        "ROWS": _ROWS,
        "COLUMNS": 128 // hidden.element_size(),
        "num_warps": _NUM_WARPS,
        "num_stages": _NUM_STAGES,
    }
