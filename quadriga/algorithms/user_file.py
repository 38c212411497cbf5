# SPDX-License-Identifier: Apache-2.0
"""A function from a user's own file, named as `path/to/file.py:function`."""

import hashlib
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from quadriga.algorithms.signature import did_you_mean
from quadriga.errors import ConfigError


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
    file = Path(path).expanduser().resolve()
    if not name:
        raise ConfigError(where, got=repr(reference), expected="file.py:function", fix="Say which function to take.")
    if not file.is_file():
        raise ConfigError(where, got=f"{path!r}, which is not a file", fix=f"Looked for {file}.")
    module = _import_file(file, where)
    function = getattr(module, name, None)
    if not callable(function):
        names = tuple(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        fix = did_you_mean(name, names) or f"It has {', '.join(names) or 'no functions'}."
        raise ConfigError(where, got=f"{name!r}, which is not a function in {path}", fix=fix)
    return function


def _import_file(file: Path, where: str) -> ModuleType:
    # The name is the path's alone, so that loading a file again replaces what it registered instead of clashing.
    name = f"quadriga_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            where, got=f"{file}, which raised {reason}", fix="Import it in a Python shell to see more."
        ) from error
    return module
