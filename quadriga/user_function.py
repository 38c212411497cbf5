# SPDX-License-Identifier: Apache-2.0
"""Writes functions of a Python program to files that a configuration can name: lambdas, closures, notebook cells.

function --write_function--> reward_1f0c.py, reward_1f0c.pickle --load--> the function itself in the process that wrote
                                                                          the file, a copy in other processes
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
# source: {source}
import sys

from quadriga.user_function import load

sys.path += [path for path in {paths!r} if path not in sys.path]
{name} = load(__file__)
"""
_written_functions: dict[str, Any] = {}  # by the path of the file that this process wrote

# Errors that objects raise if they cannot be pickled.
_PICKLING_ERRORS = (
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
    OSError,
    ImportError,
    pickle.PicklingError,
)


def source_of(*functions: Any) -> str:
    """Describe functions by their names and files, such as "grade of train.py"."""
    sources = []
    for function in functions:
        if hasattr(function, "__code__"):
            definition = function
            file = function.__code__.co_filename
        else:
            # An object that can be called is described by its class.
            definition = type(function)
            file = getattr(sys.modules.get(definition.__module__), "__file__", None)
        name = definition.__qualname__.replace("<locals>.", "")
        # The file of a notebook cell is temporary, so its name says nothing.
        is_named = file and not file.startswith("<") and "ipykernel_" not in file
        sources.append(f"{name} of {file}" if is_named else name)
    return ", ".join(sources)


def write_function(function: Any, folder: Path, label: str, source: str = "") -> tuple[Path, str]:
    """Write a Python file that defines the function under `NAME` when it is imported.

    Args:
        function: the function, or another object that can be called.
        folder: folder of the file; it is created if it does not exist.
        label: beginning of the file's name.
        source: description of the function in messages. Default: `source_of(function)`.

    Returns:
        The file; and why the function cannot be pickled, so that other processes cannot load it. ""
        if they can.
    """
    content = b""
    obstacle = ""
    try:
        content = cloudpickle.dumps(function)
    except _PICKLING_ERRORS as error:
        obstacle = f"{type(error).__name__}: {error}"
    if len(content) > LARGEST_BYTES:
        obstacle = f"it holds {len(content) >> 20} MiB, over {LARGEST_BYTES >> 20}"

    # Functions with the same pickle share a file. Those without one must not share any.
    digest = uuid.uuid4().hex if obstacle else hashlib.sha256(content).hexdigest()
    file = folder.absolute() / f"{label}_{digest[:12]}.py"
    folder.mkdir(parents=True, exist_ok=True)
    if not obstacle:
        file.with_suffix(".pickle").write_bytes(content)
    paths = [str(Path(path).absolute()) for path in sys.path]
    text = _TEXT.format(label=label, source=source or source_of(function), paths=paths, name=NAME)
    file.write_text(text, encoding="utf-8", errors="backslashreplace")
    _written_functions[str(file)] = function
    return file, obstacle


def load(file: str) -> Any:
    """Load the function of a file that `write_function` wrote.

    Returns:
        The function itself in the process that wrote the file; in others a copy.

    Raises:
        ConfigError: the function could not be pickled, so that only the process that wrote the file
            has it.
    """
    if file in _written_functions:
        return _written_functions[file]
    try:
        return pickle.loads(Path(file).with_suffix(".pickle").read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(
            file,
            got="a function that could not be pickled",
            expected="the process that wrote the file",
            fix="Start the run again from its program.",
        ) from error
