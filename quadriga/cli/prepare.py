# SPDX-License-Identifier: Apache-2.0
"""`quadriga prepare data`, `model` and `playground`: write what a run reads."""

import argparse
import os
import shlex
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from quadriga.errors import DataError
from quadriga.observe.watchdog import NOTICE_S, waiting
from quadriga.streams import log_to

_DATA_HELP = (
    "largest, gsm8k, gsm8k_tools, math, geometry3k, hellaswag, hh_rlhf, or reasoning_gym:TASK"
)
_MODEL_HELP = (
    "smollm2-135m-instruct, a .gguf file, a model folder, or a name on the Hugging Face hub"
)
_NEXT = """
Next:
  quadriga sft --config {sft}
  quadriga train --config {sums}  # afterwards: it trains the model that sft writes"""


def main(argv: list[str]) -> int:
    """Run `quadriga prepare`; return its exit status."""
    options = _make_parser().parse_args(argv)
    if not sys.stderr.isatty():
        # In a log, a library's progress bar would be one endless line.
        os.environ.setdefault("TQDM_DISABLE", "1")
    if options.what == "data":
        _prepare_data(options)
    elif options.what == "model":
        with waiting(f"the model {options.name}", lambda: f"{options.output}", NOTICE_S):
            folder = _import_recipe("quadriga_recipes.model_folder").prepare_model(
                options.name, options.output
            )
        log_to(options.output)
        print(f"model: {folder}")
    else:
        _prepare_playground(options)
    return 0


def _make_parser() -> argparse.ArgumentParser:
    """Make the parser, with a sub-command for each kind of output."""
    parser = argparse.ArgumentParser(
        prog="quadriga prepare", description="Write data or a model as a run reads them."
    )
    kinds = parser.add_subparsers(dest="what", required=True, metavar="{data,model,playground}")
    rows = kinds.add_parser("data", help="write train.parquet and val.parquet")
    rows.add_argument("name", help=_DATA_HELP)
    rows.add_argument(
        "--num-train", type=int, metavar="N", help="training rows (default: the task's own number)"
    )
    rows.add_argument(
        "--num-val", type=int, metavar="N", help="validation rows (default: the task's own number)"
    )
    rows.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of the training rows (default: 0)"
    )
    rows.add_argument(
        "--source", metavar="PATH", help="local file or folder to read instead of the hub"
    )
    model = kinds.add_parser(
        "model", help="write a model folder: safetensors, tokenizer, chat template"
    )
    model.add_argument("name", help=_MODEL_HELP)
    for command in (rows, model):
        command.add_argument(
            "--output", type=Path, required=True, metavar="DIR", help="folder to write"
        )
    playground = kinds.add_parser(
        "playground", help="write a tiny model, two tasks and configurations for them"
    )
    playground.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of weights and rows (default: 0)"
    )
    playground.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/playground"),
        metavar="DIR",
        help="default: outputs/playground",
    )
    return parser


def _prepare_data(options: argparse.Namespace) -> None:
    """Write the rows of a task, and print the files."""
    files = _import_recipe("quadriga_recipes.tasks").prepare_data(
        options.name,
        options.output,
        num_train=options.num_train,
        num_val=options.num_val,
        seed=options.seed,
        source=options.source,
    )
    log_to(options.output)
    for split, path in files.items():
        print(f"{split}: {path}")


def _prepare_playground(options: argparse.Namespace) -> None:
    """Write the playground; print its files and the commands to run next."""
    parts = _import_recipe("quadriga_recipes.playground").prepare_playground(
        options.output, seed=options.seed
    )
    log_to(options.output)
    width = max(map(len, parts))
    for name, path in parts.items():
        print(f"{name:<{width}}  {path}")
    sft = shlex.quote(str(options.output / "sft.yaml"))
    sums = shlex.quote(str(options.output / "sums.yaml"))
    print(_NEXT.format(sft=sft, sums=sums))


def _import_recipe(name: str) -> ModuleType:
    """Import a module of `quadriga_recipes`, a package that a run does not need.

    Raises:
        DataError: the package is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "quadriga_recipes":
            raise
        raise DataError(
            "quadriga prepare",
            got="no package quadriga_recipes",
            expected="the package, which is in the wheel and in the folder recipes/ of the repository",
            fix="Install quadriga again, in its repository by scripts/install.",
        ) from error
