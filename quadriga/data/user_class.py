# SPDX-License-Identifier: Apache-2.0
"""A class from a user's own Python file."""

from typing import TypeVar

from quadriga.errors import ConfigError
from quadriga.user_file import import_file

T = TypeVar("T")


def load_class(path: str, name: str, base: type[T], *, where: str) -> type[T]:
    """The class `name` in the file `path`; it must derive from `base`.

    Args:
        path: a Python file; `~` and relative paths are understood.
        name: the class.
        base: what it must be a subclass of.
        where: the section of the configuration that an error names.

    Raises:
        ConfigError: no such file, the file cannot be imported, no such class, or not a subclass of `base`.
    """
    found = getattr(import_file(path, where), name, None)
    if not isinstance(found, type):
        raise ConfigError(
            where, got=f"no class {name!r} in {path}", expected=f"a subclass of {base.__name__} of that name"
        )
    if not issubclass(found, base):
        raise ConfigError(
            where,
            got=f"{name}, a subclass of {', '.join(parent.__name__ for parent in found.__bases__)}",
            expected=f"a subclass of {base.__module__}.{base.__name__}",
            fix=f"Write `class {name}({base.__name__})` in {path}.",
        )
    return found
