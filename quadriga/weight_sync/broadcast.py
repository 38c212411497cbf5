# SPDX-License-Identifier: Apache-2.0
"""Weight sync with rollouts in other processes: broadcast buckets, then compare fingerprints.

    trainer                                             rollout
    every rank gathers each parameter in turn
    rank 0: compute its fingerprint, pack it
        {entries} + bucket          ────────────>       compute fingerprints, pass to the engine
        ...
        {version, fingerprints}     ────────────>       received as sent? loaded? which version?
     or {failed}                    ────────────>       WeightSyncError

If the parameters that were sent, received and loaded by the engine differ, the receiver raises and
its engine generates nothing. A receiver that fails still reads the rest of the stream, so that it
does not block the others. Headers are sent over gloo; buckets over gloo on a CPU and over nccl on
GPUs. The process groups are separate from torch's default group. Rank 0 is the trainer's first
process, which hosts the store; the other ranks are the rollout's.
"""

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
from quadriga.weight_sync.buckets import NamedTensors, pack, unpack
from quadriga.weight_sync.fingerprint import Fingerprint, tensor_fingerprint
from quadriga.weight_sync.publish import CopiedWeights, NamedWeights, WeightTarget, name_some

TIMEOUT = timedelta(minutes=30)  # the other side may still be generating, or updating
# All processes connect at about the same time. If one dies before it connects, no connection
# breaks, so only this timeout shows it.
MEETING_TIMEOUT = timedelta(seconds=60)
SHARES = 4
"""Number of equal shares into which a sender divides `bucket_bytes`. A bucket takes one share.

The other shares are for the shards of the parameter that is being gathered, and for tensors that
gloo still holds. A parameter larger than a share is sent without a copy. So a sender needs at most
`bucket_bytes` in addition to the model, if no parameter exceeds a sixth of `bucket_bytes`.
"""


@dataclass(frozen=True)
class Address:
    """Meeting point and members of a weight sync."""

    host: str  # host of the store, which the first sender opens
    port: int  # port of the store
    ranks: tuple[int, ...]  # the receivers' ranks in the rollout's worker group
    num_senders: int = 1


def open_store(
    host: str, ranks: Sequence[int], num_senders: int = 1
) -> tuple[Address, dist.TCPStore]:
    """Open the store of a group of senders and receivers in this process, the first sender.

    Args:
        host: name or address of this host, which all members can resolve.
        ranks: ranks of the receivers.
        num_senders: number of senders.

    Returns:
        The address for the other members, and the store.
    """
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    return Address(host, store.port, tuple(ranks), num_senders), store


def meet(
    address: Address, rank: int, device: torch.device, store: dist.TCPStore | None = None
) -> tuple[dist.ProcessGroupGloo, Any]:
    """Form the process groups of senders and receivers. All of them call it together.

    Args:
        address: from `open_store`.
        rank: rank of this process in the group; senders come first.
        device: device of the tensors to send.
        store: the store, in the process that opened it. None: connect to the store at `address`.

    Returns:
        A gloo group for CPU tensors, and a group for tensors on `device`: an nccl group, or the
        gloo group again if the device is the CPU.
    """
    size = address.num_senders + len(address.ranks)
    with waiting(f"all {size} processes of a weight sync, this one being {rank}"):
        if store is None:
            store = dist.TCPStore(address.host, address.port, None, False, MEETING_TIMEOUT)
        headers = dist.ProcessGroupGloo(
            dist.PrefixStore("headers", store), rank, size, MEETING_TIMEOUT
        )
        # The short timeout was for connecting. Broadcasts wait for the other side's work.
        headers._set_default_timeout(TIMEOUT)
        if device.type != "cuda":
            return headers, headers
        torch.cuda.set_device(device)
        contents_store = dist.PrefixStore("contents", store)
        return headers, dist.ProcessGroupNCCL(contents_store, rank, size, TIMEOUT)


class Channel:
    """Broadcasts from rank 0, which hosts the store, to the receivers. Connects at first use.

    Args:
        address: address of the store.
        rank: rank of this process in the group; the sender is 0.
        device: device of the buckets.
        store: the store, in the process that opened it.
    """

    def __init__(
        self,
        address: Address,
        rank: int,
        device: torch.device,
        store: dist.TCPStore | None = None,
    ) -> None:
        self._address = address
        self._rank = rank
        self._device = device
        self._store = store
        # Process groups for headers (gloo) and for buckets (gloo or NCCL). None: not connected.
        self._header_group: Any = None
        self._bucket_group: Any = None
        # Memory of a receiver, into which each bucket of a publication is received in turn.
        self._buffer: torch.Tensor | None = None

    def send(self, header: dict[str, Any], content: torch.Tensor | None = None) -> None:
        """Send a header and a bucket to every receiver.

        Args:
            header: a JSON object.
            content: the bucket, [bytes] uint8. The caller may overwrite it afterwards.

        Raises:
            WeightSyncError: the connection broke.
        """
        text = bytearray(json.dumps(header).encode())
        # Receivers need the length first, to allocate memory for the header.
        with self.connection("a header"):
            self._header_group.broadcast(torch.tensor([len(text)]), 0).wait()
            self._header_group.broadcast(torch.frombuffer(text, dtype=torch.uint8), 0).wait()
        if content is not None:
            self._broadcast(content)

    def receive(self) -> tuple[dict[str, Any], torch.Tensor | None]:
        """Receive the next header, and the bucket that follows if the header has `num_bytes`.

        The header's `room_bytes` is the size of memory to allocate: enough for this bucket, and for
        every later one except those with a single parameter larger than a bucket.

        Returns:
            The header; and the bucket, [bytes] uint8, or None after the last header of a
            publication. A bucket is valid until the next call.

        Raises:
            WeightSyncError: the connection broke.
        """
        with self.connection("a header"):
            length = torch.empty(1, dtype=torch.int64)
            self._header_group.broadcast(length, 0).wait()
            text = torch.empty(int(length), dtype=torch.uint8)
            self._header_group.broadcast(text, 0).wait()
        header = json.loads(text.numpy().tobytes())
        if "num_bytes" not in header:
            # The publication has ended, so no more buckets follow.
            self._buffer = None
            return header, None
        # Allocate `room_bytes`, not `num_bytes`: if a larger buffer replaced this one for a later
        # bucket, views of this one might still exist, and both would take memory.
        if self._buffer is None or self._buffer.numel() < header["num_bytes"]:
            self._buffer = torch.empty(header["room_bytes"], dtype=torch.uint8, device=self._device)
        content = self._buffer[: header["num_bytes"]]
        self._broadcast(content)
        return header, content

    def close(self) -> None:
        """Leave the process groups and free the buffer."""
        self._header_group = None
        self._bucket_group = None
        self._buffer = None

    def _broadcast(self, content: torch.Tensor) -> None:
        """Send or receive a bucket, and wait until its memory may be overwritten."""
        with self.connection("a bucket"):
            self._bucket_group.broadcast(content, 0).wait()
            if content.is_cuda:
                # `wait` of nccl only orders streams, and the sender overwrites the bucket next.
                torch.cuda.current_stream(content.device).synchronize()

    @contextmanager
    def connection(self, activity: str) -> Iterator[None]:
        """Context manager: connect if necessary, and raise errors of torch as a WeightSyncError.

        Args:
            activity: what happens inside, for errors.

        Raises:
            WeightSyncError: the processes did not connect, or the connection broke.
        """
        try:
            if self._header_group is None:
                self._header_group, self._bucket_group = meet(
                    self._address, self._rank, self._device, self._store
                )
            yield
        except torch.OutOfMemoryError:
            # Although it is a RuntimeError, the connection did not cause it.
            raise
        except RuntimeError as error:
            # Leaving the groups ends the connections, so the processes that wait for this one get
            # an error at once.
            self.close()
            raise WeightSyncError(
                f"weight sync by broadcast, process {self._rank} of "
                f"{len(self._address.ranks) + 1} in {activity}",
                got=str(error).strip().partition("\n")[0],
                expected="the trainer's first process and all processes of the rollout",
                fix="Look for the error of another process: this one was only left alone by it.",
            ) from error


class WeightSender:
    """The trainer's side, in its first process. The other ranks only help to gather parameters.

    Args:
        host: name or address of this host, which receivers can resolve.
        ranks: ranks of the receivers.
        device: device of the parameters.
        bucket_bytes: memory to use in addition to the model (see `SHARES`).
    """

    def __init__(
        self, host: str, ranks: Sequence[int], device: torch.device, bucket_bytes: int
    ) -> None:
        self._bucket_bytes = bucket_bytes // SHARES
        self.address, store = open_store(host, ranks)
        self.channel = Channel(self.address, 0, device, store)

    def publish(self, weights: NamedWeights, version: int) -> None:
        """Send a complete set of weights to all receivers.

        Args:
            weights: names and tensors [...].
            version: version of the weights.

        Raises:
            WeightSyncError: the connection broke.
            Exception: an error of `weights`. The receivers are told of it first.
        """
        # Entering `connection` connects. Do it before packing: receivers wait only MEETING_TIMEOUT
        # for the connection, and the first bucket may take longer.
        with self.channel.connection("the meeting"):
            pass
        # Filled while the parameters are packed.
        sent = {}
        buckets = iter(pack(_record_fingerprints(weights, sent), self._bucket_bytes))
        while True:
            try:
                bucket = next(buckets, None)
            except Exception as error:
                # Gathering has failed. Receivers would otherwise wait for the next bucket.
                self.channel.send({"failed": f"{type(error).__name__}: {error}"})
                raise
            if bucket is None:
                break
            entries, content = bucket
            header = {
                "entries": entries,
                "num_bytes": content.numel(),
                # A small bucket announces the full size, so that receivers allocate memory once.
                "room_bytes": max(content.numel(), self._bucket_bytes),
            }
            self.channel.send(header, content)
        self.channel.send({"version": version, "fingerprints": sent})

    def close(self) -> None:
        """Close the connection."""
        self.channel.close()


class WeightReceiver(CopiedWeights):
    """The rollout's side, in the process of one of the receivers' ranks.

    Args:
        address: the sender's address.
        rank: rank of this process in the rollout's worker group, one of `address.ranks`.
        device: device on which buckets are received.
    """

    def __init__(self, address: Address, rank: int, device: torch.device) -> None:
        super().__init__()
        # Rank 0 of the channel is the sender.
        self.channel = Channel(address, address.ranks.index(rank) + 1, device)

    def receive(self, target: WeightTarget, version: int) -> None:
        """Load the trainer's next publication into the target.

        Args:
            target: the rollout engine.
            version: the version that was announced.

        Raises:
            WeightSyncError: a parameter changed in transfer, the target did not load it, the
                version is not the announced one, or the trainer failed. The target's version is
                then -1.
        """
        # The stream fills `received`, so that `publish` need not compute fingerprints again.
        received = {}
        self.publish(self._received_weights(version, received), target, version, received)

    def close(self) -> None:
        """Close the connection."""
        self.channel.close()

    def _received_weights(self, version: int, received: dict[str, str]) -> NamedTensors:
        """Yield parameters as they arrive, and compare their fingerprints at the end.

        Args:
            version: the version that was announced.
            received: is filled with the fingerprint of each parameter, by name.

        Raises:
            WeightSyncError: the trainer failed, a parameter changed in transfer, or the trainer
                sent another version.
        """
        where = f"weights of version {version}"
        while True:
            header, content = self.channel.receive()
            if "failed" in header:
                raise WeightSyncError(
                    where,
                    got=f"none: {header['failed']}",
                    fix="Look for the error of the trainer: the rollout only lacks its weights.",
                )
            # The last header comes without a bucket.
            if content is None:
                break
            yield from _record_fingerprints(unpack(header["entries"], content), received)

        # The last header has what the trainer sent; `received` has what arrived.
        sent = header["fingerprints"]
        differing = Fingerprint(sent).differences(Fingerprint(received))
        if differing:
            raise WeightSyncError(
                where,
                got=f"{len(differing)} of {len(sent)} weights "
                f"that changed in transfer: {name_some(differing)}",
                expected="the weights that the trainer sent",
                fix="The network between trainer and rollout corrupts data.",
            )
        if header["version"] != version:
            raise WeightSyncError(
                where,
                got=f"version {header['version']}",
                expected=f"version {version}, as announced",
            )


def _record_fingerprints(weights: NamedWeights, fingerprints: dict[str, str]) -> NamedTensors:
    """Pass on a stream of parameters, and record their fingerprints.

    Args:
        weights: names and tensors.
        fingerprints: gets the fingerprint of each parameter, by name.

    Yields:
        Each name and tensor.
    """
    for name, tensor in weights:
        fingerprints[name] = tensor_fingerprint(tensor)
        yield name, tensor
        # Release the tensor before the next one is requested: both need not fit in memory.
        del tensor
