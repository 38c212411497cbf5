# SPDX-License-Identifier: Apache-2.0
"""The training engine: a model, perhaps sharded over ranks, with its optimizer.

The loop over epochs, mini-batches and micro-batches stands above it, once, in `engines/step.py`.

Legend: M predicted tokens of a packed micro-batch; [out, in] a projection, [V, D] the embedding and
the head, r the rank of an adapter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from quadriga.engines.process_group import ProcessGroup
from quadriga.models.attention import PackedBatch
from quadriga.models.flops import ModelCost
from quadriga.models.scorers import Question
from quadriga.models.vision import ImageTokens

Outputs = Mapping[str, torch.Tensor]
"""Outputs for each predicted token, float32 [M] each: `values`, or `log_probs` and what else the question names."""

LossFunction = Callable[[Outputs], torch.Tensor]
"""From outputs to a scalar that is already normalised over the whole mini-batch."""


@dataclass(frozen=True)
class OptimizerStep:
    """The outcome of an optimizer step: `grad_norm` before clipping, and whether it was finite and so applied."""

    grad_norm: float
    is_applied: bool


class TrainEngine(Protocol):
    """A model and its optimizer, replicated or sharded over ranks; all ranks call each method collectively.

    Attributes:
        replicas: the ranks that hold the model with other rows; those with the same rows are one of them.
        world: all ranks that hold the model.
        cost: operations for each token.
        model: as this rank has it; its configuration is that of the whole.
        has_replicated_weights: whether `model` has all weights on this rank, so that other roles of the process
            can compute with it.
        image_tokens: how images stand in prompts; None: a text model.
        output_names: the names of the outputs that a question wants.
        copying: work that reads the tensors of `state`; an optimizer step waits for it.
    """

    replicas: ProcessGroup
    world: ProcessGroup
    device: torch.device
    dtype: torch.dtype
    cost: ModelCost
    model: PreTrainedModel
    has_replicated_weights: bool
    image_tokens: ImageTokens | None
    output_names: Callable[[Question], tuple[str, ...]]
    copying: Future[None] | None

    def forward(self, batches: Sequence[PackedBatch], question: Question) -> list[Outputs]:
        """Outputs [M] of micro-batches without gradients, in order; none from a pipeline stage without the head."""
        ...

    def backward(self, batches: Sequence[PackedBatch], losses: Sequence[LossFunction], *, temperature: float) -> None:
        """Outputs [M] with gradients, the loss of each micro-batch, and its gradients added to those already there."""
        ...

    def optimizer_step(self, lr: float) -> OptimizerStep:
        """Add the gradients of all replicas up, clip, step at this learning rate, and clear the gradients."""
        ...

    def weights(self, *, is_merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors ([out, in], [V, D] ...) under the model's own names, in the compute dtype.

        Args:
            is_merged: whether an adapter is merged into the weights beside it, as if it had been trained in them;
                False: parameters as the engine holds them.
        """
        ...

    def adapter_weights(self, *, with_frozen: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """An adapter's full matrices A [r, in] and B [out, r], in the compute dtype.

        Args:
            with_frozen: whether the weights below come too, under the names that they have without an adapter.
        """
        ...

    def state(self, contents: frozenset[str]) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint, in the engine's own memory; DTensors where several ranks hold a tensor.

        Masters and moments have the shape of the whole parameter ([out, in], [V, D] ...), numbers of steps are scalars.

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

    def describe(self) -> dict[str, Any]:
        """The engine's automatic choices, each with its reason, for people to read."""
        ...
