# SPDX-License-Identifier: Apache-2.0
"""From hidden states to float32 logits, in training and in generation by the same function.

Legend: C tokens, D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

_VOCABULARY_BLOCK = 4096  # rows of the weight that are widened at a time


def head_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Float32 logits.

    Args:
        hidden: [C, D]
        weight: [V, D], in the dtype of `hidden` or already widened to float32.
        bias: [V] or None.
        workspace: [C, V] float32 that the logits may be written to. A CPU hands out memory of this size page by page
            each time anew, which takes as long as reading it; the allocator of a GPU keeps it.

    Returns:
        [C, V] float32
    """
    if hidden.is_cuda and hidden.dtype == weight.dtype != torch.float32:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    elif weight.dtype == torch.float32:
        logits = torch.mm(hidden.float(), weight.t(), out=workspace)
    else:
        wide = hidden.float()
        logits = wide.new_empty(hidden.shape[0], weight.shape[0]) if workspace is None else workspace
        with _exact_in_bfloat16() if weight.dtype == torch.bfloat16 == hidden.dtype else nullcontext():
            for start in range(0, weight.shape[0], _VOCABULARY_BLOCK):
                block = slice(start, start + _VOCABULARY_BLOCK)
                torch.mm(wide, weight[block].float().t(), out=logits[:, block])
    return logits if bias is None else logits.add_(bias)


@contextmanager
def _exact_in_bfloat16() -> Iterator[None]:
    """Let oneDNN round the factors of float32 products to bfloat16, which these factors are; sums stay float32.

    Where a CPU multiplies bfloat16 in hardware this is the one way to a product of bfloat16 factors whose result
    is not rounded to bfloat16.
    """
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
