# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compile for the GPUs that are in use: A100 (sm_80), H100 (sm_90), B200 (sm_100).

What it does not prove: that they compute what they should there (tests/numerics/test_heads_triton.py interprets them).
"""

import inspect

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quadriga.models import heads_triton

KERNELS = ("_statistics_kernel", "_gradients_kernel")
POINTERS = {
    "hidden": "*bf16", "weight": "*bf16", "bias": "*bf16", "places": "*i64", "result": "*fp32", "normalizer": "*fp32",
    "grad_log_probs": "*fp32", "grad_entropy": "*fp32", "entropy": "*fp32",
}  # fmt: skip
CONSTANTS = {"TOKENS": 128, "ROWS": 128, "COLUMNS": 64}


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_a_kernel_compiles(name: str, capability: int, has_bias: bool) -> None:
    """To machine code, within the shared memory of the GPU."""
    kernel = getattr(heads_triton, name)
    constants = {
        key: CONSTANTS.get(key, has_bias if key == "HAS_BIAS" else True)
        for key in inspect.signature(kernel.fn).parameters
        if key.isupper()
    }
    types = dict(POINTERS, result="*bf16") if name == "_gradients_kernel" else POINTERS
    constants |= {} if has_bias else {"bias": None}
    signature = {
        key: "constexpr" if key in constants else types.get(key, "fp32" if key == "scale" else "i32")
        for key in inspect.signature(kernel.fn).parameters
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    options = {"num_warps": heads_triton._NUM_WARPS, "num_stages": heads_triton._NUM_STAGES}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= (163 if capability == 80 else 227) * 1024
