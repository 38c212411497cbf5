# SPDX-License-Identifier: Apache-2.0
"""Loads functions and classes from users' Python files: algorithms, graders, data sets, agent loops."""

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

PACKAGE = "pkg://"
FILE = "file://"
EXTERNAL = "actor_rollout_ref.model.external_lib"
OTHER_CONTRACT = "Code that is written for verl runs with QUADRIGA_VERL=1."
"""Advice in errors about functions or classes that may be written for verl."""
# Files whose frames are not shown at the top of the traceback of a user's error.
_OUR_FILES = (__file__, contextlib.__file__, importlib.__file__, "<frozen importlib")

# Hash of the text from which each module was made, by the module's name.
_digests: dict[str, str] = {}


def import_file(path: str | Path, where: str) -> ModuleType:
    """Import a Python file, or a module by its name.

    The file can import other files of its folder, and packages in the working directory. It is
    executed once per process, and again only if its text has changed.

    Args:
        path: path of the file, also as `file://PATH`; or `pkg://package.module`.
        where: configuration key that errors name.

    Returns:
        The module.

    Raises:
        ConfigError: there is no such file, its name does not end in .py, or it raises an error.
    """
    text = str(path)
    if text.startswith(PACKAGE):
        _append_to_path(Path.cwd())
        with _importing(text, where):
            return importlib.import_module(text.removeprefix(PACKAGE))
    file = Path(text.removeprefix(FILE)).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(
            where,
            got=f"{text!r}, which is not a file",
            expected="a Python file",
            fix=f"Correct the path. Looked for {file}.",
        )
    # The module's name depends only on the path. So a file that is executed again replaces what it
    # has registered before, and other processes can unpickle its objects.
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
    # Registered before it is executed, because dataclasses look up their module by name.
    sys.modules[name] = module
    _append_to_path(file.parent, Path.cwd())
    try:
        with _importing(str(file), where):
            spec.loader.exec_module(module)
    except ConfigError:
        del sys.modules[name]
        raise
    _digests[name] = digest
    return module


def import_external(names: str | Iterable[str] | None) -> None:
    """Import the files and modules of `actor_rollout_ref.model.external_lib`.

    They register the user's algorithms, reward managers and the like.

    Args:
        names: one or several. As in verl, a name without "/" and ".py" is that of a module.
    """
    for name in [names] if isinstance(names, str) else names or []:
        is_file = "/" in name or name.endswith(".py")
        import_file(name if is_file else f"{PACKAGE}{name}", EXTERNAL)


def is_reference(name: str) -> bool:
    """Whether the text has the form `path/to/file.py:Name` or `pkg://package.module:Name`."""
    place, colon, member = name.removeprefix(PACKAGE).rpartition(":")
    return bool(colon and member) and (name.startswith(PACKAGE) or place.endswith(".py"))


def load_reference(name: str, where: str, *, base: type | None = None) -> Any:
    """Load the function or class that a reference names.

    Args:
        name: reference, in one of the forms of `is_reference`.
        where: configuration key that errors name.
        base: required base class; None if a function is required.

    Returns:
        The function or class; or the value of its attribute `quadriga_form`, which is the adapter of
        a function or class that was written for another framework.

    Raises:
        ConfigError: the file cannot be imported, or has no such function or class.
    """
    place, _, member_name = name.rpartition(":")
    member = member_of(import_file(place, where), member_name, where, base=base)
    # Not by `getattr`: a subclass must not get the adapter of its base class.
    return getattr(member, "__dict__", {}).get("quadriga_form", member)


def member_of(module: ModuleType, name: str, where: str, *, base: type | None = None) -> Any:
    """Look up a function or class in a user's module.

    Args:
        module: the user's module.
        name: name of the function or class.
        where: configuration key that errors name.
        base: required base class; None if a function is required.

    Returns:
        The function or class.

    Raises:
        ConfigError: the module has no function or class of that name; the error lists those it has.
    """

    def fits(value: Any) -> bool:
        """Whether a value is a function, or with `base` a class derived from it."""
        if base is None:
            return callable(value)
        return isinstance(value, type) and issubclass(value, base)

    member = getattr(module, name, None)
    if fits(member):
        return member

    # Say whether there is nothing of that name, or something of another kind.
    if member is None:
        kind = "function" if base is None else "class"
        got = f"no {kind} {name!r}"
    elif isinstance(member, type):
        parents = ", ".join(parent.__name__ for parent in member.__bases__)
        got = f"{name}, a subclass of {parents}"
    else:
        got = f"{name}, which is a {type(member).__name__}"
    # Suggest only what the file defines itself, not what it imports.
    candidates = []
    for key, value in vars(module).items():
        is_defined_there = getattr(value, "__module__", "") == module.__name__
        if is_defined_there and not key.startswith("_") and fits(value):
            candidates.append(key)
    expected = "function"
    fix = did_you_mean(name, candidates)
    if base is not None:
        expected = f"subclass of {base.__module__}.{base.__name__}"
        fix = fix or f"Write `class {name}({base.__name__})` there."
    raise ConfigError(
        where,
        got=got,
        expected=f"a {expected} in {module.__file__} ({', '.join(candidates) or 'it has none'})",
        fix=fix,
    )


def accepted_arguments(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Select the keyword arguments that a function, or the constructor of a class, accepts.

    Args:
        function: function or class.
        offered: keyword arguments by name.

    Returns:
        The accepted arguments; all of them if the function has `**kwargs`.
    """
    parameters = signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(offered)
    return {name: value for name, value in offered.items() if name in parameters}


def _append_to_path(*folders: Path) -> None:
    """Add folders to the end of the import path, so that users' files hide no installed package."""
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.append(folder)


@contextlib.contextmanager
def _importing(source: str, where: str) -> Iterator[None]:
    """Context manager: import users' code inside. A long wait is reported.

    Args:
        source: the file or module, for errors.
        where: configuration key that errors name.

    Raises:
        ConfigError: the code raised an error. The message has its traceback, from the first frame
            in the user's file on.
    """
    try:
        with waiting(f"{source} to be imported ({where})"):
            yield
    except (Exception, SystemExit) as error:
        # Skip the frames of the import itself.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OUR_FILES):
            trace = trace.tb_next
        shown = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        missing_module = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        fix = ""
        if missing_module.partition(".")[0] == "verl":
            fix = "Set QUADRIGA_VERL=1, or import quadriga.compat.verl first: it has verl's names."
        raise ConfigError(
            where,
            got=f"{source}, which raised {type(error).__name__} while it was loaded:\n{shown}\n",
            expected="a file that can be imported",
            fix=fix,
        ) from error
