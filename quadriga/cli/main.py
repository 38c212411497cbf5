# SPDX-License-Identifier: Apache-2.0
"""`quadriga`: picks the command and turns how it ends into an exit status.

0    it worked
1    it failed, and said why
2    the command line or the configuration is wrong
130  it was interrupted
"""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from quadriga import __version__
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

_TRACEBACK_OPTION = "--traceback"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # So that a log has the lines when they are printed, and between those of standard error.
        sys.stdout.reconfigure(line_buffering=True)
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
    try:
        try:
            return _run(options.command, options.arguments, has_traceback)
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


def _run(command: str, arguments: list[str], has_traceback: bool) -> int:
    try:
        module, _, function = COMMANDS[command][0].partition(":")
        with waiting(f"the modules of quadriga {command}", every_s=NOTICE_S), collector_paused():
            loaded = import_module(module)
        status = getattr(loaded, function or "main")(arguments)
        # A pipe that was closed is noticed here, inside the try, and not in the interpreter's last breath.
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted; what is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
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
    return status


if __name__ == "__main__":
    sys.exit(main())
