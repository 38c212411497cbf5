# SPDX-License-Identifier: Apache-2.0
"""`quadriga train`: train a policy. A run that was interrupted goes on from its newest checkpoint."""

import argparse
from collections.abc import Sequence

from quadriga.cli.config import add_config_arguments, load_from, print_notices
from quadriga.trainer.launch import run_ppo


def main(argv: Sequence[str]) -> int:
    """Runs `quadriga train` and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="quadriga train", description=__doc__, epilog="`quadriga config explain` says what a run will do."
    )
    parser.add_argument("--ray", action="store_true", help="the same as trainer.backend=ray: worker processes, on Ray")
    add_config_arguments(parser)
    options = parser.parse_intermixed_args(list(argv))
    if options.ray:
        options.overrides.append("trainer.backend=ray")
    loaded = load_from(options, for_training=True)
    print_notices(loaded.notices)
    run_ppo(loaded.config)
    return 0
