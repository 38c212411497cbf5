# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of an engine's state, written while training continues, and read by any layout.

`StateWriter` writes the state to disk as a distributed checkpoint of torch. `StateCopier` copies it
to shared memory, which outlives the process.

    rank 0                        rank 1                        who waits
      start                         start                       all callers, together:
        plans  <---------------------->                           who writes which chunk
        copies of its chunks          copies of its chunks        then the engine may change them
          | thread: its file            | thread: its file      nobody
      is_written <---- outcomes ----> is_written                only with `wait`
          | thread: list of chunks,
          |         then `afterwards`
      is_written <---- outcome  ----> is_written                only with `wait`

    memory of a rank    | step | sum | chunk | chunk ... | step | sum | chunk | chunk ... |
                          slot of the even steps           slot of the odd steps

Threads call no collectives, so they cannot interfere with those of training. A tensor that several
ranks hold in full is written by one of them. A folder without the list of chunks, which is written
last, is no checkpoint. The next optimizer step of the engine waits for a copy in memory. The `step`
of a slot is 0 until its last byte is written. If a rank dies while it copies, its other slot still
has the previous step.

Legend: [...] is the shape of a parameter, or of a rank's shard of it.
"""

import mmap
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from quadriga.background import in_background
from quadriga.engines.process_group import ProcessGroup
from quadriga.errors import CheckpointError
from quadriga.models.weight_files import METADATA, ChunkReader
from quadriga.protocol.memory import SLOT_HEADER_BYTES, slot_of

State = Mapping[str, Tensor]
"""Tensors by name: DTensors if several ranks hold shards, plain tensors otherwise."""
WrittenChunks = list[list[WriteResult]]
"""The chunks that a rank has written: one list for each folder."""
# For torch's planners: states are flat already, and their names must not change.
_KEEP_NAMES = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
_OTHER_MODEL = "Resume with the model that the checkpoint was made from."


class StateWriter:
    """Writes states in the background, one after the other. All ranks make the same calls.

    Args:
        world: all ranks of the engine.
    """

    def __init__(self, world: ProcessGroup) -> None:
        self.world = world
        # Outcome of the running thread; None if nothing is being written.
        self._thread: Future[WrittenChunks] | None = None
        # Runs in a second thread, once all ranks have written their chunks.
        self._completion: Callable[[list[WrittenChunks]], WrittenChunks] | None = None

    def start(
        self, states: Mapping[Path, State], afterwards: Callable[[], None] | None = None
    ) -> None:
        """Copy this rank's chunks, and start to write them. The state may change on return.

        First waits until the previous state is written.

        Args:
            states: tensors [...] for each folder, which is created. Names and folders are the same
                on all ranks.
            afterwards: called in a thread of rank 0 once all folders are complete.

        Raises:
            CheckpointError: a folder cannot be created, or the previous state could not be written.
        """
        self.is_written(wait=True)
        folders = [_FolderChunks(folder, state, self.world) for folder, state in states.items()]

        def write() -> WrittenChunks:
            """Write this rank's chunks."""
            return [chunks.write() for chunks in folders]

        def complete(written: list[WrittenChunks]) -> WrittenChunks:
            """On rank 0, complete each folder. Returns no chunks, since it writes none."""
            if self.world.is_first:
                for number, chunks in enumerate(folders):
                    chunks.complete([by_folder[number] for by_folder in written])
                if afterwards is not None:
                    afterwards()
            return []

        if self.world.size > 1:
            # `is_written` starts the completion when all ranks have written their chunks.
            self._thread = in_background(write, "checkpoint")
            self._completion = complete
        else:
            self._thread = in_background(lambda: complete([write()]), "checkpoint")

    def is_written(self, *, wait: bool = False) -> bool:
        """Whether the last state is complete on disk, on all ranks.

        If all ranks have written their chunks, this starts the thread that completes the folders.

        Args:
            wait: whether to wait until it is complete.

        Returns:
            True if it is complete, or if no state was started.

        Raises:
            CheckpointError: on all ranks, if one of them could not write. The state is given up.
        """
        # At most two rounds: the chunks of all ranks, then their completion.
        while self._thread is not None:
            thread = self._thread
            is_done = wait or thread.done()
            error = None
            written = None
            if is_done:
                error = thread.exception()  # waits until the thread has ended
                written = thread.result() if error is None else None
            if error is not None and not isinstance(error, CheckpointError):
                trace = "".join(format_exception(error))
                error = CheckpointError(
                    "writing a checkpoint",
                    got=f"{type(error).__name__}: {error}",
                    expected="no such error",
                )
                error.add_note(trace)

            # All ranks decide by the same outcomes, so they continue or raise together.
            outcomes = self.world.gather((is_done, written, error))
            errors = [error for _, _, error in outcomes if error is not None]
            if not errors and not all(is_done for is_done, _, _ in outcomes):
                return False
            completion = self._completion
            self._thread = None
            self._completion = None
            if errors:
                raise errors[0]
            if completion is not None:
                # On all ranks, so that all make a second round, although only rank 0 has work in it.
                complete = partial(completion, [written for _, written, _ in outcomes])
                self._thread = in_background(complete, "checkpoint")
        return True


def _gather_or_raise(world: ProcessGroup, value: Any, error: CheckpointError | None) -> list[Any]:
    """Gather a value from each rank. If any rank has an error, all ranks raise the first one."""
    outcomes = world.gather((value, error))
    for _, rank_error in outcomes:
        if rank_error is not None:
            raise rank_error
    return [value for value, _ in outcomes]


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Context manager: turn errors of writing into a CheckpointError that names the file.

    Args:
        path: file or folder that is written, for errors that do not name a file.
    """
    try:
        yield
    except CheckpointError:
        raise
    # A full disk is an OSError in Python, a SafetensorError in safetensors, a RuntimeError in
    # torch, and a bare Exception in tokenizers.
    except Exception as error:
        # torch's writer raises "unexpected pos 64 vs 0" over the error of the disk: look below it.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if isinstance(cause, OSError) and cause.filename:
            path = Path(cause.filename)
        reported = cause or error
        raise CheckpointError(
            str(path),
            got=f"{type(reported).__name__}: {reported}".strip().partition("\n")[0],
            expected="space and permission to write it",
        ) from error


class _FolderChunks(DefaultSavePlanner):
    """This rank's chunks of a distributed checkpoint, copied from the engine's tensors.

    Args:
        folder: folder of the checkpoint, created here.
        state: tensors [...] of the state.
        world: all ranks, which create it together.

    Raises:
        CheckpointError: on all ranks, if one cannot create the folder.
    """

    def __init__(self, folder: Path, state: State, world: ProcessGroup) -> None:
        super().__init__(**_KEEP_NAMES)
        self.folder = folder
        self._writer: Any = FileSystemWriter(
            folder, single_file_per_rank=True, thread_count=1, sync_files=True
        )
        # torch writes what this method returns to the list of chunks: the path of the folder, which
        # changes later, and a random number. An empty `StorageMeta` has neither.
        self._writer.storage_meta = StorageMeta
        self._writer.set_up_storage_writer(world.is_first)
        self.set_up_planner(dict(state), is_coordinator=world.is_first)

        folder_error = None
        try:
            with explain_write_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
        except CheckpointError as error:
            folder_error = error
        # Every rank makes the same global plan from all local plans, so no rank has to send it.
        local_plans = _gather_or_raise(world, self.create_local_plan(), folder_error)
        plans, _ = self.create_global_plan(local_plans)
        self.finish_plan(self._writer.prepare_global_plan(plans)[world.rank])

        self._copies = {}
        # `fqn` is torch's term for the name of a tensor, of which several chunks may be written.
        for name in sorted({item.index.fqn for item in self.plan.items}):
            local = _local_tensor(state[name])
            self._copies[name] = local.to("cpu", copy=True, memory_format=torch.contiguous_format)
        # The planner must not keep the engine's tensors, which change during the write.
        self.state_dict = {}

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Give torch's writer the copy in place of the engine's tensor."""
        return self._copies[index.fqn]

    def write(self) -> list[WriteResult]:
        """Write this rank's chunks, and free the copies. Called in a thread."""
        if not self.plan.items:
            return []
        with explain_write_errors(self.folder):
            results = self._writer.write_data(self.plan, self).wait()
        self._copies.clear()
        return results

    def complete(self, written: list[list[WriteResult]]) -> None:
        """Write the list of all chunks, and check that none is missing. Called in a thread.

        Args:
            written: the chunks that each rank has written.

        Raises:
            CheckpointError: the list cannot be written, or chunks are missing.
        """
        with explain_write_errors(self.folder):
            self._writer.finish(self.metadata, written)
        reader = ChunkReader(self.folder)
        num_planned = sum(len(tensor.chunks) for tensor in reader.tensors.values())
        num_written = len(reader.chunk_list.storage_data)
        if num_written != num_planned:
            raise CheckpointError(
                str(self.folder),
                got=f"{num_written} chunks written",
                expected=f"the {num_planned} that were planned",
            )


def _local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, or a plain tensor itself, detached."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load_state(folder: Path, state: State, world: ProcessGroup) -> None:
    """Load a state into its tensors, whatever layout wrote it. All ranks call it together.

    Args:
        folder: folder of the state.
        state: tensors [...] to fill; of a DTensor, each rank reads its shard.
        world: all ranks.

    Raises:
        CheckpointError: on all ranks, if the folder has no state, the state is damaged, or it
            belongs to another model or optimizer. No tensor has been changed then, unless a file
            turns out to be damaged while it is read.
    """
    reader = None
    reader_error = None
    try:
        if not (folder / METADATA).is_file():
            raise CheckpointError(
                str(folder),
                got="no such part of the checkpoint",
                expected=f"{folder.name!r}, as load_contents says",
                fix=f"Leave {folder.name!r} out of checkpoint.load_contents, or resume from a "
                "checkpoint that has it.",
            )
        reader = ChunkReader(folder)
    except CheckpointError as error:
        reader_error = error
    # A pipeline stage has only some of the tensors, so the stages' shapes are merged.
    local_shapes = {name: tensor.shape for name, tensor in state.items()}
    shapes = dict(ChainMap(*_gather_or_raise(world, local_shapes, reader_error)))
    assert reader is not None, "a failed reader raises above"
    _require_same_tensors(folder, reader.chunk_list, shapes)
    reader.read_into(dict(state))


def _require_same_tensors(
    folder: Path, chunk_list: Metadata, shapes: Mapping[str, torch.Size]
) -> None:
    """Check that a checkpoint has the tensors of this model and optimizer.

    Args:
        folder: folder of the state.
        chunk_list: torch's description of the tensors in it.
        shapes: shapes of this model's tensors, by name.

    Raises:
        CheckpointError: a name or a shape differs.
    """
    entries = chunk_list.state_dict_metadata.items()
    sizes = {name: getattr(entry, "size", None) for name, entry in entries}

    # Checked first, because this message says more: with another optimizer, all tensors of the
    # optimizer are unknown or missing.
    kinds = _optimizer_kinds(sizes)
    expected_kinds = _optimizer_kinds(shapes)
    if kinds != expected_kinds:
        raise CheckpointError(
            str(folder),
            got=f"what another optimizer keeps: {', '.join(kinds) or 'nothing'}",
            expected=", ".join(expected_kinds),
            fix="Resume with the optimizer that the checkpoint was made with, or leave 'optimizer' "
            "out of checkpoint.load_contents: it then starts anew.",
        )

    unknown = sorted(sizes.keys() - shapes.keys())
    missing = sorted(shapes.keys() - sizes.keys())
    if unknown or missing:
        first = [*unknown, *missing][0]
        raise CheckpointError(
            str(folder),
            got=f"{len(unknown)} unknown and {len(missing)} missing tensors, first {first}",
            expected="the tensors of this model",
            fix=_OTHER_MODEL,
        )

    differing = sorted(name for name, shape in shapes.items() if sizes[name] != shape)
    if differing:
        first = differing[0]
        got = f"shape {tuple(sizes[first])}"
        if len(differing) > 1:
            got += f", and {len(differing) - 1} more"
        raise CheckpointError(f"{folder}: {first}", got, f"{tuple(shapes[first])}", _OTHER_MODEL)


def _optimizer_kinds(names: Iterable[str]) -> list[str]:
    """Find the kinds of an optimizer's tensors: `exp_avg` in `optimizer.exp_avg.lm_head.weight`."""
    return sorted({name.split(".")[1] for name in names if name.startswith("optimizer.")})


@dataclass(frozen=True)
class CopyPlan:
    """Assignment of a state's chunks to ranks, and their offsets in the memory of each rank."""

    chunk_list: Metadata  # shape, dtype and chunks of each tensor
    locations: dict[MetadataIndex, tuple[int, int]]  # rank, and first byte in a slot, of each chunk
    slot_bytes: list[int]  # size of a slot, by rank


class StateCopier:
    """Copies the state of an engine to shared memory after each step. All ranks create it together.

    Call `open` once, before the first `start`.

    Args:
        state: tensors [...] that the engine changes in place and never replaces.
        world: all ranks.

    Attributes:
        plan: which chunk is copied where; the same on all ranks.
    """

    def __init__(self, state: State, world: ProcessGroup) -> None:
        planner = DefaultSavePlanner(**_KEEP_NAMES)
        planner.set_up_planner(dict(state), is_coordinator=world.is_first)
        plans, chunk_list = planner.create_global_plan(world.gather(planner.create_local_plan()))
        self.plan = CopyPlan(chunk_list, {}, [])
        self._chunks = []  # first byte in a slot, and tensor, of each chunk of this rank
        # Lay out the chunks of each rank in its slot, one after the other, behind the header.
        for rank, plan in enumerate(plans):
            end = SLOT_HEADER_BYTES
            for item in plan.items:
                self.plan.locations[item.index] = (rank, end)
                if rank == world.rank:
                    self._chunks.append((end, _local_tensor(state[item.index.fqn])))
                data = item.tensor_data
                size = data.chunk.sizes.numel() * data.properties.dtype.itemsize
                # Rounded up to a multiple of the header's size, so that every chunk starts at an
                # aligned address.
                end += -(-size // SLOT_HEADER_BYTES) * SLOT_HEADER_BYTES
            self.plan.slot_bytes.append(end)

    def open(self, path: str) -> None:
        """Map the file to copy into, which must have space for two slots.

        Raises:
            OSError: the file cannot be opened or mapped.
        """
        with open(path, "r+b") as file:
            self._memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)

    def start(self, step: int, on_host: Callable[[Tensor], Tensor] | None = None) -> Future[None]:
        """Start to copy the state after a step.

        Args:
            step: number of the step, starting at 1.
            on_host: returns the host copy of a tensor [...] if the tensor is offloaded, else the
                tensor itself. None: no tensor is offloaded.

        Returns:
            A future of the copy. The state must not change until it is done.
        """
        slot = slot_of(self._memory, step)
        header = slot[:16].view(torch.int64)  # the step and the checksum
        chunks = []
        windows = []
        for start, chunk in self._chunks:
            chunks.append(chunk if on_host is None else on_host(chunk))
            flat = slot[start : start + chunk.nbytes]
            windows.append(flat.view(chunk.dtype).view(chunk.shape))

        stream = None
        devices = {chunk.device for chunk in chunks if chunk.is_cuda}
        if devices:
            # In the default stream, computation would wait for the copies.
            stream = torch.cuda.Stream(devices.pop())
            stream.wait_stream(torch.cuda.current_stream(stream.device))

        @torch.no_grad()
        def copy() -> None:
            """Copy the chunks, and write the header."""
            # Step 0 marks the slot as incomplete until the last line.
            header[0] = 0
            with torch.cuda.stream(stream):  # does nothing for None
                torch._foreach_copy_(windows, chunks)
            # A checksum of all bytes behind the header, by which a reader detects damage.
            header[1] = slot[SLOT_HEADER_BYTES:].view(torch.int64).sum()
            header[0] = step

        return in_background(copy, "state copy")


def read_copy(plan: CopyPlan, read: Callable[[int, int, int], Any], state: State) -> None:
    """Load a copy from shared memory into a state, whatever layout made it.

    Args:
        plan: the plan of the copy.
        read: reads from a rank's slot. Called with the rank, the offset of the first byte, and the
            number of bytes. Returns the bytes.
        state: tensors [...] to fill; of a DTensor, each rank reads its shard.
    """
    planner = DefaultLoadPlanner(**_KEEP_NAMES)
    planner.set_up_planner(dict(state), plan.chunk_list, is_coordinator=True)
    for item in planner.create_local_plan().items:
        entry: Any = plan.chunk_list.state_dict_metadata[item.storage_index.fqn]
        chunk = entry.chunks[item.storage_index.index]
        dtype = entry.properties.dtype
        rank, start = plan.locations[item.storage_index]
        content = read(rank, start, chunk.sizes.numel() * dtype.itemsize)
        copied = torch.frombuffer(content, dtype=dtype).view(chunk.sizes)
        # Cut out the block of the chunk that this rank needs.
        for dim, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            copied = copied.narrow(dim, first, length)
        # The planner finds the part of this rank's tensor that the block fills.
        planner.resolve_tensor(item).detach().copy_(copied)
