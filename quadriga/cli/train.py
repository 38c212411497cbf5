# SPDX-License-Identifier: Apache-2.0
"""`quadriga train` and `quadriga sft`. A run that was interrupted goes on from its newest checkpoint."""

import argparse
from collections.abc import Sequence

from quadriga.cli.config import add_config_arguments, load_from
from quadriga.config import Config, keys_text, show
from quadriga.config.root import respell
from quadriga.descendants import begin_of_process
from quadriga.errors import ConfigError, QuadrigaError
from quadriga.trainer.keep_alive import OPTION, is_kept_alive, keep_run_alive
from quadriga.trainer.launch import run_ppo

_KEEP_ALIVE = "start the command again when a signal such as SIGKILL has ended it"
_RAY = "the same as trainer.backend=ray: worker processes, on Ray"
_SFT = """Supervised fine-tuning on given responses, or a reward model on pairs of a better and a worse one.

A run that was interrupted goes on from its newest checkpoint. At the end the run's directory has a folder `model`."""


def main(argv: Sequence[str]) -> int:
    """Runs `quadriga train`, a policy by rewards, and returns its exit status."""
    about = (
        "Train a policy by rewards. A run that was interrupted goes on from its newest checkpoint."
    )
    epilog = "`quadriga config explain` says what a run will do."
    parser = argparse.ArgumentParser(prog="quadriga train", description=about, epilog=epilog)
    parser.add_argument("--ray", action="store_true", help=_RAY)
    parser.add_argument(OPTION, action="store_true", help=_KEEP_ALIVE)
    add_config_arguments(parser)
    options = parser.parse_intermixed_args(list(argv))
    config = load_from(options, for_training=True)
    return _start(config, ["train", *argv] if options.keep_alive else [])


def sft(argv: Sequence[str]) -> int:
    """Runs `quadriga sft` and returns its exit status."""
    parser = argparse.ArgumentParser(prog="quadriga sft", description=_SFT)
    parser.add_argument("--ray", action="store_true", help=_RAY)
    parser.add_argument(OPTION, action="store_true", help=_KEEP_ALIVE)
    add_config_arguments(parser)
    parser.add_argument(
        "--keys", action="store_true", help="list every key with its default and meaning, and end"
    )
    parser.add_argument(
        "--show", action="store_true", help="print the resolved configuration, and end"
    )
    options = parser.parse_intermixed_args(list(argv))
    if options.keys:
        print(keys_text(options.overrides, task="sft"), end="")
        return 0
    config = load_from(options, for_training=not options.show, task="sft")
    if config.task == "rl":
        fix = "Train a policy by rewards with `quadriga train`."
        raise ConfigError("objective", got="'rl'", expected="sft or reward_model", fix=fix)
    if options.show:
        print(show(config), end="")
        return 0
    return _start(config, ["sft", *argv] if options.keep_alive else [])


def _start(config: Config, kept_alive: Sequence[str]) -> int:
    """Trains; what goes wrong is said with the spellings of the task.

    Args:
        config: what to train.
        kept_alive: the words of the command, if it is to be started again after a death; else none.
    """
    try:
        if kept_alive and not is_kept_alive():
            return keep_run_alive(config, kept_alive)
        run_ppo(config, begin_of_process())
    except QuadrigaError as error:
        respell(error, config.task)
        raise
    return 0
