# SPDX-License-Identifier: Apache-2.0
"""Weights for rollouts in other processes: packed into buckets, sent through a channel, compared at the end.

    trainer                                             rollout
    every rank gathers each tensor in turn
    rank 0: note its mark, pack it
        {entries} + bucket          ────────────>       note each tensor's mark, lend it to the engine
        ...
        {version, marks}            ────────────>       marks as sent?  version?  then: does the engine hold them?
     or {failed}                    ────────────>       WeightSyncError

A mark is the fingerprint of one tensor. The receiver raises, and its engine generates nothing, unless the three agree:
what was sent, what arrived, what the engine holds. A receiver that fails takes the rest of the stream nevertheless, so
that nobody waits for it.
"""

from collections.abc import Iterator

import torch

from quadriga.errors import WeightSyncError
from quadriga.weight_sync.base import NamedWeights, WeightTarget, name_some
from quadriga.weight_sync.buckets import SHARES, Entry, pack, unpack
from quadriga.weight_sync.channels import ReceivingEnd, SendingEnd
from quadriga.weight_sync.fingerprint import Fingerprint, tensor_fingerprint
from quadriga.weight_sync.inprocess import deliver, require_held

_LOOK_FOR = "Look for the error of the trainer: the rollout was only left without weights by it."


class WeightSender:
    """The trainer's side, in its first process; the others only take part in the gathering (`drain`).

    Args:
        end: of a channel.
        bucket_bytes: memory for what is on its way; see `buckets`.
    """

    def __init__(self, end: SendingEnd, bucket_bytes: int) -> None:
        self.end, self.bucket_bytes = end, bucket_bytes

    def send(self, weights: NamedWeights, version: int) -> None:
        """Send a complete set of weights to all receivers.

        Raises:
            WeightSyncError: the channel broke.
        """
        marks: dict[str, str] = {}
        try:
            for entries, content in pack(_marked(weights, marks), self.bucket_bytes):
                listed = [entry.as_json() for entry in entries]
                room = max(content.numel(), self.bucket_bytes // SHARES)
                self.end.send({"entries": listed, "num_bytes": content.numel(), "room_bytes": room}, content)
        except WeightSyncError:
            raise
        except Exception as error:
            self.end.send({"failed": f"{type(error).__name__}: {error}"}, None)
            raise
        self.end.send({"version": version, "marks": marks}, None)

    def close(self) -> None:
        """Give the channel back."""
        self.end.close()


class WeightReceiver:
    """The rollout's side, in each of its processes.

    Args:
        end: of a channel.
    """

    def __init__(self, end: ReceivingEnd) -> None:
        self.end = end
        self._published = Fingerprint({})

    def receive(self, target: WeightTarget, version: int) -> None:
        """Take over what the trainer sends next.

        Raises:
            WeightSyncError: a tensor changed on its way, the target did not take it over, the version is another, or
                the trainer failed. The target's version is then -1.
        """
        marks: dict[str, str] = {}
        stream = self._weights(version, marks)
        try:
            self._published = self._published.updated(deliver(stream, target, version, marks))
        except Exception as error:
            self._take_rest(stream, error)
            raise

    def verify(self, target: WeightTarget, version: int) -> None:
        """See `WeightSync.verify`."""
        require_held(self._published, target, version)

    def close(self) -> None:
        """Give the channel back."""
        self.end.close()

    def _weights(self, version: int, marks: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            header, content = self.end.receive()
            if "failed" in header:
                raise WeightSyncError(f"weights of version {version}", got=f"none: {header['failed']}", fix=_LOOK_FOR)
            if "version" in header:
                _require_arrived(header["marks"], marks, header["version"], version)
                return
            assert content is not None, "a header with entries has content"
            entries = [Entry.from_json(fields) for fields in header["entries"]]
            yield from _marked(unpack(entries, content), marks)

    @staticmethod
    def _take_rest(stream: Iterator[tuple[str, torch.Tensor]], error: Exception) -> None:
        """Whoever sends goes on as if nothing had happened here."""
        # A generator that has raised is over: then there is no rest, or nobody sends it.
        try:
            for _ in stream:
                pass
        except WeightSyncError as other:
            error.add_note(f"And the rest of the stream: {other}")


def drain(weights: NamedWeights) -> None:
    """Take part in gathering every tensor, and keep none."""
    for _ in weights:
        pass


def _marked(weights: NamedWeights, marks: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        marks[name] = tensor_fingerprint(tensor)
        yield name, tensor
        del tensor


def _require_arrived(sent: dict[str, str], arrived: dict[str, str], offered: int, expected: int) -> None:
    differing = Fingerprint(sent).differences(Fingerprint(arrived))
    if not differing and offered == expected:
        return
    got = f"{len(differing)} of {len(sent)} weights that changed on their way: {name_some(differing)}"
    raise WeightSyncError(
        f"weights of version {expected}",
        got=got if differing else f"version {offered}",
        expected="what the trainer sent",
        fix="The channel between trainer and rollout is not to be trusted: see which one the run has chosen.",
    )
