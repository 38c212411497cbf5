# SPDX-License-Identifier: Apache-2.0
"""`quadriga verl PROGRAM`: verl's command lines, taken as they are or answered in a sentence each."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from quadriga.config.yaml_text import combined, to_yaml
from quadriga.errors import ConfigError
from quadriga.trainer.keep_alive import OPTION, is_kept_alive, keep_run_alive
from quadriga.verl.hydra import VERSIONS, Tree
from quadriga.verl.programs import ENTRIES, find_entry
from quadriga.verl.shell import LAUNCHERS, launched
from quadriga.verl.translate import Line, translate

RUNS = {
    "train": "quadriga.trainer.launch:run_ppo", "generate": "quadriga.cli.generate:answer_rows",
    "eval": "quadriga.cli.generate:score", "export": "quadriga.cli.export:main",
}  # fmt: skip
"""What an entry names -> what is called with the configuration, if any, and options; loaded only then."""
_EPILOG = f"programs: {', '.join(entry.name for entry in ENTRIES)}"


def main(argv: Sequence[str]) -> int:
    """Translates a command line and runs it, or prints the translation."""
    parser = argparse.ArgumentParser(
        prog="quadriga verl", description=__doc__, epilog=_EPILOG, allow_abbrev=False
    )
    parser.add_argument(
        "--verl", metavar="VERSION", default="", help=f"whose defaults: {', '.join(VERSIONS)}"
    )
    parser.add_argument(
        "--check", action="store_true", help="print what the line means here, and end"
    )
    parser.add_argument(
        "--check-file", type=Path, metavar="FILE", help="check each line of a JSONL file"
    )
    parser.add_argument(OPTION, action="store_true", help="start a training again after its death")
    parser.add_argument(
        "program", nargs="?", help="a program of verl's, or the module or script that it is"
    )
    options, words = parser.parse_known_args(list(argv))
    if options.check_file is not None:
        return _check_file(options.check_file, options.verl)
    if options.program is None:
        parser.error("name one of verl's programs")
    if options.program in LAUNCHERS:
        options.program, words = launched([options.program, *words]) or (options.program, words)
    translation = translated(options.program, words, options.verl)
    for notice in translation.notices:
        print(f"notice: {notice}", file=sys.stderr)
    if options.check:
        print(to_yaml(Tree(translation.ours).nested()), end="")
        for title, found in (
            ("Cannot be taken", translation.refused),
            ("Not on this machine", translation.machine),
        ):
            if found:
                print(f"\n{title}:", *found, sep="\n  ", file=sys.stderr)
        return 2 if translation.refused else 0
    if problems := translation.refused + translation.machine:
        raise combined(problems)
    if options.keep_alive and not is_kept_alive():
        if translation.entry.run != "train" or translation.config is None:
            raise ConfigError(OPTION, got=translation.entry.name, expected="a program that trains")
        return keep_run_alive(translation.config, ["verl", *argv])
    module, _, name = RUNS[translation.entry.run].partition(":")
    given = () if translation.config is None else (translation.config,)
    getattr(import_module(module), name)(*given, **translation.options)
    return 0


def translated(program: str, words: Sequence[str], version: str) -> Line:
    """What a program's words mean. Of a program or a version that nobody knows the words are looked at
    as main_ppo's, or the last version's, and it is refused."""
    entry, known, problems = find_entry("main_ppo"), VERSIONS[-1], list[ConfigError]()
    try:
        entry = find_entry(program)
    except ConfigError as problem:
        problems.append(problem)
    try:
        known = version_of(version)
    except ConfigError as problem:
        problems.append(problem)
    found = translate(entry, words, known)
    return replace(found, config=None, refused=problems + found.refused) if problems else found


def version_of(text: str) -> str:
    """The version that a name means, 0.10.0 for a name without one: `0.6`, `verl-0.6.1 (2025-11)`."""
    match = re.search(r"\d+\.\d+", text)
    if match is None and not any(sign.isdigit() for sign in text.partition("(")[0]):
        return VERSIONS[-1]
    found = [one for one in VERSIONS if match is not None and one.startswith(f"{match[0]}.")]
    if not found:
        raise ConfigError(
            "--verl",
            got=f"'{text}'",
            expected=f"one of {', '.join(VERSIONS)}",
            fix="Name the nearest.",
        )
    return found[0]


def _check_file(file: Path, version: str) -> int:
    """One result a line; a line of the file may name its version as `set`."""
    accepted = 0
    try:
        texts = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        got = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            "--check-file", got=f"'{file}': {got}", expected="JSON, one line each"
        ) from error
    for number, text in enumerate(texts, start=1):
        try:
            asked = json.loads(text)
            name, program, words = (
                asked.get("id", number),
                asked["entry"],
                list(map(str, asked["args"])),
            )
            found = translated(program, words, version or asked.get("set", ""))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = ConfigError(
                f"{file}, line {number}", got=str(error), expected="JSON with entry and args"
            )
            name, found = number, Line(ENTRIES[0], VERSIONS[-1], refused=[problem])
        refused, machine = list(map(str, found.refused)), list(map(str, found.machine))
        result = {"id": name, "accepted": not refused, "refused": refused, "notices": found.notices}
        accepted += not refused
        print(json.dumps(result | {"machine": machine}, ensure_ascii=False))
    print(f"accepted {accepted} of {len(texts)}")
    return 0 if accepted == len(texts) else 2
