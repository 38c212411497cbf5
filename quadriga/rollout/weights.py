# SPDX-License-Identifier: Apache-2.0
"""Copying a stream of named weights into a model, completely or with an error that names what is wrong."""

from collections.abc import Iterable

import torch
from torch import nn

from quadriga.errors import WeightSyncError

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
