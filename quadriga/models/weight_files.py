# SPDX-License-Identifier: Apache-2.0
"""A model's weights on disk, read one tensor at a time, from any of these layouts.

    open_weights(folder)
      folder/model.safetensors.index.json   Hugging Face, in shards
      folder/model*.safetensors             Hugging Face, without an index
      folder/.metadata                      torch's distributed checkpoint
      folder/model/.metadata                the same, in the folder of a role's checkpoint

A distributed checkpoint lists its chunks, so it can be read no matter how many ranks wrote it, and
how they sharded the tensors. The list is a pickle, of which only the classes that such a list
consists of are unpickled.

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
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from quadriga.errors import CheckpointError, DamagedCheckpointError
from quadriga.partition import buckets

SHARD_BYTES = 64 << 20
MODEL = "model"
METADATA = ".metadata"
INDEX = "model.safetensors.index.json"
_ANOTHER = "Use another checkpoint."


class WeightFiles(Protocol):
    """Named tensors on disk, each read on demand.

    Attributes:
        shapes: full shape [...] of each tensor, even if it is sharded, in the order of the files.
    """

    shapes: dict[str, torch.Size]

    def read(self, name: str) -> Tensor:
        """Read a full tensor [...], in the dtype in which it was written.

        Raises:
            CheckpointError: its file is missing, truncated or damaged.
        """
        ...


def open_weights(folder: str | Path) -> WeightFiles:
    """Open the weights of a Hugging Face folder, a role's checkpoint or a distributed checkpoint.

    Raises:
        CheckpointError: the folder has no weights, or a file is missing or damaged.
    """
    folder = Path(folder)
    checkpoint = distributed_folder(folder)
    if checkpoint is not None:
        return DistributedFiles(checkpoint, prefix=f"{MODEL}.")
    if (folder / INDEX).is_file():
        files = _files_of_index(folder)
    else:
        files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    for file in files:
        # Opening a named pipe would block.
        if not file.is_file():
            raise CheckpointError(str(file), "no regular file", "whole files of weights", _ANOTHER)
    if not files:
        raise CheckpointError(
            str(folder),
            got="neither *.safetensors nor a distributed checkpoint",
            expected="the weights of a model",
            fix="A checkpoint has them when checkpoint.save_contents lists `model` or `hf_model`.",
        )
    return SafetensorFiles(files)


def _files_of_index(folder: Path) -> list[Path]:
    """List the files that the index of a folder names.

    Args:
        folder: folder with an index.

    Returns:
        The files, by name.

    Raises:
        CheckpointError: the index is damaged, or names a file that is missing or outside of the
            folder.
    """
    index = folder / INDEX
    try:
        file_names = set(json.loads(index.read_bytes())["weight_map"].values())
        files = [folder / name for name in sorted(file_names)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable_error(index, error) from error
    for file in files:
        # Compare paths without resolving links: in a hub's cache, files are links to other folders.
        if not file.is_relative_to(folder) or ".." in file.relative_to(folder).parts:
            raise _outside_error(index, file)
        if not file.exists():
            raise CheckpointError(
                str(file), "no such file", f"the file that {INDEX} names", _ANOTHER
            )
    return files


def distributed_folder(folder: str | Path) -> Path | None:
    """Find the distributed checkpoint in a folder or its `model` folder; None if there is none."""
    for candidate in (Path(folder), Path(folder) / MODEL):
        if (candidate / METADATA).is_file():
            return candidate
    return None


class SafetensorFiles:
    """Hugging Face weights in safetensors files.

    Args:
        files: the files.

    Raises:
        CheckpointError: a file is missing, truncated or damaged.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.shapes: dict[str, torch.Size] = {}
        self._file_of = {}
        for file in files:
            self._open(file)
            for name in self._opened.keys():
                self.shapes[name] = torch.Size(self._opened.get_slice(name).get_shape())
                self._file_of[name] = file

    def read(self, name: str) -> Tensor:
        """Read a whole tensor [...]."""
        file = self._file_of[name]
        if file != self._file:
            self._open(file)
        try:
            return self._opened.get_slice(name)[...]
        except SafetensorError as error:
            raise _unreadable_error(file, error) from error

    def _open(self, file: Path) -> None:
        """Open a file, and keep it open: consecutive tensors are mostly in the same file."""
        try:
            self._opened: Any = safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise _unreadable_error(file, error) from error
        self._file = file


class DistributedFiles:
    """Weights in a distributed checkpoint of torch.

    Args:
        folder: folder with `.metadata`.
        prefix: prefix of the weights' names in the checkpoint. Their names here are without it.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self._reader = ChunkReader(folder)
        self._prefix = prefix
        self.shapes: dict[str, torch.Size] = {}
        for name, entry in self._reader.tensors.items():
            if name.startswith(prefix):
                self.shapes[name.removeprefix(prefix)] = entry.size

    def read(self, name: str) -> Tensor:
        """Read a whole tensor [...]."""
        name = f"{self._prefix}{name}"
        entry = self._reader.tensors[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        self._reader.read_into({name: tensor})
        return tensor


class RenamedFiles:
    """Tensors of other files under new names.

    Args:
        files: the tensors under their old names.
        rename: maps an old name to the new one.
    """

    def __init__(self, files: WeightFiles, rename: Callable[[str], str]) -> None:
        self._files = files
        self._old_names = {rename(name): name for name in files.shapes}
        self.shapes = {name: files.shapes[old] for name, old in self._old_names.items()}

    def read(self, name: str) -> Tensor:
        """Read a whole tensor [...]."""
        return self._files.read(self._old_names[name])


class ChunkReader(FileSystemReader):
    """Reads a distributed checkpoint in a single process. Its pickle cannot run any code.

    Args:
        folder: folder of the checkpoint.

    Attributes:
        chunk_list: the checkpoint's list of chunks.
        tensors: size and dtype of each tensor, by name.

    Raises:
        CheckpointError: the list of chunks is missing or damaged, or a file that it names is
            missing, truncated or outside of the folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.chunk_list = self._load_chunk_list()
        self.tensors: dict[str, TensorStorageMetadata] = {}
        for name, entry in self.chunk_list.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self.tensors[name] = entry
        self._require_complete_files()
        self._require_complete_tensors()
        self.set_up_storage_reader(self.chunk_list, is_coordinator=True)

    def _load_chunk_list(self) -> Metadata:
        """Unpickle the list of chunks. Raises CheckpointError if it is damaged."""
        path = self.folder / METADATA
        try:
            with path.open("rb") as file:
                chunk_list = _MetadataUnpickler(file).load()
        # Damaged bytes are read as arbitrary pickle instructions, which can raise anything.
        except Exception as error:
            raise _unreadable_error(path, error) from error
        if not isinstance(chunk_list, Metadata) or chunk_list.storage_data is None:
            raise DamagedCheckpointError(
                str(path), type(chunk_list).__name__, "a list of chunks", _ANOTHER
            )
        return chunk_list

    def _require_complete_files(self) -> None:
        """Check that each file exists and is long enough for its last chunk.

        Raises:
            CheckpointError: a file is missing, truncated, or outside of the folder.
        """
        # Minimum size of each file: the end of its last chunk.
        ends = {}
        for chunk in self.chunk_list.storage_data.values():
            end = chunk.offset + chunk.length
            ends[chunk.relative_path] = max(ends.get(chunk.relative_path, 0), end)
        for name, end in sorted(ends.items()):
            file = self.folder / name
            if not file.resolve().is_relative_to(self.folder.resolve()):
                raise _outside_error(self.folder / METADATA, file)
            expected = f"at least {end} bytes"
            if not file.is_file():
                raise DamagedCheckpointError(str(file), "no such file", expected, _ANOTHER)
            size = file.stat().st_size
            if size < end:
                raise DamagedCheckpointError(str(file), f"{size} bytes", expected, _ANOTHER)

    def _require_complete_tensors(self) -> None:
        """Check that the chunks of each tensor have all of its bytes.

        A damaged list might otherwise cause a huge allocation.

        Raises:
            CheckpointError: the shape of a tensor needs more bytes.
        """
        stored_bytes = Counter[str]()
        for index, chunk in self.chunk_list.storage_data.items():
            stored_bytes[index.fqn] += chunk.length
        for name, entry in self.tensors.items():
            num_bytes = entry.size.numel() * entry.properties.dtype.itemsize
            if num_bytes > stored_bytes[name]:
                raise DamagedCheckpointError(
                    str(self.folder / METADATA),
                    got=f"{num_bytes} bytes for {name}",
                    expected=f"at most the {stored_bytes[name]} that are stored",
                    fix=_ANOTHER,
                )

    def read_into(self, state: dict[str, Tensor]) -> None:
        """Fill tensors [...] in place; of a DTensor, this rank's shard.

        Args:
            state: the tensors by name.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, self.chunk_list, is_coordinator=True)
        try:
            with torch.no_grad():
                self.read_data(planner.create_local_plan(), planner).wait()
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise _unreadable_error(self.folder, error) from error


def set_readable(folder: Path) -> None:
    """Give the safetensors files of a folder the folder's read and write permissions.

    The safetensors library writes files that only their owner can read.
    """
    for file in folder.glob("*.safetensors"):
        file.chmod(folder.stat().st_mode & 0o666)


def write_safetensors(
    folder: Path, weights: WeightFiles, dtype: torch.dtype = torch.float32
) -> None:
    """Write `model-00001-of-0000N.safetensors` and their index, with one shard in memory at a time.

    Args:
        folder: an existing folder.
        weights: tensors [...] to write.
        dtype: dtype of the written tensors.
    """
    shapes = weights.shapes.items()
    sizes = {name: shape.numel() * dtype.itemsize for name, shape in shapes}
    # Names of the tensors in each shard.
    shards = list(buckets(sizes, sizes.__getitem__, SHARD_BYTES, lambda name, _: name))
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard = {name: weights.read(name).to(dtype).contiguous() for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    set_readable(folder)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _unreadable_error(path: Path, error: Exception) -> DamagedCheckpointError:
    """Error for a file that cannot be read, and its cause."""
    # Only the first line: some libraries add a hint or a traceback.
    reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    # An OSError may name another file, such as a missing one in the folder `path`.
    if isinstance(error, OSError) and error.filename:
        path = Path(error.filename)
    return DamagedCheckpointError(
        str(path), got=reason, expected="whole files of weights", fix=_ANOTHER
    )


def _outside_error(listing: Path, file: Path) -> CheckpointError:
    """Error for a list that names a file outside of the list's folder."""
    got = str(file)
    if file.is_symlink():
        got += f", a link to {file.resolve()}"
    return CheckpointError(str(listing), got=got, expected="files in its own folder", fix=_ANOTHER)


# Classes of a list of chunks, by module.
_UNPICKLED = {
    metadata.__name__: {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    # The list contains the path to which it was written. Python 3.13 moved the classes.
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles the classes of a list of chunks, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """Look up a global that a list of chunks may contain: a class above or a torch dtype.

        Pickles of Python up to 3.11.3 look up enum members with `builtins.getattr`. They get a
        stand-in for it, which looks up nothing else.
        """
        if (module, name) == ("builtins", "getattr"):
            return _get_enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in _UNPICKLED.get(module, ()) and not is_dtype:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which no list of chunks contains"
            )
        return super().find_class(module, name)


def _get_enum_member(owner: object, name: str) -> Enum:
    """Stand-in for `getattr` in a pickle, which only looks up enum members."""
    if not isinstance(owner, EnumType):
        raise pickle.UnpicklingError(f"it asks {owner!r} for {name}, which is not an enum member")
    return owner[name]
