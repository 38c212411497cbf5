# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compile for the GPUs that are in use: A100 (sm_80), H100 (sm_90), B200 (sm_100).

What it does not prove: that they compute what they should there (tests/numerics/test_heads_triton.py interprets them).
"""

import inspect
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quadriga.models import fused_triton, heads_triton
from quadriga.rollout.native import kernels_triton

POINTERS = {
    "*bf16": "grad gate up grad_gate grad_up"
    " hidden weight bias states added result cos sin query key value own_keys own_values shared_keys"
    " shared_values",
    "*fp32": "scales normalizer grad_log_probs grad_entropy entropy sums parts logits temperature peaks sinks",
    "*fp64": "uniforms", "*i64": "target_rows prefix_of prefix_length num_written",
    "*i32": "likeliest", "*i1": "is_greedy",
    "fp32": "scale softcap epsilon",
}  # fmt: skip
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}
HEAD_TILE = {"TOKENS": 128, "ROWS": 128, "COLUMNS": 64, "WITH_ENTROPY": True, "WITH_SQUARES": True}
ATTENTION = {"NUM_KEYS": 2, "GROUP": 6, "QUERIES": 16, "TOKENS": 64}
SAMPLING = {"BLOCKS": 16, "BLOCK": 256, "DEPTH": 10, "DEPTH_INSIDE": 8, "CHUNKS": 64}


def compiled(
    kernel: Any, capability: int, constants: dict[str, Any], result: str = "*bf16", **options: int
) -> None:
    """To machine code, within the shared memory of the GPU."""
    names = inspect.signature(kernel.fn).parameters
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {
        name: "constexpr" if name in constants else (TYPES | {"result": result}).get(name, "i32")
        for name in names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert made.asm["cubin"]
    assert made.metadata.shared <= (163 if capability == 80 else 227) * 1024


@pytest.mark.parametrize("columns", [64, 2048, 8192])
@pytest.mark.parametrize(
    "name", ["_norm_kernel", "_norm_gradients_kernel", "_gate_kernel", "_gate_gradients_kernel"]
)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_a_kernel_of_norms_and_gates_compiles(name: str, capability: int, columns: int) -> None:
    """For widths of heads and of hidden states."""
    shape = {"ROWS": max(1, 2048 // columns), "COLUMNS": columns, "NUMBERS": columns}
    compiled(getattr(fused_triton, name), capability, shape)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("name", ["_statistics_kernel", "_gradients_kernel"])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_a_kernel_compiles(name: str, capability: int, has_bias: bool) -> None:
    constants = HEAD_TILE | {"HAS_BIAS": has_bias} | ({} if has_bias else {"bias": None})
    options = {"num_warps": heads_triton._NUM_WARPS, "num_stages": heads_triton._NUM_STAGES}
    result = "*bf16" if name == "_gradients_kernel" else "*fp32"
    compiled(getattr(heads_triton, name), capability, constants, result, **options)


@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize("has_options", [True, False], ids=["window, cap and sinks", "plain"])
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_decode_attention_compiles(
    capability: int, size: int, has_options: bool, parts: int
) -> None:
    shape = ATTENTION | {
        "SIZE": size,
        "COLUMNS": triton.next_power_of_2(size),
        "PARTS": parts,
        "NUM_HEADS": 12,
    }
    shape |= {"HAS_WINDOW": has_options, "HAS_CAP": has_options, "HAS_SINKS": has_options}
    shape |= {} if has_options else {"sinks": None}
    result = "*bf16" if parts == 1 else "*fp32"
    compiled(kernels_triton._attention_kernel, capability, shape, result, num_warps=4, num_stages=2)
    compiled(kernels_triton._combine_kernel, capability, shape)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_norms_rotary_positions_gates_and_sampling_compile(capability: int) -> None:
    for size in (1536, 8192):
        columns = triton.next_power_of_2(size)
        shape = {"SIZE": size, "COLUMNS": columns}
        for added in ({"HAS_ADDED": True}, {"HAS_ADDED": False, "added": None}):
            compiled(
                kernels_triton._normalize_kernel,
                capability,
                shape | added,
                num_warps=columns // 512,
            )
    compiled(kernels_triton._rotate_kernel, capability, {"SIZE": 80, "HEADS": 8, "COLUMNS": 64})
    compiled(kernels_triton._gate_kernel, capability, {"COLUMNS": 1024})
    for is_asked in (True, False):
        shape = SAMPLING | {"HAS_TEMPERATURE": is_asked, "HAS_GREEDY": is_asked}
        shape |= {} if is_asked else {"temperature": None, "is_greedy": None}
        compiled(kernels_triton._summarize_kernel, capability, shape, num_warps=8)
        compiled(kernels_triton._draw_kernel, capability, shape, "*fp64")
