# SPDX-License-Identifier: Apache-2.0
"""`quadriga config`: the resolved tree, a description of a run, and all keys.

It also has the options by which all commands read a configuration: `--config FILE`, `key=value`.
"""

import argparse
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from quadriga.cli.verl import translated
from quadriga.config import Config, explain, keys_text, load_config, show, with_groups
from quadriga.config.root import respell
from quadriga.config.yaml_text import combined, to_yaml
from quadriga.errors import ConfigError
from quadriga.verl.hydra import Tree
from quadriga.verl.programs import find_entry
from quadriga.verl.shell import commands, launched

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


# Imported on demand, because it loads torch.
_PREFLIGHT = "quadriga.trainer.preflight"
_TRANSLATED = "Convert verl's shell script, command line or YAML file to a commented YAML."
_COMMANDS = {"generate": "generate MODEL --output FILE", "eval": "eval FILE", "export": "export"}


def main(argv: Sequence[str]) -> int:
    """Run `quadriga config`; return its exit status."""
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
        help="for explain with async_training.enable: a run in lockstep, whose lengths and times "
        "are used for a simulation",
    )
    add_config_arguments(parser)
    options = parser.parse_intermixed_args(list(argv))
    if options.action == "keys":
        _print_keys(options.overrides)
        return 0
    config, choice = with_groups(load_from(options))
    if choice:
        print(f"notice: {choice}", file=sys.stderr)
    if options.action == "show":
        print(show(config), end="")
        return 0
    report = import_module(_PREFLIGHT).preflight(config, options.recorded)
    print(explain(config, report.num_prompts, report.fields), end="")
    _print_section("Models", report.models)
    _print_section("Simulated", report.simulated)
    _print_section("Before training", [respell(error, config.task) for error in report.problems])
    _print_section("To know", report.notices)
    return 2 if report.problems else 0


def _print_keys(words: Sequence[str]) -> None:
    text = keys_text(words)
    if not text:
        got = " ".join(words)
        expected = "part of a key's name or meaning"
        fix = "No key has it."
        raise ConfigError("quadriga config keys", got=got, expected=expected, fix=fix)
    print(text, end="")


def _print_section(title: str, lines: Collection[object]) -> None:
    if lines:
        print(f"\n{title}", *lines, sep="\n  ")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands with a configuration; use `parse_intermixed_args` to parse."""
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
    options: argparse.Namespace, *, for_training: bool = False, task: str = "rl"
) -> Config:
    """Load the configuration that parsed arguments name.

    Notices are printed on standard error, so that standard output remains YAML.

    Args:
        options: the parsed arguments.
        for_training: whether to make the checks of a training run.
        task: the task, unless the arguments name one.
    """
    overrides = list(options.overrides)
    if getattr(options, "ray", False):
        overrides.append("trainer.backend=ray")
    loaded = load_config(overrides, options.config_files, for_training=for_training, task=task)
    for notice in loaded.notices:
        print(f"notice: {notice}", file=sys.stderr)
    return loaded.config


def translate(argv: Sequence[str]) -> int:
    """Print the YAML. The exit status is 2 if something on the command line is not supported."""
    parser = argparse.ArgumentParser(
        prog="quadriga config translate", description=_TRANSLATED, allow_abbrev=False
    )
    parser.add_argument("--verl", metavar="VERSION", default="", help="whose defaults")
    parser.add_argument(
        "--line",
        type=int,
        help="for a script with several commands: line in which the command begins",
    )
    parser.add_argument(
        "--program", default="main_ppo", help="for a YAML file: the program that reads it"
    )
    parser.add_argument(
        "source",
        help="a shell script, a YAML file of verl, or a program followed by its arguments",
    )
    options, words = parser.parse_known_args(list(argv))
    line = _command_line(options, words)
    translation = translated(line.program, line.words, options.verl)
    if translation.refused:
        raise combined(translation.refused)
    entry = translation.entry
    command = _COMMANDS.get(entry.run, "sft" if entry.task == "sft" else "train")
    print(f"# {line.place}: {entry.name} of verl. `quadriga {command} --config THIS_FILE`")
    for notice in translation.notices:
        print(f"# {notice}")
    for name, value in translation.options.items():
        print(f"# {name}: {value}")
    print(*_lines(Tree(translation.ours).nested(), translation.sources), sep="\n")
    for problem in translation.machine:
        print(f"not on this machine: {problem}", file=sys.stderr)
    return 0


@dataclass
class _CommandLine:
    """A command line of verl, and the place that it was read from."""

    place: str
    program: str
    words: list[str]


def _command_line(options: argparse.Namespace, words: list[str]) -> _CommandLine:
    """Find the command line in a shell script or a YAML file, or on the command line itself."""
    source = Path(options.source)
    if source.suffix in (".yaml", ".yml"):
        file_words = [f"--config-path={source.parent}", f"--config-name={source.stem}"]
        return _CommandLine(options.source, options.program, [*file_words, *words])
    if source.suffix == ".sh":
        return _script_line(options, words)
    line = None if _is_known(options.source) else launched([options.source, *words])
    program, words = line or (options.source, words)
    return _CommandLine("the command line", program, words)


def _script_line(options: argparse.Namespace, words: list[str]) -> _CommandLine:
    """Find the command of verl in a shell script."""
    try:
        text = Path(options.source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = getattr(error, "strerror", None) or str(error)
        expected = "a readable shell script"
        raise ConfigError(options.source, got=got, expected=expected) from error
    candidates = {}
    for command in commands(text, os.environ):
        line = launched(command.words)
        if line and _is_known(line[0]):
            candidates[command.line] = (command, line)
    if not candidates:
        fix = "Give its arguments after the name of the program."
        raise ConfigError(options.source, got="no command of verl", expected="one", fix=fix)
    number = options.line if options.line in candidates else next(iter(candidates))
    if len(candidates) > 1 and number != options.line:
        got = f"commands of verl in lines {', '.join(map(str, candidates))}"
        raise ConfigError(options.source, got=got, expected="one", fix="Name one with --line.")
    command, (program, program_words) = candidates[number]
    place = f"{options.source}, line {number}"
    if command.problems:
        got = "; ".join(command.problems)
        expected = "words that are all known"
        fix = "Set variables in front: NAME=value quadriga config translate ..."
        raise ConfigError(place, got=got, expected=expected, fix=fix)
    return _CommandLine(place, program, [*program_words, *words])


def _is_known(program: str) -> bool:
    try:
        find_entry(program)
    except ConfigError:
        return False
    return True


def _lines(tree: Mapping[str, Any], sources: Mapping[str, str], above: str = "") -> Iterator[str]:
    """Format a tree as YAML, with verl's key behind each key that has another name there."""
    indent = "  " * above.count(".")
    for name, value in tree.items():
        key = f"{above}{name}"
        if isinstance(value, dict) and value and key not in sources:
            yield f"{indent}{name}:"
            yield from _lines(value, sources, f"{key}.")
            continue
        has_line_breaks = isinstance(value, str | dict) and "\n" in str(value)
        text = json.dumps(value) if has_line_breaks else to_yaml([value])[1:-2]
        source = sources.get(key, key) or key
        comment = "" if source == key else f"  # {source}"
        yield f"{indent}{name}: {text}{comment}"
