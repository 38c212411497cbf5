# SPDX-License-Identifier: Apache-2.0
"""Weights from the shards of a training layout into those of a rollout's, without a whole copy anywhere.

    connect     each rank says once what it has and what it wants; all make the same plan of it
    bucket      rank 0  [ to 1 | to 2 |  from 1 | from 3 ]      all-to-all: a rank sends its pieces, and gets its own
    ...         rank 1  [ to 0 | to 3 |  from 0 ]
    marks       fingerprints of what each rank has sent to each other one, compared with those of what came

A rank holds both of its shards and one bucket, in which it sends and receives. What it has itself is copied, or shared
where it is what it wants. A weight that fills more than a bucket goes in slices of its rows. An engine that cuts whole
tensors by itself wants all of each, and is lent those of a bucket at a time.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from quadriga.errors import WeightSyncError
from quadriga.observe.machine import taking_part
from quadriga.weight_sync.fingerprint import Fingerprint, tensor_fingerprint
from quadriga.weight_sync.publish import CopiedWeights, WeightTarget, name_some, require_version

_ALIGNMENT = 8  # bytes: of the words of a fingerprint, and of any dtype


class Piece(NamedTuple):
    """A box of a weight: where it starts in each dimension of the whole, and its shape."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: "Piece") -> "Piece | None":
        """What both have; None: nothing."""
        start = tuple(map(max, self.start, other.start))
        ends = [
            min(a + size, b + other_size)
            for a, size, b, other_size in zip(*self, *other, strict=True)
        ]
        shape = tuple(end - first for first, end in zip(start, ends, strict=True))
        return Piece(start, shape) if min(shape, default=1) > 0 else None

    def view(self, tensor: torch.Tensor, inner: "Piece") -> torch.Tensor:
        """Of `tensor`, which is this box, the part that is the box `inner`."""
        for dim, (own, start, size) in enumerate(zip(self.start, *inner, strict=True)):
            tensor = tensor.narrow(dim, start - own, size)
        return tensor


Held = Mapping[str, tuple[Piece, torch.Tensor]]
"""By name the part of each weight that a rank has. Those of different ranks are equal, or have nothing in common."""
Wanted = Mapping[str, tuple[Piece, torch.dtype]]
"""By name the part of each weight that a rank computes with, and in what."""


class Move(NamedTuple):
    """A box of a weight that one rank has and another one wants, or the same one."""

    name: str
    sender: int
    receiver: int
    box: Piece
    num_bytes: int  # in a bucket; 0: the sender wants it itself


Bucket = list[Move]


class ReshardedWeights:
    """The ranks that weights go between, seen from one of them: of the trainer, which have parts of them, and of the
    rollout, which have shards of their own. All of them call `publish`.

    Args:
        rank, size: number of this rank among them, and how many there are.
        device: where a tensor must lie to be sent.
        bucket_bytes: memory in which a rank sends and receives.
        meet: makes torch's groups of them, of which the second sends what is on the device; None: it is torch's default
            group.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        bucket_bytes: int,
        meet: Callable[[], tuple[Any, Any]] | None = None,
    ) -> None:
        self.rank, self.size, self.device, self.bucket_bytes, self._meet = (
            rank,
            size,
            device,
            bucket_bytes,
            meet,
        )
        self._group: Any = None
        self._buckets: list[Bucket] = []  # what goes from this rank or to it
        self._dtypes: dict[str, torch.dtype] = {}
        self._shards: dict[str, torch.Tensor] = {}
        self._published = Fingerprint({})
        # Shards that are the trainer's own memory, and weights that are cut, for no bucket holds them.
        self.num_shared = self.num_sliced = 0

    def publish(self, held: Held, target: Any, version: int) -> None:
        """Give the ranks that want them the weights that the ranks hold; `target` is what wants them on this one: a
        rollout engine, which computes with a shard of each, or None. Its version is -1 where that fails.
        Raises WeightSyncError: nobody has a weight, a piece changed on its way, or a rank is at another version.
        PeerLostError: a rank is gone."""
        wanted = {} if target is None else target.wanted_shards()
        if target is not None:
            target.weight_version = -1
        if self._group is None:
            self._connect({name: box for name, (box, _) in held.items()}, wanted)
            merged = () if target is None else target.merged_shards
            views = {
                name: self._own(held.get(name), *wanted[name])
                for name in wanted.keys() - set(merged)
            }
            shared = {name: view for name, view in views.items() if view is not None}
            self.num_shared = len(shared)
            self._shards = {
                name: torch.empty(box.shape, dtype=dtype, device=self.device)
                if name not in shared
                else shared[name]
                for name, (box, dtype) in wanted.items()
            }
            if target is not None:
                target.hold_shards(self._shards)
        for _ in self._run(held, wanted, version):
            pass
        if target is not None:
            target.load_weights(self._shards.items(), version)
            self._published = target.fingerprint()

    def verify(self, target: WeightTarget, version: int) -> None:
        """A WeightSyncError if the version is another, or a shard is not what was published."""
        require_version(target, version)
        if differing := self._published.differences(target.fingerprint()):
            total = len(self._published.tensors)
            got = f"{len(differing)} of {total} shards that were written to: {name_some(differing)}"
            raise WeightSyncError(
                f"weights of version {version}", got=got, expected="what was published"
            )

    def describe(self) -> str:
        """How the weights travel, for people to read."""
        way = f"{len(self._buckets)} buckets of up to {self.bucket_bytes / 2**20:g} MiB between {self.size} ranks"
        return f"{way}, {self.num_shared} shards shared with the trainer, {self.num_sliced} weights in slices"

    def _connect(self, held: Mapping[str, Piece], wanted: Wanted) -> None:
        with taking_part(self._where("the meeting")):
            self._group = dist.group.WORLD if self._meet is None else self._meet()[1]
        own = [
            held,
            {
                name: (box, str(dtype).removeprefix("torch."))
                for name, (box, dtype) in wanted.items()
            },
        ]
        facts = self._gather(own)
        having = [
            {name: Piece(*map(tuple, box)) for name, box in known.items()} for known, _ in facts
        ]
        wanting = [
            {name: Piece(*map(tuple, box)) for name, (box, _) in asked.items()}
            for _, asked in facts
        ]
        self._dtypes = {
            name: getattr(torch, dtype) for _, asked in facts for name, (_, dtype) in asked.items()
        }
        sizes = {name: dtype.itemsize for name, dtype in self._dtypes.items()}
        buckets, self.num_sliced = plan(having, wanting, sizes, self.bucket_bytes)
        self._buckets = [
            [one for one in bucket if self.rank in (one.sender, one.receiver)] for bucket in buckets
        ]

    def _own(
        self, held: tuple[Piece, torch.Tensor] | None, box: Piece, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """The trainer's own memory of a shard, where it is one: laid out alike."""
        if held is None or held[1].dtype != dtype or held[0].overlap(box) != box:
            return None
        view = held[0].view(held[1], box)
        return view if view.is_contiguous() and view.device == self.device else None

    @torch.no_grad()
    def _run(self, held: Held, wanted: Wanted, version: int) -> Iterator[str]:
        """Fill the shards, bucket by bucket; the name of each that is complete."""
        buckets = self._buckets
        missing = Counter(
            one.name for bucket in buckets for one in bucket if one.receiver == self.rank
        )
        num_bytes = max((_rank_bytes(bucket)[self.rank] for bucket in buckets), default=0)
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        # [ranks, 1 + buckets]: what each other rank shall find, and what came from it; first the version.
        sent, came = (torch.full((self.size, 1 + len(buckets)), version) for _ in range(2))
        for number, bucket in enumerate(buckets, start=1):
            outgoing = sorted(
                (one for one in bucket if one.sender == self.rank), key=lambda one: one.receiver
            )
            incoming = sorted(
                (one for one in bucket if one.receiver == self.rank), key=lambda one: one.sender
            )
            out_sizes, in_sizes = self._sizes(outgoing, "receiver"), self._sizes(incoming, "sender")
            source, output, _ = memory.tensor_split(
                (sum(out_sizes), sum(out_sizes) + sum(in_sizes))
            )
            for move, place in self._places(outgoing, source):
                if place is not None:
                    box, tensor = held[move.name]
                    place.copy_(box.view(tensor, move.box))
            with taking_part(self._where("a bucket of weights")):
                self._group.alltoall_base(output, source, in_sizes, out_sizes).wait()
            sent[:, number], came[:, number] = _marks(source, out_sizes), _marks(output, in_sizes)
            for move, place in self._places(incoming, output):
                self._take(move, *(held[move.name] if place is None else (move.box, place)), wanted)
                missing[move.name] -= 1
                if not missing[move.name]:
                    yield move.name
        self._compare(sent, came)

    def _sizes(self, moves: Bucket, side: Literal["sender", "receiver"]) -> list[int]:
        total = Counter[int]()
        for move in moves:
            total[getattr(move, side)] += move.num_bytes
        return [total[rank] for rank in range(self.size)]

    def _take(self, move: Move, box: Piece, tensor: torch.Tensor, wanted: Wanted) -> None:
        """Put a move, out of what is this box, into the shard, which has memory from its first move on."""
        whole, dtype = wanted[move.name]
        if move.name not in self._shards:
            self._shards[move.name] = torch.empty(whole.shape, dtype=dtype, device=self.device)
        part, target = box.view(tensor, move.box), whole.view(self._shards[move.name], move.box)
        if target.data_ptr() != part.data_ptr():
            target.copy_(part)

    def _places(
        self, moves: Iterable[Move], memory: torch.Tensor
    ) -> Iterator[tuple[Move, torch.Tensor | None]]:
        """Each move, and where it lies in a bucket; None: it is the rank's own."""
        end = 0
        for move in moves:
            if not move.num_bytes:
                yield move, None
                continue
            dtype, shape = self._dtypes[move.name], move.box.shape
            flat = memory[end : end + move.num_bytes].view(dtype)
            yield move, flat[: torch.Size(shape).numel()].view(shape)
            end += move.num_bytes

    def _compare(self, sent: torch.Tensor, came: torch.Tensor) -> None:
        expected = torch.empty_like(sent, device=self.device)
        with taking_part(self._where("the comparison of fingerprints")):
            self._group.alltoall_base(expected, sent.to(self.device), [], []).wait()
        expected = expected.cpu()
        version = int(came[self.rank, 0])
        if others := {int(one) for one in expected[:, 0]} - {version}:
            where, got = f"weights of version {version}", f"version {min(others)} from another rank"
            raise WeightSyncError(where, got=got, expected="one version everywhere")
        for rank, number in (expected != came).nonzero().tolist():
            bucket = self._buckets[number - 1]
            names = [one.name for one in bucket if (one.sender, one.receiver) == (rank, self.rank)]
            got = f"{len(names)} weights from rank {rank}, of which some changed on their way: {name_some(names)}"
            fix = "The network between the ranks corrupts data."
            raise WeightSyncError(
                f"weights of version {version}", got=got, expected="what it sent", fix=fix
            )

    def _gather(self, facts: Any) -> list[Any]:
        """The facts [ranks] of all ranks, JSON."""
        text = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8).to(
            self.device
        )
        lengths = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        with taking_part(self._where("what each has and wants")):
            self._group.allgather(
                [lengths], [torch.tensor([text.numel()], device=self.device)]
            ).wait()
            sizes = [int(one) for one in lengths]
            padded = torch.nn.functional.pad(text, (0, max(sizes) - text.numel()))
            texts = [torch.empty_like(padded) for _ in sizes]
            self._group.allgather([texts], [padded]).wait()
        return [
            json.loads(bytes(one[:size].cpu().numpy()))
            for one, size in zip(texts, sizes, strict=True)
        ]

    def _where(self, what: str) -> str:
        return f"weight sync, rank {self.rank} of {self.size}, in {what}"


class StreamedWeights(ReshardedWeights):
    """The same for an engine that cuts whole tensors by itself: each rank of it wants all of each weight, and holds the
    tensors of a bucket beside the bucket."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bucket_bytes //= 2
        self._copied = CopiedWeights()

    def publish(self, held: Held, target: Any, version: int) -> None:
        if target is None:
            super().publish(held, None, version)
            return
        wanted = target.wanted_shards()
        if self._group is None:
            self._connect({name: box for name, (box, _) in held.items()}, wanted)
        names = self._run(held, wanted, version)
        self._copied.publish(((name, self._shards.pop(name)) for name in names), target, version)

    def verify(self, target: WeightTarget, version: int) -> None:
        self._copied.verify(target, version)


def plan(
    having: Sequence[Mapping[str, Piece]],
    wanting: Sequence[Mapping[str, Piece]],
    itemsizes: Mapping[str, int],
    bucket_bytes: int,
) -> tuple[list[Bucket], int]:
    """What goes from which rank to which, in buckets; and how many weights are cut, for no bucket holds them. `having`
    and `wanting` are by rank. In a bucket no rank sends and receives more than `bucket_bytes` together. Of several
    ranks with the same piece one that wants it takes its own; others are served by them in turn.
    Raises WeightSyncError: a piece that is wanted is not there, or one that is there is not wanted."""
    names = dict.fromkeys(name for known in having for name in known)
    if differing := sorted(names.keys() ^ {name for asked in wanting for name in asked}):
        got = f"{len(differing)} weights that only one of trainer and rollout has: {name_some(differing)}"
        fix = "Trainer and rollout must hold the same architecture."
        raise WeightSyncError("weight sync", got=got, expected="the same weights in both", fix=fix)
    found: list[Bucket] = [[]]
    load, num_sliced = Counter[int](), 0
    for name in names:
        parts = list(
            _cut(
                list(_moves(name, having, wanting, itemsizes[name])), itemsizes[name], bucket_bytes
            )
        )
        num_sliced += len(parts) > 1
        for part in parts:
            added = _rank_bytes(part)
            if found[-1] and max((load + added).values(), default=0) > bucket_bytes:
                found.append([])
                load.clear()
            found[-1] += part
            load += added
    return found, num_sliced


def _moves(
    name: str,
    having: Sequence[Mapping[str, Piece]],
    wanting: Sequence[Mapping[str, Piece]],
    itemsize: int,
) -> Iterator[Move]:
    owners: dict[Piece, list[int]] = {}
    for rank, known in enumerate(having):
        if name in known and 0 not in known[name].shape:
            owners.setdefault(known[name], []).append(rank)
    for receiver, asked in enumerate(wanting):
        if name not in asked:
            continue
        missing = torch.Size(asked[name].shape).numel()
        for box, ranks in owners.items():
            if (common := box.overlap(asked[name])) is None:
                continue
            sender = receiver if receiver in ranks else ranks[receiver % len(ranks)]
            missing -= torch.Size(common.shape).numel()
            yield Move(
                name,
                sender,
                receiver,
                common,
                _num_bytes(common, itemsize) if sender != receiver else 0,
            )
        if missing:
            got = f"{missing} numbers of rank {receiver}'s part that no rank of the trainer has, or two have"
            raise WeightSyncError(f"weight {name}", got=got, expected="each of them once")


def _cut(moves: Bucket, itemsize: int, bucket_bytes: int) -> Iterator[Bucket]:
    """The moves of one weight, in slices of its rows that a bucket holds."""
    first = min((one.box.start[0] for one in moves if one.box.start), default=0)
    end = max((one.box.start[0] + one.box.shape[0] for one in moves if one.box.start), default=1)
    if end - first <= 1 or max(_rank_bytes(moves).values(), default=0) <= bucket_bytes:
        yield moves
        return
    middle = (first + end) // 2
    for start, stop in ((first, middle), (middle, end)):
        half = []
        for one in moves:
            box = one.box
            rows = Piece((start, *box.start[1:]), (stop - start, *box.shape[1:]))
            if (common := box.overlap(rows)) is not None:
                half.append(
                    one._replace(
                        box=common, num_bytes=_num_bytes(common, itemsize) if one.num_bytes else 0
                    )
                )
        yield from _cut(half, itemsize, bucket_bytes)


def _num_bytes(box: Piece, itemsize: int) -> int:
    return -(-torch.Size(box.shape).numel() * itemsize // _ALIGNMENT) * _ALIGNMENT


def _rank_bytes(moves: Iterable[Move]) -> Counter[int]:
    total = Counter[int]()
    for one in moves:
        total[one.sender] += one.num_bytes
        total[one.receiver] += one.num_bytes
    return total


def _marks(memory: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """[ranks] int64: fingerprints of the parts of a bucket."""
    marks = [int(tensor_fingerprint(part), 16) for part in memory.split(list(sizes))]
    return torch.tensor([mark - (1 << 63) for mark in marks])
