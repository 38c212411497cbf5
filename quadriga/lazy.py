# SPDX-License-Identifier: Apache-2.0
"""Packages whose names load on first use, so that who needs one of them does not pay for the imports of all; and
imports without the garbage collector, which takes a fifth of their time."""

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


def lazy_names(package: str) -> tuple[list[str], Callable[[str], Any]]:
    """`__all__` and `__getattr__` of a package: the names that it imports under `if TYPE_CHECKING`."""
    tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
    blocks = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    home_of = {one.name: str(node.module) for node in imports for one in node.names}

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with collector_paused():
            module = import_module(home_of[name])
        return getattr(module, name)

    return list(home_of), load


class _Collector:
    """State of the pauses of this process's garbage collector."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_pauses = 0
        self.was_enabled = True
        self.keeps_modules = False

    def pause(self) -> None:
        with self.lock:
            if self.num_pauses == 0:
                self.was_enabled = gc.isenabled()
                gc.disable()
            self.num_pauses += 1

    def resume(self) -> None:
        with self.lock:
            self.num_pauses -= 1
            if self.num_pauses:
                return
            # New objects become old ones without a pass over them.
            if self.keeps_modules:
                gc.freeze()
            elif gc.get_freeze_count() == 0:
                gc.freeze()
                gc.unfreeze()
            if self.was_enabled:
                gc.enable()


_COLLECTOR = _Collector()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Context manager for imports of many modules: the garbage collector is off inside, and as it was before on exit.

    Modules stay until the process ends, so each pass over what they are made of is in vain.
    """
    _COLLECTOR.pause()
    try:
        yield
    finally:
        _COLLECTOR.resume()


def keep_modules() -> None:
    """Exempt whatever exists after a `collector_paused` block from all later collections.

    Only for processes of our own: in a user's program, it would also keep the garbage of that program.
    """
    _COLLECTOR.keeps_modules = True


# The interpreter's last collection would look at all modules, for up to two seconds.
atexit.register(gc.freeze)
