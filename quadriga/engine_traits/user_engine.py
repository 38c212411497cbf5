# SPDX-License-Identifier: Apache-2.0
"""Traits of a user's engine, read from the text of its file.

The file is not imported: a configuration is checked without torch and without running users' code.
"""

import ast
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from quadriga.engine_traits.traits import EngineTraits
from quadriga.errors import ConfigError, did_you_mean

_PACKAGE = "pkg://"
_FIX_OF_DECLARATION = (
    "Declare there what the engine can do, by keywords with literal values, as they are read "
    "without importing the file. See quadriga.engine_traits.EngineTraits."
)


def read_traits(name: str) -> EngineTraits:
    """Read the traits that a class declares as `traits = EngineTraits(...)`.

    Args:
        name: `path/to/file.py:Class` or `pkg://package.module:Class`.

    Raises:
        ConfigError: there is no such file or class, or it does not declare valid traits.
    """

    def make_error(expected: str, fix: str) -> ConfigError:
        """Make an error about the name of the engine."""
        return ConfigError(
            "actor_rollout_ref.rollout.name", got=repr(name), expected=expected, fix=fix
        )

    place, _, class_name = name.rpartition(":")
    file = _find_file(place)
    try:
        # Read as text: importing an engine may take a GPU, and the configuration is checked first.
        tree = ast.parse(file.read_bytes())
    except FileNotFoundError as error:
        fix = f"There is no {file}; relative paths start at the current directory."
        raise make_error("a Python file", fix) from error
    except SyntaxError as error:
        raise make_error("a Python file", f"{file}, line {error.lineno}: {error.msg}.") from error
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if class_name not in classes:
        fix = f"Write `class {class_name}(RolloutEngine)` there."
        fix = did_you_mean(class_name, classes) or fix
        raise make_error(f"a class in {file} ({', '.join(classes) or 'it has none'})", fix)

    values = _declared_values(classes[class_name])
    if values is None:
        expected = f"`traits = EngineTraits(...)` in the body of {class_name} in {file}"
        raise make_error(expected, _FIX_OF_DECLARATION)
    try:
        return EngineTraits(**values)
    except ValidationError as error:
        problem = error.errors()[0]
        trait = str(problem["loc"][0])  # the name of the keyword
        fix = f"{trait}: {problem['msg']}."
        known_traits = EngineTraits.__dataclass_fields__
        if trait not in known_traits:
            fix = f"EngineTraits has no {trait}, but {', '.join(known_traits)}."
        raise make_error(f"valid traits in {class_name} of {file}", fix) from error


def _find_file(place: str) -> Path:
    """File of a path or a module. Packages around a module are not imported.

    Args:
        place: a path, `file://PATH` or `pkg://package.module`.

    Returns:
        The file. It may not exist: for a module that is not found, it is the last file tried.
    """
    if not place.startswith(_PACKAGE):
        return Path(place.removeprefix("file://")).expanduser().resolve()
    path = place.removeprefix(_PACKAGE).replace(".", "/") + ".py"
    candidates = [Path(folder, path) for folder in (*sys.path, Path.cwd())]
    return next(filter(Path.is_file, candidates), candidates[-1])


def _declared_values(node: ast.ClassDef) -> dict[str, Any] | None:
    """Arguments of the call in `traits = EngineTraits(...)` in the body of a class.

    None: the class has no such assignment, or an argument is not literal.
    """
    for statement in node.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id="traits")], value=ast.Call(keywords=keywords))
                | ast.AnnAssign(target=ast.Name(id="traits"), value=ast.Call(keywords=keywords))
            ):
                try:
                    return {
                        str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords
                    }
                except (ValueError, TypeError):
                    return None
    return None
