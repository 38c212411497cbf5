# SPDX-License-Identifier: Apache-2.0
"""Which weights make a model complete, and that all of them arrived.

An engine that keeps its weights in a form of its own cannot tell by looking at them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quadriga.errors import WeightSyncError
from quadriga.weight_sync.base import name_some
from quadriga.weight_sync.fingerprint import Fingerprint


@dataclass(frozen=True)
class Manifest:
    """Names and shapes of a model's weights.

    Attributes:
        shapes: of each weight, by each name that it has.
        same: by name, all names of the same weight: a tied one is complete under any of them.
    """

    shapes: dict[str, tuple[int, ...]]
    same: dict[str, frozenset[str]]

    @classmethod
    def of(cls, model: nn.Module) -> "Manifest":
        """The weights of a model, which may be on "meta"."""
        named = dict(model.named_parameters(remove_duplicate=False))
        names: dict[int, set[str]] = {}
        for name, parameter in named.items():
            names.setdefault(id(parameter), set()).add(name)
        same = {name: frozenset(names[id(parameter)]) for name, parameter in named.items()}
        return cls({name: tuple(parameter.shape) for name, parameter in named.items()}, same)

    def part(self, wanted: Callable[[str], bool]) -> "Manifest":
        """The weights whose names are wanted, which share nothing with the others."""
        return Manifest(
            {name: shape for name, shape in self.shapes.items() if wanted(name)},
            {name: names for name, names in self.same.items() if wanted(name)},
        )

    def joined(self, other: "Manifest") -> "Manifest":
        """Both together."""
        return Manifest(self.shapes | other.shapes, self.same | other.same)

    def checked(
        self, weights: Iterable[tuple[str, torch.Tensor]], kept: Collection[str] = ()
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The stream as it comes; a weight that comes under a second name too is passed on each time.

        Args:
            weights: the stream.
            kept: names of weights that are there already. The stream has all of them, or none.

        Raises:
            WeightSyncError: a name or a shape is not the model's, or at the end a weight did not come.
        """
        arrived: set[str] = set()
        for name, tensor in weights:
            if self.shapes.get(name) != tuple(tensor.shape):
                raise WeightSyncError(
                    f"weight {name}",
                    got=f"shape {tuple(tensor.shape)}",
                    expected=f"shape {self.shapes[name]}" if name in self.shapes else "a weight of the rollout's model",
                    fix="Trainer and rollout must hold the same architecture.",
                )
            arrived |= self.same[name]
            yield name, tensor
        needed = self.shapes.keys() if arrived.intersection(kept) else self.shapes.keys() - self._all_names(kept)
        if missing := sorted(needed - arrived):
            raise WeightSyncError(
                "rollout weights",
                got=f"a stream without {len(missing)} of {len(self.shapes)} weights: {name_some(missing)}",
                expected="every weight of the model",
            )

    def _all_names(self, names: Iterable[str]) -> set[str]:
        return {other for name in names for other in self.same[name]}


def agreed(marks: Sequence[Mapping[str, str]], where: str) -> Fingerprint:
    """What all processes of an engine received.

    Args:
        marks: the fingerprint of each tensor by name, from each process.
        where: for the error.

    Raises:
        WeightSyncError: they did not receive the same.
    """
    first = Fingerprint(marks[0])
    for rank, mark in enumerate(marks[1:], start=1):
        if differing := first.differences(Fingerprint(mark)):
            raise WeightSyncError(
                where,
                got=f"{len(differing)} weights that differ between process 0 and {rank}: {name_some(differing)}",
                expected="the same in each process",
            )
    return first
