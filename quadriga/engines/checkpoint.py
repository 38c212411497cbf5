# SPDX-License-Identifier: Apache-2.0
"""The state of an engine outside of it, written while training goes on, read on any layout: on disk as torch's
distributed checkpoint, and in memory that outlives the process.

    rank 0                        rank 1                        who waits
      start                         start                       the callers, together:
        plans  <---------------------->                           who writes which chunk
        copies of its chunks          copies of its chunks        from here on the engine may change them
          | thread: its file            | thread: its file      no rank
      is_written <---- outcomes ----> is_written                only with `wait`
          | thread: list of chunks,
          |         then `afterwards`
      is_written <---- outcome  ----> is_written                only with `wait`

    memory of a rank    | step | sum | chunk | chunk ... | step | sum | chunk | chunk ... |
                          slot of the even steps           slot of the odd steps

Threads call no collective, so they cannot get in the way of those of training. What is equal on several ranks is
written by one of them. Without the list of chunks, written last, a folder is no checkpoint. A copy in memory is waited
for by the engine's next optimizer step; its `step` is 0 until the last byte is there, so a rank that dies on the way
leaves the slot of the step before as it was.

Legend: [...] is the shape of a parameter, or of a rank's part of it.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from quadriga.background import in_background
from quadriga.engines.process_group import ProcessGroup
from quadriga.errors import CheckpointError
from quadriga.models.weight_files import METADATA, ChunkReader
from quadriga.protocol.memory import SLOT_HEADER_BYTES, slot_of

State = Mapping[
    str, torch.Tensor
]  # tensors by name, plain where one rank holds them whole, DTensors where several do
Written = list[list[WriteResult]]  # the chunks that a rank has written, folder by folder
_UNSHARDED = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
_OTHER_MODEL = "Resume with the model that the checkpoint was made of."


class StateWriter:
    """Writes states in the background, one after the other. All ranks of the engine call the same in turn."""

    def __init__(self, world: ProcessGroup) -> None:
        self.world = world
        self._thread: Future[Written] | None = None
        self._rest: Callable[[list[Written]], Written] | None = None
        """What is left to do, in a thread too, once all ranks have written their chunks."""

    def start(
        self, states: Mapping[Path, State], afterwards: Callable[[], None] | None = None
    ) -> None:
        """Copy what this rank is to write, and begin to write it. The state may be changed when this returns.

        Args:
            states: the tensors [...] of each folder; the folders are made. The same on all ranks but for the tensors.
            afterwards: called in a thread of rank 0 when all folders are complete.

        Raises CheckpointError: a folder cannot be made, or the last state could not be written."""
        self.is_written(wait=True)
        parts = [_Part(folder, state, self.world) for folder, state in states.items()]
        rest = partial(self._complete, parts, afterwards)
        if self.world.size > 1:
            self._thread = in_background(lambda: [part.write() for part in parts], "checkpoint")
            self._rest = rest
        else:
            self._thread = in_background(
                lambda: rest([[part.write() for part in parts]]), "checkpoint"
            )

    def is_written(self, *, wait: bool = False) -> bool:
        """Whether the last state is complete on disk, on all ranks; with `wait`, it is when this returns. Raises
        CheckpointError: on all processes: one of them could not write its part. There is then nothing more to do."""
        while (thread := self._thread) is not None:
            is_over = wait or thread.done()
            error = thread.exception() if is_over else None
            if error is not None and not isinstance(error, CheckpointError):
                trace, got = "".join(format_exception(error)), f"{type(error).__name__}: {error}"
                error = CheckpointError("writing a checkpoint", got=got, expected="no such error")
                error.add_note(trace)
            written = thread.result() if is_over and error is None else None
            outcomes = self.world.gather((is_over, written, error))
            if errors := [error for *_, error in outcomes if error is not None]:
                self._thread = self._rest = None
                raise errors[0]
            if not all(is_over for is_over, *_ in outcomes):
                return False
            rest, self._thread, self._rest = self._rest, None, None
            if rest is not None:
                self._thread = in_background(
                    partial(rest, [written for _, written, _ in outcomes]), "checkpoint"
                )
        return True

    def _complete(
        self,
        parts: "Sequence[_Part]",
        afterwards: Callable[[], None] | None,
        written: list[Written],
    ) -> Written:
        if self.world.is_first:
            for number, part in enumerate(parts):
                part.complete([of_rank[number] for of_rank in written])
            if afterwards is not None:
                afterwards()
        return []


def _agreed(world: ProcessGroup, value: Any, error: CheckpointError | None) -> list[Any]:
    """The values of all ranks; the first error of one is raised on all of them."""
    outcomes = world.gather((value, error))
    for _, error in outcomes:
        if error is not None:
            raise error
    return [value for value, _ in outcomes]


@contextmanager
def explained(where: Path) -> Iterator[None]:
    """What goes wrong while something is written becomes a CheckpointError that names it."""
    try:
        yield
    except CheckpointError:
        raise
    # A full disk is an OSError to Python, a SafetensorError to safetensors, a RuntimeError to torch, and a bare
    # Exception to tokenizers.
    except Exception as error:
        told: BaseException | None = error
        # torch's writer raises an error of its own over that of the disk: "unexpected pos 64 vs 0".
        while told is not None and not isinstance(told, OSError):
            told = told.__context__
        told = told or error
        named = Path(told.filename) if isinstance(told, OSError) and told.filename else where
        reason = f"{type(told).__name__}: {told}".strip().partition("\n")[0]
        raise CheckpointError(
            str(named), got=reason, expected="room and permission to write it"
        ) from error


class _Part(DefaultSavePlanner):
    """This rank's part of a distributed checkpoint: planned with the engine's tensors, written from copies of them."""

    def __init__(self, folder: Path, state: State, world: ProcessGroup) -> None:
        super().__init__(**_UNSHARDED)
        self.folder = folder
        self._writer: Any = FileSystemWriter(
            folder, single_file_per_rank=True, thread_count=1, sync_files=True
        )
        # Files have neither a path, which changes when the checkpoint gets its name, nor a random number.
        self._writer.storage_meta = StorageMeta
        self._writer.set_up_storage_writer(world.is_first)
        self.set_up_planner(dict(state), is_coordinator=world.is_first)
        error = None
        try:
            with explained(folder):
                folder.mkdir(parents=True, exist_ok=True)
        except CheckpointError as found:
            error = found
        # Every rank makes the same plan of all plans, so that nothing need be sent back.
        plans, _ = self.create_global_plan(_agreed(world, self.create_local_plan(), error))
        self.finish_plan(self._writer.prepare_global_plan(plans)[world.rank])
        self._copies: dict[str, torch.Tensor] = {}
        for name in sorted({item.index.fqn for item in self.plan.items}):
            tensor = state[name].detach()
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._copies[name] = local.to("cpu", copy=True, memory_format=torch.contiguous_format)
        self.state_dict = {}

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._copies[index.fqn]

    def write(self) -> list[WriteResult]:
        """Write this rank's chunks. Called in a thread."""
        if not self.plan.items:
            return []
        with explained(self.folder):
            results = self._writer.write_data(self.plan, self).wait()
        self._copies.clear()
        return results

    def complete(self, written: list[list[WriteResult]]) -> None:
        """Write the list of chunks, after all have written theirs, and look whether all is there. In a thread."""
        with explained(self.folder):
            self._writer.finish(self.metadata, written)
        found = ChunkReader(self.folder)
        num_planned = sum(len(one.chunks) for one in found.tensors.values())
        num_written = len(found.listed.storage_data)
        if num_written != num_planned:
            expected = f"the {num_planned} that were planned"
            raise CheckpointError(
                str(self.folder), got=f"{num_written} chunks written", expected=expected
            )


def load_state(folder: Path, state: State, world: ProcessGroup) -> None:
    """Fill the tensors [...] of a state in place, whatever layout wrote them. All ranks of the engine call it.
    `state`: room for all of it; of DTensors each rank reads the part that it holds.

    Raises CheckpointError: on all ranks alike: there is no such state, it is damaged, or is that of another model or
    optimizer. Nothing was changed then, unless a file turns out to be damaged while it is read."""
    reader = error = None
    try:
        if not (folder / METADATA).is_file():
            got = "no such part of the checkpoint"
            fix = f"Leave {folder.name!r} out of checkpoint.load_contents, or resume from a checkpoint that has it."
            raise CheckpointError(
                str(folder), got=got, expected=f"{folder.name!r}, as load_contents says", fix=fix
            )
        reader = ChunkReader(folder)
    except CheckpointError as found:
        error = found
    shapes: dict[str, torch.Size] = {}
    for of_rank in _agreed(world, {name: tensor.shape for name, tensor in state.items()}, error):
        shapes |= of_rank
    assert reader is not None, "without one there was an error"
    _require_fit(folder, reader.listed, shapes)
    reader.read_into(dict(state))


def _require_fit(folder: Path, listed: Metadata, shapes: Mapping[str, torch.Size]) -> None:
    sizes = {
        name: getattr(entry, "size", None) for name, entry in listed.state_dict_metadata.items()
    }
    # What an optimizer keeps: `exp_avg` of `optimizer.exp_avg.lm_head.weight`.
    kinds, expected_kinds = (
        {name.split(".")[1] for name in names if name.startswith("optimizer.")}
        for names in (sizes, shapes)
    )
    if kinds != expected_kinds:
        got = f"what another optimizer keeps: {', '.join(sorted(kinds)) or 'nothing'}"
        fix = "Resume with the optimizer that the checkpoint was made with, or leave 'optimizer' out of "
        fix += "checkpoint.load_contents: it then starts anew."
        raise CheckpointError(
            str(folder), got=got, expected=", ".join(sorted(expected_kinds)), fix=fix
        )
    unknown, missing = sorted(set(sizes) - set(shapes)), sorted(set(shapes) - set(sizes))
    if unknown or missing:
        got = f"{len(unknown)} unknown and {len(missing)} missing tensors, first {[*unknown, *missing][0]}"
        raise CheckpointError(
            str(folder), got=got, expected="the tensors of this model", fix=_OTHER_MODEL
        )
    unlike = sorted(name for name, shape in shapes.items() if sizes[name] != shape)
    if unlike:
        got = f"shape {tuple(sizes[unlike[0]])}" + (
            f", and {len(unlike) - 1} more" if len(unlike) > 1 else ""
        )
        raise CheckpointError(
            f"{folder}: {unlike[0]}", got, f"{tuple(shapes[unlike[0]])}", _OTHER_MODEL
        )


@dataclass(frozen=True)
class CopyPlan:
    """Which rank copies which chunks of a state, and where they lie in its memory."""

    listed: Metadata  # shape, dtype and chunks of each tensor
    places: dict[MetadataIndex, tuple[int, int]]  # rank and first byte in a slot, of each chunk
    slot_bytes: list[int]  # of each rank


class StateCopier:
    """Copies the state of an engine, again and again, by a `plan` that is the same on all ranks; all make one together.
    `state`: tensors [...] that the engine changes in place and never replaces."""

    def __init__(self, state: State, world: ProcessGroup) -> None:
        planner = DefaultSavePlanner(**_UNSHARDED)
        planner.set_up_planner(dict(state), is_coordinator=world.is_first)
        plans, listed = planner.create_global_plan(world.gather(planner.create_local_plan()))
        self.plan = CopyPlan(listed, {}, [])
        self._rank = world.rank
        self._pieces: list[tuple[int, torch.Tensor]] = []
        for rank, plan in enumerate(plans):
            end = SLOT_HEADER_BYTES
            for item in plan.items:
                self.plan.places[item.index] = rank, end
                if rank == world.rank:
                    tensor = state[item.index.fqn].detach()
                    self._pieces.append(
                        (end, tensor.to_local() if isinstance(tensor, DTensor) else tensor)
                    )
                size = (
                    item.tensor_data.chunk.sizes.numel()
                    * item.tensor_data.properties.dtype.itemsize
                )
                end += -(-size // SLOT_HEADER_BYTES) * SLOT_HEADER_BYTES
            self.plan.slot_bytes.append(end)

    def open(self, path: str) -> None:
        """Copy into this file, which has room for two slots. Raises OSError: it cannot be opened."""
        with open(path, "r+b") as file:
            self._memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)

    def start(self, step: int) -> Future[None]:
        """Begin to copy the state as it is after this step (from 1). It must not change until the future is done."""
        slot = slot_of(self._memory, step)
        header = slot[:16].view(torch.int64)

        @torch.no_grad()
        def copy() -> None:
            header[0] = 0
            windows = [
                slot[start : start + one.nbytes].view(one.dtype).view(one.shape)
                for start, one in self._pieces
            ]
            torch._foreach_copy_(windows, [piece for _, piece in self._pieces])
            header[1] = slot[SLOT_HEADER_BYTES:].view(torch.int64).sum()
            header[0] = step

        return in_background(copy, "state copy")


def read_copy(plan: CopyPlan, read: Callable[[int, int, int], Any], state: State) -> None:
    """Fill tensors [...] in place, whatever layout has copied them; of DTensors each rank reads the part that it holds.
    `read`: gives bytes of the slot of a rank; called with the rank, the first byte, and their number."""
    planner = DefaultLoadPlanner(**_UNSHARDED)
    planner.set_up_planner(dict(state), plan.listed, is_coordinator=True)
    for item in planner.create_local_plan().items:
        entry: Any = plan.listed.state_dict_metadata[item.storage_index.fqn]
        chunk, dtype = entry.chunks[item.storage_index.index], entry.properties.dtype
        rank, start = plan.places[item.storage_index]
        content = read(rank, start, chunk.sizes.numel() * dtype.itemsize)
        copied = torch.frombuffer(content, dtype=dtype).view(chunk.sizes)
        for dim, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            copied = copied.narrow(dim, first, length)
        planner.resolve_tensor(item).detach().copy_(copied)
