# SPDX-License-Identifier: Apache-2.0
"""Matrix products with weights that stay for a while, on a CPU: a second copy of them, in the order of a library.

A decode step multiplies a few rows with every weight of the model, and libraries begin each such product by bringing
the weight into an order of their own. Here that is done once:

    model         this CPU has        few rows                        many rows
    bfloat16      tiles (AMX)         bfloat16, in oneDNN's order     the same
    bfloat16      none, but MKL       bfloat16, in oneDNN's order     float32, in MKL's order
    bfloat16      neither             bfloat16, in oneDNN's order     the same
    float32       MKL                 float32, in MKL's order         the same

With few rows it is reading the weights that takes the time, with many the arithmetic. Float32 has no place beside
bfloat16 where it takes too much memory.

The factors are those of training, sums are float32, and a result is rounded once; only the order of summation differs.

Legend: D inputs, O outputs.
"""

from abc import ABC, abstractmethod

import torch
from torch.nn.functional import linear

FEW_ROWS = 16  # up to here bfloat16 is as fast as float32, for it is half as much to read
_MAX_WIDE_BYTES = 4 * 2**30
# The number of rows for which a library chooses its order; others are right, too.
_PACKED_ROWS = 16
_WIDE_ROWS = 128


class Weight(ABC):
    """A weight in a form of its own.

    Args:
        weight: [O, D] bfloat16 or float32
        bias: [O], or None
    """

    @abstractmethod
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None: ...

    @abstractmethod
    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        """[..., D] in the model's dtype -> [..., O], in it or in float32."""


class PackedWeight(Weight):
    """bfloat16, in oneDNN's order."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS), bias

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        """[..., D] bfloat16 -> [..., O] bfloat16"""
        return torch.ops.mkldnn._linear_pointwise(states, self.packed, self.bias, "none", [], "")


class WideWeight(Weight):
    """Float32, in MKL's order where this build of torch has MKL."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight.float(), None if bias is None else bias.float()
        self.packed: torch.Tensor | None = None
        self.takes_tiles = weight.dtype == torch.bfloat16 and has_tiles()
        if has_mkl() and not self.takes_tiles:
            self.packed = torch.ops.mkl._mkl_reorder_linear_weight(self.weight.contiguous(), _WIDE_ROWS)
            self.weight = self.weight.new_empty(1).expand(weight.shape)  # its shape is all that is asked for now

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., O] float32"""
        if self.packed is not None:
            num_rows = states.shape[:-1].numel()
            return torch.ops.mkl._mkl_linear(states.float(), self.packed, self.weight, self.bias, num_rows)
        if not self.takes_tiles:
            return linear(states.float(), self.weight, self.bias)
        settings = torch.backends.mkldnn.matmul
        before = settings.fp32_precision
        settings.fp32_precision = "bf16"  # in tiles. Both factors are, so nothing is rounded; sums stay float32
        try:
            return linear(states.float(), self.weight, self.bias)
        finally:
            settings.fp32_precision = before


class TwofoldWeight(Weight):
    """bfloat16 in oneDNN's order for few rows, float32 in MKL's for many."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed, self.wide = PackedWeight(weight, bias), WideWeight(weight, bias)

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        """[..., D] bfloat16 -> [..., O], bfloat16 for few rows and float32 for many"""
        form = self.packed if states.shape[:-1].numel() <= FEW_ROWS else self.wide
        return form.multiply(states)


def form_for(dtype: torch.dtype, num_weights: int) -> type[Weight] | None:
    """The form for the layers of a model on this CPU; None: no form is faster than the parameters themselves.

    Args:
        dtype: of the model.
        num_weights: of the model.
    """
    packs = dtype == torch.bfloat16 and can_pack()
    widens = has_mkl() and 4 * num_weights <= _MAX_WIDE_BYTES
    if packs:
        return TwofoldWeight if widens and not has_tiles() else PackedWeight
    return WideWeight if widens and dtype in (torch.bfloat16, torch.float32) else None


def can_pack() -> bool:
    """Whether this build of torch packs bfloat16 weights for oneDNN, on a processor that multiplies them."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def has_mkl() -> bool:
    """Whether this build of torch packs float32 weights for MKL."""
    has_operators = hasattr(torch.ops.mkl, "_mkl_linear") and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight")
    return torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and has_operators


def has_tiles() -> bool:
    """Whether this processor multiplies bfloat16 in tiles."""
    return torch.cpu._is_amx_tile_supported()
