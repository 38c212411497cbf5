# SPDX-License-Identifier: Apache-2.0
"""`quadriga`: picks the command and turns how it ends into an exit status.

0    it worked
1    it failed, and said why
2    the command line or the configuration is wrong
130  it was interrupted
141  its output could not be written, and no log took it
"""

import argparse
import errno
import os
import re
import signal
import sys
from codecs import lookup
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from quadriga import __version__, streams
from quadriga.descendants import Guardian
from quadriga.errors import ConfigError, QuadrigaError, did_you_mean
from quadriga.lazy import collector_paused, keep_modules
from quadriga.observe.watchdog import NOTICE_S, waiting
from quadriga.redact import redacted_text

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("quadriga.cli.train", "train a model with rewards"),
    "generate": (
        "quadriga.cli.generate",
        "generate responses to prompts with a model or a checkpoint",
    ),
    "sft": (
        "quadriga.cli.train:sft",
        "supervised fine-tuning on given responses, or a reward model on pairs of them",
    ),
    "eval": ("quadriga.cli.generate:grade", "grade a model or a checkpoint on a data set"),
    "prepare": ("quadriga.cli.prepare", "write data and models that training reads"),
    "data": ("quadriga.cli.data", "show what a data file holds, and what a run would make of it"),
    "verl": ("quadriga.cli.verl", "run a command line of verl's, or say what it means here"),
    "config": ("quadriga.cli.config", "show, explain or list the configuration"),
    "doctor": (
        "quadriga.cli.doctor",
        "say what is installed and usable here, and what is not and why",
    ),
    "export": ("quadriga.cli.export", "turn a checkpoint into a Hugging Face folder"),
}
"""Command -> its module, whose `main` (or what is named behind a colon) is called, and what it does."""

GUARDED = ("train", "generate", "sft", "eval", "verl")
"""Commands that start processes and run users' code: what these leave behind ends with the command."""

GOES_ON = ("train", "generate", "sft", "prepare", "verl")
"""Commands that go on when their output cannot be written: `console.log` takes it, where it has a
folder."""

_UNDECODABLE = re.compile("[\ud800-\udfff]")
_TRACEBACK_OPTION = "--traceback"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    if argv is None:
        # Where Python code calls this, the streams are the caller's.
        os.environ.pop(streams.LOG_VARIABLE, None)
        streams.install()
    status = 0
    try:
        status = _run(argv)
        if sys.stdout is not None:
            # What is in the buffer may be what fails.
            sys.stdout.flush()
    except OSError as error:
        if error is not streams.lost_output():
            raise
    except SystemExit as end:
        # argparse's, after a help text
        if end.code or streams.lost_output() is None:
            raise
    lost = streams.lost_output()
    if lost is None or status:
        return status
    # A reader that leaves (`| head`) has what it wanted.
    if lost.errno != errno.EPIPE:
        print(f"quadriga: standard output cannot be written ({lost.strerror})", file=sys.stderr)
    return 141


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Trackers record the command line.
    sys.argv = [*sys.argv[:1], *map(redacted_text, sys.argv[1:])]
    # It may stand anywhere, also behind the keys of a long command line.
    has_traceback = _TRACEBACK_OPTION in arguments or os.environ.get("QUADRIGA_TRACEBACK") == "1"
    arguments = [one for one in arguments if one != _TRACEBACK_OPTION]
    parser = argparse.ArgumentParser(
        prog="quadriga",
        description="Post-training of language models by reinforcement learning.",
        epilog="commands:\n"
        + "\n".join(
            f"  {name:{max(map(len, COMMANDS))}}  {summary}"
            for name, (_, summary) in COMMANDS.items()
        )
        + "\n\n`quadriga COMMAND --help` says more about each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="quadriga [--version] [--traceback] COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=f"quadriga {__version__}")
    parser.add_argument(
        _TRACEBACK_OPTION,
        action="store_true",
        help="show where an error arose (QUADRIGA_TRACEBACK=1)",
    )
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    _refuse_undecodable(parser, arguments)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    if options.command not in COMMANDS:
        hint = did_you_mean(options.command, COMMANDS) or f"There are {', '.join(COMMANDS)}."
        parser.error(f"no command {options.command!r}. {hint}")
    # Where Python code calls this, its other processes are not the command's to end.
    guardian = Guardian() if argv is None and options.command in GUARDED else None
    if argv is None:
        keep_modules()
    if options.command not in GOES_ON:
        streams.raise_failures()
    try:
        try:
            return _call(options.command, options.arguments, has_traceback)
        finally:
            if guardian is not None:
                # Whoever presses Ctrl-C once more wants what is going on here already.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        if has_traceback:
            raise
        print(f"quadriga {options.command}: interrupted", file=sys.stderr)
        return 130
    finally:
        if guardian is not None:
            with waiting("processes of the run to end", every_s=NOTICE_S):
                guardian.close()


def _refuse_undecodable(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Ends with a message where a path has bytes that are no text: libraries cannot open it."""
    texts = {f"argument {number}": word for number, word in enumerate(arguments, start=1)}
    # A deleted directory is named by the command that needs it.
    with suppress(FileNotFoundError):
        texts["the working directory"] = os.getcwd()
    for place, text in texts.items():
        if _UNDECODABLE.search(text):
            encoding = sys.getfilesystemencoding()
            expected = f"expected text in {encoding}, the encoding of this locale"
            fix = "Rename it, or set LC_ALL=C.UTF-8."
            parser.error(f"{place}: got {text!a}, {expected}. {fix}")


def _call(command: str, arguments: list[str], has_traceback: bool) -> int:
    try:
        module, _, function = COMMANDS[command][0].partition(":")
        with waiting(f"the modules of quadriga {command}", every_s=NOTICE_S), collector_paused():
            loaded = import_module(module)
        return getattr(loaded, function or "main")(arguments)
    except QuadrigaError as error:
        if has_traceback:
            raise
        print(f"quadriga {command}: {error}", file=sys.stderr)
        if not isinstance(error, ConfigError):
            print(
                f"({type(error).__name__}; {_TRACEBACK_OPTION} shows where it arose)",
                file=sys.stderr,
            )
        return 2 if isinstance(error, ConfigError) else 1
    except ModuleNotFoundError as error:
        if has_traceback or (error.name or "quadriga").split(".")[0] == "quadriga":
            raise
        missing = (
            f"the package {error.name} is not installed. `quadriga doctor` says what is missing."
        )
        print(f"quadriga {command}: {missing}", file=sys.stderr)
        return 1
    except UnicodeEncodeError as error:
        encoding = sys.getfilesystemencoding()
        if has_traceback or encoding == "utf-8" or lookup(error.encoding) != lookup(encoding):
            raise
        # The name of a file that a configuration or a data file names.
        expected = f"expected text in {encoding}, the encoding of this locale"
        fix = "Set LC_ALL=C.UTF-8."
        got = f"got {error.object[:200]!a}"
        print(f"quadriga {command}: {got}, {expected}. {fix}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
