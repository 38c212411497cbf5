# SPDX-License-Identifier: Apache-2.0
"""What the engines on a causal model of transformers share: its weights, its end-of-text tokens, its room."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from quadriga.errors import RolloutError, WeightSyncError
from quadriga.rollout.base import SamplingParams

_NUM_NAMED = 5


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter under every name that it has: a tied head appears twice."""
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}


@torch.no_grad()
def copy_weights(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copies the stream into the model's parameters; a tensor that is the parameter itself is left alone.

    A tied parameter is complete under any one of its names.

    Raises:
        WeightSyncError: a name or a shape does not fit, or a parameter did not come.
    """
    targets = named_weights(model)
    complete: set[int] = set()
    for name, tensor in weights:
        target = targets.get(name)
        if target is None or target.shape != tensor.shape:
            expected = "a parameter of the rollout's model" if target is None else f"shape {tuple(target.shape)}"
            raise WeightSyncError(
                f"weight {name}",
                got=f"shape {tuple(tensor.shape)}",
                expected=expected,
                fix="Trainer and rollout must hold the same architecture.",
            )
        if target.data_ptr() != tensor.data_ptr():
            target.copy_(tensor)
        complete.add(target.data_ptr())
    missing = [name for name, target in targets.items() if target.data_ptr() not in complete]
    if missing:
        named = ", ".join(missing[:_NUM_NAMED]) + (", ..." if len(missing) > _NUM_NAMED else "")
        raise WeightSyncError(
            "rollout weights",
            got=f"a stream without {len(missing)} of {len(targets)} weights: {named}",
            expected="every weight of the model",
        )


def declared_eos(model: PreTrainedModel) -> list[int]:
    """The end-of-text tokens of the model's generation configuration."""
    generation_config = getattr(model, "generation_config", None)
    declared = getattr(generation_config, "eos_token_id", None)
    return declared if isinstance(declared, list) else [] if declared is None else [declared]


def require_room(
    name: str, model: PreTrainedModel, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
) -> None:
    """Refuses requests that may run past the positions that the model knows."""
    room = getattr(model.config, "max_position_embeddings", None)
    for row, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        if room is not None and len(prompt) + params.max_tokens > room:
            raise RolloutError(
                f"{name}.generate, prompt {row}",
                got=f"{len(prompt)} prompt tokens and up to {params.max_tokens} new ones",
                expected=f"at most {room} together (the model's max_position_embeddings)",
                fix="Lower data.max_prompt_length or data.max_response_length.",
            )
