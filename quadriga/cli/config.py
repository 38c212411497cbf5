# SPDX-License-Identifier: Apache-2.0
"""`quadriga config`: print the resolved configuration, a description of a run, or all keys.

The functions for the arguments `--config FILE` and `key=value` are used by all commands.
"""

import argparse
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from quadriga.cli.loading import LazyModule
from quadriga.config import Config, explain, keys_text, load_config, show, with_groups
from quadriga.config.root import respell
from quadriga.errors import ConfigError

_DESCRIPTION = """\
show     print the resolved configuration as YAML, defaults included
explain  describe a training run: batch arithmetic, passes, files; and list what would keep it from
         starting, by the checks that a run makes before it loads its models, and by grading one
         row; the status is 2 if there is a problem
keys     list all keys with type, default and meaning; words narrow the list by name, by meaning or
         by the names that other trainers use: `quadriga config keys optim`, `keys "kv cache"`,
         `keys num_generations`
translate  convert verl's shell script, command line or YAML to a commented YAML:
         `quadriga config translate run_grpo.sh`
"""

if TYPE_CHECKING:
    from quadriga.trainer import preflight
else:
    # It loads torch.
    preflight = LazyModule("quadriga.trainer.preflight", import_module)
# Another package, which may not be installed.
config_translate = LazyModule("quadriga_verl.config_translate", import_module)


def main(argv: Sequence[str]) -> int:
    """Run `quadriga config`; return its exit status."""
    if argv[:1] == ["translate"]:
        return config_translate.translate(argv[1:])
    parser = argparse.ArgumentParser(
        prog="quadriga config",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "action", choices=("show", "explain", "keys", "translate"), help="what to print"
    )
    parser.add_argument(
        "--recorded",
        metavar="RUN",
        type=Path,
        help="for explain with async_training.enable: a run in lockstep, whose lengths and times "
        "are used for a simulation",
    )
    add_config_arguments(parser)
    options = parse(parser, argv)
    if options.action == "keys":
        _print_keys(options.overrides)
        return 0
    config = load_from(options)
    if options.action == "show":
        print(show(config), end="")
        return 0
    # As a run does, choose `rollout.n` if the estimator needs groups of responses.
    config, notice = with_groups(config)
    if notice:
        print(f"notice: {notice}", file=sys.stderr)
    report = preflight.preflight(config, options.recorded)
    print(explain(config, report.num_prompts, report.fields), end="")
    _print_section("Models", report.models)
    _print_section("Simulated", report.simulated)
    _print_section("Before training", [respell(error, config.task) for error in report.problems])
    _print_section("To know", report.notices)
    return 2 if report.problems else 0


def _print_keys(words: Sequence[str]) -> None:
    """Print the keys that have all words in their name or meaning.

    If there are none, print why verl's keys with these words have no counterpart.
    """
    # Words may be quoted together: `keys "kv cache"`.
    words = " ".join(words).split()
    text = keys_text(words)
    if not text and find_spec("quadriga_verl"):
        text = "".join(f"{line}\n" for line in config_translate.verl_meanings(words))
    if not text:
        raise ConfigError(
            "quadriga config keys",
            got=" ".join(words),
            expected="part of a key's name or meaning",
            fix="No key has it: try other or fewer words.",
        )
    print(text, end="")


def _print_section(title: str, lines: Collection[object]) -> None:
    """Print a title with indented lines below it, if there are any."""
    if lines:
        print(f"\n{title}", *lines, sep="\n  ")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command that loads a configuration.

    Args:
        parser: parser of the command, with the arguments of `add_config_arguments`.
        argv: words after the name of the command.

    Raises:
        ConfigError: a key is written with dashes, as an option.
    """
    for word in argv:
        match = re.match(r"--((?:\w+\.)+\w+)(=.*)?$", word, re.DOTALL)
        if match:
            raise ConfigError(
                "command line",
                got=f"'{word}'",
                expected="a key without dashes",
                fix=f"Write {match[1]}{match[2] or '=VALUE'}.",
            )
    return parser.parse_intermixed_args(list(argv))


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments `--config FILE` and `key=value` to a command's parser."""
    parser.add_argument(
        "--config",
        dest="config_files",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="a YAML file; of several files, a later one replaces values of an earlier one",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="a key of the tree, such as trainer.seed=2",
    )


def load_from(
    options: argparse.Namespace,
    settings: Mapping[str, Any] = MappingProxyType({}),
    *,
    for_training: bool = False,
    task: str = "rl",
) -> Config:
    """Load the configuration that parsed arguments name.

    Notices are printed on standard error, because standard output may be YAML.

    Args:
        options: the parsed arguments (`add_config_arguments`). An option `--ray` also counts.
        settings: values by key that other options of the command set. A key with None is not set.
        for_training: whether to make the checks of a training run.
        task: the task, unless the arguments name one.
    """
    overrides = list(options.overrides)
    overrides += [f"{key}={value}" for key, value in settings.items() if value is not None]
    if getattr(options, "ray", False):
        overrides.append("trainer.backend=ray")
    loaded = load_config(overrides, options.config_files, for_training=for_training, task=task)
    for notice in loaded.notices:
        print(f"notice: {notice}", file=sys.stderr)
    return loaded.config
