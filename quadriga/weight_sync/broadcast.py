# SPDX-License-Identifier: Apache-2.0
"""Weight sync with rollouts in other processes: buckets by broadcast, and fingerprints compared at the end.

    trainer                                             rollout
    every rank gathers each tensor in turn
    rank 0: note its fingerprint, pack it
        {entries} + bucket          ────────────>       note each tensor's fingerprint, lend it to the engine
        ...
        {version, fingerprints}     ────────────>       as sent?  which version?  does the engine hold them?
     or {failed}                    ────────────>       WeightSyncError

What was sent, what arrived and what the engine holds must agree, or the receiver raises and its engine generates
nothing. A receiver that fails still reads the rest of the stream, so that it does not block the others. Headers go over
gloo; buckets over gloo on a CPU, over nccl on GPUs. The process group is apart from torch's default one, with a store
in the trainer's first process, rank 0; the others are the rollout's."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from quadriga.errors import WeightSyncError
from quadriga.observe.watchdog import waiting
from quadriga.weight_sync.buckets import pack, unpack
from quadriga.weight_sync.fingerprint import Fingerprint, tensor_fingerprint
from quadriga.weight_sync.publish import CopiedWeights, NamedWeights, WeightTarget, name_some

TIMEOUT = timedelta(minutes=30)  # the other side may still be generating, or updating
# All processes come at once to where they meet. One that dies on its way there breaks no connection: only its absence
# is seen.
MEETING_TIMEOUT = timedelta(seconds=60)
SHARES = 4
"""Parts of `bucket_bytes`. One holds the bucket; the others leave room for the pieces of the tensor that is gathered,
and for tensors that gloo still holds. A tensor larger than a part is sent without a copy. So a sender needs at most
`bucket_bytes` beside the model, if none of its tensors takes more than a sixth of them."""


@dataclass(frozen=True)
class Address:
    """Host and port of a store in the first sender; the ranks of all receivers; how many senders there are."""

    host: str
    port: int
    ranks: tuple[int, ...]
    num_senders: int = 1


def open_store(
    host: str, ranks: Sequence[int], num_senders: int = 1
) -> tuple[Address, dist.TCPStore]:
    """The address of senders of which this process is the first, and the store behind it."""
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    return Address(host, store.port, tuple(ranks), num_senders), store


def meet(
    address: Address, rank: int, device: torch.device, store: dist.TCPStore | None = None
) -> tuple[dist.ProcessGroupGloo, Any]:
    """The groups of senders and receivers, where all of them come: for what lies on a CPU, and for what is on `device`.
    Senders have the first ranks; `store` is the first one's own."""
    size = address.num_senders + len(address.ranks)
    with waiting(f"all {size} processes of a weight sync, here {rank}"):
        store = store or dist.TCPStore(address.host, address.port, None, False, MEETING_TIMEOUT)
        headers = dist.ProcessGroupGloo(
            dist.PrefixStore("headers", store), rank, size, MEETING_TIMEOUT
        )
        headers._set_default_timeout(TIMEOUT)
        if device.type != "cuda":
            return headers, headers
        torch.cuda.set_device(device)
        return headers, dist.ProcessGroupNCCL(
            dist.PrefixStore("contents", store), rank, size, TIMEOUT
        )


class Channel:
    """Broadcasts from rank 0, whose process has the store, to the receivers. The group is made at first use."""

    def __init__(
        self, address: Address, rank: int, device: torch.device, store: dist.TCPStore | None = None
    ) -> None:
        self._address, self._rank, self._device, self._store = address, rank, device, store
        self._size = len(address.ranks) + 1
        self._headers: Any = None
        self._contents: Any = None
        self._buffer: torch.Tensor | None = None
        """Of a receiver: as large as the largest bucket that has come in this publication."""

    def send(self, header: dict[str, Any], content: torch.Tensor | None = None) -> None:
        """Give every receiver a header of JSON and [bytes] uint8, which may be overwritten afterwards."""
        text = bytearray(json.dumps(header).encode())
        with self._open("a header"):
            self._headers.broadcast(torch.tensor([len(text)]), 0).wait()
            self._headers.broadcast(torch.frombuffer(text, dtype=torch.uint8), 0).wait()
        if content is not None:
            self._broadcast(content)

    def receive(self) -> tuple[dict[str, Any], torch.Tensor | None]:
        """What was sent next. Where `num_bytes` stands in the header, content follows; it is lent until the next call.

        `room_bytes` is what holds it and, unless it is a tensor of its own, all content that comes after it.
        """
        with self._open("a header"):
            length = torch.empty(1, dtype=torch.int64)
            self._headers.broadcast(length, 0).wait()
            text = torch.empty(int(length), dtype=torch.uint8)
            self._headers.broadcast(text, 0).wait()
        header = json.loads(text.numpy().tobytes())
        if "num_bytes" not in header:
            self._buffer = None
            return header, None
        # Room for every bucket at once: what was lent may live on while a larger one would be made.
        if self._buffer is None or self._buffer.numel() < header["num_bytes"]:
            self._buffer = torch.empty(header["room_bytes"], dtype=torch.uint8, device=self._device)
        content = self._buffer[: header["num_bytes"]]
        self._broadcast(content)
        return header, content

    def close(self) -> None:
        """Leave the group."""
        self._headers = self._contents = self._buffer = None

    def _broadcast(self, content: torch.Tensor) -> None:
        with self._open("a bucket"):
            self._contents.broadcast(content, 0).wait()
            if content.is_cuda:
                torch.cuda.current_stream(content.device).synchronize()

    @contextmanager
    def _open(self, what: str) -> Iterator[None]:
        """The group is there, and what goes wrong in it is explained."""
        try:
            if self._headers is None:
                self._headers, self._contents = meet(
                    self._address, self._rank, self._device, self._store
                )
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # The others wait for this process: they see its connections end.
            self.close()
            where = f"weight sync by broadcast, process {self._rank} of {self._size} in {what}"
            got = str(error).strip().partition("\n")[0]
            expected = "the trainer's first process and all of the rollout's"
            fix = "Look for the error of another process: this one was only left alone by it."
            raise WeightSyncError(where, got=got, expected=expected, fix=fix) from error


class WeightSender:
    """The trainer's side, in its first process; its other ranks only take part in gathering each tensor. Receivers must
    be able to resolve `host`. For `bucket_bytes` see `SHARES`."""

    def __init__(
        self, host: str, ranks: Sequence[int], device: torch.device, bucket_bytes: int
    ) -> None:
        self._bucket_bytes = bucket_bytes // SHARES
        self.address, store = open_store(host, ranks)
        self.channel = Channel(self.address, 0, device, store)

    def publish(self, weights: NamedWeights, version: int) -> None:
        """Send a complete set of weights to all receivers; a WeightSyncError if the connection breaks."""
        sent: dict[str, str] = {}
        with self.channel._open("the meeting"):
            pass  # the first bucket may take a while
        try:
            for entries, content in pack(_noted(weights, sent), self._bucket_bytes):
                room = max(content.numel(), self._bucket_bytes)
                self.channel.send(
                    {"entries": entries, "num_bytes": content.numel(), "room_bytes": room}, content
                )
        except WeightSyncError:
            raise
        except Exception as error:
            self.channel.send({"failed": f"{type(error).__name__}: {error}"})
            raise
        self.channel.send({"version": version, "fingerprints": sent})

    def close(self) -> None:
        """End the connection."""
        self.channel.close()


class WeightReceiver(CopiedWeights):
    """The rollout's side, in the process of one of the address's ranks."""

    def __init__(self, address: Address, rank: int, device: torch.device) -> None:
        super().__init__()
        self.channel = Channel(address, address.ranks.index(rank) + 1, device)

    def receive(self, target: WeightTarget, version: int) -> None:
        """Load what the trainer sends next into the target. Raises WeightSyncError: a tensor changed on its way, the
        target did not take it over, the version is another, or the trainer failed. The target's version is then -1."""
        arrived: dict[str, str] = {}
        self.publish(self._stream(version, arrived), target, version, arrived)

    def close(self) -> None:
        """End the connection."""
        self.channel.close()

    def _stream(self, version: int, arrived: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
        where = f"weights of version {version}"
        while True:
            header, content = self.channel.receive()
            if "failed" in header:
                fix = "Look for the error of the trainer: the rollout was only left without weights by it."
                raise WeightSyncError(where, got=f"none: {header['failed']}", fix=fix)
            if content is None:
                break
            yield from _noted(unpack(header["entries"], content), arrived)
        sent, offered = header["fingerprints"], header["version"]
        if differing := Fingerprint(sent).differences(Fingerprint(arrived)):
            got = f"{len(differing)} of {len(sent)} weights that changed on their way: {name_some(differing)}"
            fix = "The network between trainer and rollout corrupts data."
            raise WeightSyncError(where, got=got, expected="what the trainer sent", fix=fix)
        if offered != version:
            raise WeightSyncError(
                where, got=f"version {offered}", expected=f"version {version}, which was announced"
            )


def _noted(weights: NamedWeights, marks: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream; the fingerprint of each tensor is noted as it passes."""
    for name, tensor in weights:
        marks[name] = tensor_fingerprint(tensor)
        yield name, tensor
        del tensor
