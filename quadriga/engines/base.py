# SPDX-License-Identifier: Apache-2.0
"""What a training engine is: a model, perhaps spread over processes, with its optimizer.

The loop over epochs, mini-batches and micro-batches stands above it, once, in `engines/step.py`.

Legend: M predicted tokens of a packed micro-batch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from quadriga.engines.packing import PackedBatch
from quadriga.engines.process_group import ProcessGroup
from quadriga.models.flops import ModelCost

Outputs = Mapping[str, torch.Tensor]
"""What the model says of each predicted token, float32 [M] each: `log_probs` and `entropy`, or `values`."""

LossFunction = Callable[[Outputs], torch.Tensor]
"""From outputs to a scalar that is already normalised over the whole mini-batch."""


@dataclass(frozen=True)
class OptimizerStep:
    """What an optimizer step did: `grad_norm` before clipping, and whether it was finite and so applied."""

    grad_norm: float
    is_applied: bool


class TrainEngine(Protocol):
    """One model that can be asked and taught; `replicas` are the processes that hold it too, each with other rows."""

    replicas: ProcessGroup
    device: torch.device
    cost: ModelCost

    def output_names(self, with_entropy: bool) -> tuple[str, ...]:
        """The names of the outputs."""
        ...

    def forward(self, batch: PackedBatch, *, temperature: float, with_entropy: bool) -> Outputs:
        """Outputs without gradients."""
        ...

    def backward(self, batch: PackedBatch, loss: LossFunction, *, temperature: float) -> None:
        """Outputs with gradients, the loss, and its gradients added to those already there."""
        ...

    def optimizer_step(self, lr: float) -> OptimizerStep:
        """Add the gradients of all replicas up, clip, step at this learning rate, and clear the gradients."""
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors under the model's own names, in the compute dtype."""
        ...

    def save(self, directory: Path, contents: frozenset[str]) -> None:
        """Write `model`, `optimizer` or both into an existing directory."""
        ...

    def load(self, directory: Path, contents: frozenset[str]) -> None:
        """Read what `save` wrote."""
        ...

    def sleep(self) -> None:
        """Give up memory that only training needs."""
        ...

    def wake(self) -> None:
        """Take it back."""
        ...

    def describe(self) -> dict[str, Any]:
        """The engine's automatic choices, each with its reason, for people to read."""
        ...
