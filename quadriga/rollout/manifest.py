# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of the weights of a complete model, and the check that all of them arrived."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from quadriga.errors import WeightSyncError
from quadriga.models.weight_names import weight_buffers
from quadriga.weight_sync.publish import NamedWeights, name_some
from quadriga.weight_sync.reshard import Box, Wanted


@dataclass(frozen=True)
class Manifest:
    """Names and shapes of the weights that make a model complete.

    Attributes:
        shapes: shape of each weight, by every name that it has.
        same: for each name, all names of the same weight. A tied weight has several, and may arrive
            under any of them.
        buffers: dtype of each weight that is not trained, by name.
    """

    shapes: dict[str, tuple[int, ...]]
    same: dict[str, frozenset[str]]
    buffers: dict[str, torch.dtype] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> "Manifest":
        """Make the manifest of a model, which may be on "meta"."""
        buffers = weight_buffers(model)
        weights = dict(model.named_parameters(remove_duplicate=False)) | buffers
        # Names of a tied weight lead to the same object.
        names = defaultdict[int, set[str]](set)
        for name, weight in weights.items():
            names[id(weight)].add(name)
        return cls(
            shapes={name: tuple(weight.shape) for name, weight in weights.items()},
            same={name: frozenset(names[id(weight)]) for name, weight in weights.items()},
            buffers={name: buffer.dtype for name, buffer in buffers.items()},
        )

    def full_weights(self, dtype: torch.dtype) -> Wanted:
        """Describe each weight as a full tensor, under the first of its names.

        Args:
            dtype: dtype in which the trainer computes, for parameters. Buffers have their own.
        """
        weights: dict[str, tuple[Box, torch.dtype]] = {}
        for name, shape in self.shapes.items():
            # A tied weight is needed once.
            if weights.keys().isdisjoint(self.same[name]):
                full_box = Box((0,) * len(shape), shape)
                weights[name] = (full_box, self.buffers.get(name, dtype))
        return weights

    def select(self, accepts: Callable[[str], bool]) -> "Manifest":
        """Select weights by their names, without `buffers`.

        Args:
            accepts: returns whether to select the weight of a name. Selected weights must not be
                tied to others.
        """
        shapes = {name: shape for name, shape in self.shapes.items() if accepts(name)}
        return Manifest(shapes, {name: self.same[name] for name in shapes})

    def union(self, other: "Manifest") -> "Manifest":
        """Join the weights of two manifests, of which `other` has no `buffers`."""
        return Manifest(self.shapes | other.shapes, self.same | other.same, self.buffers)

    def check_stream(
        self, weights: NamedWeights, optional_names: Collection[str] = ()
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass on a stream of weights while checking it.

        Args:
            weights: names and tensors. A weight may arrive under several names.
            optional_names: names of weights that the model still has from an earlier stream. The
                stream must bring all of them or none.

        Yields:
            Each name and tensor.

        Raises:
            WeightSyncError: a name or a shape is not the model's, or a weight is missing.
        """
        arrived: set[str] = set()
        for name, tensor in weights:
            shape = tuple(tensor.shape)
            if self.shapes.get(name) != shape:
                expected = "a weight of the rollout's model"
                if name in self.shapes:
                    expected = f"shape {self.shapes[name]}"
                fix = "Trainer and rollout must hold the same architecture."
                raise WeightSyncError(
                    f"weight {name}", got=f"shape {shape}", expected=expected, fix=fix
                )
            # A tied weight counts as arrived under each of its names.
            arrived |= self.same[name]
            yield name, tensor

        # If none of the optional weights has arrived, the model keeps those that it has.
        needed = set(self.shapes)
        if arrived.isdisjoint(optional_names):
            for name in optional_names:
                needed -= self.same[name]
        missing = sorted(needed - arrived)
        if missing:
            got = f"a stream without {len(missing)} of {len(self.shapes)} weights"
            got += f": {name_some(missing)}"
            raise WeightSyncError("rollout weights", got, expected="every weight of the model")
