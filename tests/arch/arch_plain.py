# SPDX-License-Identifier: Apache-2.0
"""Rules about statements, names and docstrings: they can be read without decoding.

A rule finds places to read again. A place that only gets around its rule, such as `found_item` for `found`, reads no
better.
"""

import ast
import re
from collections.abc import Iterator

from arch_tree import Source, is_text

# The packages that keep these rules so far.
PLAIN_PACKAGES = frozenset(
    {
        "",  # modules directly under quadriga/
        *(
            "algorithms",
            "cli",
            "config",
            "data",
            "engine_traits",
            "engines",
            "models",
            "observe",
            "protocol",
        ),
        *(
            "planning",
            "quadriga_recipes",
            "replay",
            "rewards",
            "rollout",
            "single_controller",
            "view",
            "weight_sync",
            "workers",
        ),
    }
)

MAX_ATTRIBUTES = 15
VAGUE_NAMES = frozenset(
    {
        *("one", "ones", "found", "own", "given", "told", "kept", "left", "made"),
        *("those", "what", "wanted", "here", "there", "others", "whole"),
    }
)
VAGUE_WITH_TAIL = re.compile(
    r"(one|found|given|told|kept|those|wanted)_(one|item|thing|value|obj|object|data|result)s?|the_(given|others|rest)"
)
# Vague names of the public interface, by file. Callers use them, so they stay.
PUBLIC_NAMES: dict[str, set[str]] = {
    "quadriga/algorithms/masked.py": {"others"},
}
# A docstring that begins so completes a sentence that stands elsewhere.
INCOMPLETE_START = re.compile(
    r"(What|One(?! of\b|-)|Of|Those|As|Its?|Let|Have|How(?! many\b)|Which|Where|That|These|Around|Inside)\b"
)
# Classes with more attributes, each with the reason.
MANY_ATTRIBUTES: dict[str, str] = {
    "quadriga/engine_traits/traits.py:EngineTraits": "a declaration, with a field for each ability",
    "quadriga/rollout/native/generation.py:GenerationRequest": "all state of a request, which moves between threads",
    "quadriga/rollout/agent_loop/conversation.py:Conversation": "users' agent loops read its fields",
}


def paired_assignment(source: Source) -> Iterator[str]:
    """`a, b = x, y`, where neither value needs the other's old one."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple | ast.List):
            continue
        target = node.targets[0]
        if not isinstance(target, ast.Tuple | ast.List) or len(target.elts) != len(node.value.elts):
            continue
        assigned = {ast.unparse(element) for element in target.elts}
        read = {ast.unparse(part) for part in ast.walk(node.value) if isinstance(part, ast.expr)}
        if not assigned & read:
            yield source.at(
                node.lineno, "several unrelated names are assigned at once; give each its line"
            )


def vague_name(source: Source) -> Iterator[str]:
    """A variable, attribute or parameter whose name does not say what it holds."""
    names = list(assigned_names(source))
    exceptions = set(PUBLIC_NAMES.get(source.name, ()))
    if any(name == "right" for _, name in names):
        # The sides of something are called left and right.
        exceptions.add("left")
    for line, name in names:
        is_vague = name in VAGUE_NAMES or VAGUE_WITH_TAIL.fullmatch(name)
        if is_vague and name not in exceptions:
            yield source.at(line, f"{name!r} does not say what it holds")


def assigned_names(source: Source) -> Iterator[tuple[int, str]]:
    """Variables, attributes and parameters, with the lines that assign to them."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def incomplete_docstring(source: Source) -> Iterator[str]:
    """A docstring that cannot be understood without its neighbours."""
    for node in ast.walk(source.tree):
        if is_text(node):
            text = node.value.value.strip()
            if INCOMPLETE_START.match(text):
                beginning = text.partition("\n")[0][:60]
                yield source.at(
                    node.lineno, f"{beginning!r} is no sentence or noun phrase of its own"
                )


def many_attributes(source: Source) -> Iterator[str]:
    """A class that keeps more than a reader can hold. Sections of the configuration are data."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ClassDef):
            continue
        names = attributes_of(node)
        is_listed = f"{source.name}:{node.name}" in MANY_ATTRIBUTES
        if len(names) > MAX_ATTRIBUTES and not is_listed and source.layer != "config":
            yield source.at(
                node.lineno, f"{node.name} has {len(names)} attributes, at most {MAX_ATTRIBUTES}"
            )


def attributes_of(node: ast.ClassDef) -> set[str]:
    """The attributes that the methods of a class assign to `self`, and the fields that it declares."""
    fields = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
    names = {field.id for field in fields if isinstance(field, ast.Name)}
    for part in ast.walk(node):
        is_assigned = isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
        if is_assigned and isinstance(part.value, ast.Name) and part.value.id == "self":
            names.add(part.attr)
    return names


def splatted_tuple(source: Source) -> Iterator[str]:
    """Arguments that are collected in a tuple and splatted into a call: `given = (a, b); Class(*given)`."""
    for _, function in source.functions():
        tuples = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            if not isinstance(node, ast.Call):
                continue
            for argument in node.args:
                is_splat = isinstance(argument, ast.Starred) and isinstance(
                    argument.value, ast.Name
                )
                if is_splat and argument.value.id in tuples:
                    name = argument.value.id
                    yield source.at(
                        node.lineno, f"the tuple {name} is splatted; pass its values by keyword"
                    )
