# SPDX-License-Identifier: Apache-2.0
"""Imports of modules that load torch, by commands that may not need them."""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from quadriga.lazy import collector_paused
from quadriga.observe.watchdog import NOTICE_S, waiting
from quadriga.openmp import threads_for_load


def load_module(name: str, purpose: str = "") -> Any:
    """Import a module, with a notice if that takes long.

    If the module loads torch, the threads of torch wait for each other in the way that fits the
    machine's load (`quadriga.openmp`).

    Args:
        name: name of the module.
        purpose: text after "waiting for" in the notice. "": "the module NAME".
    """
    # Notices of a long wait must not be in the standard output, which may be data.
    emit = partial(print, file=sys.stderr, flush=True)
    with (
        waiting(purpose or f"the module {name}", every_s=NOTICE_S, emit=emit),
        collector_paused(),
        threads_for_load(),
    ):
        return import_module(name)


class LazyModule(ModuleType):
    """Stands for a module that is imported when one of its attributes is first used.

    Type checkers and editors know the module by an import under `if TYPE_CHECKING`.

    Args:
        name: name of the module.
        load: function that imports the module by its name. The default prints a notice if that takes
            long.
    """

    def __init__(self, name: str, load: Callable[[str], Any] = load_module) -> None:
        super().__init__(name)
        self._load = load

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._load(self.__name__), attribute)
