# SPDX-License-Identifier: Apache-2.0
"""`quadriga train`: train a policy. A run that was interrupted goes on from its newest checkpoint."""

import argparse
from collections.abc import Sequence

from quadriga.cli.config import add_config_arguments, load_from, print_notices
from quadriga.config import Loaded
from quadriga.config.tasks import respell
from quadriga.errors import QuadrigaError
from quadriga.trainer.launch import run_ppo


def main(argv: Sequence[str]) -> int:
    """Runs `quadriga train` and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="quadriga train", description=__doc__, epilog="`quadriga config explain` says what a run will do."
    )
    add_run_arguments(parser)
    options = parser.parse_intermixed_args(list(argv))
    return start(load_from(options, for_training=True))


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what a command that trains takes; parse with `parse_intermixed_args`."""
    parser.add_argument("--ray", action="store_true", help="the same as trainer.backend=ray: worker processes, on Ray")
    add_config_arguments(parser)


def start(loaded: Loaded) -> int:
    """Trains with a configuration that was read; what goes wrong is said with the spellings of its task."""
    print_notices(loaded.notices)
    try:
        run_ppo(loaded.config)
    except QuadrigaError as error:
        respell(error, loaded.config.task)
        raise
    return 0
