# SPDX-License-Identifier: Apache-2.0
"""`quadriga export`: convert the model of a run or a checkpoint to a Hugging Face folder."""

import argparse
import shutil
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
from quadriga.models.weight_files import INDEX, set_readable
from quadriga.trainer.checkpoint import MANIFEST, model_folder, verify

FILE_BYTES = 5 * 10**9
"""Largest file. Larger models are written in several files, which hubs handle more easily."""
SINGLE_FILE = "model.safetensors"
"""Name of the file of a model that fits into one."""


def main(argv: list[str]) -> int:
    """Run `quadriga export`; return its exit status."""
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
        help="default: bfloat16; with --adapter: float32",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write only the adapter, as PEFT does (default: merge it into its model)",
    )
    arguments = parser.parse_args(argv)
    folder = Path(model_folder(arguments.checkpoint))
    _check_folders(arguments, folder)
    dtype_name = arguments.dtype or ("float32" if arguments.adapter else "bfloat16")
    dtype = getattr(torch, dtype_name)
    disable_progress_bar()
    # An adapter is not loaded as a model: its weights are converted one by one.
    model_and_tokenizer = None if arguments.adapter else _load(folder, dtype)
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        if model_and_tokenizer is None:
            shutil.copyfile(folder / ADAPTER_CONFIG, arguments.output / ADAPTER_CONFIG)
            files = AdapterFiles(folder)
            factors = {name: files.read(name).to(dtype) for name in files.shapes}
            write_factors(arguments.output, factors)
        else:
            model, tokenizer = model_and_tokenizer
            _save(model, tokenizer, arguments.output)
            copy_processor(model.config, arguments.output, folder)
    except QuadrigaError:
        raise
    except Exception as error:
        # For a full disk Python raises an OSError, safetensors a SafetensorError, tokenizers a plain
        # Exception.
        raise CheckpointError(
            f"--output {arguments.output}",
            got=f"{type(error).__name__}: {error}",
            expected="room and permission to write the model",
            fix="Make room, and export again: the files written so far are not complete.",
        ) from error
    print(f"{folder} -> {arguments.output} ({dtype_name})")
    return 0


def _check_folders(arguments: argparse.Namespace, folder: Path) -> None:
    """Raise an error if the checkpoint cannot be exported, or the output would replace files.

    Args:
        arguments: arguments of the command.
        folder: model folder of the checkpoint.

    Raises:
        CheckpointError: there is no checkpoint or no adapter, it is damaged, or it is the output itself.
        ConfigError: the output has files.
    """
    output = arguments.output
    where = f"--output {output}"
    if not folder.is_dir():
        raise CheckpointError(
            arguments.checkpoint,
            got="no such folder",
            expected="a run or a checkpoint",
            fix="Check the path.",
        )
    # The folder may be inside a checkpoint, whose files are then compared with its list of them.
    for parent in (folder.parent, folder.parent.parent):
        if (parent / MANIFEST).is_file():
            verify(parent)
    if output.resolve() == folder.resolve():
        raise CheckpointError(
            where,
            got="the folder that is exported",
            expected="another one",
            fix="Name another folder: the weights would be replaced by rounded ones.",
        )
    if not arguments.overwrite and output.is_dir() and any(output.iterdir()):
        raise ConfigError(
            where,
            got="a folder with files",
            expected="a new folder or an empty one",
            fix="--overwrite replaces files of the same names.",
        )
    if arguments.adapter and not is_adapter(folder):
        raise CheckpointError(
            str(folder),
            got="no adapter: all weights were trained",
            expected="a checkpoint with an adapter, or PEFT's folder of one",
            fix="Leave --adapter out.",
        )


def _load(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer of a folder; an adapter is merged into its model."""
    try:
        model, _ = from_pretrained(folder, load_config(folder), dtype=dtype)
        return model, read_tokenizer(folder)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise CheckpointError(
            str(folder),
            got=str(error).strip().partition("\n")[0],
            expected="a model and a tokenizer that transformers can load",
            fix="Export another checkpoint.",
        ) from error


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write model and tokenizer into a folder, which may have files of an earlier export."""
    # `save_pretrained` refuses the sampling settings of some models. They are written separately below.
    generation_config = model.generation_config
    model.generation_config = GenerationConfig()
    # An earlier export may have had another number of files. `save_pretrained` would not remove them,
    # and transformers would later load their weights.
    for name in (SINGLE_FILE, INDEX):
        (folder / name).unlink(missing_ok=True)
    model.save_pretrained(folder, max_shard_size=FILE_BYTES)
    set_readable(folder)
    tokenizer.save_pretrained(folder)
    generation_config.to_json_file(folder / "generation_config.json")
