# SPDX-License-Identifier: Apache-2.0
"""`quadriga sft`: teach a model answers that are given, or a reward model which of two answers is better.

A run that was interrupted goes on from its newest checkpoint. At the end the run's directory has a folder `model`.
"""

import argparse
from collections.abc import Sequence

from quadriga.cli.config import add_files_argument, print_notices
from quadriga.config import keys_text, show
from quadriga.config.sft import SFTConfig, in_sft_words
from quadriga.config.sft_loader import load_sft_config
from quadriga.errors import QuadrigaError
from quadriga.trainer.supervised_launch import run_sft


def main(argv: Sequence[str]) -> int:
    """Runs `quadriga sft` and returns its exit status."""
    parser = argparse.ArgumentParser(prog="quadriga sft", description=__doc__)
    add_files_argument(parser)
    parser.add_argument("--ray", action="store_true", help="the same as trainer.backend=ray: worker processes, on Ray")
    parser.add_argument("--keys", action="store_true", help="list every key with its default and meaning, and end")
    parser.add_argument("--show", action="store_true", help="print the resolved configuration, and end")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="a key of the tree, such as optim.lr=2e-5")
    options = parser.parse_intermixed_args(list(argv))
    if options.keys:
        print(keys_text(root=SFTConfig), end="")
        return 0
    overrides = [*options.overrides, *(["trainer.backend=ray"] if options.ray else [])]
    loaded = load_sft_config(overrides, options.config_files, for_training=not options.show)
    print_notices(loaded.notices)
    if options.show:
        print(show(loaded.config), end="")
        return 0
    _run(loaded.config)
    return 0


def _run(config: SFTConfig) -> None:
    try:
        run_sft(config)
    except QuadrigaError as error:
        # Engines and checkpoints speak of the keys of `quadriga train`.
        for name in ("where", "got", "expected", "fix"):
            setattr(error, name, in_sft_words(getattr(error, name)))
        error.args = tuple(in_sft_words(str(one)) for one in error.args)
        raise
