# SPDX-License-Identifier: Apache-2.0
"""Weight sync from the shards of a training layout to those of a rollout, without full parameters.

    connect       ranks exchange which shards they hold and want; all make the same plan
    bucket        rank 0  [ to 1 | to 2 |  from 1 | from 3 ]    all-to-all: a rank sends what others
    ...           rank 1  [ to 0 | to 3 |  from 0 ]             want, and receives what it wants
    compare       fingerprints of what each rank sent to each other one, with what arrived

A rank needs memory for its shards of both layouts, and for one bucket in which it sends and
receives. Blocks that a rank both holds and wants are copied locally, or shared if the shard that it
holds contains the whole shard that it wants. A parameter larger than a bucket is sent in slices of
its rows. An engine that shards parameters by itself wants full ones, and gets those of one bucket
at a time.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from operator import add, attrgetter
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from quadriga.errors import WeightSyncError
from quadriga.observe.machine import detect_lost_peer
from quadriga.weight_sync.fingerprint import Fingerprint, tensor_fingerprint
from quadriga.weight_sync.publish import CopiedWeights, WeightTarget, name_some, require_version

_ALIGNMENT = 8  # bytes: the size of a fingerprint's words, and a multiple of every dtype's size


class Box(NamedTuple):
    """Position of a shard or block in its parameter: start and shape, for each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        """End in each dimension, exclusive."""
        return tuple(map(add, self.start, self.shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def overlap(self, other: "Box") -> "Box | None":
        """The intersection of two boxes of one parameter, or None if they are disjoint."""
        start = tuple(max(pair) for pair in zip(self.start, other.start, strict=True))
        end = [min(pair) for pair in zip(self.end, other.end, strict=True)]
        shape = tuple(last - first for first, last in zip(start, end, strict=True))
        # A scalar has no dimension, and its boxes are equal.
        if min(shape, default=1) <= 0:
            return None
        return Box(start, shape)

    def view(self, tensor: torch.Tensor, inner: "Box") -> torch.Tensor:
        """A view of the part of a tensor that lies in an inner box.

        Args:
            tensor: [*shape], the content of this box.
            inner: a box within this box, with its start in the same parameter.

        Returns:
            The content of `inner`, [*inner.shape].
        """
        for dim, origin in enumerate(self.start):
            tensor = tensor.narrow(dim, inner.start[dim] - origin, inner.shape[dim])
        return tensor


# Names that version 0.2.0 had for boxes, for code that imports them.
Piece = Box
Shard = Box

Boxes = Mapping[str, Box]
"""Boxes by the names of their parameters."""
Held = Mapping[str, tuple[Box, torch.Tensor]]
"""Box and content of the shard that a rank holds, by the name of the parameter.

The boxes of two ranks are equal or disjoint."""
Wanted = Mapping[str, tuple[Box, torch.dtype]]
"""Box and dtype of the shard that a rank wants, by the name of the parameter."""


class Move(NamedTuple):
    """A block of a parameter that the sender holds and the receiver wants. They may be one rank."""

    name: str  # name of the parameter
    sender: int  # rank
    receiver: int  # rank
    box: Box  # position of the block in the parameter
    num_bytes: int  # size in a bucket; 0 if sender and receiver are the same rank


Bucket = list[Move]


class ReshardedWeights:
    """Weight sync between ranks that hold shards of the trainer's or the rollout's layout.

    All ranks call `publish` together.

    Args:
        rank: rank of this process among those that call `publish`.
        size: number of these ranks.
        device: device of the tensors to send.
        bucket_bytes: memory in which a rank sends and receives.
        meet: forms two process groups of the ranks: for tensors on the CPU, and for tensors on
            `device`. None: torch's default group is used.

    Attributes:
        num_shared: number of shards of the rollout that are the trainer's own memory.
        num_sliced: number of parameters that are sent in slices because they are larger than a
            bucket.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        bucket_bytes: int,
        meet: Callable[[], tuple[Any, Any]] | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.bucket_bytes = bucket_bytes
        self.num_shared = 0
        self.num_sliced = 0
        self._meet = meet
        self._group: Any = None
        self._buckets: list[Bucket] = []  # only the moves from or to this rank
        self._dtypes: dict[str, torch.dtype] = {}  # the rollout's, in which parameters are sent
        self._shards: dict[str, torch.Tensor] = {}  # shards of the rollout engine on this rank
        self._published = Fingerprint({})  # of these shards after the last publication

    def publish(self, held: Held, target: Any, version: int) -> None:
        """Send the shards that ranks hold to the ranks that want them.

        Args:
            held: this rank's shards of the trainer.
            target: the rollout engine of this rank, if it has one. Its version is -1 after an
                error.
            version: version of the weights.

        Raises:
            WeightSyncError: no rank holds a block that is wanted, a block changed in transfer, or a
                rank has another version.
            PeerLostError: a rank is lost.
        """
        wanted_shards = {}
        if target is not None:
            wanted_shards = target.wanted_shards()
            target.weight_version = -1
            target.allocate_weights()
        # Layouts do not change during a run, so all publications use the plan of the first one.
        if self._group is None:
            self._connect(held, wanted_shards)
            if target is not None:
                self._allocate(held, target, wanted_shards)
        # The shards are filled in place. Only `StreamedWeights` needs the names of complete ones.
        for _ in self._fill_shards(held, wanted_shards, version):
            pass
        if target is not None:
            # The shards are in place: the engine only merges adapters, and takes the version.
            target.load_weights(self._shards.items(), version)
            self._published = target.fingerprint()

    def receive(self, target: WeightTarget, version: int) -> None:
        """Fill the shards of a rollout engine, on a rank that holds no shard of the trainer.

        Args:
            target: the rollout engine of this rank.
            version: the version that was announced.

        Raises:
            WeightSyncError, PeerLostError: see `publish`.
        """
        self.publish({}, target, version)

    def close(self) -> None:
        """Do nothing: connections end with the processes."""

    def verify(self, target: WeightTarget, version: int) -> None:
        """Check that no shard was written to since `publish`.

        Args:
            target: the rollout engine of this rank.
            version: version that the engine must have.

        Raises:
            WeightSyncError: the version differs, or a shard was written to.
        """
        require_version(target, version)
        differing = self._published.differences(target.fingerprint())
        if differing:
            raise WeightSyncError(
                f"weights of version {version}",
                got=f"{len(differing)} of {len(self._published.tensors)} shards "
                f"that were written to: {name_some(differing)}",
                expected="the shards as published",
            )

    def describe(self) -> str:
        """Describe buckets, ranks and shared shards, to be printed."""
        bucket_mib = self.bucket_bytes / 2**20
        return (
            f"{len(self._buckets)} buckets of up to {bucket_mib:g} MiB between {self.size} ranks, "
            f"{self.num_shared} shards shared with the trainer, {self.num_sliced} weights in slices"
        )

    def _connect(self, held: Held, wanted_shards: Wanted) -> None:
        """Form the group, exchange which shards ranks hold and want, and plan the moves.

        Args:
            held: this rank's shards of the trainer.
            wanted_shards: shards that the rollout engine of this rank wants.

        Raises:
            WeightSyncError: trainer and rollout do not have the same parameters, or no rank holds a
                block that is wanted.
            PeerLostError: a rank is lost.
        """
        with detect_lost_peer(self._name_activity("the meeting")):
            if self._meet is None:
                self._group = dist.group.WORLD
            else:
                _, self._group = self._meet()

        # Exchange boxes and dtypes as JSON, in which tuples become lists and dtypes are names.
        held_here = {name: box for name, (box, _) in held.items()}
        wanted_here = {
            name: (box, str(dtype).removeprefix("torch."))
            for name, (box, dtype) in wanted_shards.items()
        }
        held_boxes = []
        wanted_boxes = []
        for rank_held, rank_wanted in self._gather([held_here, wanted_here]):
            held_boxes.append({name: Box(*map(tuple, box)) for name, box in rank_held.items()})
            boxes = {}
            for name, (box, dtype_name) in rank_wanted.items():
                boxes[name] = Box(*map(tuple, box))
                self._dtypes[name] = getattr(torch, dtype_name)
            wanted_boxes.append(boxes)

        # All ranks make the same plan from the same data; each keeps only its own moves.
        itemsizes = {name: dtype.itemsize for name, dtype in self._dtypes.items()}
        buckets, self.num_sliced = plan(held_boxes, wanted_boxes, itemsizes, self.bucket_bytes)
        # A bucket without any is kept, too, because all ranks exchange every bucket together.
        for bucket in buckets:
            moves = [move for move in bucket if self.rank in (move.sender, move.receiver)]
            self._buckets.append(moves)

    def _allocate(self, held: Held, target: Any, wanted_shards: Wanted) -> None:
        """Give the target memory for its shards, and share the trainer's memory where possible.

        Args:
            held: this rank's shards of the trainer.
            target: the rollout engine of this rank.
            wanted_shards: the shards that the engine wants.
        """
        for name, (shard, dtype) in wanted_shards.items():
            # The engine changes merged shards after they arrive, so they need their own memory.
            memory = None
            if name in held and name not in target.merged_shards:
                memory = self._shared_view(*held[name], shard, dtype)
            if memory is None:
                memory = torch.empty(shard.shape, dtype=dtype, device=self.device)
            else:
                self.num_shared += 1
            self._shards[name] = memory
        target.hold_shards(self._shards)

    def _shared_view(
        self, held: Box, tensor: torch.Tensor, target: Box, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """A view of the trainer's memory for a shard of the target.

        None if the trainer's shard does not contain the whole shard, or has another dtype, device
        or layout of memory.

        Args:
            held: box of the trainer's shard.
            tensor: content of the trainer's shard.
            target: box of the target's shard.
            dtype: dtype of the target's shard.
        """
        if tensor.dtype != dtype or held.overlap(target) != target:
            return None
        view = held.view(tensor, target)
        return view if view.is_contiguous() and view.device == self.device else None

    @torch.no_grad()
    def _fill_shards(self, held: Held, wanted_shards: Wanted, version: int) -> Iterator[str]:
        """Fill this rank's shards, bucket by bucket, and compare fingerprints at the end.

        Args:
            held: this rank's shards of the trainer.
            wanted_shards: shards that the rollout engine of this rank wants.
            version: version of the weights.

        Yields:
            The name of each shard, once all of its blocks have been stored.

        Raises:
            WeightSyncError: a block changed in transfer, or a rank has another version.
            PeerLostError: a rank is lost.
        """
        buckets = self._buckets
        # Number of blocks that each shard of the rollout engine still lacks.
        num_missing_blocks = Counter[str]()
        for bucket in buckets:
            num_missing_blocks.update(move.name for move in bucket if move.receiver == self.rank)
        num_bytes = max((_rank_bytes(bucket)[self.rank] for bucket in buckets), default=0)
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        # For each peer, [ranks, 1 + buckets]: the version, then a fingerprint of each bucket.
        sent = torch.full((self.size, 1 + len(buckets)), version)
        received = sent.clone()

        for number, bucket in enumerate(buckets, start=1):
            # All-to-all expects the blocks in the order of the peers' ranks.
            outgoing = [move for move in bucket if move.sender == self.rank]
            incoming = [move for move in bucket if move.receiver == self.rank]
            outgoing.sort(key=attrgetter("receiver"))
            incoming.sort(key=attrgetter("sender"))
            out_sizes = self._bytes_by_peer(outgoing, "receiver")
            in_sizes = self._bytes_by_peer(incoming, "sender")
            # The memory holds the blocks to send, behind them those to receive, and unused bytes.
            out_end = sum(out_sizes)
            source, output, _ = memory.tensor_split((out_end, out_end + sum(in_sizes)))

            # Copy the blocks for other ranks into the bucket, and exchange it.
            for move, block in self._blocks(outgoing, source):
                if block is not None:
                    box, tensor = held[move.name]
                    block.copy_(box.view(tensor, move.box))
            with detect_lost_peer(self._name_activity("a bucket of weights")):
                self._group.alltoall_base(output, source, in_sizes, out_sizes).wait()
            sent[:, number] = _fingerprints(source, out_sizes)
            received[:, number] = _fingerprints(output, in_sizes)

            # Store the blocks that have arrived, and those that stay on this rank.
            for move, block in self._blocks(incoming, output):
                if block is None:
                    box, tensor = held[move.name]
                    block = box.view(tensor, move.box)
                self._store_block(move, block, wanted_shards)
                num_missing_blocks[move.name] -= 1
                if not num_missing_blocks[move.name]:
                    yield move.name
        self._compare(sent, received)

    def _bytes_by_peer(self, moves: Bucket, side: Literal["sender", "receiver"]) -> list[int]:
        """Sum the bytes of moves by the other rank that takes part in them.

        Args:
            moves: moves from this rank, or moves to this rank.
            side: what the other rank is in these moves.

        Returns:
            Number of bytes, [ranks].
        """
        total = Counter[int]()
        for move in moves:
            total[getattr(move, side)] += move.num_bytes
        return [total[rank] for rank in range(self.size)]

    def _store_block(self, move: Move, block: torch.Tensor, wanted_shards: Wanted) -> None:
        """Copy a block into the rollout engine's shard of its parameter.

        Args:
            move: the move that brought the block.
            block: content of the block.
            wanted_shards: shards that the rollout engine of this rank wants.
        """
        box, dtype = wanted_shards[move.name]
        # `StreamedWeights` has no shards before their first block.
        if move.name not in self._shards:
            self._shards[move.name] = torch.empty(box.shape, dtype=dtype, device=self.device)
        target = box.view(self._shards[move.name], move.box)
        # In memory shared with the trainer, the block is already in its place.
        if target.data_ptr() != block.data_ptr():
            target.copy_(block)

    def _blocks(
        self, moves: Iterable[Move], memory: torch.Tensor
    ) -> Iterator[tuple[Move, torch.Tensor | None]]:
        """Find the blocks of moves in the memory of a bucket.

        Args:
            moves: the moves, in the order of their blocks.
            memory: [bytes] uint8.

        Yields:
            Each move, and a view of its block in `memory`; None for a move within this rank, whose
            block is not in a bucket.
        """
        start = 0
        for move in moves:
            if not move.num_bytes:
                yield move, None
                continue
            flat = memory[start : start + move.num_bytes].view(self._dtypes[move.name])
            # The block ends before the padding that aligns the next one.
            yield move, flat[: move.box.numel].view(move.box.shape)
            start += move.num_bytes

    def _compare(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Compare what this rank received with what the senders say that they sent.

        Args:
            sent: a row for each rank, [ranks, 1 + buckets]: the version, then for each bucket the
                fingerprint of what this rank sent to that rank.
            received: the same for what arrived from each rank; the version is this rank's.

        Raises:
            WeightSyncError: a version or a fingerprint differs.
            PeerLostError: a rank is lost.
        """
        expected = torch.empty_like(sent, device=self.device)
        with detect_lost_peer(self._name_activity("the comparison of fingerprints")):
            # With empty lists of sizes, each rank gets one row from each rank.
            self._group.alltoall_base(expected, sent.to(self.device), [], []).wait()
        expected = expected.cpu()
        version = int(received[self.rank, 0])
        where = f"weights of version {version}"
        other_versions = set(expected[:, 0].tolist()) - {version}
        if other_versions:
            raise WeightSyncError(
                where,
                got=f"version {min(other_versions)} from another rank",
                expected="one version everywhere",
            )
        # Versions are equal by now, so a number is that of a bucket, from 1 on. The first
        # difference is reported.
        for rank, number in (expected != received).nonzero().tolist():
            # The fingerprint is that of all blocks from the rank, so any of them may be corrupt.
            moves = self._buckets[number - 1]
            sides = (rank, self.rank)
            names = [move.name for move in moves if (move.sender, move.receiver) == sides]
            raise WeightSyncError(
                where,
                got=f"{len(names)} weights from rank {rank}, "
                f"of which some changed in transfer: {name_some(names)}",
                expected="what that rank sent",
                fix="The network between the ranks corrupts data.",
            )

    def _gather(self, value: Any) -> list[Any]:
        """Gather a value from each rank, which JSON can hold. Returns the values, [ranks]."""
        content = bytearray(json.dumps(value).encode())
        text = torch.frombuffer(content, dtype=torch.uint8).to(self.device)
        length = torch.tensor([text.numel()], device=self.device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        with detect_lost_peer(self._name_activity("the exchange of shards held and wanted")):
            self._group.allgather([lengths], [length]).wait()
            sizes = [int(size) for size in lengths]
            padded = torch.nn.functional.pad(text, (0, max(sizes) - text.numel()))
            texts = [torch.empty_like(padded) for _ in sizes]
            self._group.allgather([texts], [padded]).wait()
        values = []
        for text_of_rank, size in zip(texts, sizes, strict=True):
            # Drop the padding, which allgather needs for texts of different lengths.
            values.append(json.loads(bytes(text_of_rank[:size].cpu().numpy())))
        return values

    def _name_activity(self, activity: str) -> str:
        """Say which rank waits for what, for the error of a lost peer."""
        return f"weight sync, rank {self.rank} of {self.size}, in {activity}"


class StreamedWeights(ReshardedWeights):
    """Resharding for an engine that shards parameters by itself.

    Each rank of the engine wants full parameters. It needs memory for the parameters of one bucket
    in addition to the bucket. Takes the arguments of `ReshardedWeights`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # A bucket takes half of the memory. The other half is for the full parameters of the
        # bucket, until the engine has loaded them.
        self.bucket_bytes //= 2
        self._copied = CopiedWeights()

    def publish(self, held: Held, target: Any, version: int) -> None:
        """Send the shards that ranks hold. The engine gets each parameter once it is complete.

        Args:
            held: this rank's shards of the trainer.
            target: the rollout engine of this rank, if it has one. Its version is -1 after an
                error.
            version: version of the weights.

        Raises:
            WeightSyncError, PeerLostError: as in the base class; also if the engine's weights
                differ afterwards.
        """
        if target is None:
            super().publish(held, None, version)
            return
        wanted_shards = target.wanted_shards()
        if self._group is None:
            self._connect(held, wanted_shards)
        names = self._fill_shards(held, wanted_shards, version)
        # Pop each parameter, so that its memory is free once the engine has it.
        complete = ((name, self._shards.pop(name)) for name in names)
        self._copied.publish(complete, target, version)

    def verify(self, target: WeightTarget, version: int) -> None:
        """Compare the engine's fingerprints with those of the published parameters.

        Args:
            target: the rollout engine of this rank.
            version: version that the engine must have.

        Raises:
            WeightSyncError: the version or a fingerprint differs.
        """
        self._copied.verify(target, version)


def plan(
    held_boxes: Sequence[Boxes],
    wanted_boxes: Sequence[Boxes],
    itemsizes: Mapping[str, int],
    bucket_bytes: int,
) -> tuple[list[Bucket], int]:
    """Plan which rank sends which blocks to which rank, in buckets.

    If several ranks hold the same shard, a receiver among them uses its own copy. The other
    receivers are spread over the holders.

    Args:
        held_boxes: shards that each rank holds, by parameter.
        wanted_boxes: shards that each rank wants, by parameter.
        itemsizes: bytes of an element, by parameter.
        bucket_bytes: largest number of bytes that a rank sends and receives, together, in a bucket.

    Returns:
        The buckets, and the number of parameters that are sliced because they are larger than a
        bucket.

    Raises:
        WeightSyncError: a parameter is not both held and wanted, or a part of a wanted shard is not
            held exactly once.
    """
    # Every rank must get the same order, which a set would not have.
    names = dict.fromkeys(chain.from_iterable(held_boxes))
    differing = sorted(names.keys() ^ set(chain.from_iterable(wanted_boxes)))
    if differing:
        raise WeightSyncError(
            "weight sync",
            got=f"{len(differing)} weights "
            f"that only one of trainer and rollout has: {name_some(differing)}",
            expected="the same weights in both",
            fix="Trainer and rollout must have the same architecture.",
        )
    buckets: list[Bucket] = [[]]
    load = Counter[int]()  # bytes of each rank in the last bucket
    num_sliced = 0
    for name in names:
        moves = list(_moves_of(name, held_boxes, wanted_boxes, itemsizes[name]))
        slices = list(_slice_moves(moves, itemsizes[name], bucket_bytes))
        num_sliced += len(slices) > 1
        for slice_moves in slices:
            slice_load = _rank_bytes(slice_moves)
            # A bucket is full if any rank would exceed its bytes.
            if buckets[-1] and max((load + slice_load).values(), default=0) > bucket_bytes:
                buckets.append([])
                load.clear()
            buckets[-1] += slice_moves
            load += slice_load
    return buckets, num_sliced


def _moves_of(
    name: str,
    held_boxes: Sequence[Boxes],
    wanted_boxes: Sequence[Boxes],
    itemsize: int,
) -> Iterator[Move]:
    """Yield the moves that fill all wanted shards of a parameter.

    Args:
        name: name of the parameter.
        held_boxes: shards that each rank holds, by parameter.
        wanted_boxes: shards that each rank wants, by parameter.
        itemsize: bytes of an element.

    Raises:
        WeightSyncError: an element of a wanted shard is not held, or held in two different shards.
    """
    # Ranks that hold each shard; several if they are replicas. Empty shards have nothing to send.
    holders = {}
    for rank, shards in enumerate(held_boxes):
        if name in shards and 0 not in shards[name].shape:
            holders.setdefault(shards[name], []).append(rank)
    for receiver, shards in enumerate(wanted_boxes):
        if name not in shards:
            continue
        num_missing = shards[name].numel
        for shard, ranks in holders.items():
            common = shard.overlap(shards[name])
            if common is None:
                continue
            num_missing -= common.numel
            if receiver in ranks:
                yield Move(name, receiver, receiver, common, num_bytes=0)
            else:
                # Spread receivers over the holders.
                sender = ranks[receiver % len(ranks)]
                yield Move(name, sender, receiver, common, _aligned_bytes(common, itemsize))
        if num_missing:
            # Elements in two of the trainer's shards were subtracted twice.
            holders_text = "no rank of the trainer holds" if num_missing > 0 else "two ranks hold"
            raise WeightSyncError(
                f"weight {name}",
                got=f"{abs(num_missing)} elements of rank {receiver}'s shard that {holders_text}",
                expected="each element in one shard of the trainer",
            )


def _slice_moves(moves: Bucket, itemsize: int, bucket_bytes: int) -> Iterator[Bucket]:
    """Divide the moves of a parameter by rows, in halves, until each part fits in a bucket.

    Args:
        moves: the moves.
        itemsize: bytes of an element.
        bucket_bytes: largest number of bytes that a rank sends and receives in a bucket.

    Yields:
        The moves of each slice of rows. A slice of one row may be larger than a bucket.
    """
    # Range of rows of all moves; a scalar has none.
    boxes = [move.box for move in moves if move.box.start]
    first = min((box.start[0] for box in boxes), default=0)
    end = max((box.end[0] for box in boxes), default=1)
    largest = max(_rank_bytes(moves).values(), default=0)
    if end - first <= 1 or largest <= bucket_bytes:
        yield moves
        return
    middle = (first + end) // 2
    for start, stop in ((first, middle), (middle, end)):
        half = []
        for move in moves:
            # The part of the block that is in the rows from `start` to `stop`.
            rows = Box((start, *move.box.start[1:]), (stop - start, *move.box.shape[1:]))
            common = move.box.overlap(rows)
            if common is not None:
                # A move within a rank has no bytes in a bucket.
                num_bytes = _aligned_bytes(common, itemsize) if move.num_bytes else 0
                half.append(move._replace(box=common, num_bytes=num_bytes))
        yield from _slice_moves(half, itemsize, bucket_bytes)


def _aligned_bytes(box: Box, itemsize: int) -> int:
    """Size of a block in a bucket, rounded up to the alignment."""
    num_words = -(-box.numel * itemsize // _ALIGNMENT)
    return num_words * _ALIGNMENT


def _rank_bytes(moves: Iterable[Move]) -> Counter[int]:
    """Bytes that each rank sends and receives."""
    total = Counter[int]()
    for move in moves:
        total[move.sender] += move.num_bytes
        total[move.receiver] += move.num_bytes
    return total


def _fingerprints(memory: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Fingerprints of the consecutive parts of a bucket, one for each peer.

    Args:
        memory: [bytes] uint8.
        sizes: bytes of each part.

    Returns:
        [ranks] int64.
    """
    digests = []
    for block in memory.split(list(sizes)):
        digest = int(tensor_fingerprint(block), 16)
        digests.append(digest - (1 << 63))  # from unsigned to the range of int64
    return torch.tensor(digests)
