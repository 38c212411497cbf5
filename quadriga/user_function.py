# SPDX-License-Identifier: Apache-2.0
"""Functions of a Python program as files that a configuration can name: lambdas, closures, cells of a notebook.

a function ── write_function ──> reward_1f0c.py, reward_1f0c.pickle ── load ──> the function itself, in the process
                                                                                that wrote it; elsewhere a copy
"""

import hashlib
import pickle
import sys
import uuid
from pathlib import Path
from typing import Any

import cloudpickle

from quadriga.errors import ConfigError

NAME = "function"  # name of the function in its file

LARGEST_BYTES = 1 << 24
_TEXT = """# SPDX-License-Identifier: Apache-2.0
# {label}, a function of a Python program: quadriga wrote this file for it, and the .pickle file beside it holds it.
import sys

from quadriga.user_function import load

sys.path += [path for path in {paths!r} if path not in sys.path]
{name} = load(__file__)
"""
_here: dict[str, Any] = {}  # path of a file that this process wrote -> the function


def write_function(function: Any, folder: Path, label: str) -> tuple[Path, str]:
    """Write a file in which other processes find the function under `NAME`.
    Returns the file, and why other processes cannot load it; "" where they can."""
    content, obstacle = b"", ""
    try:
        content = cloudpickle.dumps(function)
    # What objects raise that have no state to give.
    except (
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        OSError,
        ImportError,
        pickle.PicklingError,
    ) as error:
        obstacle = f"{type(error).__name__}: {error}"
    if len(content) > LARGEST_BYTES:
        obstacle = f"it holds {len(content) >> 20} MiB, over {LARGEST_BYTES >> 20}"
    digest = uuid.uuid4().hex if obstacle else hashlib.sha256(content).hexdigest()
    file = folder.absolute() / f"{label}_{digest[:12]}.py"
    folder.mkdir(parents=True, exist_ok=True)
    if not obstacle:
        file.with_suffix(".pickle").write_bytes(content)
    file.write_text(
        _TEXT.format(
            label=label, paths=[str(Path(path).absolute()) for path in sys.path], name=NAME
        )
    )
    _here[str(file)] = function
    return file, obstacle


def load(file: str) -> Any:
    """The function that a file of `write_function` stands for; ConfigError where it is another process's alone."""
    if file in _here:
        return _here[file]
    try:
        return pickle.loads(Path(file).with_suffix(".pickle").read_bytes())
    except FileNotFoundError as error:
        got, expected = "a function that could not be pickled", "the process that wrote the file"
        raise ConfigError(
            file, got=got, expected=expected, fix="Start the run again from its program."
        ) from error
