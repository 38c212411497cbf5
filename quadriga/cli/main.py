# SPDX-License-Identifier: Apache-2.0
"""`quadriga`: run a command, and convert its result to an exit status.

0    success
1    failure, with a message
2    wrong command line or configuration
130  interrupted
141  the output could not be written, and no log took it
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
from importlib.util import find_spec

from quadriga import __version__, streams
from quadriga.cli.loading import load_module
from quadriga.descendants import Guardian
from quadriga.errors import ConfigError, QuadrigaError, did_you_mean
from quadriga.lazy import keep_modules
from quadriga.observe.watchdog import NOTICE_S, waiting
from quadriga.redact import redact_text

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
    "eval": ("quadriga.cli.generate:grade", "grade a model or a checkpoint on a dataset"),
    "serve": ("quadriga.cli.serve", "serve a model or a checkpoint over HTTP, as vLLM does"),
    "show": ("quadriga.cli.show", "show what a run has done: rewards, time, responses"),
    "view": (
        "quadriga.cli.view",
        "show runs on a page in the browser, with all rollouts and tokens",
    ),
    "replay": ("quadriga.cli.replay", "compute a recorded step of a run again, and compare"),
    "prepare": ("quadriga.cli.prepare", "write data and models that training reads"),
    "data": ("quadriga.cli.data", "show a data file, and how a run would read it"),
    "verl": ("quadriga_verl.cli", "run a command line of verl, or translate it"),
    "env": ("quadriga.cli.env", "list environments, and play episodes of one"),
    "config": ("quadriga.cli.config", "show, explain or list the configuration"),
    "plan": ("quadriga.cli.plan", "predict the memory and the time of a run on some devices"),
    "doctor": (
        "quadriga.cli.doctor",
        "report what is installed and usable, and what is not and why",
    ),
    "export": ("quadriga.cli.export", "convert a checkpoint to a Hugging Face folder"),
}
"""Function of each command (`main` of a module, or `module:function`), and its summary."""
if find_spec("quadriga_verl") is None:
    # The package is part of the wheel, but not of every installation.
    del COMMANDS["verl"]

GUARDED = ("train", "generate", "sft", "eval", "env", "serve", "replay", "verl")
"""Commands that start processes and run users' code. All their processes end with the command."""

GOES_ON = ("train", "generate", "sft", "prepare", "verl")
"""Commands that go on if their output cannot be written; then it goes to `console.log` in their folder."""

# Characters that Python puts in place of bytes that it cannot decode.
_UNDECODABLE = re.compile("[\ud800-\udfff]")
_TRACEBACK_OPTION = "--traceback"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status.

    Args:
        argv: words of the command line. None: those of this process, whose streams and child processes
            then belong to the command.
    """
    if argv is None:
        os.environ.pop(streams.LOG_VARIABLE, None)
        streams.install()
    status = 0
    try:
        status = _run_command(argv)
        if sys.stdout is not None:
            # Not only at exit, because a failure must change the status.
            sys.stdout.flush()
    except OSError as error:
        # The loss of standard output is reported below.
        if error is not streams.lost_output():
            raise
    except SystemExit as end:
        # Raised by argparse, for example after a help text.
        if end.code or streams.lost_output() is None:
            raise
    failure = streams.lost_output()
    if failure is None or status:
        return status
    # EPIPE: the reader of a pipe (`| head`) has read all it needs, which deserves no message.
    if failure.errno != errno.EPIPE:
        print(f"quadriga: standard output cannot be written ({failure.strerror})", file=sys.stderr)
    return 141


def _run_command(argv: Sequence[str] | None) -> int:
    """Parse the command line and call its command, with its processes under guard."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Trackers record `sys.argv`, so secrets are removed from it.
    sys.argv = [*sys.argv[:1], *map(redact_text, sys.argv[1:])]
    # The option may be anywhere, also after the keys of a long command line.
    has_traceback = _TRACEBACK_OPTION in arguments or os.environ.get("QUADRIGA_TRACEBACK") == "1"
    arguments = [argument for argument in arguments if argument != _TRACEBACK_OPTION]
    parser = _make_parser()
    _refuse_undecodable(parser, arguments)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    if options.command not in COMMANDS:
        hint = did_you_mean(options.command, COMMANDS) or f"There are {', '.join(COMMANDS)}."
        parser.error(f"no command {options.command!r}. {hint}")
    # If Python code calls `main`, its other processes must not be ended with the command.
    guardian = Guardian() if argv is None and options.command in GUARDED else None
    if argv is None:
        keep_modules()
    # Output that cannot be written is an error, except for commands that go on without it.
    if options.command not in GOES_ON:
        streams.raise_failures()
    try:
        try:
            return _call_command(options.command, options.arguments, has_traceback)
        finally:
            if guardian is not None:
                # Ignore a second Ctrl-C while the processes are being ended below.
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


def _make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line up to the command, whose arguments are not parsed."""
    width = max(map(len, COMMANDS))
    summaries = [f"  {name:{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="quadriga",
        description="Post-training of language models by reinforcement learning.",
        epilog="\n".join(
            ["commands:", *summaries, "", "`quadriga COMMAND --help` describes a command."]
        ),
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
    return parser


def _refuse_undecodable(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Exit with a message if an argument or the working directory has bytes that are not text.

    They may be paths, which libraries cannot open.
    """
    texts = {f"argument {number}": word for number, word in enumerate(arguments, start=1)}
    # The working directory may have been deleted. Commands that need it report that.
    with suppress(FileNotFoundError):
        texts["the working directory"] = os.getcwd()
    for place, text in texts.items():
        if _UNDECODABLE.search(text):
            parser.error(
                f"{place}: got {text!a}, expected text in {sys.getfilesystemencoding()}, the "
                "encoding of this locale. Rename it, or set LC_ALL=C.UTF-8."
            )


def _call_command(command: str, arguments: list[str], has_traceback: bool) -> int:
    """Call the function of a command; print errors without a traceback.

    Args:
        command: name of the command.
        arguments: words after the name.
        has_traceback: whether to raise errors instead of printing them.

    Returns:
        The exit status.

    Raises:
        Exception: an error that is not expected of a command, which is a fault of the program.
    """
    try:
        module, _, function = COMMANDS[command][0].partition(":")
        loaded = load_module(module, f"the modules of quadriga {command}")
        return getattr(loaded, function or "main")(arguments)
    except QuadrigaError as error:
        if has_traceback:
            raise
        print(f"quadriga {command}: {error}", file=sys.stderr)
        if isinstance(error, ConfigError):
            return 2
        print(
            f"({type(error).__name__}; {_TRACEBACK_OPTION} shows where it arose)", file=sys.stderr
        )
        return 1
    except ModuleNotFoundError as error:
        # A missing module of Quadriga itself is a fault.
        if has_traceback or (error.name or "quadriga").split(".")[0] == "quadriga":
            raise
        print(
            f"quadriga {command}: the package {error.name} is not installed. "
            "`quadriga doctor` lists missing packages.",
            file=sys.stderr,
        )
        return 1
    except UnicodeEncodeError as error:
        encoding = sys.getfilesystemencoding()
        # In a locale without UTF-8, this is a file name from a configuration or a data file.
        if has_traceback or encoding == "utf-8" or lookup(error.encoding) != lookup(encoding):
            raise
        print(
            f"quadriga {command}: got {error.object[:200]!a}, expected text in {encoding}, the "
            "encoding of this locale. Set LC_ALL=C.UTF-8.",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
