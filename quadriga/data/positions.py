# SPDX-License-Identifier: Apache-2.0
"""Position ids of padded batches.

Shapes: `B` sequences, `P` prompt positions (padding included), `T` response positions, `C` the 3 or 4 components that
multimodal rotary embeddings have.
"""

import torch
from torch import Tensor


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Number the valid tokens of each sequence from 0; padding, on either side, gets 0.

    Args:
        mask: [..., L], 1 for a token and 0 for padding.

    Returns:
        [..., L] int64.
    """
    mask = mask.to(torch.int64)
    return (mask.cumsum(dim=-1) - 1).clamp(min=0) * mask


def extend_position_ids(prompt_position_ids: Tensor, response_length: int) -> Tensor:
    """Continue the positions of left-padded prompts over their responses.

    Positions go on counting over the padding at a response's end: nothing attends to it, so they have no effect there,
    and every row of a batch has the same form.

    Args:
        prompt_position_ids: [B, P], or [B, C, P] for multimodal rotary embeddings.
        response_length: T.

    Returns:
        [B, P + T], or [B, C, P + T].
    """
    steps = torch.arange(1, response_length + 1, device=prompt_position_ids.device, dtype=prompt_position_ids.dtype)
    return torch.cat([prompt_position_ids, prompt_position_ids[..., -1:] + steps], dim=-1)
