# SPDX-License-Identifier: Apache-2.0
"""RMS norms and gated MLPs on CUDA: Triton kernels behind `quadriga.models.fused`, one per pass.

They round at the same points as the plain functions there.

Legend: R rows, D columns of a norm, F width of an MLP.
"""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

_NUMBERS = 2048  # numbers that one program computes
# Maximum number of programs in a norm's backward pass. Each sums the weight's gradient over a part
# of the rows. The number is the same on all devices, and so is the order of the sum.
_PARTS = 512


@triton.jit
def _norm_kernel(
    hidden,
    weight,
    result,
    scales,
    num_rows,
    size,
    epsilon,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute `rms_norm` for ROWS rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    is_row = rows < num_rows
    is_column = columns < size
    is_inside = is_row[:, None] & is_column[None, :]
    offsets = rows[:, None].to(tl.int64) * size + columns[None, :]
    # Rounded as in eager mode: once after the norm, and once after the weight.
    wide = tl.load(hidden + offsets, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / size + epsilon)
    normed = (wide * scale[:, None]).to(result.dtype.element_ty).to(tl.float32)
    factors = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(result + offsets, normed * factors[None, :], mask=is_inside)
    tl.store(scales + rows, scale, mask=is_row)


@triton.jit
def _norm_gradients_kernel(
    grad,
    hidden,
    weight,
    scales,
    result,
    sums,
    num_rows,
    size,
    rows_of_part,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute `rms_norm_gradients` for one part of the rows, ROWS at a time."""
    part = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    is_column = columns < size
    factors = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    first = part * rows_of_part
    for start in range(first, min(first + rows_of_part, num_rows), ROWS):
        rows = start + tl.arange(0, ROWS)
        is_row = rows < num_rows
        is_inside = is_row[:, None] & is_column[None, :]
        offsets = rows[:, None].to(tl.int64) * size + columns[None, :]
        scale = tl.load(scales + rows, mask=is_row, other=0.0)[:, None]
        normed = tl.load(hidden + offsets, mask=is_inside, other=0.0).to(tl.float32) * scale
        # Gradients of the result (outer) and of the normed row (inner).
        outer = tl.load(grad + offsets, mask=is_inside, other=0.0).to(tl.float32)
        total += tl.sum(outer * normed, 0)
        inner = outer * factors[None, :]
        # d hidden = scale * (g w - n * mean(g w n)), with n the normed row.
        projection = tl.sum(inner * normed, 1) / size
        gradient = (inner - normed * projection[:, None]) * scale
        tl.store(result + offsets, gradient, mask=is_inside)
    tl.store(sums + part * size + columns, total, mask=is_column)


@triton.jit
def _gate_kernel(gate, up, result, num_numbers, NUMBERS: tl.constexpr):
    """Compute NUMBERS elements of `gated_silu`."""
    offsets = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    is_inside = offsets < num_numbers
    wide = tl.load(gate + offsets, mask=is_inside, other=0.0).to(tl.float32)
    factor = tl.load(up + offsets, mask=is_inside, other=0.0).to(tl.float32)
    # silu is rounded to half precision before the product, as in eager mode.
    activated = (wide * tl.sigmoid(wide)).to(result.dtype.element_ty).to(tl.float32)
    tl.store(result + offsets, activated * factor, mask=is_inside)


@triton.jit
def _gate_gradients_kernel(grad, gate, up, grad_gate, grad_up, num_numbers, NUMBERS: tl.constexpr):
    """Compute NUMBERS elements of `gated_silu_gradients`."""
    offsets = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    is_inside = offsets < num_numbers
    wide = tl.load(gate + offsets, mask=is_inside, other=0.0).to(tl.float32)
    outer = tl.load(grad + offsets, mask=is_inside, other=0.0).to(tl.float32)
    factor = tl.load(up + offsets, mask=is_inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(wide)
    # `inner` is the gradient of silu(gate), and
    # d silu(x) / dx = sigmoid(x) * (1 + x * (1 - sigmoid(x))).
    inner = (outer * factor).to(grad_gate.dtype.element_ty).to(tl.float32)
    gate_gradient = inner * share * (1 + wide * (1 - share))
    tl.store(grad_gate + offsets, gate_gradient, mask=is_inside)
    activated = (wide * share).to(grad_up.dtype.element_ty).to(tl.float32)
    tl.store(grad_up + offsets, activated * outer, mask=is_inside)


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Compute the RMS norm of each row.

    Args:
        hidden: [..., D] in half precision, R rows.
        weight: [D].
        epsilon: added to the mean of squares.

    Returns:
        The result [..., D], and the factor [R] float32 by which each row was multiplied.
    """
    hidden = hidden.contiguous()
    size = hidden.shape[-1]
    num_rows = hidden.numel() // size
    result = torch.empty_like(hidden)
    scales = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
    tile = _tile(size)
    grid = (triton.cdiv(num_rows, tile["ROWS"]),)
    _norm_kernel[grid](hidden, weight, result, scales, num_rows, size, epsilon, **tile)
    return result, scales


def rms_norm_gradients(
    grad: Tensor, hidden: Tensor, weight: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `rms_norm`.

    Args:
        grad: gradient [..., D] of the result.
        hidden: [..., D] as in the forward pass.
        weight: [D] as in the forward pass.
        scales: [R] float32 from the forward pass.

    Returns:
        Gradients of `hidden` [..., D], and of `weight` [D] in float32.
    """
    grad = grad.contiguous()
    hidden = hidden.contiguous()
    result = torch.empty_like(hidden)
    size = hidden.shape[-1]
    num_rows = len(scales)
    tile = _tile(size)
    num_tiles = triton.cdiv(num_rows, tile["ROWS"])
    # Parts consist of whole tiles, and there are at most _PARTS of them.
    rows_of_part = tile["ROWS"] * triton.cdiv(num_tiles, _PARTS)
    num_parts = triton.cdiv(num_rows, rows_of_part)
    # The kernel sums the weight's gradient over the rows of each part. Torch then sums over parts.
    sums = torch.empty(num_parts, size, dtype=torch.float32, device=hidden.device)
    _norm_gradients_kernel[(num_parts,)](
        grad, hidden, weight, scales, result, sums, num_rows, size, rows_of_part, **tile
    )
    return result, sums.sum(0)


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up.

    Args:
        gate: [..., F] in half precision.
        up: [..., F] in the same dtype.

    Returns:
        [..., F] in the same dtype.
    """
    gate = gate.contiguous()
    up = up.contiguous()
    result = torch.empty_like(gate)
    size = gate.numel()
    _gate_kernel[(triton.cdiv(size, _NUMBERS),)](gate, up, result, size, NUMBERS=_NUMBERS)
    return result


def gated_silu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `gated_silu`.

    Args:
        grad: gradient [..., F] of the result.
        gate: [..., F] as in the forward pass.
        up: [..., F] as in the forward pass.

    Returns:
        Gradients of `gate` and `up`, [..., F] each.
    """
    grad = grad.contiguous()
    gate = gate.contiguous()
    up = up.contiguous()
    grad_gate = torch.empty_like(gate)
    grad_up = torch.empty_like(up)
    size = gate.numel()
    grid = (triton.cdiv(size, _NUMBERS),)
    _gate_gradients_kernel[grid](grad, gate, up, grad_gate, grad_up, size, NUMBERS=_NUMBERS)
    return grad_gate, grad_up


def _tile(size: int) -> dict[str, int]:
    """Options of a norm's kernel for rows of `size` numbers."""
    columns = triton.next_power_of_2(size)
    return {
        "ROWS": max(1, _NUMBERS // columns),
        "COLUMNS": columns,
        "num_warps": 4 if columns <= 2048 else 8,
    }
