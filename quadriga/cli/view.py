# SPDX-License-Identifier: Apache-2.0
"""`quadriga view`: serve a page about runs until Ctrl-C, or write it to a file."""

import argparse
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

from quadriga.errors import ConfigError, MachineError
from quadriga.view.data import ViewData
from quadriga.view.page import export

_ABOUT = """Show runs on a page in the browser: curves, every recorded rollout with its tokens, what
was trained, where the time went, and what looks wrong. Runs are only read, whether they have ended
or go on."""
_DEFAULT_FOLDER = "outputs"
_PORT = 7878
_MAX_RANGE = 1_000_000
# An import string: Starlette and uvicorn are an extra, which an export does not need.
_SERVER = "quadriga.view.server:ViewServer"


def main(argv: Sequence[str]) -> int:
    """Run `quadriga view`; return its exit status. A server runs until KeyboardInterrupt."""
    parser = argparse.ArgumentParser(prog="quadriga view", description=_ABOUT)
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        default=[_DEFAULT_FOLDER],
        help=f"a run's directory, or a folder above several (default: {_DEFAULT_FOLDER})",
    )
    parser.add_argument("--port", type=int, default=_PORT, help=f"0: a free one (default: {_PORT})")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; another one lets other machines in (default: 127.0.0.1)",
    )
    parser.add_argument("--export", metavar="FILE.html", help="write the page as one file instead")
    parser.add_argument(
        "--steps",
        help="with --export: steps whose rollouts are written, as in 1,5,10-20 "
        "(default: the first, the last and 20 between)",
    )
    options = parser.parse_args(list(argv))
    if options.steps and not options.export:
        raise ConfigError("--steps", got="no --export", expected="--steps only with --export")
    data = ViewData([Path(run).expanduser() for run in options.runs])
    if options.export:
        path = Path(options.export).expanduser()
        for note in export(data, path, _parse_steps(options.steps)):
            print(note)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
        return 0
    try:
        server_class = resolve_name(_SERVER)
    except ModuleNotFoundError as error:
        raise MachineError(
            "quadriga view",
            got=f"no package {error.name}",
            expected="Starlette and uvicorn",
            fix="Install them: pip install -e '.[serve]'. --export works without them.",
        ) from error
    # Lower the priority of this process, so that a run on this machine does not become slower.
    os.nice(10)
    server = server_class(data, options.host, options.port)
    num_runs = len(data.names())
    print(
        f"{num_runs} {'run' if num_runs == 1 else 'runs'} at {server.url}; Ctrl-C ends it",
        flush=True,
    )
    if not server.is_local:
        print("Everyone who has this address can read the runs.", flush=True)
    try:
        threading.Event().wait()
    finally:
        server.close()
    return 0


def _parse_steps(text: str | None) -> list[int] | None:
    """Parse a list of steps such as `1,5,10-20`; None stays None.

    Raises:
        ConfigError: the text has another form, or a range has over `_MAX_RANGE` steps.
    """
    if text is None:
        return None
    error = ConfigError("--steps", got=text, expected="numbers and ranges, as in 1,5,10-20")
    steps = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise error
        first = int(match[1])
        last = int(match[2] or first)
        if not first <= last < first + _MAX_RANGE:
            raise error
        steps.update(range(first, last + 1))
    return sorted(steps)
