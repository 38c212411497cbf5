# SPDX-License-Identifier: Apache-2.0
"""`quadriga train` and `quadriga sft`. An interrupted run resumes from its newest checkpoint."""

import argparse
from collections.abc import Sequence

from quadriga.cli.config import add_config_arguments, load_from, parse
from quadriga.config import Config, keys_text, show
from quadriga.config.root import respell
from quadriga.descendants import process_start_time
from quadriga.errors import ConfigError, QuadrigaError
from quadriga.trainer.keep_alive import OPTION, is_kept_alive, keep_run_alive
from quadriga.trainer.launch import run_ppo

_COMMON_KEYS = """\
common keys:
  data.train_files=FILE                          rows with prompts: parquet, json or jsonl
  data.val_files=FILE                            rows for validation
  actor_rollout_ref.model.path=MODEL             a folder, or a name on the hub
  custom_reward_function.path=FILE               your reward function, called compute_score
  data.train_batch_size=64                       prompts of a step
  actor_rollout_ref.rollout.n=8                  responses to each prompt
  data.max_response_length=512                   tokens of a response
  actor_rollout_ref.actor.optim.lr=1e-6          learning rate
  trainer.total_training_steps=100               steps
  trainer.default_local_dir=DIR                  checkpoints, metrics and samples

  quadriga config keys WORDS                     all keys, or those about WORDS
  quadriga config show KEY=VALUE ... > run.yaml  a configuration to edit, for --config run.yaml
  quadriga config explain KEY=VALUE ...          what a run will do
  quadriga --traceback train ...                 show where an error arose"""
_SFT = """Supervised fine-tuning on responses, or training of a reward model on pairs of responses.

An interrupted run resumes from its newest checkpoint. At the end the run's directory has a folder `model`."""


def main(argv: Sequence[str]) -> int:
    """Run `quadriga train`, which trains a policy by rewards; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="quadriga train",
        description="Train a policy by rewards. An interrupted run resumes from its newest checkpoint.",
        epilog=_COMMON_KEYS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_arguments(parser)
    options = parse(parser, argv)
    config = load_from(options, for_training=True)
    return _start(config, ["train", *argv] if options.keep_alive else [])


def sft(argv: Sequence[str]) -> int:
    """Run `quadriga sft`; return its exit status."""
    parser = argparse.ArgumentParser(prog="quadriga sft", description=_SFT)
    _add_arguments(parser)
    parser.add_argument(
        "--keys", action="store_true", help="list all keys with default and meaning, and end"
    )
    parser.add_argument(
        "--show", action="store_true", help="print the resolved configuration, and end"
    )
    options = parse(parser, argv)
    if options.keys:
        print(keys_text(options.overrides, task="sft"), end="")
        return 0
    config = load_from(options, for_training=not options.show, task="sft")
    if config.task == "rl":
        raise ConfigError(
            "objective",
            got="'rl'",
            expected="sft or reward_model",
            fix="Train a policy by rewards with `quadriga train`.",
        )
    if options.show:
        print(show(config), end="")
        return 0
    return _start(config, ["sft", *argv] if options.keep_alive else [])


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of both commands."""
    parser.add_argument(
        "--ray",
        action="store_true",
        help="the same as trainer.backend=ray: worker processes, on Ray",
    )
    parser.add_argument(
        OPTION, action="store_true", help="restart the command if a signal such as SIGKILL ends it"
    )
    add_config_arguments(parser)


def _start(config: Config, restart_command: Sequence[str]) -> int:
    """Train. Errors name keys in the task's spelling.

    Args:
        config: the run.
        restart_command: words after `quadriga` of the command to restart if a signal ends it; empty:
            it is not restarted.

    Returns:
        The exit status.
    """
    try:
        # A process that was started by `keep_run_alive` trains itself.
        if restart_command and not is_kept_alive():
            return keep_run_alive(config, restart_command)
        run_ppo(config, process_start_time())
    except QuadrigaError as error:
        respell(error, config.task)
        raise
    return 0
