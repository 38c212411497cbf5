# SPDX-License-Identifier: Apache-2.0
"""Old import paths of modules that moved. An old path yields the same module object as the new one.

`import quadriga` installs the finder, so users' files and pickles with an old path keep working.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "quadriga.algorithms.core_algos": "quadriga_verl.core_algos",
    "quadriga.cli.verl": "quadriga_verl.cli",
    "quadriga.compat": "quadriga_verl",
    "quadriga.compat.verl": "quadriga_verl.shim",
    "quadriga.verl": "quadriga_verl.commands",
}
"""Old path of a module or package -> its path today. Submodules of a package follow it."""


def path_today(name: str) -> str | None:
    """The path of a module today, given an old path; None for a module that did not move."""
    moved = name
    while moved:
        if moved in MOVED:
            return MOVED[moved] + name[len(moved) :]
        moved = moved.rpartition(".")[0]
    return None


class MovedModules(MetaPathFinder, Loader):
    """Import hook for the old paths in `MOVED`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        """Claim the old paths; None for all others."""
        is_moved = fullname.startswith("quadriga.") and path_today(fullname) is not None
        return ModuleSpec(fullname, self) if is_moved else None

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module by the one at the new path."""
        name = module.__name__
        # The import system returns what `sys.modules` has after this call.
        sys.modules[name] = import_module(str(path_today(name)))


def install() -> None:
    """Make the old paths importable."""
    # First, because a package under its old name has the folder of the new one: the usual finder
    # would load the files there a second time.
    sys.meta_path.insert(0, MovedModules())
