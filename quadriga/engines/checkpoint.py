# SPDX-License-Identifier: Apache-2.0
"""The state of an engine on disk: torch's distributed checkpoint, written while training goes on, read on any layout.

    rank 0                        rank 1                        who waits
      start                         start                       the callers, together:
        plans  <---------------------->                           who writes which chunk
        copies of its chunks          copies of its chunks        from here on the engine may change them
          | thread: its file            | thread: its file      no rank
      is_written <---- outcomes ----> is_written                only with `wait`
          | thread: list of chunks,
          |         then `afterwards`
      is_written <---- outcome  ----> is_written                only with `wait`

Threads call no collective, so they cannot get in the way of those of training. What is equal on several ranks is
written by one of them. Without the list of chunks, written last, a folder is no checkpoint.

Legend: [...] is the shape of a parameter, or of a rank's part of it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from traceback import format_exception
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from quadriga.background import in_background
from quadriga.engines.process_group import ProcessGroup
from quadriga.errors import CheckpointError
from quadriga.models.weight_files import METADATA, ChunkReader

State = Mapping[str, torch.Tensor]
"""Tensors by name, plain where one rank holds them whole, DTensors where several do."""

_OTHER_MODEL = "Resume with the model that the checkpoint was made of."


@dataclass(frozen=True)
class _Outcome:
    """What a thread came to: the chunks that it wrote, folder by folder, or the error; neither: it is at work."""

    is_over: bool
    written: list[list[WriteResult]] = field(default_factory=list)
    error: CheckpointError | None = None


class StateWriter:
    """Writes states in the background, one after the other. All ranks of an engine call the same in turn.

    Args:
        world: all ranks of the engine.
    """

    def __init__(self, world: ProcessGroup) -> None:
        self.world = world
        self._folders: list[_Folder] = []
        self._afterwards: Callable[[], None] | None = None
        self._chunks: Future[list[list[WriteResult]]] | None = None
        self._rest: Future[list[list[WriteResult]]] | None = None

    def start(self, states: Mapping[Path, State], afterwards: Callable[[], None] | None = None) -> None:
        """Copy what this rank is to write, and begin to write it. The state may be changed when this returns.

        Args:
            states: the tensors [...] of each folder; the folders are made. The same on all ranks but for the tensors.
            afterwards: called in a thread of rank 0 when all folders are complete.

        Raises:
            CheckpointError: a folder cannot be made, or the last state could not be written.
        """
        self.is_written(wait=True)
        self._afterwards = afterwards
        self._folders = [_Folder(folder, state, self.world) for folder, state in states.items()]
        if self.world.size > 1:
            self._chunks = in_background(self._write, "checkpoint")
        else:
            self._rest = in_background(lambda: self._complete([self._write()]), "checkpoint")

    def is_written(self, *, wait: bool = False) -> bool:
        """Whether the last state is complete on disk, on all ranks.

        Args:
            wait: until it is.

        Raises:
            CheckpointError: on all processes: one of them could not write its part. There is then nothing more to do.
        """
        if self._chunks is not None:
            written = self._outcomes(self._chunks, wait)
            if written is None:
                return False
            self._chunks = None
            self._rest = in_background(lambda: self._complete(written), "checkpoint")
        if self._rest is not None:
            if self._outcomes(self._rest, wait) is None:
                return False
            self._rest = None
        self._folders, self._afterwards = [], None
        return True

    def _write(self) -> list[list[WriteResult]]:
        return [folder.write() for folder in self._folders]

    def _complete(self, written: list[list[list[WriteResult]]]) -> list[list[WriteResult]]:
        if self.world.is_first:
            for number, folder in enumerate(self._folders):
                folder.complete([of_rank[number] for of_rank in written])
            if self._afterwards is not None:
                self._afterwards()
        return []

    def _outcomes(self, future: Future[list[list[WriteResult]]], wait: bool) -> list[list[list[WriteResult]]] | None:
        """What all ranks have written, if all are through."""
        outcomes = self.world.gather(_look(future, wait))
        try:
            _raise_first(outcomes)
        except CheckpointError:
            self._chunks = self._rest = None
            self._folders, self._afterwards = [], None
            raise
        return [outcome.written for outcome in outcomes] if all(outcome.is_over for outcome in outcomes) else None


def _look(future: Future[list[list[WriteResult]]], wait: bool) -> _Outcome:
    if not wait and not future.done():
        return _Outcome(is_over=False)
    error = future.exception()
    if error is None:
        return _Outcome(is_over=True, written=future.result())
    if isinstance(error, CheckpointError):
        return _Outcome(is_over=True, error=error)
    trace = "".join(format_exception(error))
    unknown = CheckpointError("writing a checkpoint", got=f"{type(error).__name__}: {error}", expected="no such error")
    unknown.add_note(trace)
    return _Outcome(is_over=True, error=unknown)


def _raise_first(outcomes: Sequence[_Outcome]) -> None:
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error


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
        named = Path(error.filename) if isinstance(error, OSError) and error.filename else where
        reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        raise CheckpointError(str(named), got=reason, expected="room and permission to write it") from error


def _make(folder: Path) -> _Outcome:
    try:
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
    except CheckpointError as error:
        return _Outcome(is_over=True, error=error)
    return _Outcome(is_over=True)


class _Folder:
    """One distributed checkpoint in the making, and this rank's part of it.

    Args:
        folder: is made.
        state: what this rank holds.
        world: all who write.
    """

    def __init__(self, folder: Path, state: State, world: ProcessGroup) -> None:
        self.folder = folder
        self._writer = _Writer(folder, single_file_per_rank=True, thread_count=1, sync_files=True)
        self._writer.set_up_storage_writer(world.is_first)
        self._planner = _Copies()
        self._planner.set_up_planner(dict(state), is_coordinator=world.is_first)
        _raise_first(world.gather(_make(folder)))
        plans = world.gather(self._writer.prepare_local_plan(self._planner.create_local_plan()))
        # Every rank makes the same plan of all plans, so that nothing need be sent back.
        plans, self._listed = self._planner.create_global_plan(plans)
        self._plan: SavePlan = self._planner.finish_plan(self._writer.prepare_global_plan(plans)[world.rank])
        self._planner.copy({item.index.fqn for item in self._plan.items})

    def write(self) -> list[WriteResult]:
        """Write this rank's chunks. Called in a thread."""
        if not self._plan.items:
            return []
        with explained(self.folder):
            results = self._writer.write_data(self._plan, self._planner).wait()
        self._planner.copies.clear()
        return results

    def complete(self, written: list[list[WriteResult]]) -> None:
        """Write the list of chunks, after all have written theirs, and look whether all is there. In a thread."""
        with explained(self.folder):
            self._writer.finish(self._listed, written)
        found = ChunkReader(self.folder)
        num_chunks = sum(len(entry.chunks) for entry in found.tensors.values())
        if len(found.listed.storage_data) != num_chunks:
            raise CheckpointError(
                str(self.folder),
                got=f"{len(found.listed.storage_data)} chunks written",
                expected=f"the {num_chunks} that were planned",
            )


class _Writer(FileSystemWriter):
    """Notes neither a path, which changes when the checkpoint gets its name, nor a random number."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


class _Copies(DefaultSavePlanner):
    """Plans with the engine's tensors, and hands out copies of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.copies: dict[str, torch.Tensor] = {}

    def copy(self, names: Collection[str]) -> None:
        """Copy what this rank holds of these tensors into main memory, and let go of the tensors."""
        for name in sorted(names):
            tensor = self.state_dict[name].detach()
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self.copies[name] = local.to("cpu", copy=True, memory_format=torch.contiguous_format)
        self.state_dict = {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.copies[index.fqn]


def load_state(folder: Path, state: State, world: ProcessGroup) -> None:
    """Fill the tensors [...] of a state in place, whatever layout wrote them. All ranks of the engine call it.

    Args:
        folder: what `StateWriter` has written.
        state: room for all of it; of DTensors each rank reads the part that it holds.
        world: all ranks of the engine.

    Raises:
        CheckpointError: on all ranks alike: there is no such state, it is damaged, or is that of another model or
            optimizer. Nothing was changed then, unless a file turns out to be damaged while it is read.
    """
    reader, outcome = None, _Outcome(is_over=True)
    try:
        reader = _open(folder)
    except CheckpointError as error:
        outcome = _Outcome(is_over=True, error=error)
    _raise_first(world.gather(outcome))
    assert reader is not None
    shapes: dict[str, torch.Size] = {}
    for of_rank in world.gather({name: tensor.shape for name, tensor in state.items()}):
        shapes |= of_rank
    _require_fit(folder, reader.listed, shapes)
    reader.read_into(dict(state))


def _open(folder: Path) -> ChunkReader:
    if not (folder / METADATA).is_file():
        raise CheckpointError(
            str(folder),
            got="no such part of the checkpoint",
            expected=f"{folder.name!r}, as load_contents says",
            fix=f"Leave {folder.name!r} out of checkpoint.load_contents, or resume from a checkpoint that has it.",
        )
    return ChunkReader(folder)


def _require_fit(folder: Path, listed: Metadata, shapes: Mapping[str, torch.Size]) -> None:
    sizes = {name: getattr(entry, "size", None) for name, entry in listed.state_dict_metadata.items()}
    kinds, expected_kinds = _kinds(sizes), _kinds(shapes)
    if kinds != expected_kinds:
        raise CheckpointError(
            str(folder),
            got=f"what another optimizer keeps: {', '.join(sorted(kinds)) or 'nothing'}",
            expected=", ".join(sorted(expected_kinds)),
            fix="Resume with the optimizer that the checkpoint was made with, or leave 'optimizer' out of "
            "checkpoint.load_contents: it then starts anew.",
        )
    unknown, missing = sorted(set(sizes) - set(shapes)), sorted(set(shapes) - set(sizes))
    if unknown or missing:
        raise CheckpointError(
            str(folder),
            got=f"{len(unknown)} unknown and {len(missing)} missing tensors, first {[*unknown, *missing][0]}",
            expected="the tensors of this model",
            fix=_OTHER_MODEL,
        )
    unlike = sorted(name for name, shape in shapes.items() if sizes[name] != shape)
    if unlike:
        raise CheckpointError(
            f"{folder}: {unlike[0]}",
            got=f"shape {tuple(sizes[unlike[0]])}" + (f", and {len(unlike) - 1} more" if len(unlike) > 1 else ""),
            expected=f"{tuple(shapes[unlike[0]])}",
            fix=_OTHER_MODEL,
        )


def _kinds(names: Collection[str]) -> set[str]:
    """What an optimizer keeps: `exp_avg` of `optimizer.exp_avg.lm_head.weight`."""
    return {name.split(".")[1] for name in names if name.startswith("optimizer.")}
