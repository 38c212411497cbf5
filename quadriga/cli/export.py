# SPDX-License-Identifier: Apache-2.0
"""`quadriga export`: turn a run or a checkpoint into an ordinary Hugging Face folder."""

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from quadriga.config.adapter import ADAPTER_CONFIG, is_adapter
from quadriga.data.tokenizing import read_tokenizer
from quadriga.errors import CheckpointError, ConfigError, QuadrigaError
from quadriga.models.adapter_files import AdapterFiles, write_factors
from quadriga.models.load import from_pretrained, load_config
from quadriga.models.vision import copy_processor
from quadriga.models.weight_files import share_with_readers
from quadriga.trainer.checkpoint import MANIFEST, model_folder, verify


def main(argv: list[str]) -> int:
    """Load the model of a checkpoint, verify it, and save it in the dtype asked for."""
    parser = argparse.ArgumentParser(prog="quadriga export", description=__doc__)
    parser.add_argument(
        "checkpoint", help="a run's directory (its newest checkpoint), or one of its global_step_N"
    )
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--overwrite", action="store_true", help="write into a folder that has files already"
    )
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        help="default: bfloat16; of an adapter alone: float32",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the adapter alone, as PEFT does (default: merged into its model)",
    )
    arguments = parser.parse_args(argv)
    folder = Path(model_folder(arguments.checkpoint))
    if not folder.is_dir():
        expected = "a run or a checkpoint"
        raise CheckpointError(
            arguments.checkpoint, got="no such folder", expected=expected, fix="Check the path."
        )
    for place in (
        one for one in (folder.parent, folder.parent.parent) if (one / MANIFEST).is_file()
    ):
        verify(place)
    if arguments.output.resolve() == folder.resolve():
        got, fix = (
            "the folder that is exported",
            "Writing would replace its weights by rounded ones.",
        )
        raise CheckpointError(
            f"--output {arguments.output}", got=got, expected="another one", fix=fix
        )
    if not arguments.overwrite and arguments.output.is_dir() and any(arguments.output.iterdir()):
        got, fix = "a folder with files", "--overwrite writes over those of the same names."
        raise ConfigError(
            f"--output {arguments.output}",
            got=got,
            expected="a new folder or an empty one",
            fix=fix,
        )
    dtype = arguments.dtype or ("float32" if arguments.adapter else "bfloat16")
    if arguments.adapter and not is_adapter(folder):
        got, expected = (
            "no adapter: all weights were trained",
            "a checkpoint with an adapter, or PEFT's folder of one",
        )
        raise CheckpointError(str(folder), got=got, expected=expected, fix="Leave --adapter out.")
    disable_progress_bar()
    parts = None if arguments.adapter else _load(folder, getattr(torch, dtype))
    with _writing(arguments.output):
        arguments.output.mkdir(parents=True, exist_ok=True)
        if parts is None:
            shutil.copyfile(folder / ADAPTER_CONFIG, arguments.output / ADAPTER_CONFIG)
            files = AdapterFiles(folder)
            factors = {name: files.read(name).to(getattr(torch, dtype)) for name in files.shapes}
            write_factors(arguments.output, factors)
        else:
            _save(*parts, arguments.output)
            copy_processor(parts[0].config, arguments.output, folder)
    print(f"{folder} -> {arguments.output} ({dtype})")
    return 0


def _load(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        model, _ = from_pretrained(folder, load_config(folder), dtype=dtype)
        return model, read_tokenizer(folder)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, UnpicklingError) as error:
        got, expected = (
            str(error).strip().partition("\n")[0],
            "a model and a tokenizer that transformers can load",
        )
        raise CheckpointError(
            str(folder), got=got, expected=expected, fix="Export another checkpoint."
        ) from error


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    # Written by itself: save_pretrained refuses sampling settings that models on the hub come with.
    generation_config, model.generation_config = model.generation_config, GenerationConfig()
    model.save_pretrained(folder)
    share_with_readers(folder)
    tokenizer.save_pretrained(folder)
    generation_config.to_json_file(folder / "generation_config.json")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except QuadrigaError:
        raise
    except Exception as error:
        # A full disk is an OSError to Python, a SafetensorError to safetensors, and a bare Exception to tokenizers.
        got, expected = f"{type(error).__name__}: {error}", "room and permission to write the model"
        fix = "What is there already is not complete."
        raise CheckpointError(f"--output {folder}", got=got, expected=expected, fix=fix) from error
