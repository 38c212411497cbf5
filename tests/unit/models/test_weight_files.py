# SPDX-License-Identifier: Apache-2.0
"""Weights by name, from the folders that transformers writes and from those of our checkpoints."""

import json
import os
import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter, metadata, save

from quadriga.errors import CheckpointError
from quadriga.models import weight_files
from quadriga.models.weight_files import WeightFiles, open_weights, write_safetensors

WEIGHTS = {
    "layer.weight": torch.arange(12.0).reshape(3, 4),
    "layer.bias": torch.tensor([0.5, -1.25]).bfloat16(),
    "scale": torch.tensor(3.0),
}


def one_file(folder: Path) -> None:
    save_file(WEIGHTS, folder / "model.safetensors")


def several_files(folder: Path) -> None:
    save_file({"scale": WEIGHTS["scale"]}, folder / "model-00001-of-00002.safetensors")
    save_file(
        {name: WEIGHTS[name] for name in WEIGHTS if name != "scale"},
        folder / "model-00002-of-00002.safetensors",
    )


def indexed(folder: Path) -> None:
    """Beside a file that the index does not name."""
    several_files(folder)
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"scale": "model-00001-of-00002.safetensors", '
        '"layer.weight": "model-00002-of-00002.safetensors", "layer.bias": "model-00002-of-00002.safetensors"}}'
    )
    save_file({"of another model": torch.ones(2)}, folder / "model-old.safetensors")


def distributed(folder: Path) -> None:
    """Beside what is no weight."""
    state = {f"model.{name}": weight for name, weight in WEIGHTS.items()} | {
        "optimizer.step.scale": torch.tensor(1.0)
    }
    with pytest.warns(UserWarning, match="single process"):
        save(state, storage_writer=FileSystemWriter(folder))


def in_a_role(folder: Path) -> None:
    distributed(folder / "model")


ALL = [one_file, several_files, indexed, distributed, in_a_role]


@pytest.mark.parametrize("write", ALL, ids=lambda write: write.__name__)
def test_what_was_written_is_read(write: Callable[[Path], None], tmp_path: Path) -> None:
    """Names, shapes, dtypes and values; in any order."""
    write(tmp_path)
    files = open_weights(tmp_path)
    assert sorted(files.shapes) == sorted(WEIGHTS)
    for name in [*WEIGHTS, *reversed(WEIGHTS)]:
        tensor = files.read(name)
        assert files.shapes[name] == WEIGHTS[name].shape and tensor.dtype == WEIGHTS[name].dtype
        assert torch.equal(tensor, WEIGHTS[name])


@pytest.mark.parametrize(
    ("write", "damage", "words"),
    [
        (
            indexed,
            lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
            "00002.safetensors: got no",
        ),
        (
            indexed,
            lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
            "index.json: got JSON",
        ),
        (
            one_file,
            lambda folder: cut(folder / "model.safetensors"),
            "model.safetensors: got SafetensorError",
        ),
        (
            distributed,
            lambda folder: (folder / "__0_0.distcp").unlink(),
            "__0_0.distcp: got no such file",
        ),
        (distributed, lambda folder: cut(folder / "__0_0.distcp"), "__0_0.distcp: got "),
        (in_a_role, lambda folder: cut(folder / "model" / ".metadata"), "model/.metadata: got "),
        (
            lambda folder: None,
            lambda folder: None,
            "neither *.safetensors nor a distributed checkpoint",
        ),
        (
            indexed,
            lambda folder: (folder / "model.safetensors.index.json").write_text("[" * 10_000),
            "index.json: got",
        ),
        (
            distributed,
            lambda folder: enlarged_in_list(folder),
            ".metadata: got 4398046511104 bytes for model.scale",
        ),
        (
            one_file,
            lambda folder: as_pipe(folder / "model.safetensors"),
            "model.safetensors: got no regular file",
        ),
    ],
    ids=[
        "missing",
        "no index",
        "cut",
        "missing chunk",
        "cut chunk",
        "cut list",
        "empty",
        "nested",
        "terabytes",
        "pipe",
    ],
)
def test_damage_is_named(
    write: Callable[[Path], None], damage: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    write(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        open_weights(tmp_path)
    assert words in str(caught.value)


def as_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def enlarged_in_list(folder: Path) -> None:
    """The list of chunks with a tensor of 4 TB, of which it has a few bytes."""
    listed = pickle.loads((folder / ".metadata").read_bytes())
    listed.state_dict_metadata["model.scale"].size = torch.Size([2**40])
    (folder / ".metadata").write_bytes(pickle.dumps(listed))


def renamed_in_list(folder: Path, name: str) -> None:
    """The list of chunks with another name for its file."""
    listed = pickle.loads((folder / ".metadata").read_bytes())
    for chunk in listed.storage_data.values():
        chunk.relative_path = name
    (folder / ".metadata").write_bytes(pickle.dumps(listed))


@pytest.mark.parametrize("way", ["..", "absolute", "a link", "a link to a folder"])
def test_lists_that_lead_outside_are_refused(way: str, tmp_path: Path) -> None:
    """The file that is named is a good one: it is the place that is refused."""
    folder, other = tmp_path / "here", tmp_path / "other"
    distributed(folder)
    other.mkdir()
    file = (folder / "__0_0.distcp").rename(other / "__0_0.distcp")
    names = {"..": "../other/__0_0.distcp", "absolute": str(file), "a link": "__0_0.distcp"}
    if way == "a link":
        (folder / "__0_0.distcp").symlink_to(file)
    elif way == "a link to a folder":
        (folder / "sub").symlink_to(other)
    renamed_in_list(folder, names.get(way, "sub/__0_0.distcp"))
    with pytest.raises(
        CheckpointError,
        match=r"/\.metadata: got .*/__0_0\.distcp.*expected files in its own folder",
    ):
        open_weights(folder)


@pytest.mark.parametrize("write", [distributed, indexed])
def test_a_checkpoint_behind_a_link_or_a_way_up_is_read(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    write(tmp_path / "disk")
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for folder in (tmp_path / "link", tmp_path / "disk" / ".." / "disk"):
        assert torch.equal(open_weights(folder).read("scale"), WEIGHTS["scale"])


@pytest.mark.parametrize("is_absolute", [False, True])
def test_an_index_that_leads_outside_is_refused(is_absolute: bool, tmp_path: Path) -> None:
    for write, place in ((one_file, tmp_path / "other"), (indexed, tmp_path / "here")):
        place.mkdir()
        write(place)
    name = (
        str(tmp_path / "other" / "model.safetensors")
        if is_absolute
        else "../other/model.safetensors"
    )
    path = tmp_path / "here" / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"scale": name}}))
    with pytest.raises(
        CheckpointError,
        match=r"index\.json: got .*/other/model\.safetensors, expected files in its own",
    ):
        open_weights(tmp_path / "here")


def test_bytes_that_are_no_tensor_are_named(tmp_path: Path) -> None:
    """Without a manifest a flipped byte is found only where it breaks the file's own form."""
    distributed(tmp_path)
    (tmp_path / "__0_0.distcp").write_bytes(bytes((tmp_path / "__0_0.distcp").stat().st_size))
    with pytest.raises(CheckpointError, match="expected whole files of weights"):
        open_weights(tmp_path).read("layer.weight")


def test_a_list_of_chunks_of_an_older_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.2 writes a member of an enum as a call of getattr."""

    def reduced(member: Enum, protocol: int) -> tuple[object, ...]:
        return getattr, (type(member), member.name)

    monkeypatch.setattr(metadata._MEM_FORMAT_ENCODING, "__reduce_ex__", reduced)
    distributed(tmp_path)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert torch.equal(open_weights(tmp_path).read("scale"), WEIGHTS["scale"])


class Bomb:
    """A pickle that would call something."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("exploded"),)


class Fuse:
    """A pickle that would look for something to call."""

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (torch.Size, "count")


@pytest.mark.parametrize(
    ("pickled", "words"), [(Bomb(), "it names pathlib"), (Fuse(), "it asks .* for count")]
)
def test_nothing_that_a_list_of_chunks_names_is_called(
    pickled: object, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(pickled))
    with pytest.raises(CheckpointError, match=rf"\.metadata: got UnpicklingError: {words}"):
        open_weights(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_safetensors_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor larger than a shard has one of its own; what is read back is what was written, rounded once."""
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 6)
    distributed(tmp_path / "from")
    source = open_weights(tmp_path / "from")
    (tmp_path / "to").mkdir()
    most: list[int] = []
    write_safetensors(tmp_path / "to", Counting(source, most), torch.bfloat16)
    assert sorted(path.name for path in (tmp_path / "to").glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    written = open_weights(tmp_path / "to")
    for name, weight in WEIGHTS.items():
        assert torch.equal(written.read(name), weight.bfloat16())
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "to").iterdir()}
    assert modes == {(tmp_path / "to").stat().st_mode & 0o666}
    assert sorted(most) == sorted(weight.numel() for weight in WEIGHTS.values())


class Counting:
    """Notes how many numbers are read."""

    def __init__(self, files: WeightFiles, read: list[int]) -> None:
        self.files, self.noted = files, read
        self.shapes = files.shapes

    def read(self, name: str) -> torch.Tensor:
        self.noted.append(self.files.shapes[name].numel())
        return self.files.read(name)


def cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
