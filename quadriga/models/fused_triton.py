# SPDX-License-Identifier: Apache-2.0
"""RMS norms and gated MLPs on CUDA, each pass one kernel: Triton's behind `quadriga.models.fused`, rounding as its
functions do.

Legend: R rows, D columns of a norm, N numbers.
"""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

_NUMBERS = 2048  # of a program
_PARTS = 512  # most programs of a norm's backward pass, each with a sum for the weight's gradient: not by the device


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
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    exists = (rows < num_rows)[:, None] & (columns < size)[None, :]
    places = rows[:, None].to(tl.int64) * size + columns[None, :]
    wide = tl.load(hidden + places, mask=exists, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / size + epsilon)
    normed = (wide * scale[:, None]).to(result.dtype.element_ty).to(tl.float32)
    factors = tl.load(weight + columns, mask=columns < size, other=0.0).to(tl.float32)
    tl.store(result + places, normed * factors[None, :], mask=exists)
    tl.store(scales + rows, scale, mask=rows < num_rows)


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
    part, columns = tl.program_id(0), tl.arange(0, COLUMNS)
    factors = tl.load(weight + columns, mask=columns < size, other=0.0).to(tl.float32)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    first = part * rows_of_part
    for start in range(first, min(first + rows_of_part, num_rows), ROWS):
        rows = start + tl.arange(0, ROWS)
        is_row = rows < num_rows
        exists = is_row[:, None] & (columns < size)[None, :]
        places = rows[:, None].to(tl.int64) * size + columns[None, :]
        scale = tl.load(scales + rows, mask=is_row, other=0.0)[:, None]
        normed = tl.load(hidden + places, mask=exists, other=0.0).to(tl.float32) * scale
        outer = tl.load(grad + places, mask=exists, other=0.0).to(tl.float32)
        total += tl.sum(outer * normed, 0)
        inner = outer * factors[None, :]
        projection = tl.sum(inner * normed, 1) / size
        tl.store(result + places, (inner - normed * projection[:, None]) * scale, mask=exists)
    tl.store(sums + part * size + columns, total, mask=columns < size)


@triton.jit
def _gate_kernel(gate, up, result, num_numbers, NUMBERS: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    exists = places < num_numbers
    wide = tl.load(gate + places, mask=exists, other=0.0).to(tl.float32)
    bent = (wide * tl.sigmoid(wide)).to(result.dtype.element_ty).to(tl.float32)
    tl.store(
        result + places,
        bent * tl.load(up + places, mask=exists, other=0.0).to(tl.float32),
        mask=exists,
    )


@triton.jit
def _gate_gradients_kernel(grad, gate, up, grad_gate, grad_up, num_numbers, NUMBERS: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    exists = places < num_numbers
    wide = tl.load(gate + places, mask=exists, other=0.0).to(tl.float32)
    outer = tl.load(grad + places, mask=exists, other=0.0).to(tl.float32)
    factor = tl.load(up + places, mask=exists, other=0.0).to(tl.float32)
    share = tl.sigmoid(wide)
    inner = (outer * factor).to(grad_gate.dtype.element_ty).to(tl.float32)
    tl.store(grad_gate + places, inner * share * (1 + wide * (1 - share)), mask=exists)
    bent = (wide * share).to(grad_up.dtype.element_ty).to(tl.float32)
    tl.store(grad_up + places, bent * outer, mask=exists)


def norm(
    hidden: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., D], [D] -> [..., D], and what each row was multiplied with, [R] float32."""
    hidden = hidden.contiguous()
    size, result = hidden.shape[-1], torch.empty_like(hidden)
    num_rows, tile = hidden.numel() // size, _tile(size)
    scales = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
    grid = (triton.cdiv(num_rows, tile["ROWS"]),)
    _norm_kernel[grid](hidden, weight, result, scales, num_rows, size, epsilon, **tile)
    return result, scales


def norm_gradients(
    grad: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the hidden states [..., D], and of the weight [D] in float32."""
    grad, hidden = grad.contiguous(), hidden.contiguous()
    size, result, num_rows = hidden.shape[-1], torch.empty_like(hidden), len(scales)
    tile = _tile(size)
    rows_of_part = tile["ROWS"] * triton.cdiv(triton.cdiv(num_rows, tile["ROWS"]), _PARTS)
    num_parts = triton.cdiv(num_rows, rows_of_part)
    sums = torch.empty(num_parts, size, dtype=torch.float32, device=hidden.device)
    call = (grad, hidden, weight, scales, result, sums, num_rows, size, rows_of_part)
    _norm_gradients_kernel[(num_parts,)](*call, **tile)
    return result, sums.sum(0)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    gate, up = gate.contiguous(), up.contiguous()
    result, size = torch.empty_like(gate), gate.numel()
    _gate_kernel[(triton.cdiv(size, _NUMBERS),)](gate, up, result, size, NUMBERS=_NUMBERS)
    return result


def gated_gradients(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of gate and up."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    found, size = (torch.empty_like(gate), torch.empty_like(up)), gate.numel()
    _gate_gradients_kernel[(triton.cdiv(size, _NUMBERS),)](
        grad, gate, up, *found, size, NUMBERS=_NUMBERS
    )
    return found


def _tile(size: int) -> dict[str, int]:
    columns = triton.next_power_of_2(size)
    return {
        "ROWS": max(1, _NUMBERS // columns),
        "COLUMNS": columns,
        "num_warps": 4 if columns <= 2048 else 8,
    }
