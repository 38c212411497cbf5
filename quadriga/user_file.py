# SPDX-License-Identifier: Apache-2.0
"""Functions and classes from a user's own Python file: algorithms, graders, data sets, samplers, tools, agent loops."""

import contextlib
import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

from quadriga.errors import ConfigError, did_you_mean
from quadriga.observe.watchdog import waiting

PACKAGE, FILE = "pkg://", "file://"
EXTERNAL = "actor_rollout_ref.model.external_lib"
OTHER_CONTRACT = "Code that is written for verl runs with QUADRIGA_VERL=1."
"""Advice for an error about a function or class that has the parameters or results of verl's."""
_OURS = (__file__, contextlib.__file__, importlib.__file__)

_digests: dict[
    str, str
] = {}  # name of a module that was made of a file -> hash of the text it was made of


def import_file(path: str | Path, where: str) -> ModuleType:
    """The file as a module; files beside it, and packages in the working directory, can be imported from it.

    A file is run once in a process, and again only if its text has changed. Raises ConfigError: no such file, one whose
    name does not end in .py, or one that raises; the error shows where.
    `path`: of the file, also as `file://PATH`; or `pkg://package.module`, a module that can be imported.
    `where`: the key that errors name."""
    text = str(path)
    if text.startswith(PACKAGE):
        _append_to_path(Path.cwd())
        with _told(text, where):
            return importlib.import_module(text.removeprefix(PACKAGE))
    file = Path(text.removeprefix(FILE)).expanduser().resolve()
    if not file.is_file():
        got = f"{text!r}, which is not a file"
        raise ConfigError(where, got=got, expected="a Python file", fix=f"Looked for {file}.")
    # The name is the path's alone: a file that is run again replaces what it registered, and another process that
    # unpickles something of it finds it under the same name.
    name = f"quadriga_user_{file.stem}_{hashlib.sha256(os.fsencode(file)).hexdigest()[:8]}"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if _digests.get(name) == digest and name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(
            where, got=str(file), expected="a Python file, with a name that ends in .py"
        )
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    _append_to_path(file.parent, Path.cwd())
    try:
        with _told(str(file), where):
            spec.loader.exec_module(module)
    except ConfigError:
        del sys.modules[name]
        raise
    _digests[name] = digest
    return module


def import_external(names: str | Iterable[str] | None) -> None:
    """Import the files and modules of `actor_rollout_ref.model.external_lib`, so that what they register is known."""
    for name in [names] if isinstance(names, str) else names or []:
        is_file = "/" in name or name.endswith(".py")  # else, as in verl, the name of a module
        import_file(name if is_file else f"{PACKAGE}{name}", EXTERNAL)


def is_reference(name: str) -> bool:
    """Whether the text has the form `path/to/file.py:Name` or `pkg://package.module:Name`."""
    place, colon, member = name.removeprefix(PACKAGE).rpartition(":")
    return bool(colon and member) and (name.startswith(PACKAGE) or place.endswith(".py"))


def referred(name: str, where: str, *, base: type | None = None) -> Any:
    """The function, or the subclass of `base`, that such a text names; errors as for `import_file` and `member_of`."""
    place, _, member = name.rpartition(":")
    found = member_of(import_file(place, where), member, where, base=base)
    # What has another contract has the form in which it is called here beside it.
    return getattr(found, "__dict__", {}).get("quadriga_form", found)


def member_of(module: ModuleType, name: str, where: str, *, base: type | None = None) -> Any:
    """The function `name` of a user's module, or its class of that name if it is to be a subclass of `base`.
    Raises ConfigError: there is no such function or class; the error lists those that the file defines."""

    def fits(value: Any) -> bool:
        return (
            callable(value) if base is None else isinstance(value, type) and issubclass(value, base)
        )

    found = getattr(module, name, None)
    if fits(found):
        return found
    kind = "function" if base is None else "class"
    got = f"no {kind} {name!r}" if found is None else f"{name}, which is a {type(found).__name__}"
    if isinstance(found, type):
        got = f"{name}, a subclass of {', '.join(parent.__name__ for parent in found.__bases__)}"
    own = [
        key
        for key, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    ]
    names = [key for key in own if fits(vars(module)[key]) and not key.startswith("_")]
    wanted = "function" if base is None else f"subclass of {base.__module__}.{base.__name__}"
    expected = f"a {wanted} in {module.__file__} ({', '.join(names) or 'it has none'})"
    fix = did_you_mean(name, names) or (
        f"Write `class {name}({base.__name__})` there." if base else ""
    )
    raise ConfigError(where, got=got, expected=expected, fix=fix)


def taken(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments that a function, or the `__init__` of a class, takes."""
    parameters = signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {name: value for name, value in offered.items() if takes_all or name in parameters}


def _append_to_path(*folders: Path) -> None:
    # Last, so that no file of the user's hides an installed package.
    sys.path.extend(str(folder) for folder in dict.fromkeys(folders) if str(folder) not in sys.path)


@contextlib.contextmanager
def _told(what: str, where: str) -> Iterator[None]:
    """While a user's code is imported: a long wait is reported, and an error is shown from the user's file on."""
    try:
        with waiting(f"{what} to be imported ({where})"):
            yield
    except (Exception, SystemExit) as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(
            (*_OURS, "<frozen importlib")
        ):
            trace = trace.tb_next
        shown = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        is_verls = (
            isinstance(error, ModuleNotFoundError)
            and (error.name or "").partition(".")[0] == "verl"
        )
        got = f"{what}, which raised {type(error).__name__} while it was loaded:\n{shown}\n"
        fix = (
            "Set QUADRIGA_VERL=1, or import quadriga.compat.verl first: it has verl's names."
            if is_verls
            else ""
        )
        raise ConfigError(
            where, got=got, expected="a file that can be imported", fix=fix
        ) from error
