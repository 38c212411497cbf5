# SPDX-License-Identifier: Apache-2.0
"""Old import paths of modules that have moved.

Importing an old path returns the very module at its new path, not a copy: classes, state and
patches are the same under both names. Nothing is loaded before an old path is imported.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED: dict[str, str] = {
    "quadriga.algorithms.core_algos": "quadriga_verl.core_algos",
    "quadriga.cli.verl": "quadriga_verl.cli",
    "quadriga.compat": "quadriga_verl",
    "quadriga.compat.verl": "quadriga_verl.shim",
    "quadriga.verl": "quadriga_verl.commands",
    "quadriga.trainer.async_batches": "quadriga.trainer.asynchronous.batches",
    "quadriga.trainer.async_record": "quadriga.trainer.asynchronous.record",
    "quadriga.trainer.async_rules": "quadriga.trainer.asynchronous.rules",
    "quadriga.trainer.async_schedule": "quadriga.trainer.asynchronous.schedule",
    "quadriga.trainer.async_state": "quadriga.trainer.asynchronous.snapshot",
    "quadriga.trainer.simulation": "quadriga.trainer.asynchronous.simulation",
    "quadriga.trainer.stream_pool": "quadriga.trainer.asynchronous.streams",
}
"""New path of each module by its old path. An entry for a package covers all of its modules."""


def path_today(name: str) -> str | None:
    """New path of a module that has moved; None if it has not."""
    # Look up the module, then the packages around it: their entries cover all of their modules.
    prefix = name
    while prefix:
        if prefix in MOVED:
            return MOVED[prefix] + name.removeprefix(prefix)
        prefix = prefix.rpartition(".")[0]
    return None


class MovedModules:
    """Finder and loader of old import paths, for `sys.meta_path`.

    It has no base class of `importlib.abc`, because importing that would slow `import quadriga`.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that has moved; None leaves the module to other finders."""
        if not fullname.startswith("quadriga.") or path_today(fullname) is None:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return None: Python creates an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module by the one at the new path."""
        moved = path_today(module.__name__)
        assert moved is not None, "this loader has found the module"
        # Afterwards, Python's import returns the entry of `sys.modules`.
        sys.modules[module.__name__] = import_module(moved)


def install() -> None:
    """Add the finder of old paths to the import system. A second call does nothing."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        # Before Python's own finder, which would load a second copy of modules in moved packages.
        sys.meta_path.insert(0, MovedModules())
