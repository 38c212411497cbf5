# SPDX-License-Identifier: Apache-2.0
"""Weight sync within a process: trainer and rollout share the parameters, or the rollout has a copy of them.

Weights are streams of `(name, tensor)`: what model, engine or framework stands behind them is not known here.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, TypeAlias

import torch

from quadriga.errors import PeerLostError, WeightSyncError
from quadriga.weight_sync.fingerprint import Fingerprint, tensor_fingerprint

NamedWeights: TypeAlias = Iterable[tuple[str, torch.Tensor]]
_NUM_NAMED = 5


class WeightTarget(Protocol):
    """What receives weights: a rollout engine."""

    weight_version: int  # of its weights; -1: none that are complete

    @abstractmethod
    def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Load a complete set of weights. Afterwards `weight_version` is `version`, or -1 if loading failed.

        A tensor is only lent: its memory is overwritten once the iterator goes on, so what is kept is copied. An engine
        with `has_frozen_weights` may get the matrices of an adapter alone, which complete what is there.
        """

    @abstractmethod
    def named_weights(self) -> NamedWeights:
        """The weights that it generates with, under the trainer's names; none if it keeps them in another form."""

    @abstractmethod
    def fingerprint(self) -> Fingerprint:
        """Of the weights that it generates with; if it keeps them in another form, of what reached it."""


class SharedWeights:
    """Trainer and rollout hold the same parameters: only the version travels. What was published is known by the
    address of each tensor and by torch's count of writes to it: an update of the trainer changes the rollout's weights
    at once, so the rollout must not go on under the old version."""

    def __init__(self) -> None:
        self._published: dict[str, tuple[object, ...]] = {}

    def publish(self, weights: NamedWeights, target: WeightTarget, version: int) -> None:
        """Pass on the version. A weight that is not the target's own memory is a WeightSyncError."""
        offered, held = dict(weights), dict(target.named_weights())
        addresses = {_address(tensor) for tensor in offered.values()}
        apart = [
            name
            for name, tensor in offered.items()
            if name not in held or _address(tensor) != _address(held[name])
        ]
        apart += [
            name
            for name, tensor in held.items()
            if name not in offered and _address(tensor) not in addresses
        ]
        if apart:
            got = f"{len(apart)} of {len(held)} weights that are not the trainer's own: {name_some(apart)}"
            fix = "Give the rollout the trainer's module, or publish by CopiedWeights."
            raise WeightSyncError(
                f"shared weights, version {version}", got, "one set of parameters for both", fix
            )
        target.load_weights(offered.items(), version)
        self._published = _states(target)

    def verify(self, target: WeightTarget, version: int) -> None:
        """A WeightSyncError if the version is another, or a weight was written to since. No tensor is read."""
        require_version(target, version)
        held = _states(target)
        changed = [name for name, state in self._published.items() if held.get(name) != state]
        if changed:
            got = f"{len(changed)} of {len(held)} weights that were written to since: {name_some(changed)}"
            expected, fix = (
                "weights as they were published",
                "Publish the weights after each update.",
            )
            raise WeightSyncError(
                f"shared weights, version {version}", got=got, expected=expected, fix=fix
            )


class CopiedWeights:
    """The rollout has a copy of the model: each tensor is copied in the rollout's dtype, and compared afterwards."""

    def __init__(self) -> None:
        self._published: dict[str, str] = {}  # fingerprints by name

    def publish(
        self,
        weights: NamedWeights,
        target: WeightTarget,
        version: int,
        known: Mapping[str, str] | None = None,
    ) -> None:
        """Copy the weights, a complete set or what is new of one (see `WeightTarget.load_weights`), one tensor at a
        time, and compare what the target holds with what was sent. `known` has fingerprints of tensors by name where
        they are known, and may be filled while the stream runs.
        Raises WeightSyncError: the target refused the weights, or holds others afterwards. Its version is then -1, and
        it generates nothing until a complete set has come."""
        dtypes = {name: tensor.dtype for name, tensor in target.named_weights()}
        sent: dict[str, str] = {}

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                fitted = tensor.detach().to(dtypes.get(name, tensor.dtype))
                mark = (
                    known.get(name) if known is not None and fitted.dtype == tensor.dtype else None
                )
                sent[name] = mark or tensor_fingerprint(fitted)
                yield name, fitted

        running = stream()
        try:
            target.load_weights(running, version)
            for _ in (
                running
            ):  # a target that did not take all of them does not hold up the sender of the rest
                pass
            self._published |= sent
            self.verify(target, version)
        except BaseException as error:
            target.weight_version = -1
            if isinstance(error, Exception) and isinstance(weights, Iterator):
                # The senders go on. A generator that has raised is over: there is no rest then.
                try:
                    for _ in weights:
                        pass
                except (WeightSyncError, PeerLostError) as other:
                    error.add_note(f"And the rest of the stream: {other}")
            raise

    def verify(self, target: WeightTarget, version: int) -> None:
        """A WeightSyncError if the version is another, or the fingerprint of a tensor that was published. Names that
        only the target has are not compared: a tied weight is sent under one of its names."""
        require_version(target, version)
        held = target.fingerprint().tensors
        differing = [name for name, mark in self._published.items() if held.get(name) != mark]
        if differing:
            got = f"{len(differing)} of {len(self._published)} weights that differ: {name_some(sorted(differing))}"
            fix = "The rollout's engine did not take them over as they are; it generates nothing until it does."
            raise WeightSyncError(
                f"weights of version {version}", got, "in the rollout what the trainer sent", fix
            )


def require_version(target: WeightTarget, version: int) -> None:
    """Raise a WeightSyncError unless the target's weights are of this version."""
    if target.weight_version != version:
        got, fix = (
            f"version {target.weight_version}",
            "Publish the weights before the next generation.",
        )
        raise WeightSyncError(
            "weights of the rollout", got=got, expected=f"version {version}, the trainer's", fix=fix
        )


def name_some(names: Iterable[str]) -> str:
    """The first names of a list and how many more there are."""
    names = list(names)
    rest = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _address(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _states(target: WeightTarget) -> dict[str, tuple[object, ...]]:
    return {name: (*_address(tensor), tensor._version) for name, tensor in target.named_weights()}
