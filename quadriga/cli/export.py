# SPDX-License-Identifier: Apache-2.0
"""`quadriga export`: turn a run or a checkpoint into an ordinary Hugging Face folder."""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quadriga.errors import CheckpointError
from quadriga.trainer.checkpoint import MANIFEST, model_folder, verify


def main(argv: list[str]) -> int:
    """Load the model of a checkpoint, verify it, and save it in the dtype asked for."""
    parser = argparse.ArgumentParser(prog="quadriga export", description=__doc__)
    parser.add_argument("checkpoint", help="a run's directory (its newest checkpoint), or one of its global_step_N")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    arguments = parser.parse_args(argv)
    folder = Path(model_folder(arguments.checkpoint))
    if not folder.is_dir():
        raise CheckpointError(
            arguments.checkpoint, got="no such folder", expected="a run or a checkpoint", fix="Check the path."
        )
    if (folder.parent / MANIFEST).is_file():
        verify(folder.parent)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, arguments.dtype))
    model.save_pretrained(arguments.output)
    AutoTokenizer.from_pretrained(folder).save_pretrained(arguments.output)
    print(f"{folder} -> {arguments.output} ({arguments.dtype})")
    return 0
