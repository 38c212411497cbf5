# SPDX-License-Identifier: Apache-2.0
"""Tensors and small facts on disk: safetensors in shards, and JSON. Nothing is pickled.

Shards keep the memory of a save small, since safetensors copies a file's tensors while it writes them; the names
are those of Hugging Face, so a folder with `model` shards and a config.json loads with transformers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from quadriga.errors import CheckpointError

SHARD_BYTES = 64 << 20


def write_tensors(directory: Path, stem: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `stem-00001-of-0000N.safetensors` and their index."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if size > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor
        room -= size
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        contents = {name: tensor.detach().cpu().contiguous() for name, tensor in shard.items()}
        save_file(contents, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    write_json(directory / f"{stem}.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def read_tensors(directory: Path, stem: str, *, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read what `write_tensors` wrote, and check names and shapes before anything is used.

    Args:
        directory: the folder.
        stem: as it was written.
        expected: tensors (on any device, "meta" too) with the names and shapes that the caller has room for.

    Raises:
        CheckpointError: a file is missing or damaged, or names or shapes differ.
    """
    where = read_json(directory / f"{stem}.safetensors.index.json")["weight_map"]
    unknown, missing = sorted(set(where) - set(expected)), sorted(set(expected) - set(where))
    if unknown or (missing and where):
        raise CheckpointError(
            f"{directory}/{stem}",
            got=f"{len(unknown)} unknown and {len(missing)} missing tensors, first {[*unknown, *missing][0]}",
            expected="the tensors of this model",
            fix="Resume with the model that the checkpoint was made of.",
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(set(where.values())):
        tensors |= _read_shard(directory / file)
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"{directory}/{stem}: {name}",
                got=f"shape {tuple(tensor.shape)}",
                expected=f"{tuple(expected[name].shape)}",
                fix="Resume with the model that the checkpoint was made of.",
            )
    return tensors


def _read_shard(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as shard:
            return {name: shard.get_tensor(name) for name in shard.keys()}  # it is no mapping
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            str(path), got=str(error), expected="a whole safetensors file", fix="Resume from another checkpoint."
        ) from error


def write_json(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a JSON object."""
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(
            str(path), got=str(error), expected="a JSON file", fix="Resume from another checkpoint."
        ) from error
