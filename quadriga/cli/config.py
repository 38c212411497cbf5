# SPDX-License-Identifier: Apache-2.0
"""`quadriga config`: the resolved tree, the batch arithmetic in words, every key.

Also how every command reads its configuration: `--config FILE` and `key=value`.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from quadriga.cli import translate
from quadriga.config import Config, explain, keys_text, load_config, show
from quadriga.config.root import respell
from quadriga.errors import ConfigError

_DESCRIPTION = """\
show     the resolved configuration as YAML, defaults included
explain  what a training run with it does: batch arithmetic, passes, files; and what would keep it from starting, by
         the checks that a run makes before its models are loaded, and one row graded; status 2 if there is something
keys     every key with what it takes, its default and its meaning; words narrow the list, by name, by meaning or by
         what other trainers call it: `quadriga config keys optim`, `keys "kv cache"`, `keys num_generations`
translate  a commented YAML from verl's shell script, command line or YAML: `quadriga config translate run_grpo.sh`
"""


# By its name: it loads torch, which nothing else here needs.
_PREFLIGHT = "quadriga.trainer.preflight"


def main(argv: Sequence[str]) -> int:
    """Runs `quadriga config` and returns its exit status."""
    if argv[:1] == ["translate"]:
        return translate.main(argv[1:])
    parser = argparse.ArgumentParser(
        prog="quadriga config", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("show", "explain", "keys", "translate"), help="what to print")
    add_config_arguments(parser)
    options = parser.parse_intermixed_args(list(argv))
    if options.action == "keys":
        if not (text := keys_text(options.overrides)):
            got, expected = " ".join(options.overrides), "part of a key's name or meaning"
            raise ConfigError("quadriga config keys", got=got, expected=expected, fix="No key has it.")
        print(text, end="")
        return 0
    config = load_from(options)
    if options.action == "show":
        print(show(config), end="")
        return 0
    found = import_module(_PREFLIGHT).preflight(config)
    print(explain(config, found.num_prompts, found.fields), end="")
    problems = [respell(one, config.task) for one in found.problems]
    for title, lines in (("Before training", problems), ("To know", found.notices)):
        if lines:
            print(f"\n{title}", *lines, sep="\n  ")
    return 2 if problems else 0


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what every command with a configuration takes; parse with `parse_intermixed_args`."""
    parser.add_argument(
        "--config",
        dest="config_files",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="a YAML file; of several, each goes over the one before",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="a key of the tree, such as trainer.seed=2")


def load_from(options: argparse.Namespace, *, for_training: bool = False, task: str = "rl") -> Config:
    """The configuration that parsed arguments name, for a task unless they name one.

    Notices are printed on standard error, so that what is on standard output stays YAML.
    """
    overrides = [*options.overrides, *(["trainer.backend=ray"] if getattr(options, "ray", False) else [])]
    loaded = load_config(overrides, options.config_files, for_training=for_training, task=task)
    for notice in loaded.notices:
        print(f"notice: {notice}", file=sys.stderr)
    return loaded.config
