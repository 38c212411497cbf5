# SPDX-License-Identifier: Apache-2.0
"""`quadriga config`: the resolved tree, the batch arithmetic in words, every key.

Also how every command reads its configuration: `--config FILE` and `key=value`.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from quadriga.cli.verl import translated
from quadriga.config import Config, explain, keys_text, load_config, show
from quadriga.config.root import respell
from quadriga.config.yaml_text import combined, to_yaml
from quadriga.errors import ConfigError
from quadriga.verl.hydra import Tree
from quadriga.verl.programs import Entry, find_entry
from quadriga.verl.shell import commands, launched

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
_TRANSLATED = "A commented YAML from verl's shell script, command line or YAML file."
_COMMANDS = {"generate": "generate MODEL --output FILE", "eval": "eval FILE", "export": "export"}


def main(argv: Sequence[str]) -> int:
    """Runs `quadriga config` and returns its exit status."""
    if argv[:1] == ["translate"]:
        return translate(argv[1:])
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
        help="of explain, with async_training.enable: a run in lockstep, whose lengths and seconds are simulated",
    )
    add_config_arguments(parser)
    options = parser.parse_intermixed_args(list(argv))
    if options.action == "keys":
        if not (text := keys_text(options.overrides)):
            got, expected = " ".join(options.overrides), "part of a key's name or meaning"
            raise ConfigError(
                "quadriga config keys", got=got, expected=expected, fix="No key has it."
            )
        print(text, end="")
        return 0
    config = load_from(options)
    if options.action == "show":
        print(show(config), end="")
        return 0
    found = import_module(_PREFLIGHT).preflight(config, options.recorded)
    print(explain(config, found.num_prompts, found.fields), end="")
    problems = [respell(one, config.task) for one in found.problems]
    parts = (("Models", found.models), ("Simulated", found.simulated))
    for title, lines in (*parts, ("Before training", problems), ("To know", found.notices)):
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
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="a key of the tree, such as trainer.seed=2",
    )


def load_from(
    options: argparse.Namespace, *, for_training: bool = False, task: str = "rl"
) -> Config:
    """The configuration that parsed arguments name, for a task unless they name one.
    Notices are printed on standard error, so that what is on standard output stays YAML."""
    overrides = [
        *options.overrides,
        *(["trainer.backend=ray"] if getattr(options, "ray", False) else []),
    ]
    loaded = load_config(overrides, options.config_files, for_training=for_training, task=task)
    for notice in loaded.notices:
        print(f"notice: {notice}", file=sys.stderr)
    return loaded.config


def translate(argv: Sequence[str]) -> int:
    """Prints the YAML; exit status 2 where something in the line cannot be taken."""
    parser = argparse.ArgumentParser(
        prog="quadriga config translate", description=_TRANSLATED, allow_abbrev=False
    )
    parser.add_argument("--verl", metavar="VERSION", default="", help="whose defaults")
    parser.add_argument(
        "--line",
        type=int,
        help="of a script with several commands: the one that begins in this line",
    )
    parser.add_argument(
        "--program", default="main_ppo", help="of a YAML file: the program that reads it"
    )
    parser.add_argument(
        "source",
        help="a shell script, a YAML file of verl's, or a program with its words behind it",
    )
    options, words = parser.parse_known_args(list(argv))
    place, (program, words) = _line(options, words)
    found = translated(program, words, options.verl)
    entry = found.entry
    if found.refused:
        raise combined(found.refused)
    command = _COMMANDS.get(entry.run, "sft" if entry.task == "sft" else "train")
    print(f"# {place}: {entry.name} of verl. `quadriga {command} --config THIS_FILE`")
    for sentence in (
        *found.notices,
        *(f"{name}: {value}" for name, value in found.options.items()),
    ):
        print(f"# {sentence}")
    print(*_lines(Tree(found.ours).nested(), found.sources), sep="\n")
    for problem in found.machine:
        print(f"not on this machine: {problem}", file=sys.stderr)
    return 0


def _line(options: argparse.Namespace, words: list[str]) -> tuple[str, tuple[str, list[str]]]:
    """Where the command line is from; its program, and its words."""
    source = Path(options.source)
    if source.suffix in (".yaml", ".yml"):
        file = [f"--config-path={source.parent}", f"--config-name={source.stem}"]
        return options.source, (options.program, [*file, *words])
    if source.suffix != ".sh":
        line = None if _known(options.source) else launched([options.source, *words])
        return "the command line", line or (options.source, words)
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            options.source, got=got, expected="a shell script that can be read"
        ) from error
    found = {
        one.line: (one, line)
        for one in commands(text, os.environ)
        if (line := launched(one.words)) and _known(line[0])
    }
    chosen = found.get(options.line, next(iter(found.values()))) if found else None
    if chosen is None or (len(found) > 1 and options.line not in found):
        lines = (
            f"commands of verl's in lines {', '.join(map(str, found))}"
            if found
            else "no command of verl's"
        )
        fix = "Name one with --line." if found else "Give its words behind the name of the program."
        raise ConfigError(options.source, got=lines, expected="one", fix=fix)
    command, line = chosen
    if command.problems:
        got, fix = (
            "; ".join(command.problems),
            "Set variables in front: NAME=value quadriga config translate ...",
        )
        where = f"{options.source}, line {command.line}"
        raise ConfigError(where, got=got, expected="words that are all known", fix=fix)
    return f"{options.source}, line {command.line}", (line[0], [*line[1], *words])


def _known(program: str) -> Entry | None:
    try:
        return find_entry(program)
    except ConfigError:
        return None


def _lines(tree: Mapping[str, Any], sources: Mapping[str, str], above: str = "") -> Iterator[str]:
    """YAML, each key with verl's key that it was set from, where that has another name."""
    indent = "  " * above.count(".")
    for name, value in tree.items():
        key = f"{above}{name}"
        if isinstance(value, dict) and value and key not in sources:
            yield f"{indent}{name}:"
            yield from _lines(value, sources, f"{key}.")
        else:
            text = (
                json.dumps(value)
                if isinstance(value, str | dict) and "\n" in str(value)
                else to_yaml([value])[1:-2]
            )
            source = sources.get(key, "")
            yield f"{indent}{name}: {text}" + (f"  # {source}" if source not in ("", key) else "")
