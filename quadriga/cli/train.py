# SPDX-License-Identifier: Apache-2.0
"""`quadriga train` and `quadriga sft`. An interrupted run resumes from its newest checkpoint."""

import argparse
from collections.abc import Sequence

from quadriga.cli.config import add_config_arguments, load_from
from quadriga.config import Config, keys_text, show
from quadriga.config.root import respell
from quadriga.descendants import begin_of_process
from quadriga.errors import ConfigError, QuadrigaError
from quadriga.trainer.keep_alive import OPTION, is_kept_alive, keep_run_alive
from quadriga.trainer.launch import run_ppo

_KEEP_ALIVE = "restart the command if a signal such as SIGKILL ends it"
_RAY = "the same as trainer.backend=ray: worker processes, on Ray"
_SFT = """Supervised fine-tuning on responses, or training of a reward model on pairs of responses.

An interrupted run resumes from its newest checkpoint. At the end the run's directory has a folder `model`."""


def main(argv: Sequence[str]) -> int:
    """Run `quadriga train`, which trains a policy by rewards; return its exit status."""
    about = "Train a policy by rewards. An interrupted run resumes from its newest checkpoint."
    epilog = "`quadriga config explain` describes what a run will do."
    parser = argparse.ArgumentParser(prog="quadriga train", description=about, epilog=epilog)
    parser.add_argument("--ray", action="store_true", help=_RAY)
    parser.add_argument(OPTION, action="store_true", help=_KEEP_ALIVE)
    add_config_arguments(parser)
    options = parser.parse_intermixed_args(list(argv))
    config = load_from(options, for_training=True)
    return _start(config, ["train", *argv] if options.keep_alive else [])


def sft(argv: Sequence[str]) -> int:
    """Run `quadriga sft`; return its exit status."""
    parser = argparse.ArgumentParser(prog="quadriga sft", description=_SFT)
    parser.add_argument("--ray", action="store_true", help=_RAY)
    parser.add_argument(OPTION, action="store_true", help=_KEEP_ALIVE)
    add_config_arguments(parser)
    parser.add_argument(
        "--keys", action="store_true", help="list all keys with default and meaning, and end"
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
    """Train, with keys in the task's spelling in errors.

    Args:
        config: the run.
        kept_alive: words of the command to restart after a death; empty for no restart.
    """
    try:
        if kept_alive and not is_kept_alive():
            return keep_run_alive(config, kept_alive)
        run_ppo(config, begin_of_process())
    except QuadrigaError as error:
        respell(error, config.task)
        raise
    return 0
