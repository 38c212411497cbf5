# SPDX-License-Identifier: Apache-2.0
"""Channels: how headers and the content of buckets get from the first process of a trainer to those of a rollout.

    trainer, rank 0                                 rollout, each rank
    end, address = offer(...)   ── address ──>      end = connect(address, ...)
    end.send(header, content)   ────────────>       header, content = end.receive()
    end.close()                                     end.close()

A new channel is a file with a `SendingEnd` and a `ReceivingEnd`, and an entry in `_CHANNELS`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from quadriga.errors import WeightSyncError
from quadriga.weight_sync.broadcast import BroadcastReceiver, BroadcastSender
from quadriga.weight_sync.cuda_ipc import IpcReceiver, IpcSender
from quadriga.weight_sync.disk import DiskReceiver, DiskSender

Header = dict[str, Any]
"""What is said beside the content: JSON. Where content follows, `num_bytes` is its size, and `room_bytes` what holds it
and, unless it is a tensor of its own, all that come after it."""


class SendingEnd(Protocol):
    """The end of rank 0 of the trainer. Its `place` is what the receivers must know to find it."""

    place: str

    def send(self, header: Header, content: torch.Tensor | None) -> None:
        """Give a header and [bytes] uint8 to every receiver; the content may be overwritten afterwards."""
        ...

    def close(self) -> None:
        """Give back what the channel holds."""
        ...


class ReceivingEnd(Protocol):
    """The end of one process of the rollout."""

    def receive(self) -> tuple[Header, torch.Tensor | None]:
        """What was sent next; the content is lent until the next call."""
        ...

    def close(self) -> None:
        """Give back what the channel holds."""
        ...


@dataclass(frozen=True)
class Address:
    """Where a channel begins: what kind it is, where it is found, and how many processes receive from it."""

    kind: str
    place: str
    num_receivers: int


class _Channel(NamedTuple):
    sender: Any
    receiver: Any


_CHANNELS = {
    "broadcast": _Channel(BroadcastSender, BroadcastReceiver),
    "disk": _Channel(DiskSender, DiskReceiver),
    "cuda_ipc": _Channel(IpcSender, IpcReceiver),
}


def offer(kind: str, place: str, num_receivers: int, device: torch.device) -> tuple[SendingEnd, Address]:
    """The sending end of a new channel, and its address for the receivers.

    Args:
        kind: one of broadcast, disk, cuda_ipc.
        place: for disk a folder that all can reach, else a name of this machine that the receivers can resolve.
        num_receivers: processes that will connect.
        device: of the weights.

    Raises:
        WeightSyncError: there is no such channel, or not on this device.
    """
    end = _channel(kind).sender(place, num_receivers, device)
    return end, Address(kind, end.place, num_receivers)


def connect(address: Address, rank: int, device: torch.device) -> ReceivingEnd:
    """One receiving end; every receiver has a `rank` of its own, from 0."""
    return _channel(address.kind).receiver(address.place, address.num_receivers, rank, device)


def _channel(kind: str) -> _Channel:
    if kind not in _CHANNELS:
        raise WeightSyncError("channel of weights", got=repr(kind), expected=f"one of {', '.join(_CHANNELS)}")
    return _CHANNELS[kind]
