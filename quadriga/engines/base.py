# SPDX-License-Identifier: Apache-2.0
"""What a training engine is: a model, perhaps spread over processes, with its optimizer.

The loop over epochs, mini-batches and micro-batches stands above it, once, in `engines/step.py`.

Legend: M predicted tokens of a packed micro-batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from quadriga.engines.packing import PackedBatch
from quadriga.engines.process_group import ProcessGroup
from quadriga.models.flops import ModelCost
from quadriga.models.scorers import Question

Outputs = Mapping[str, torch.Tensor]
"""What the model says of each predicted token, float32 [M] each: `values`, or `log_probs` and what else was asked."""

LossFunction = Callable[[Outputs], torch.Tensor]
"""From outputs to a scalar that is already normalised over the whole mini-batch."""


@dataclass(frozen=True)
class OptimizerStep:
    """What an optimizer step did: `grad_norm` before clipping, and whether it was finite and so applied."""

    grad_norm: float
    is_applied: bool


class TrainEngine(Protocol):
    """One model that can be asked and taught, in one process or in many that call the same methods in turn.

    Attributes:
        replicas: the processes that hold the model with other rows; those with the same rows are one of them.
        world: all processes that hold it.
        device, dtype: where it computes, and in what.
        cost: of a token.
        model: as this process has it; its configuration is that of the whole.
        has_whole_weights: whether `model` has all of them here, so that others in the process can compute with it.
    """

    replicas: ProcessGroup
    world: ProcessGroup
    device: torch.device
    dtype: torch.dtype
    cost: ModelCost
    model: PreTrainedModel
    has_whole_weights: bool

    def output_names(self, question: Question) -> tuple[str, ...]:
        """The names of the outputs."""
        ...

    def forward(self, batches: Sequence[PackedBatch], question: Question) -> list[Outputs]:
        """Outputs of micro-batches without gradients, in their order; none from a process that others answer for."""
        ...

    def backward(self, batches: Sequence[PackedBatch], losses: Sequence[LossFunction], *, temperature: float) -> None:
        """Outputs with gradients, the loss of each micro-batch, and its gradients added to those already there."""
        ...

    def optimizer_step(self, lr: float) -> OptimizerStep:
        """Add the gradients of all replicas up, clip, step at this learning rate, and clear the gradients."""
        ...

    def weights(self, *, is_merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors under the model's own names, in the compute dtype.

        Args:
            is_merged: whether an adapter is merged into the weights beside it, as if it had been trained in them;
                False: parameters as the engine holds them.
        """
        ...

    def adapter_weights(self, *, with_frozen: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """An adapter's full matrices, in the compute dtype.

        Args:
            with_frozen: whether the weights below come too, under the names that they have without an adapter.
        """
        ...

    def state(self, contents: frozenset[str]) -> dict[str, torch.Tensor]:
        """What a checkpoint holds, in the engine's own memory; DTensors where several processes hold a tensor.

        Args:
            contents: `model` (`model.NAME`, float32), `optimizer` (`optimizer.exp_avg.NAME`,
                `optimizer.exp_avg_sq.NAME`, `optimizer.step.NAME`, `optimizer.nonfinite_steps`), or both. Of a model
                with an adapter `model` is the adapter alone, and `frozen` (`frozen.NAME`, in the compute dtype) the
                rest, under the names that it has without one.
        """
        ...

    def state_was_loaded(self, contents: frozenset[str]) -> None:
        """The tensors of `state` were written to."""
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
