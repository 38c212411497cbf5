# SPDX-License-Identifier: Apache-2.0
"""Packages whose names load on first use, so that who needs one of them does not pay for the imports of all."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str) -> tuple[list[str], Callable[[str], Any]]:
    """`__all__` and `__getattr__` of a package: the names that it imports under `if TYPE_CHECKING`."""
    tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    home_of = {one.name: str(node.module) for node in imports for one in node.names}

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home_of[name]), name)

    return list(home_of), load
