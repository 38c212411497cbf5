# SPDX-License-Identifier: Apache-2.0
"""Functions and classes from a user's own Python file: algorithms, graders, data sets, samplers, tools, agent loops."""

import hashlib
import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from quadriga.errors import ConfigError, did_you_mean
from quadriga.observe.watchdog import waiting


def import_file(path: str | Path, where: str) -> ModuleType:
    """The file as a module; files beside it can be imported from it. `where` is the key that errors name.

    Raises:
        ConfigError: no such file, one whose name does not end in .py, or one that raises; the error shows where.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(
            where, got=f"{str(path)!r}, which is not a file", expected="a Python file", fix=f"Looked for {file}."
        )
    # The name is the path's alone: a file that is loaded again replaces what it registered, and another process that
    # unpickles something of it finds it under the same name.
    name = f"quadriga_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(where, got=str(file), expected="a Python file, with a name that ends in .py")
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last, so that no file of the user's hides an installed package
    try:
        with waiting(f"{file} to be imported ({where})"):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(
            where,
            got=f"{file}, which raised {type(error).__name__} while it was loaded:\n{_told(error)}\n",
            expected="a file that can be imported",
        ) from error
    return module


def member_of(module: ModuleType, name: str, where: str, *, base: type | None = None) -> Any:
    """The function `name` of a user's module, or its class of that name if it is to be a subclass of `base`.

    Raises:
        ConfigError: there is no such function or class; the error lists those that the file defines.
    """

    def fits(value: Any) -> bool:
        return callable(value) if base is None else isinstance(value, type) and issubclass(value, base)

    found = getattr(module, name, None)
    if fits(found):
        return found
    kind = "function" if base is None else "class"
    got = f"no {kind} {name!r}" if found is None else f"{name}, which is a {type(found).__name__}"
    if isinstance(found, type):
        got = f"{name}, a subclass of {', '.join(parent.__name__ for parent in found.__bases__)}"
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    names = [key for key in own if fits(vars(module)[key]) and not key.startswith("_")]
    raise ConfigError(
        where,
        got=got,
        expected=f"a {'function' if base is None else f'subclass of {base.__module__}.{base.__name__}'} in "
        f"{module.__file__} ({', '.join(names) or 'it has none'})",
        fix=did_you_mean(name, names) or (f"Write `class {name}({base.__name__})` there." if base else ""),
    )


def _told(error: BaseException) -> str:
    """The error as Python prints it, from the user's file on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((__file__, "<frozen importlib")):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()
