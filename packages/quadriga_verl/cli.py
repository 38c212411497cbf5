# SPDX-License-Identifier: Apache-2.0
"""`quadriga verl PROGRAM`: run verl's command lines, or explain what is not supported."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from quadriga.config.yaml_text import combine_errors, to_yaml
from quadriga.errors import ConfigError
from quadriga.trainer.keep_alive import OPTION, is_kept_alive, keep_run_alive
from quadriga_verl.commands.entries import ENTRIES, find_entry
from quadriga_verl.commands.hydra import VERSIONS, Tree
from quadriga_verl.commands.shell import LAUNCHERS, find_program
from quadriga_verl.commands.translate import Line, translate
from quadriga_verl.commands.verl_keys import VerlKeys

RUNS = {
    "train": "quadriga.trainer.launch:run_ppo",
    "generate": "quadriga.cli.generate:answer_rows",
    "eval": "quadriga.cli.generate:score",
    "export": "quadriga.cli.export:main",
}
"""Functions that run in place of verl's programs, by `Entry.run`. They are imported on demand, and called
with `Line.config`, unless it is None, and with `Line.options` by name."""
_EPILOG = f"programs: {', '.join(entry.name for entry in ENTRIES)}"


def main(argv: Sequence[str]) -> int:
    """Translate a command line of verl and run it, or print the translation or the results of checks.

    Args:
        argv: words after `quadriga verl`.

    Returns:
        The exit status: 2 if `--check` or `--check-file` finds something that is not supported (what
        only this machine lacks does not count), that of the training with `--keep-alive`, else 0.

    Raises:
        ConfigError: the command line cannot be run.
    """
    parser = argparse.ArgumentParser(
        prog="quadriga verl", description=__doc__, epilog=_EPILOG, allow_abbrev=False
    )
    parser.add_argument(
        "--verl", metavar="VERSION", default="", help=f"whose defaults: {', '.join(VERSIONS)}"
    )
    parser.add_argument("--check", action="store_true", help="print the translation, and end")
    parser.add_argument(
        "--check-file", type=Path, metavar="FILE", help="check each line of a JSONL file"
    )
    parser.add_argument(OPTION, action="store_true", help="start a training again after its death")
    parser.add_argument("program", nargs="?", help="a program of verl, or its module or script")
    options, words = parser.parse_known_args(list(argv))
    if options.check_file is not None:
        return _check_file(options.check_file, options.verl)
    if options.program is None:
        parser.error("name one of verl's programs")
    # As in `quadriga verl torchrun --nproc_per_node=8 -m verl.trainer.main_ppo ...`.
    if options.program in LAUNCHERS:
        options.program, words = find_program([options.program, *words]) or (options.program, words)
    translation = translate_program(options.program, words, options.verl)
    for notice in translation.notices:
        print(f"notice: {notice}", file=sys.stderr)
    if options.check:
        print(to_yaml(Tree(translation.settings).to_nested()), end="")
        _print_problems("Not supported", translation.refused)
        _print_problems("Not on this machine", translation.machine)
        return 2 if translation.refused else 0
    problems = translation.refused + translation.machine
    if problems:
        raise combine_errors(problems)
    # None: the program `model_merger`, which has only options.
    config = translation.config
    # A process that was started by `keep_run_alive` runs the program itself.
    if options.keep_alive and not is_kept_alive():
        if translation.entry.run != "train" or config is None:
            raise ConfigError(OPTION, got=translation.entry.name, expected="a program that trains")
        return keep_run_alive(config, ["verl", *argv])
    module, _, name = RUNS[translation.entry.run].partition(":")
    function = getattr(import_module(module), name)
    if config is None:
        function(**translation.options)
    else:
        function(config, **translation.options)
    return 0


def _print_problems(title: str, problems: Sequence[ConfigError]) -> None:
    """Print problems under a title, if there are any."""
    if problems:
        print(f"\n{title}:", *problems, sep="\n  ", file=sys.stderr)


def translate_program(program: str, words: Sequence[str], version: str) -> Line:
    """Translate the arguments of a program of verl.

    If the program or the version is unknown, the translation has a problem. Further problems are
    found by translating for main_ppo, or for the latest version.

    Args:
        program: name of the program.
        words: its arguments.
        version: text that names a version of verl, see `version_of`.

    Returns:
        The translation, whose problems are not raised.
    """
    entry = find_entry("main_ppo")
    known_version = VERSIONS[-1]
    problems = []
    try:
        entry = find_entry(program)
    except ConfigError as problem:
        problems.append(problem)
    try:
        known_version = version_of(version)
    except ConfigError as problem:
        problems.append(problem)
    translation = translate(entry, words, known_version)
    if problems:
        translation.refused = problems + translation.refused
        translation.config = None
    return translation


def version_of(text: str) -> str:
    """Find the known version of verl that a text names.

    Args:
        text: such as `0.6` or `verl-0.6.1 (2025-11)`. A text without a number, such as `main`,
            names the latest version.

    Returns:
        One of `VERSIONS`. The patch number in the text is not compared.

    Raises:
        ConfigError: the version is unknown.
    """
    match = re.search(r"\d+\.\d+", text)
    if match is None:
        # A date in parentheses is not a version.
        name = text.partition("(")[0]
        if not any(character.isdigit() for character in name):
            return VERSIONS[-1]
    else:
        for version in VERSIONS:
            if version.startswith(f"{match[0]}."):
                return version
    raise ConfigError(
        "--verl",
        got=f"'{text}'",
        expected=f"one of {', '.join(VERSIONS)}",
        fix="Name the nearest version.",
    )


def _check_file(file: Path, version: str) -> int:
    """Check each line of a JSONL file, and print a result in JSON for each.

    A line that cannot be read counts as one that is not accepted.

    Args:
        file: each line is a JSON object with a program of verl ("entry"), its arguments ("args"), and
            optionally a name for the result ("id") and the version of verl ("set").
        version: version of verl for all lines. "": the version in the line, or else the latest.

    Returns:
        The exit status: 0 if all lines are accepted, else 2.

    Raises:
        ConfigError: the file cannot be read.
    """
    num_accepted = 0
    try:
        texts = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "--check-file",
            got=f"'{file}': {getattr(error, 'strerror', None) or error}",
            expected="JSON, one line each",
        ) from error
    for number, text in enumerate(texts, start=1):
        try:
            fields = json.loads(text)
            name = fields.get("id", number)
            program = fields["entry"]
            words = [str(word) for word in fields["args"]]
            line = translate_program(program, words, version or fields.get("set", ""))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            name = number
            problem = ConfigError(
                f"{file}, line {number}", got=str(error), expected="JSON with entry and args"
            )
            # The problem needs a translation, of any program: only `refused` is read below.
            keys = VerlKeys(ENTRIES[0])
            line = Line(ENTRIES[0], VERSIONS[-1], keys, refused=[problem])
        num_accepted += not line.refused
        result = {
            "id": name,
            "accepted": not line.refused,
            "refused": [str(problem) for problem in line.refused],
            "notices": line.notices,
            "machine": [str(problem) for problem in line.machine],
        }
        print(json.dumps(result, ensure_ascii=False))
    print(f"accepted {num_accepted} of {len(texts)}")
    return 0 if num_accepted == len(texts) else 2
