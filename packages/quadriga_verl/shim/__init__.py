# SPDX-License-Identifier: Apache-2.0
"""verl's modules for users' files that import them.

    import verl.x.y ──> a row of table.tsv ──> a name of Quadriga, or an adapter in this package

Importing this package installs the import hook. `QUADRIGA_VERL=1` does so in every process, and
`import quadriga.compat.verl` in a user's file. `QUADRIGA_VERL=0.6.1` also selects a version: before
0.7 policy losses return four scalars, since then a scalar and metrics; before 0.6
`server_manager.generate` returns only token ids.

A module imports a name when it is read, so that a grading process does not load torch for
`verl.utils.reward_score`. To offer another name, add it to a row of table.tsv. If its arguments or
results in verl differ from those here, write an adapter in the module of its topic.
"""

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from quadriga.errors import did_you_mean

VARIABLE = "QUADRIGA_VERL"
TABLE = Path(__file__).with_name("table.tsv")
_WAS_REPORTED = "QUADRIGA_VERL_TOLD"
"""Environment variable of processes that need not report an installed verl again."""


def read_table() -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Read table.tsv.

    Returns:
        modules: names by module of verl; parent packages are modules too. Each name has the place of the
            object that it stands for, such as "quadriga.protocol:DataProto".
        missing: what to use instead of a module or name that does not exist here, by dotted name.
    """
    modules = {}
    missing = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]:
        module, home, names = line.split("\t")
        # Without a home, the third cell is the advice what to use instead.
        if not home:
            missing[module] = names
            continue
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:end]), {})
        for entry in names.split():
            name, _, attribute = entry.partition("=")
            modules[module][name] = f"{home}:{attribute or name}"
    return modules, missing


MODULES, MISSING = read_table()


def is_before(*version: int) -> bool:
    """Whether `QUADRIGA_VERL` names a version of verl before `version`, such as `is_before(0, 7)`.

    The value 1, which names no version, means the latest one.
    """
    numbers = os.environ.get(VARIABLE, "1").split(".")
    is_version = len(numbers) > 1
    return is_version and tuple(map(int, numbers[: len(version)])) < version


def missing_name(name: str) -> ModuleNotFoundError:
    """Return the error for a dotted name of verl that does not exist here, with advice."""
    advice = _advice_for(name)
    return ModuleNotFoundError(
        f"{name}: quadriga has verl's contracts without this name ({VARIABLE}). {advice}"
    )


def _advice_for(name: str) -> str:
    """Say what to use instead of a dotted name of verl that does not exist here."""
    if name in MISSING:
        return MISSING[name]
    parent, _, last = name.rpartition(".")
    known_names = list(MODULES.get(parent, ()))
    for module in MODULES:
        module_parent, _, module_name = module.rpartition(".")
        if module_parent == parent:
            known_names.append(module_name)
    # The cutoff admits only misspelled names: a name that is merely similar means something else.
    suggestion = did_you_mean(last, get_close_matches(last, known_names, cutoff=0.93))
    if suggestion:
        return suggestion
    # The advice for a package also applies to its modules.
    while parent.count("."):
        if parent in MISSING:
            return MISSING[parent]
        parent = parent.rpartition(".")[0]
    modules_with_name = [module for module, names in MODULES.items() if last in names]
    if modules_with_name:
        return f"A {last} is in {' and '.join(modules_with_name)}."
    return "docs/verl_names.md lists all names."


class _Module(ModuleType):
    """A module of verl. A name is imported when it is read for the first time."""

    def __getattr__(self, name: str) -> Any:
        full_name = f"{self.__name__}.{name}"
        place = MODULES[self.__name__].get(name)
        if place is not None:
            home, _, attribute = place.partition(":")
            value = getattr(import_module(home), attribute)
        elif full_name in MODULES:
            value = import_module(full_name)
        elif name.startswith("__"):
            # Python itself asks for such names, and expects this error.
            raise AttributeError(name)
        else:
            raise missing_name(full_name)
        setattr(self, name, value)
        return value


class Finder(MetaPathFinder, Loader):
    """Import hook for the modules of the table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        """Find a module of verl.

        Returns:
            The module's spec. None: the module belongs to another package than `verl`.

        Raises:
            ModuleNotFoundError: the table does not have the module.
        """
        if fullname.partition(".")[0] != "verl":
            return None
        if fullname not in MODULES:
            raise missing_name(fullname)
        # Every module may have modules below it.
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create a module that imports its names when they are read."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Set `__all__`, so that `from module import *` takes the names of the table."""
        module.__dict__["__all__"] = list(MODULES[module.__name__])


def install() -> None:
    """Install the import hook, unless it is installed.

    `QUADRIGA_VERL` is set in the environment, so that child processes install the hook too. The first
    process reports that the hook hides an installed verl.
    """
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    os.environ[VARIABLE] = os.environ.get(VARIABLE) or "1"
    if PathFinder.find_spec("verl") is not None and _WAS_REPORTED not in os.environ:
        os.environ[_WAS_REPORTED] = "1"
        setting = f"{VARIABLE}={os.environ[VARIABLE]}"
        print(f"verl is installed; with {setting} `import verl` takes quadriga's names instead.")
    # Python does not ask the hook for modules that are loaded already, such as those of an installed
    # verl.
    for name in list(sys.modules):
        if name.partition(".")[0] == "verl":
            del sys.modules[name]
    sys.meta_path.insert(0, Finder())


install()
