# SPDX-License-Identifier: Apache-2.0
"""`quadriga sft`: supervised fine-tuning on given responses, or a reward model on pairs of a better and a worse one.

A run that was interrupted goes on from its newest checkpoint. At the end the run's directory has a folder `model`.
"""

import argparse
from collections.abc import Sequence

from quadriga.cli.config import load_from, print_notices
from quadriga.cli.train import add_run_arguments, start
from quadriga.config import keys_text, show
from quadriga.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Runs `quadriga sft` and returns its exit status."""
    parser = argparse.ArgumentParser(prog="quadriga sft", description=__doc__)
    add_run_arguments(parser)
    parser.add_argument("--keys", action="store_true", help="list every key with its default and meaning, and end")
    parser.add_argument("--show", action="store_true", help="print the resolved configuration, and end")
    options = parser.parse_intermixed_args(list(argv))
    if options.keys:
        print(keys_text(options.overrides, task="sft"), end="")
        return 0
    loaded = load_from(options, for_training=not options.show, task="sft")
    if loaded.config.task == "rl":
        fix = "Train a policy by rewards with `quadriga train`."
        raise ConfigError("objective", got="'rl'", expected="sft or reward_model", fix=fix)
    if options.show:
        print_notices(loaded.notices)
        print(show(loaded.config), end="")
        return 0
    return start(loaded)
