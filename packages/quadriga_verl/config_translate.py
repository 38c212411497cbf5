# SPDX-License-Identifier: Apache-2.0
"""`quadriga config translate`: convert a command line of verl to a YAML file of this framework.

The command line is in a shell script or a YAML file, or follows `translate` itself.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from quadriga.config.keys import leaf_keys
from quadriga.config.loader import read_settings
from quadriga.config.root import spell_key
from quadriga.config.yaml_text import combine_errors, to_yaml
from quadriga.errors import ConfigError
from quadriga_verl.cli import translate_program
from quadriga_verl.commands.entries import find_entry
from quadriga_verl.commands.hydra import Tree, known_keys
from quadriga_verl.commands.line import Line
from quadriga_verl.commands.rules import find_rule
from quadriga_verl.commands.shell import UNDECIDED, Command, find_commands, find_program
from quadriga_verl.commands.verl_keys import is_same

_DESCRIPTION = "Convert verl's shell script, command line or YAML file to a commented YAML."
_COMMANDS = {"generate": "generate MODEL --output FILE", "eval": "eval FILE", "export": "export"}
"""Command lines that read the YAML, by `Entry.run`. Training has others."""
_ALWAYS_WRITTEN = frozenset({"trainer.save_freq", "actor_rollout_ref.rollout.n"})
"""Keys that are written even with their default, because a run may replace a default by another value."""
_WITHOUT_EFFECT = ("any", "note", "values", "stop")
"""Kinds of rules (`Rule.becomes`) whose keys set nothing here."""


def translate(argv: Sequence[str]) -> int:
    """Print the translation of a command line as a YAML file.

    Comments in the YAML name the keys of verl that were translated, notices, and options that are not
    keys. What only this machine lacks, such as a file, is printed to standard error.

    Args:
        argv: words after `quadriga config translate`.

    Returns:
        The exit status.

    Raises:
        ConfigError: there is no command line, or something in it is not supported.
    """
    parser = argparse.ArgumentParser(
        prog="quadriga config translate", description=_DESCRIPTION, allow_abbrev=False
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
    translation = translate_program(line.program, line.words, options.verl)
    if translation.refused:
        raise combine_errors(translation.refused)
    entry = translation.entry
    command = _COMMANDS.get(entry.run, "sft" if entry.task == "sft" else "train")
    print(f"# {line.place}: {entry.name} of verl. `quadriga {command} --config THIS_FILE`")
    for notice in line.notices + translation.notices:
        print(f"# {notice}")
    for name, value in translation.options.items():
        print(f"# {name}: {value}")
    changed = changed_keys(translation)
    left_out = {source for key, source in translation.sources.items() if key not in changed}
    left_out &= translation.keys.from_user
    if left_out:
        print(f"# Left out, for they have the defaults: {', '.join(sorted(left_out))}")
    # A key's comment is the reason for another value than in verl, or verl's name for the key.
    comments = {}
    for key, source in translation.sources.items():
        comments[key] = translation.comments.get(key) or ("" if source == key else source)
    print(*_lines(Tree(changed).to_nested(), comments), sep="\n")
    for problem in translation.machine:
        print(f"not on this machine: {problem}", file=sys.stderr)
    return 0


def changed_keys(translation: Line) -> dict[str, Any]:
    """Leave out the translated keys whose values are Quadriga's defaults.

    Args:
        translation: the translation, without problems.

    Returns:
        The other keys with their values. They give the same configuration as all keys.
    """
    ours = translation.settings
    task = translation.entry.task
    leaves = leaf_keys(task)
    left_out = set()
    for key in ours.keys() & leaves.keys() - _ALWAYS_WRITTEN:
        default = leaves[key].default
        if is_same(ours[key], list(default) if isinstance(default, tuple) else default):
            left_out.add(key)
    # The default of a key may depend on another key. So keys are put back until the configuration
    # without the remaining ones is the same.
    differing_keys = left_out  # for the first pass of the loop
    while differing_keys and translation.config is not None:
        changed = {key: value for key, value in ours.items() if key not in left_out}
        config, _, _ = read_settings(changed, {}, task=task, for_training=False)
        differing_keys = set()
        for key in left_out:
            value_of = attrgetter(spell_key(key, task, in_full=True))
            if config is None or value_of(config) != value_of(translation.config):
                differing_keys.add(key)
        left_out -= differing_keys
    return {key: value for key, value in ours.items() if key not in left_out}


def verl_meanings(words: Sequence[str]) -> list[str]:
    """Explain why keys of verl's training programs have no effect here.

    Args:
        words: keys that contain all of these words are explained.

    Returns:
        A line "verl's KEYS: REASON" for each reason.
    """
    keys_by_reason = {}
    for task, rule_names in (("rl", ("ppo",)), ("sft", ("fsdp_sft", "sft"))):
        for key in sorted(known_keys()):
            if not all(word.lower() in key for word in words):
                continue
            rule = find_rule(rule_names, task, key)
            if rule is not None and rule.becomes in _WITHOUT_EFFECT:
                keys = keys_by_reason.setdefault(rule.sentence, [])
                # A key may have the same row for both tasks.
                if key not in keys:
                    keys.append(key)
    return [f"verl's {', '.join(keys)}: {reason}" for reason, keys in keys_by_reason.items()]


@dataclass
class _CommandLine:
    """A command line of verl, and where it was found.

    Attributes:
        place: description of the place, for messages.
        program: name, module or script of the program.
        words: the program's arguments.
        notices: notices about the shell script that contains the line.
    """

    place: str
    program: str
    words: list[str]
    notices: list[str] = field(default_factory=list)


def _command_line(options: argparse.Namespace, words: list[str]) -> _CommandLine:
    """Find the command line of verl.

    Args:
        options: options of `translate`; `source` is a script, a YAML file, or the first word.
        words: further words, which are added to those of a script or file.

    Raises:
        ConfigError: the script cannot be read, or has no command of verl, or several.
    """
    source = Path(options.source)
    if source.suffix in (".yaml", ".yml"):
        file_words = [f"--config-path={source.parent}", f"--config-name={source.stem}"]
        return _CommandLine(options.source, options.program, [*file_words, *words])
    if source.suffix == ".sh":
        return _script_line(options, words)
    program = options.source
    # The words may begin with a launcher, such as torchrun.
    if not _is_program(program):
        program, words = find_program([program, *words]) or (program, words)
    return _CommandLine("the command line", program, words)


def _script_line(options: argparse.Namespace, words: list[str]) -> _CommandLine:
    """Find the command of verl in a shell script; see `_command_line`."""
    try:
        text = Path(options.source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            options.source,
            got=getattr(error, "strerror", None) or str(error),
            expected="a readable shell script",
        ) from error
    candidates = {}  # commands of verl, each with its program and arguments, by line
    for command in find_commands(text, os.environ):
        program_words = find_program(command.words)
        if program_words and _is_program(program_words[0]):
            candidates[command.line] = (command, program_words)
    if not candidates:
        raise ConfigError(
            options.source,
            got="no command of verl",
            expected="one",
            fix="Give its arguments after the name of the program.",
        )
    # The only command is used whatever `--line` says. Of several, `--line` must name one.
    number = options.line if options.line in candidates else next(iter(candidates))
    if len(candidates) > 1 and number != options.line:
        raise ConfigError(
            options.source,
            got=f"commands of verl in lines {', '.join(map(str, candidates))}",
            expected="one",
            fix="Name one with --line.",
        )
    command, (program, script_words) = candidates[number]
    place = f"{options.source}, line {number}"
    _check_words(command, place, is_chosen=options.line is not None)
    return _CommandLine(place, program, [*script_words, *words], command.notices)


def _check_words(command: Command, place: str, *, is_chosen: bool) -> None:
    """Raise a ConfigError if words of a command are unknown, or if the script may skip the command.

    Args:
        command: the command.
        place: "SCRIPT, line NUMBER", for the error.
        is_chosen: whether the user has named its line, so that conditions before it do not matter.
    """
    problems = [text for text in command.problems if not (is_chosen and text == UNDECIDED)]
    if not problems:
        return
    # Problems with a variable begin "NAME is not set" or "NAME is set".
    names = dict.fromkeys(re.findall(r"^(\w+) is (?:not )?set", "\n".join(problems), re.MULTILINE))
    script = place.partition(", line ")[0]
    command_line = f"quadriga config translate {script}"
    if UNDECIDED in problems:
        command_line += f" --line {command.line}"
    fix = f"Write its words after the name of the program, or translate it as it is: {command_line}"
    if names:
        assignments = " ".join(f"{name}=VALUE" for name in names)
        fix = f"Set what is not known in front: {assignments} {command_line}"
    raise ConfigError(place, got="; ".join(problems), expected="words that are all known", fix=fix)


def _is_program(name: str) -> bool:
    """Whether a word names a known program of verl."""
    try:
        find_entry(name)
    except ConfigError:
        return False
    return True


def _lines(tree: Mapping[str, Any], comments: Mapping[str, str], above: str = "") -> Iterator[str]:
    """Format a tree as lines of YAML.

    Args:
        tree: nested values.
        comments: comments by dotted key, written after the value. "": the key has none. A dictionary
            whose key is here is written in a single line.
        above: dotted key of the section `tree` with a dot at its end; "" for the whole tree.
    """
    indent = "  " * above.count(".")
    for name, value in tree.items():
        key = f"{above}{name}"
        if isinstance(value, dict) and value and key not in comments:
            yield f"{indent}{name}:"
            yield from _lines(value, comments, f"{key}.")
            continue
        # Text with line breaks would become several lines of YAML, and a comment fits on one line.
        has_line_breaks = isinstance(value, str | dict) and "\n" in str(value)
        # `to_yaml` writes a list of one value as "[VALUE]" and a line break.
        text = json.dumps(value) if has_line_breaks else to_yaml([value])[1:-2]
        comment = comments.get(key)
        yield f"{indent}{name}: {text}" + (f"  # {comment}" if comment else "")
