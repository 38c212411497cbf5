# SPDX-License-Identifier: Apache-2.0
"""Weight sync within a process: the rollout shares the trainer's parameters, or has a copy of them.

Weights are streams of `(name, tensor)`. This module does not know which model, engine or framework
they come from.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, TypeAlias

import torch

from quadriga.errors import PeerLostError, WeightSyncError
from quadriga.weight_sync.buckets import NamedTensors
from quadriga.weight_sync.fingerprint import Fingerprint, PendingFingerprints

NamedWeights: TypeAlias = Iterable[tuple[str, torch.Tensor]]
_NUM_NAMED = 5  # parameters that a message names


class WeightTarget(Protocol):
    """A receiver of weights: a rollout engine."""

    weight_version: int  # -1 while the weights are incomplete

    @abstractmethod
    def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Load a complete set of weights. Set `weight_version` to `version`, or to -1 on failure.

        Args:
            weights: names and tensors [...]. A tensor's memory is reused when the iterator
                continues, so tensors must be copied. An engine that still has the frozen weights
                below an adapter (`has_frozen_weights`) may receive the adapter's matrices alone.
            version: version of the weights.
        """

    @abstractmethod
    def named_weights(self) -> NamedWeights:
        """The weights used for generation, by the trainer's names.

        Empty if the engine stores its weights in another form.
        """

    @abstractmethod
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the weights used for generation.

        If the engine stores its weights in another form, this is the fingerprint of the weights as
        they were received.
        """


class SharedWeights:
    """Weight sync between a trainer and a rollout that share parameters: sends only the version.

    An update by the trainer changes the rollout's parameters at once, and the rollout must not
    continue under the old version. `verify` detects writes since the publication by the address of
    each parameter and by torch's count of writes to it.
    """

    def __init__(self) -> None:
        self._published: dict[str, tuple[object, ...]] = {}  # `_parameter_states` when published

    def publish(self, weights: NamedWeights, target: WeightTarget, version: int) -> None:
        """Check that trainer and target share every parameter, and give the target the version.

        Args:
            weights: names and tensors [...] of the trainer.
            target: the rollout engine.
            version: version of the weights.

        Raises:
            WeightSyncError: trainer and target do not share the memory of a parameter.
        """
        offered = dict(weights)
        offered_memory = {name: _memory_of(tensor) for name, tensor in offered.items()}
        target_memory = {name: _memory_of(tensor) for name, tensor in target.named_weights()}
        unshared = []
        for name, memory in offered_memory.items():
            if memory != target_memory.get(name):
                unshared.append(name)
        for name, memory in target_memory.items():
            # A tied parameter has two names in the target, and may have only one in the trainer.
            if name not in offered and memory not in offered_memory.values():
                unshared.append(name)
        if unshared:
            raise WeightSyncError(
                f"shared weights, version {version}",
                got=f"{len(unshared)} of {len(target_memory)} weights "
                f"that are not the trainer's own: {name_some(unshared)}",
                expected="the same parameters in trainer and rollout",
                fix="Give the rollout the trainer's module, or publish with CopiedWeights.",
            )
        target.load_weights(offered.items(), version)
        self._published = _parameter_states(target)

    def verify(self, target: WeightTarget, version: int) -> None:
        """Check that no parameter was written to since `publish`. Reads no tensor.

        Args:
            target: the rollout engine.
            version: version that the target must have.

        Raises:
            WeightSyncError: the version differs, or a parameter was written to.
        """
        require_version(target, version)
        states = _parameter_states(target)
        changed = [name for name, state in self._published.items() if state != states.get(name)]
        if changed:
            raise WeightSyncError(
                f"shared weights, version {version}",
                got=f"{len(changed)} of {len(states)} weights "
                f"that were written to since: {name_some(changed)}",
                expected="the weights as published",
                fix="Publish the weights after each update.",
            )


class CopiedWeights:
    """Weight sync for a rollout with its own copy of the model: copies and compares weights."""

    def __init__(self) -> None:
        self._published: dict[str, str] = {}  # fingerprints by name

    def publish(
        self,
        weights: NamedWeights,
        target: WeightTarget,
        version: int,
        known: Mapping[str, str] | None = None,
    ) -> None:
        """Copy the weights to the target, one parameter at a time, and compare fingerprints.

        Args:
            weights: names and tensors [...]: a complete set, or the matrices of an adapter (see
                `WeightTarget.load_weights`). Converted to the target's dtypes.
            target: the rollout engine.
            version: version of the weights.
            known: fingerprints of `weights` that have already been computed, by name, so that they
                are not computed again. `weights` may fill it as it is read.

        Raises:
            WeightSyncError: the target refused the weights, or its weights differ afterwards. After
                this and any other error the target's version is -1, and it generates nothing until
                it has a complete set.
        """
        dtypes = {name: tensor.dtype for name, tensor in target.named_weights()}
        # Fingerprints of the weights as the target gets them: those known before, and those to be
        # computed.
        known_digests = {}
        pending = PendingFingerprints()

        def stream() -> NamedTensors:
            """Convert the weights, and note their fingerprints."""
            for name, tensor in weights:
                converted = tensor.detach().to(dtypes.get(name, tensor.dtype))
                # A known fingerprint is that of the tensor before its conversion, so it is valid
                # only for a tensor that is not converted.
                digest = None
                if known is not None and converted.dtype == tensor.dtype:
                    digest = known.get(name)
                if digest is None:
                    pending.add(name, converted)
                else:
                    known_digests[name] = digest
                yield name, converted

        converted_weights = stream()
        try:
            target.load_weights(converted_weights, version)
            # A target may stop early. Read the rest, because the sender waits until it is read.
            for _ in converted_weights:
                pass
            # Earlier fingerprints stay: the matrices of an adapter are no complete set.
            self._published |= known_digests | pending.read()
            self.verify(target, version)
        except BaseException as error:
            target.weight_version = -1
            # After a KeyboardInterrupt, end at once. Else read on: an iterator may come from a
            # sender in another process, which would wait.
            if isinstance(error, Exception) and isinstance(weights, Iterator):
                _read_rest(weights, error)
            raise

    def verify(self, target: WeightTarget, version: int) -> None:
        """Compare the target's fingerprints with those of the published parameters.

        Names that only the target has are not compared: a tied parameter is sent under one name.

        Args:
            target: the rollout engine.
            version: version that the target must have.

        Raises:
            WeightSyncError: the version or a fingerprint differs.
        """
        require_version(target, version)
        digests = target.fingerprint().tensors
        # A name that the target lacks differs, too.
        differing = [
            name for name, digest in self._published.items() if digests.get(name) != digest
        ]
        if differing:
            names = name_some(sorted(differing))
            raise WeightSyncError(
                f"weights of version {version}",
                got=f"{len(differing)} of {len(self._published)} weights that differ: {names}",
                expected="the trainer's weights in the rollout",
                fix="The rollout engine did not load them unchanged, and generates nothing.",
            )


def _read_rest(weights: NamedTensors, error: Exception) -> None:
    """Read the rest of a stream after an error, because its senders go on sending.

    Args:
        weights: the stream. If `error` came from the stream, it yields nothing more.
        error: the error; it gets a note if the rest of the stream fails, too.
    """
    try:
        for _ in weights:
            pass
    except (WeightSyncError, PeerLostError) as later_error:
        error.add_note(f"The rest of the stream failed as well: {later_error}")


def require_version(target: WeightTarget, version: int) -> None:
    """Check the version of the target's weights.

    Args:
        target: the rollout engine.
        version: version that the target must have.

    Raises:
        WeightSyncError: the target has another version.
    """
    if target.weight_version != version:
        raise WeightSyncError(
            "weights of the rollout",
            got=f"version {target.weight_version}",
            expected=f"version {version}, the trainer's",
            fix="Publish the weights before the next generation.",
        )


def name_some(names: Iterable[str]) -> str:
    """The first `_NUM_NAMED` names as text, and how many more there are."""
    names = list(names)
    listed = ", ".join(names[:_NUM_NAMED])
    if len(names) <= _NUM_NAMED:
        return listed
    return f"{listed} and {len(names) - _NUM_NAMED} more"


def _memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Describe the memory and the layout of a tensor: equal for two tensors that share both."""
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _parameter_states(target: WeightTarget) -> dict[str, tuple[object, ...]]:
    """Memory of each parameter of a target, with torch's count of writes to it, by name."""
    return {name: (*_memory_of(tensor), tensor._version) for name, tensor in target.named_weights()}
