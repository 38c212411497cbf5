# SPDX-License-Identifier: Apache-2.0
"""A class from a user's own Python file."""

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import TypeVar

from quadriga.errors import DataError

T = TypeVar("T")


def load_class(path: str, name: str, base: type[T], *, where: str) -> type[T]:
    """The class `name` in the file `path`; it must derive from `base`.

    Args:
        path: a Python file; `~` and relative paths are understood.
        name: the class.
        base: what it must be a subclass of.
        where: the section of the configuration that an error names.

    Raises:
        DataError: no such file, the file cannot be imported, no such class, or not a subclass of `base`.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise DataError(
            where, got=f"{path!r}, which is not a file", expected="a Python file", fix=f"Looked for {file}."
        )
    found = getattr(_import_file(file, where), name, None)
    if not isinstance(found, type):
        raise DataError(
            where, got=f"no class {name!r} in {file}", expected=f"a subclass of {base.__name__} of that name"
        )
    if not issubclass(found, base):
        raise DataError(
            where,
            got=f"{name}, a subclass of {', '.join(parent.__name__ for parent in found.__bases__)}",
            expected=f"a subclass of {base.__module__}.{base.__name__}",
            fix=f"Write `class {name}({base.__name__})` in {file}.",
        )
    return found


def _import_file(file: Path, where: str) -> object:
    # Worker processes of a loader unpickle the class by this name, which is the same for the same file everywhere.
    module_name = f"quadriga_user_data_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise DataError(where, got=str(file), expected="a file whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise DataError(
            where,
            got=f"{file}, which raised {type(error).__name__}: {error}",
            expected="a file that can be imported",
            fix="Import it in a Python shell to see more.",
        ) from error
    return module
