# SPDX-License-Identifier: Apache-2.0
"""`quadriga config translate`: a commented YAML from verl's shell script, command line or YAML file."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quadriga.cli.verl import translated
from quadriga.config.yaml_text import combined, to_yaml
from quadriga.errors import ConfigError
from quadriga.verl.entries import Entry, find_entry
from quadriga.verl.hydra import Tree
from quadriga.verl.shell import commands, launched

_COMMANDS = {"generate": "generate MODEL --output FILE", "eval": "eval FILE", "export": "export"}


def main(argv: Sequence[str]) -> int:
    """Prints the YAML; exit status 2 where something in the line cannot be taken."""
    parser = argparse.ArgumentParser(prog="quadriga config translate", description=__doc__, allow_abbrev=False)
    parser.add_argument("--verl", metavar="VERSION", default="", help="whose defaults")
    parser.add_argument("--line", type=int, help="of a script with several commands: the one that begins in this line")
    parser.add_argument("--program", default="main_ppo", help="of a YAML file: the program that reads it")
    parser.add_argument("source", help="a shell script, a YAML file of verl's, or a program with its words behind it")
    options, words = parser.parse_known_args(list(argv))
    place, (program, words) = _line(options, words)
    entry, found = translated(program, words, options.verl)
    if found.refused:
        raise combined(found.refused)
    command = _COMMANDS.get(entry.run, "sft" if entry.task == "sft" else "train")
    print(f"# {place}: {entry.name} of verl. `quadriga {command} --config THIS_FILE`")
    for sentence in (*found.notices, *(f"{name}: {value}" for name, value in found.options.items())):
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
        raise ConfigError(options.source, got=got, expected="a shell script that can be read") from error
    found = {
        one.line: (one, line) for one in commands(text, os.environ) if (line := launched(one.words)) and _known(line[0])
    }
    chosen = found.get(options.line, next(iter(found.values()))) if found else None
    if chosen is None or (len(found) > 1 and options.line not in found):
        lines = f"commands of verl's in lines {', '.join(map(str, found))}" if found else "no command of verl's"
        fix = "Name one with --line." if found else "Give its words behind the name of the program."
        raise ConfigError(options.source, got=lines, expected="one", fix=fix)
    command, line = chosen
    if command.problems:
        got, fix = "; ".join(command.problems), "Set variables in front: NAME=value quadriga config translate ..."
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
            text = json.dumps(value) if isinstance(value, str | dict) and "\n" in str(value) else to_yaml([value])[1:-2]
            source = sources.get(key, "")
            yield f"{indent}{name}: {text}" + (f"  # {source}" if source not in ("", key) else "")
