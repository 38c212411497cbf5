# SPDX-License-Identifier: Apache-2.0
"""What engines share that others wrote, beside this process or in it: they keep the weights in a form of their own.

load_weights ── the model's weights, each of them ──> _receive ──> fingerprints of what each of its processes got
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from quadriga.errors import QuadrigaError, RolloutError, WeightSyncError, first_line
from quadriga.observe.probe import release_numbers
from quadriga.rollout.base import EngineBase, SamplingParams, require_length
from quadriga.rollout.manifest import Manifest, agreed
from quadriga.weight_sync.fingerprint import Fingerprint


class LoadedEngine(EngineBase):
    """An engine that generates with what was loaded into it. See `RolloutEngine` for its methods.

    Args:
        manifest: the weights that make the model complete.
        max_model_len: longest prompt and answer together, in tokens.
        has_weights: whether it starts with the model's weights; without, the first load brings them.
    """

    title: str
    """What its authors call it."""

    def __init__(self, manifest: Manifest, max_model_len: int, *, has_weights: bool) -> None:
        super().__init__()
        self.weight_version = 0 if has_weights else -1
        self._manifest, self._max_model_len = manifest, max_model_len
        self._arrived = Fingerprint({})
        self._frozen = Fingerprint({})
        """Of weights that are here to stay: later loads may leave them out. Engines that apply adapters have some."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `RolloutEngine.load_weights`. What was computed with the weights before is dropped.

        Raises:
            WeightSyncError: the stream is not the model's set of weights, the engine does not take it, or its
                processes received different ones.
        """
        self._require_open("load_weights")
        self.weight_version = -1
        where = f"rollout.name={self.name}, weights of version {version}"
        try:
            marks = self._receive(self._manifest.checked(weights, self._frozen.tensors))
        except Exception as error:  # failures of others' engines have no class in common
            if isinstance(error, QuadrigaError) and not isinstance(error, RolloutError):
                raise
            raise WeightSyncError(
                where,
                got=f"{self.title}, which does not take them: {_reason(error)}",
                expected="a load",
                fix="Its own message stands in the log above. Answers that are under way have to end before weights "
                "are published: wait for them, or call abort().",
            ) from error
        self._arrived = self._frozen.updated(agreed(marks, where))
        self._frozen = Fingerprint({name: mark for name, mark in self._arrived.tensors.items() if self._stays(name)})
        self.weight_version = version

    @property
    def has_frozen_weights(self) -> bool:
        """See `RolloutEngine`."""
        return bool(self._frozen.tensors)

    @abstractmethod
    def _receive(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Sequence[Mapping[str, str]]:
        """Hands the weights over, and drops what was computed with others. Returns the fingerprints of each process.

        Before a frozen weight is written to, `_frozen` is emptied.
        """

    def _stays(self, name: str) -> bool:
        """Whether a weight that has come need not come again."""
        return False

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """None: the engine fuses and packs its weights. `fingerprint` says what reached it."""
        return iter(())

    def fingerprint(self) -> Fingerprint:
        """Of each weight of the last load, taken of what was given to the engine's model; empty before the first."""
        return self._arrived

    def _require_ready(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> None:
        """See `EngineBase._require_ready`; and that no request may run past the engine's limit."""
        super()._require_ready(prompts, sampling)
        require_length(self.name, prompts, sampling, self._max_model_len, "actor_rollout_ref.rollout.max_model_len")

    def _refused(self, what: str) -> RolloutError:
        """What is told where the engine cannot be made."""
        return RolloutError(
            f"rollout.name={self.name}, at its start",
            got=what,
            expected=f"a model and settings that {self.title} takes",
            fix=f"See max_model_len, cache_gigabytes and engine_kwargs.{self.name} of actor_rollout_ref.rollout; "
            f"{self.title}'s own traceback stands above.",
        )

    def _died(self, what: str) -> RolloutError:
        """What everybody is told whose answers will not come."""
        return RolloutError(
            f"{self.name}.generate",
            got=f"{self.title}, which {what}",
            expected="answers",
            fix="Its own message stands in the log above. Less memory: lower actor_rollout_ref.rollout.max_num_seqs, "
            "max_num_batched_tokens or gpu_memory_utilization.",
        )


def require_release(title: str, found: str, least: str, *, where: str, fix: str) -> None:
    """Refuses a version of an engine that the code was not written for.

    Args:
        title: what its authors call it.
        found: the version that is installed, or "".
        least: the oldest that will do.
        where, fix: for the error.

    Raises:
        RolloutError: it is missing, or older.
    """
    if not found:
        raise RolloutError(where, got=f"no {title} in this environment", expected=f"{least} or newer", fix=fix)
    if release_numbers(found) < release_numbers(least):
        raise RolloutError(where, got=f"{title} {found}", expected=f"{least} or newer", fix=fix)


def _reason(error: Exception) -> str:
    return error.got if isinstance(error, RolloutError) else first_line(error)
