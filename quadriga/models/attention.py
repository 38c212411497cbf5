# SPDX-License-Identifier: Apache-2.0
"""The one door through which every Hugging Face causal model reaches our attention.

A model whose attention implementation is `ATTENTION_NAME` hands queries, keys and values of each layer to
the `AttentionPlan` that travels with the call: `model(..., attention_plan=plan)`. Training passes a plan over
packed sequences, decoding one over a key-value cache; the model code in between is Hugging Face's, untouched.

Legend: B rows, H query heads, K key-value heads, N tokens, D head size.
"""

from typing import Any, Protocol

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quadriga.errors import EngineError

ATTENTION_NAME = "quadriga"

_UNSUPPORTED = ("softcap", "sliding_window", "s_aux")


class AttentionPlan(Protocol):
    """Knows which tokens of a call may see which keys."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of one layer.

        Args:
            layer: index of the layer, from 0.
            query: [B, H, N, D], rotated.
            key, value: [B, K, N, D], rotated.
            scale: factor on the scores.

        Returns:
            [B, N, H, D]
        """
        ...


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    attention_plan: AttentionPlan | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if attention_plan is None:
        raise EngineError(
            "attention",
            got="a call of the model without attention_plan",
            fix="Pass attention_plan=..., or load the model with another attention implementation.",
        )
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise EngineError(
                f"attention of {type(module).__name__}",
                got=f"the option {name}={options[name]!r}",
                expected="plain causal attention",
                fix="Use rollout.name=hf and a model without this option: exact packing of it is not available.",
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention_plan.attend(module.layer_idx, query, key, value, scale), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The plan knows the mask; the model need not build one."""


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _no_mask)
