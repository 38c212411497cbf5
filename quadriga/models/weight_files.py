# SPDX-License-Identifier: Apache-2.0
"""The weights of a model on disk, read one tensor at a time, from any of these layouts.

    open_weights(folder)
      folder/model.safetensors.index.json   Hugging Face, in shards
      folder/model*.safetensors             Hugging Face, without an index
      folder/.metadata                      torch's distributed checkpoint
      folder/model/.metadata                the same, in a role's part of a checkpoint

A distributed checkpoint is read by its own list of chunks, so it does not matter how many ranks wrote it, nor how the
tensors were cut. That list is a pickle, of which only the classes that it is made of are let through.

Legend: [...] is the shape of a parameter.
"""

import json
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, EnumType
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from quadriga.errors import CheckpointError, DamagedCheckpointError
from quadriga.partition import buckets

SHARD_BYTES = 64 << 20
MODEL = "model"
METADATA = ".metadata"
INDEX = "model.safetensors.index.json"
_ANOTHER = "Use another checkpoint."
_UNSHARDED = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


class WeightFiles(Protocol):
    """Tensors by name; each is read when it is needed."""

    shapes: dict[
        str, torch.Size
    ]  # the whole shape [...] of each, however it was cut, in the order of the files

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor [...], in the dtype in which it was written.
        Raises CheckpointError: its file is missing, cut or damaged."""
        ...


def open_weights(folder: str | Path) -> WeightFiles:
    """The weights of a Hugging Face folder, of a role's part of a checkpoint, or of a distributed checkpoint.
    Raises CheckpointError: there are none, or a file that belongs to them is missing or damaged."""
    folder = Path(folder)
    if place := distributed_folder(folder):
        return DistributedFiles(place, prefix=f"{MODEL}.")
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if (index := folder / INDEX).is_file():
        try:
            files = [
                folder / file
                for file in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            ]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _unreadable(index, error) from error
        # Not resolved: in a hub's cache files are links to where their content is.
        for file in files:
            if not file.is_relative_to(folder) or ".." in file.relative_to(folder).parts:
                raise _leads_outside(index, file)
        if missing := [file for file in files if not file.exists()]:
            raise CheckpointError(
                str(missing[0]), "no such file", f"the file that {INDEX} names", _ANOTHER
            )
    if unreadable := [
        file for file in files if not file.is_file()
    ]:  # a named pipe would be waited for
        raise CheckpointError(
            str(unreadable[0]), "no regular file", "whole files of weights", _ANOTHER
        )
    if not files:
        got = "neither *.safetensors nor a distributed checkpoint"
        fix = "A checkpoint has them when `model` or `hf_model` is in checkpoint.save_contents."
        raise CheckpointError(str(folder), got=got, expected="the weights of a model", fix=fix)
    return SafetensorFiles(files)


def distributed_folder(folder: str | Path) -> Path | None:
    """Where the weights of a folder are, if they are a distributed checkpoint."""
    places = (Path(folder), Path(folder) / MODEL)
    return next((place for place in places if (place / METADATA).is_file()), None)


class SafetensorFiles:
    """Weights of Hugging Face, in safetensors files. CheckpointError: one is missing, cut or damaged."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.shapes: dict[str, torch.Size] = {}
        self._file_of: dict[str, Path] = {}
        for file in files:
            self._open(file)
            for name in self._opened.keys():
                self.shapes[name] = torch.Size(self._opened.get_slice(name).get_shape())
                self._file_of[name] = file

    def read(self, name: str) -> torch.Tensor:
        if (file := self._file_of[name]) != self._file:
            self._open(file)
        try:
            return self._opened.get_slice(name)[...]
        except SafetensorError as error:
            raise _unreadable(file, error) from error

    def _open(self, file: Path) -> None:
        """Open one file and close the last: neighbours stand in the same one."""
        try:
            self._opened: Any = safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise _unreadable(file, error) from error
        self._file = file


class DistributedFiles:
    """A distributed checkpoint, whoever wrote its chunks. `prefix`: of the names of weights; left out here."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._reader, self._prefix = ChunkReader(folder), prefix
        tensors = self._reader.tensors.items()
        self.shapes = {
            name.removeprefix(prefix): entry.size
            for name, entry in tensors
            if name.startswith(prefix)
        }

    def read(self, name: str) -> torch.Tensor:
        name = f"{self._prefix}{name}"
        entry = self._reader.tensors[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        self._reader.read_into({name: tensor})
        return tensor


class RenamedFiles:
    """The tensors of other files; `rename` gives the name that a tensor has here."""

    def __init__(self, files: WeightFiles, rename: Callable[[str], str]) -> None:
        self._files, self._names = files, {rename(name): name for name in files.shapes}
        self.shapes = {own: files.shapes[name] for own, name in self._names.items()}

    def read(self, name: str) -> torch.Tensor:
        return self._files.read(self._names[name])


class ChunkReader(FileSystemReader):
    """Reads a distributed checkpoint of torch without any other process, and without trusting its pickle.
    Raises CheckpointError: the list of chunks is missing or damaged, or a file that it names is missing or cut."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder, path = folder, folder / METADATA
        try:
            with path.open("rb") as file:
                listed = _MetadataUnpickler(file).load()
        # Damaged bytes make the unpickler raise whatever its next instruction happens to be.
        except Exception as error:
            raise _unreadable(path, error) from error
        if not isinstance(listed, Metadata) or listed.storage_data is None:
            raise DamagedCheckpointError(
                str(path), type(listed).__name__, "a list of chunks", _ANOTHER
            )
        ends: dict[str, int] = {}
        for chunk in listed.storage_data.values():
            ends[chunk.relative_path] = max(
                ends.get(chunk.relative_path, 0), chunk.offset + chunk.length
            )
        for name, end in sorted(ends.items()):
            if not (folder / name).resolve().is_relative_to(folder.resolve()):
                raise _leads_outside(path, folder / name)
            size = (folder / name).stat().st_size if (folder / name).is_file() else None
            if size is None or size < end:
                got = "no such file" if size is None else f"{size} bytes"
                raise DamagedCheckpointError(
                    str(folder / name), got, f"at least {end} bytes", _ANOTHER
                )
        self.listed: Metadata = listed
        entries = listed.state_dict_metadata.items()
        self.tensors = {
            name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)
        }
        stored_bytes = Counter[str]()
        for index, chunk in listed.storage_data.items():
            stored_bytes[index.fqn] += chunk.length
        for name, entry in self.tensors.items():
            num_bytes = entry.size.numel() * entry.properties.dtype.itemsize
            if num_bytes > stored_bytes[name]:
                got = f"{num_bytes} bytes for {name}"
                raise DamagedCheckpointError(
                    str(path), got, f"at most the {stored_bytes[name]} that are stored", _ANOTHER
                )
        self.set_up_storage_reader(listed, is_coordinator=True)

    def read_into(self, state: dict[str, torch.Tensor]) -> None:
        """Fill tensors [...] in place, of DTensors this rank's part. CheckpointError: a file is missing or damaged."""
        planner = DefaultLoadPlanner(**_UNSHARDED)
        planner.set_up_planner(state, self.listed, is_coordinator=True)
        try:
            with torch.no_grad():
                self.read_data(planner.create_local_plan(), planner).wait()
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise _unreadable(self.folder, error) from error


def share_with_readers(folder: Path) -> None:
    """Give the safetensors files of a folder its own permissions: the library lets nobody but their owner read them."""
    for file in folder.glob("*.safetensors"):
        file.chmod(folder.stat().st_mode & 0o666)


def write_safetensors(
    folder: Path, weights: WeightFiles, dtype: torch.dtype = torch.float32
) -> None:
    """Write tensors [...] to `model-00001-of-0000N.safetensors` and their index, at most a shard in memory."""
    sizes = {name: shape.numel() * dtype.itemsize for name, shape in weights.shapes.items()}
    shards = list(buckets(sizes, sizes.__getitem__, SHARD_BYTES, lambda name, _: name))
    where: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard = {name: weights.read(name).to(dtype).contiguous() for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
    share_with_readers(folder)
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _unreadable(path: Path, error: Exception) -> DamagedCheckpointError:
    reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    # The error of a missing file names it.
    path = Path(error.filename) if isinstance(error, OSError) and error.filename else path
    return DamagedCheckpointError(
        str(path), got=reason, expected="whole files of weights", fix=_ANOTHER
    )


def _leads_outside(listing: Path, file: Path) -> CheckpointError:
    got = f"{file}{f', a link to {file.resolve()}' if file.is_symlink() else ''}"
    return CheckpointError(str(listing), got=got, expected="files in its own folder", fix=_ANOTHER)


class _MetadataUnpickler(pickle.Unpickler):
    """Makes what a list of chunks consists of, and nothing else."""

    _CLASSES = frozenset(
        {
            *(
                (metadata.__name__, name)
                for name in ("Metadata", "TensorStorageMetadata", "TensorProperties")
            ),
            *(
                (metadata.__name__, name)
                for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta")
            ),
            (metadata.__name__, "_MEM_FORMAT_ENCODING"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
            # Where torch's own writer wrote to. Python 3.13 has the classes in another module.
            *(
                (module, name)
                for module in ("pathlib", "pathlib._local")
                for name in ("PosixPath", "WindowsPath")
            ),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """A class of the list, a dtype of torch, or what Python up to 3.11.3 finds a member of an enum with."""
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in self._CLASSES and not is_dtype:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no list of chunks has")
        return super().find_class(module, name)


def _member(owner: object, name: str) -> Enum:
    if not isinstance(owner, EnumType):
        raise pickle.UnpicklingError(f"it asks {owner!r} for {name}, which is no member of an enum")
    return owner[name]
