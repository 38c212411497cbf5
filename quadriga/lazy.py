# SPDX-License-Identifier: Apache-2.0
"""Faster imports: names that a package loads on first use, and imports without the garbage collector.

The collector takes a fifth of the time that the imports of torch and transformers take.
"""

import ast
import atexit
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from quadriga.openmp import threads_for_load


def lazy_names(package: str) -> tuple[list[str], Callable[[str], Any]]:
    """Make a package load its public names on first use.

    Args:
        package: name of a package whose `__init__.py` imports its public names under `if TYPE_CHECKING`.

    Returns:
        `__all__` and `__getattr__` for the package.
    """
    # The names are read from the source, so that they are listed only once.
    module_of = {}
    tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
    for block in tree.body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for statement in block.body:
                if isinstance(statement, ast.ImportFrom):
                    module_of |= {alias.name: str(statement.module) for alias in statement.names}

    def load(name: str) -> Any:
        """Import the module of a name and return the name's value; `__getattr__` of the package."""
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with collector_paused(), threads_for_load():
            module = import_module(module_of[name])
        return getattr(module, name)

    return list(module_of), load


class _Collector:
    """State of the garbage collector while threads import modules.

    Attributes:
        lock: protects the other attributes.
        num_pauses: number of `collector_paused` blocks that threads are in.
        was_enabled: whether the collector was enabled before the first of these blocks.
        keeps_modules: see `keep_modules`.
    """

    lock = threading.Lock()
    num_pauses = 0
    was_enabled = True
    keeps_modules = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Context manager: import modules while the garbage collector is disabled.

    Modules live as long as the process, so collections during an import find nothing.
    """
    with _Collector.lock:
        if _Collector.num_pauses == 0:
            _Collector.was_enabled = gc.isenabled()
            gc.disable()
        _Collector.num_pauses += 1
    try:
        yield
    finally:
        with _Collector.lock:
            _Collector.num_pauses -= 1
            if _Collector.num_pauses == 0:
                _enable_collector()


def _enable_collector() -> None:
    """Enable the collector after the last pause, if it was enabled before the first.

    The objects of the imported modules are first taken out of the young generations, which the next
    collections would visit: for good with `keep_modules`, else into the oldest generation.
    """
    # `unfreeze` moves all frozen objects into the oldest generation. It would do so with those that
    # a user's program has frozen, too, so both calls are left out if there are any.
    if _Collector.keeps_modules:
        gc.freeze()
    elif gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()
    if _Collector.was_enabled:
        gc.enable()


def keep_modules() -> None:
    """Exempt all objects that exist at the end of a `collector_paused` block from later collections.

    Only for processes of this package: a user's program may have garbage at that time.
    """
    _Collector.keeps_modules = True


# Without this, the collection at exit visits the objects of all modules, which takes up to two seconds.
atexit.register(gc.freeze)
