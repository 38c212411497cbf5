# SPDX-License-Identifier: Apache-2.0
"""Which weights make a model complete, and whether all of them arrived."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from quadriga.errors import WeightSyncError
from quadriga.models.weight_names import weight_buffers
from quadriga.weight_sync.publish import name_some
from quadriga.weight_sync.reshard import Piece, Wanted


@dataclass(frozen=True)
class Manifest:
    """Names and shapes of a model's weights.

    Attributes:
        shapes: of each weight, by each name that it has.
        same: by name, all names of the same weight: a tied one is complete under any of them.
        buffers: the dtypes of those that do not learn.
    """

    shapes: dict[str, tuple[int, ...]]
    same: dict[str, frozenset[str]]
    buffers: dict[str, torch.dtype] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> "Manifest":
        """The weights of a model, which may be on "meta"."""
        buffers = weight_buffers(model)
        named = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
        names: dict[int, set[str]] = {}
        for name, parameter in named.items():
            names.setdefault(id(parameter), set()).add(name)
        same = {name: frozenset(names[id(parameter)]) for name, parameter in named.items()}
        kinds = {name: buffer.dtype for name, buffer in buffers.items()}
        return cls({name: tuple(parameter.shape) for name, parameter in named.items()}, same, kinds)

    def whole(self, dtype: torch.dtype) -> Wanted:
        """All of each weight, under the first of its names, in the dtype of a trainer that computes in `dtype`."""
        found: dict[str, tuple[Piece, torch.dtype]] = {}
        for name, shape in self.shapes.items():
            if found.keys().isdisjoint(self.same[name]):
                found[name] = Piece((0,) * len(shape), shape), self.buffers.get(name, dtype)
        return found

    def part(self, wanted: Callable[[str], bool]) -> "Manifest":
        """The weights whose names are wanted, which share nothing with the others."""
        names = [name for name in self.shapes if wanted(name)]
        return Manifest(
            {name: self.shapes[name] for name in names}, {name: self.same[name] for name in names}
        )

    def joined(self, other: "Manifest") -> "Manifest":
        """Both together."""
        return Manifest(self.shapes | other.shapes, self.same | other.same, self.buffers)

    def checked(
        self, weights: Iterable[tuple[str, torch.Tensor]], kept: Collection[str] = ()
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The stream as it comes; a weight that comes under a second name too is passed on each time.
        `weights`: the stream.
        `kept`: names of weights that are there already. The stream has all of them, or none.
        Raises WeightSyncError: a name or a shape is not the model's, or at the end a weight did not come."""
        arrived: set[str] = set()
        for name, tensor in weights:
            if self.shapes.get(name) != tuple(tensor.shape):
                expected = (
                    f"shape {self.shapes[name]}"
                    if name in self.shapes
                    else "a weight of the rollout's model"
                )
                fix = "Trainer and rollout must hold the same architecture."
                raise WeightSyncError(
                    f"weight {name}", got=f"shape {tuple(tensor.shape)}", expected=expected, fix=fix
                )
            arrived |= self.same[name]
            yield name, tensor
        needed = self.shapes.keys()
        if not arrived.intersection(kept):
            needed = needed - {other for name in kept for other in self.same[name]}
        if missing := sorted(needed - arrived):
            got = f"a stream without {len(missing)} of {len(self.shapes)} weights: {name_some(missing)}"
            raise WeightSyncError("rollout weights", got=got, expected="every weight of the model")
