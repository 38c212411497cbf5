# SPDX-License-Identifier: Apache-2.0
"""A function from a user's own file, named as `path/to/file.py:function`."""

from collections.abc import Callable
from typing import Any

from quadriga.algorithms.signature import did_you_mean
from quadriga.errors import ConfigError
from quadriga.user_file import import_file


def is_file_reference(name: str) -> bool:
    """Whether `name` points into a Python file instead of naming a registered algorithm."""
    return name.endswith(".py") or ".py:" in name


def load_from_file(reference: str, where: str) -> Callable[..., Any]:
    """The function that `path/to/file.py:function` names; `~` and relative paths are understood.

    Args:
        reference: the file and the function in it.
        where: the key to name in an error.

    Raises:
        ConfigError: no such file, a file that cannot be imported, or no such function in it (with the nearest names).
    """
    path, _, name = reference.rpartition(":") if not reference.endswith(".py") else (reference, "", "")
    if not name:
        raise ConfigError(where, got=repr(reference), expected="file.py:function", fix="Say which function to take.")
    module = import_file(path, where)
    function = getattr(module, name, None)
    if not callable(function):
        names = tuple(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        fix = did_you_mean(name, names) or f"It has {', '.join(names) or 'no functions'}."
        raise ConfigError(where, got=f"{name!r}, which is not a function in {path}", fix=fix)
    return function
