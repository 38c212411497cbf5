# SPDX-License-Identifier: Apache-2.0
"""verl's import paths, for files that were written for verl: `QUADRIGA_VERL=1`, or `import quadriga.compat.verl` there.

    import verl.x.y ──> table.tsv ──> a name of ours, or an adapter of this package between verl's contract and ours

`QUADRIGA_VERL=0.6.1` means a version: before 0.7 policy losses return four scalars, since then a scalar and metrics;
before 0.6 `server_manager.generate` returns token ids alone.
Modules are filled when a name is read: a grading process loads no torch for `verl.utils.reward_score`.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from quadriga.errors import did_you_mean

VARIABLE = "QUADRIGA_VERL"
TABLE = Path(__file__).with_name("table.tsv")


def read_table() -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """verl's modules, packages too: name -> `module:attribute` of ours; and what is missing: name -> what to use."""
    modules: dict[str, dict[str, str]] = {}
    missing: dict[str, str] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]:
        module, home, names = line.split("\t")
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
    """Whether `QUADRIGA_VERL` names a version before this one."""
    asked = os.environ.get(VARIABLE, "1").split(".")
    return len(asked) > 1 and tuple(map(int, asked[: len(version)])) < version


def missing_name(name: str) -> ModuleNotFoundError:
    """The error about a name of verl's, with dots, that is not covered: what to use."""
    parts = name.split(".")
    parent, _, own = name.rpartition(".")
    modules = [one.rpartition(".") for one in MODULES]
    beside = [*MODULES.get(parent, {}), *(last for above, _, last in modules if above == parent)]
    above = (MISSING.get(".".join(parts[:end]), "") for end in range(len(parts) - 1, 1, -1))
    advice = MISSING.get(name) or did_you_mean(own, beside) or next(filter(None, above), "")
    advice = advice or "docs/from_verl.md says where all names are listed."
    return ModuleNotFoundError(
        f"{name}: quadriga has verl's contracts without this name ({VARIABLE}). {advice}"
    )


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        place = MODULES[self.__name__].get(name)
        if place is not None:
            home, _, attribute = place.partition(":")
            value = getattr(import_module(home), attribute)
        elif f"{self.__name__}.{name}" in MODULES:
            value = import_module(f"{self.__name__}.{name}")
        elif name.startswith("__"):
            raise AttributeError(name)
        else:
            raise missing_name(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(MetaPathFinder, Loader):
    """Finds verl's modules in the table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        """A module of the table; None for what is not verl's, and a ModuleNotFoundError for what is missing."""
        if fullname.partition(".")[0] != "verl":
            return None
        if fullname not in MODULES:
            raise missing_name(fullname)
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module without names; they are looked up when they are read."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """`from module import *` takes the names of the table."""
        module.__dict__["__all__"] = list(MODULES[module.__name__])


def install() -> None:
    """Have `import verl` find this; processes that are started from here inherit it. Once more does nothing."""
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    os.environ[VARIABLE] = os.environ.get(VARIABLE) or "1"
    if PathFinder.find_spec("verl") is not None and "QUADRIGA_VERL_TOLD" not in os.environ:
        os.environ["QUADRIGA_VERL_TOLD"] = "1"
        asked = f"{VARIABLE}={os.environ[VARIABLE]}"
        print(f"verl is installed; with {asked} `import verl` takes quadriga's names instead.")
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]
    sys.meta_path.insert(0, Finder())


install()
