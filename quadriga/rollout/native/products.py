# SPDX-License-Identifier: Apache-2.0
"""Matrix products on a CPU, with weights in the form that is fastest for the number of rows.

With few rows, as in a decode step, most of the time is spent on reading the weights; with many
rows, on arithmetic. Libraries reorder a weight before each product; here that is done once.

    model       this CPU has              few rows                       many rows
    bfloat16    AVX-512 and a compiler    the parameters, by `kernels`   float32, in MKL's order
    bfloat16    AVX-512, no compiler      bfloat16, in oneDNN's order    float32, in MKL's order
    bfloat16    fast bfloat16 units       bfloat16, in oneDNN's order    the same
    float16     MKL                       float32, in MKL's order        the same
    float32     MKL                       float32, in MKL's order        the same

Bfloat16 units that are faster than those for float32 are AMX, and AVX-512 on AMD. Without MKL, or
if float32 takes too much memory, oneDNN's order serves many rows, too. Sums are float32, and a
result is rounded once, as in training; only the order of summation differs.

Weights with the same input, such as those of query, key and value, are multiplied in one product.

Legend: D inputs, O outputs of all weights of a product. Each weight is [., D], each bias [.].
"""

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from quadriga.models.heads import exact_in_bfloat16
from quadriga.rollout.native.kernels import Kernels, Tensors, about_kernels, kernels

_MAX_WIDE_BYTES = 4 * 2**30
# The number of rows for which a library chooses its order; other numbers work, too.
_PACKED_ROWS = 16
_WIDE_ROWS = 128
# oneDNN compiles a loop for each number of rows, which takes longer than the product of a few rows,
# and caches the last 64 (see `quadriga.models`). So rows are padded to multiples of this.
_FULL_ROWS = 8


class OwnWeight:
    """The bfloat16 parameters themselves, multiplied by a loop compiled on this machine.

    Args:
        weights: weights with the same input.
        biases: a bias for each weight, or None.
        dtype: dtype of the result, bfloat16 or float32.
    """

    max_rows = 24  # up to here this is the fastest form

    def __init__(
        self, weights: Tensors, biases: Tensors | None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        loops = kernels()
        assert loops is not None, about_kernels()
        self.kernels = loops
        self.weights = weights
        self.biases = biases
        self.dtype = dtype

    @staticmethod
    def is_supported(weights: Tensors) -> bool:
        """Whether this machine has the loop, and it accepts the weights' sizes and dtype."""
        return kernels() is not None and all(map(Kernels.can_multiply, weights))

    def multiply(self, states: Tensor) -> Tensor:
        """Multiply: [..., D] bfloat16 -> [..., O] in `dtype`."""
        rows = states.reshape(-1, states.shape[-1])
        product = self.kernels.multiply(rows, self.weights, self.biases, self.dtype)
        return product.view(*states.shape[:-1], -1)


class PackedWeight:
    """A copy in bfloat16, in oneDNN's order.

    Args:
        weights: weights with the same input.
        biases: a bias for each weight, or None.
    """

    max_rows = 16  # up to here this is as fast as float32: it reads half as many bytes

    def __init__(self, weights: Tensors, biases: Tensors | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat([*weights]), _PACKED_ROWS)
        self.bias = None if biases is None else torch.cat([*biases])

    def multiply(self, states: Tensor) -> Tensor:
        """Multiply: [..., D] bfloat16 -> [..., O] bfloat16."""
        rows = states.reshape(-1, states.shape[-1])
        num_rows = len(rows)
        # Products of one or two rows are not padded: that would multiply their work.
        num_padding = -num_rows % _FULL_ROWS if num_rows > 2 else 0
        if num_padding:
            rows = pad(rows, (0, 0, 0, num_padding))
        out = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return out[:num_rows].view(*states.shape[:-1], -1)


class WideWeight:
    """A copy in float32, in MKL's order if this build of torch has MKL.

    On a CPU with fast bfloat16 units the copy of bfloat16 weights stays in torch's order. These
    units multiply it without loss, because its numbers are bfloat16 numbers.

    Args:
        weights: weights with the same input.
        biases: a bias for each weight, or None.
    """

    def __init__(self, weights: Tensors, biases: Tensors | None) -> None:
        self.weight = torch.cat([weight.float() for weight in weights])
        self.bias = None if biases is None else torch.cat([bias.float() for bias in biases])
        self.packed: Tensor | None = None
        self.uses_bfloat16_units = weights[0].dtype == torch.bfloat16 and has_fast_bfloat16()
        if has_mkl() and not self.uses_bfloat16_units:
            self.packed = torch.ops.mkl._mkl_reorder_linear_weight(self.weight, _WIDE_ROWS)
            # MKL's product reads only the shape of the original, which is replaced by a view of one
            # number to free its memory.
            self.weight = self.weight.new_empty(1).expand(self.weight.shape)

    def multiply(self, states: Tensor) -> Tensor:
        """Multiply: [..., D] -> [..., O] float32."""
        wide = states.float()
        if self.packed is not None:
            num_rows = states.shape[:-1].numel()
            return torch.ops.mkl._mkl_linear(wide, self.packed, self.weight, self.bias, num_rows)
        with exact_in_bfloat16() if self.uses_bfloat16_units else nullcontext():
            return linear(wide, self.weight, self.bias)


@dataclass(frozen=True)
class Weight:
    """Weights with the same input, in the forms for few and for many rows."""

    few: OwnWeight | PackedWeight | None  # None: the form for many rows serves few rows, too
    many: PackedWeight | WideWeight

    def multiply(self, states: Tensor) -> Tensor:
        """Multiply: [..., D] in the model's dtype -> [..., O] in the model's dtype or float32."""
        num_rows = states.shape[:-1].numel()
        if self.few is not None and num_rows <= self.few.max_rows:
            return self.few.multiply(states)
        return self.many.multiply(states)


class Forms:
    """The forms for the weights of a model on this CPU.

    Args:
        dtype: dtype of the model.
        num_weights: number of parameters of the model.

    Attributes:
        few: class of the form for few rows; None: the form for many rows serves few rows, too.
        many: class of the form for many rows; None: there are no forms, and the model's own modules
            multiply.
    """

    def __init__(self, dtype: torch.dtype, num_weights: int) -> None:
        self.few: type[OwnWeight | PackedWeight] | None = None
        self.many: type[WideWeight | PackedWeight] | None = None
        # A copy of the model in float32 takes 4 bytes per weight.
        can_widen = has_mkl() and 4 * num_weights <= _MAX_WIDE_BYTES
        if can_widen and dtype in (torch.bfloat16, torch.float16, torch.float32):
            self.many = WideWeight
        if dtype == torch.bfloat16 and can_pack():
            is_fast = has_fast_bfloat16()
            self.few = OwnWeight if kernels() is not None and not is_fast else PackedWeight
            self.many = WideWeight if can_widen and not is_fast else PackedWeight

    @property
    def description(self) -> str:
        """Copies of the weights that the forms need: "" or text that begins with a semicolon."""
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
        """Convert the weights of modules with the same input to the forms.

        Args:
            weights: [., D] each.
            biases: [.] each, or None.
            is_head: whether they make logits. The results are then float32.
            is_sum: whether the results are summed over ranks. They are then float32, unless the
                form for many rows is `PackedWeight`.

        Returns:
            The weights in their forms; None if `many` is None.
        """
        if self.many is None:
            return None
        many = WideWeight(weights, biases) if is_head else self.many(weights, biases)
        # Logits and parts of sums must not be rounded to bfloat16, as oneDNN's product does.
        needs_float32 = is_head or is_sum
        few: OwnWeight | PackedWeight | None = None
        if (is_head or self.few is OwnWeight) and OwnWeight.is_supported(weights):
            few = OwnWeight(weights, biases, torch.float32 if needs_float32 else torch.bfloat16)
        elif self.few is PackedWeight and self.many is WideWeight and not needs_float32:
            few = PackedWeight(weights, biases)
        return Weight(few, many)


def can_pack() -> bool:
    """Whether torch can pack bfloat16 weights for oneDNN, and oneDNN supports them on this CPU."""
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
    if not torch.cpu._is_avx512_bf16_supported():
        return False
    # Intel's AVX-512 units for bfloat16 are no faster than those for float32; AMD's are.
    cpu_info = Path("/proc/cpuinfo")
    return cpu_info.exists() and "AuthenticAMD" in cpu_info.read_text(encoding="utf-8")


def has_mkl() -> bool:
    """Whether this build of torch can pack float32 weights for MKL."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkl, "_mkl_linear")
        and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight")
    )
