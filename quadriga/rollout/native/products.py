# SPDX-License-Identifier: Apache-2.0
"""Matrix products on a CPU with weights in the form that is fastest for the number of rows.

With few rows, as in a decode step, reading the weights takes the time; with many the arithmetic does. Libraries reorder
a weight before each product; here that is done once.

    model       this CPU has              few rows                                   many rows
    bfloat16    AVX-512 and a compiler    the parameters themselves, by `kernels`    float32, in MKL's order
    bfloat16    AVX-512, no compiler      bfloat16, in oneDNN's order                float32, in MKL's order
    bfloat16    faster units for it       bfloat16, in oneDNN's order                the same
    float16     MKL                       float32, in MKL's order                    the same
    float32     MKL                       float32, in MKL's order                    the same

Units for bfloat16 that are faster than those for float32 are AMX, and the AVX-512 ones of AMD. Without MKL, or where
float32 takes too much memory, oneDNN's order serves many rows, too. Sums are float32 and a result is rounded once, as
in training; only the order of summation differs.

Legend: D inputs, O outputs of all weights of a form together, which are [., D] each, with biases [.] each or None.
"""

import functools
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn.functional import linear, pad

from quadriga.models.heads import exact_in_bfloat16
from quadriga.rollout.native.kernels import Kernels, Tensors, about_kernels, kernels

_MAX_WIDE_BYTES = 4 * 2**30
# The number of rows for which a library chooses its order; others are right, too.
_PACKED_ROWS = 16
_WIDE_ROWS = 128
# For each number of rows oneDNN compiles a loop, which takes longer than the product of a few, and it keeps the last 64
# (see `quadriga.models`). So rows are filled up to multiples of this.
_FULL_ROWS = 8


class OwnWeight:
    """The bfloat16 parameters themselves, by a loop that was compiled here; the result is bfloat16 or float32."""

    max_rows = 24  # up to here it is the fastest form

    def __init__(
        self, weights: Tensors, biases: Tensors | None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        found = kernels()
        assert found is not None, about_kernels()
        self.kernels, self.weights, self.biases, self.dtype = found, weights, biases, dtype

    @staticmethod
    def takes(weights: Tensors) -> bool:
        """Whether weights are of such a size and dtype, and this machine has the loop."""
        return kernels() is not None and all(map(Kernels.can_multiply, weights))

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        """[..., D] bfloat16 -> [..., O]"""
        rows = states.reshape(-1, states.shape[-1])
        return self.kernels.multiply(rows, self.weights, self.biases, self.dtype).view(
            *states.shape[:-1], -1
        )


class PackedWeight:
    """bfloat16, in oneDNN's order."""

    max_rows = 16  # up to here it is as fast as float32, for it is half as much to read

    def __init__(self, weights: Tensors, biases: Tensors | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat([*weights]), _PACKED_ROWS)
        self.bias = None if biases is None else torch.cat([*biases])

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        """[..., D] bfloat16 -> [..., O] bfloat16"""
        rows = states.reshape(-1, states.shape[-1])
        added = -len(rows) % _FULL_ROWS if len(rows) > 2 else 0
        rows = pad(rows, (0, 0, 0, added)) if added else rows
        out = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return out[: len(rows) - added].view(*states.shape[:-1], -1)


class WideWeight:
    """Float32, in MKL's order where this build of torch has MKL."""

    def __init__(self, weights: Tensors, biases: Tensors | None) -> None:
        self.weight = torch.cat([weight.float() for weight in weights])
        self.bias = None if biases is None else torch.cat([bias.float() for bias in biases])
        self.packed: torch.Tensor | None = None
        self.narrows = weights[0].dtype == torch.bfloat16 and has_fast_bfloat16()
        if has_mkl() and not self.narrows:
            self.packed = torch.ops.mkl._mkl_reorder_linear_weight(self.weight, _WIDE_ROWS)
            self.weight = self.weight.new_empty(1).expand(
                self.weight.shape
            )  # from here on only its shape is needed

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., O] float32"""
        if self.packed is not None:
            num_rows = states.shape[:-1].numel()
            return torch.ops.mkl._mkl_linear(
                states.float(), self.packed, self.weight, self.bias, num_rows
            )
        with exact_in_bfloat16() if self.narrows else nullcontext():
            return linear(states.float(), self.weight, self.bias)


class Weight:
    """Weights of one input, side by side: one form for many rows, and perhaps another one for few."""

    def __init__(
        self, few: OwnWeight | PackedWeight | None, many: PackedWeight | WideWeight
    ) -> None:
        self.few, self.many = few, many

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        """[..., D] in the model's dtype -> [..., O], in it or in float32."""
        if self.few is not None and states.shape[:-1].numel() <= self.few.max_rows:
            return self.few.multiply(states)
        return self.many.multiply(states)


class Forms:
    """The forms for the weights of a model on this CPU."""

    def __init__(self, dtype: torch.dtype, num_weights: int) -> None:
        is_half, widens = dtype == torch.bfloat16, has_mkl() and 4 * num_weights <= _MAX_WIDE_BYTES
        self.few: type[OwnWeight | PackedWeight] | None = None
        self.many: type[WideWeight | PackedWeight] | None = (
            WideWeight
            if widens and dtype in (torch.bfloat16, torch.float16, torch.float32)
            else None
        )
        if is_half and can_pack():
            is_fast = has_fast_bfloat16()
            self.few = OwnWeight if kernels() is not None and not is_fast else PackedWeight
            self.many = WideWeight if widens and not is_fast else PackedWeight

    @property
    def description(self) -> str:
        """Which second copies of the weights that takes, for people to read."""
        names = {PackedWeight: "oneDNN's order, bfloat16", WideWeight: "MKL's order, float32"}
        copies = [names[form] for form in (self.many, self.few) if form in names]
        return "".join(f"; a copy of its weights in {name}" for name in dict.fromkeys(copies))

    def make(
        self,
        weights: Tensors,
        biases: Tensors | None,
        *,
        is_head: bool = False,
        is_sum: bool = False,
    ) -> Weight | None:
        """For modules with one input; None: no form is faster than the parameters. A head's results are float32, and
        so is a part of a sum where the form has it so."""
        if self.many is None:
            return None
        many = (WideWeight if is_head else self.many)(weights, biases)
        few: OwnWeight | PackedWeight | None = None
        if (is_head or self.few is OwnWeight) and OwnWeight.takes(weights):
            few = OwnWeight(weights, biases, torch.float32 if is_head or is_sum else torch.bfloat16)
        elif self.few is PackedWeight and self.many is WideWeight and not (is_head or is_sum):
            few = PackedWeight(weights, biases)
        return Weight(few, many)


def can_pack() -> bool:
    """Whether this build of torch packs bfloat16 weights for oneDNN, on a processor that multiplies them."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


@functools.cache
def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32."""
    if torch.cpu._is_amx_tile_supported():
        return True
    facts = Path("/proc/cpuinfo")
    return (
        torch.cpu._is_avx512_bf16_supported()
        and facts.exists()
        and "AuthenticAMD" in facts.read_text(encoding="utf-8")
    )


def has_mkl() -> bool:
    """Whether this build of torch packs float32 weights for MKL."""
    has_operators = hasattr(torch.ops.mkl, "_mkl_linear") and hasattr(
        torch.ops.mkl, "_mkl_reorder_linear_weight"
    )
    return (
        torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and has_operators
    )
