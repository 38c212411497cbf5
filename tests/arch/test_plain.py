# SPDX-License-Identifier: Apache-2.0
"""Statements, names and docstrings of the packages that keep the rules of `arch_plain`."""

import ast

import pytest

import arch_house
import arch_plain
from arch_tree import Source, package_sources

RULES = [
    arch_plain.paired_assignment,
    arch_plain.vague_name,
    arch_plain.incomplete_docstring,
    arch_plain.many_attributes,
    arch_plain.splatted_tuple,
]
MANY = "class C:\n    def __init__(self):\n" + "".join(
    f"        self.a{n} = {n}\n" for n in range(16)
)
BAD = [
    (arch_plain.paired_assignment, "a, b = 1, f()"),
    (arch_plain.paired_assignment, "self.a, self.b = x, []"),
    (arch_plain.vague_name, "found = {}"),
    (arch_plain.vague_name, "def f(given): ..."),
    (arch_plain.vague_name, "found_items = []"),
    (arch_plain.vague_name, "left = 1"),
    (arch_plain.incomplete_docstring, '"""What befell the engines."""'),
    (arch_plain.incomplete_docstring, 'class C:\n    size: int\n    """Of the step, from 1 on."""'),
    (arch_plain.many_attributes, MANY),
    (arch_plain.splatted_tuple, "def f():\n    parts = (1, 2)\n    return g(*parts)"),
]
GOOD = [
    (arch_plain.paired_assignment, "a, b = b, a"),
    (arch_plain.paired_assignment, "a, b = b, a + b"),
    (arch_plain.paired_assignment, "a, b = f()"),
    (arch_plain.vague_name, "left, right = sides\nleft = right"),
    (arch_plain.vague_name, "missing_keys = []"),
    (arch_plain.incomplete_docstring, '"""Restart counts of the engines."""'),
    (arch_plain.incomplete_docstring, '"""One of the supported names."""'),
    (arch_plain.many_attributes, MANY.replace("        self.a15 = 15\n", "")),
    (arch_plain.splatted_tuple, "def f(parts):\n    return g(*parts)"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_plain_packages(rule) -> None:
    """No file of a package in the list breaks the rule."""
    sources = [
        source
        for source in package_sources()
        if arch_house.package_of(source) in arch_plain.PLAIN_PACKAGES
    ]
    complaints = [complaint for source in sources for complaint in rule(source)]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(("rule", "text"), BAD)
def test_rule_complains(rule, text: str) -> None:
    """A file that breaks the rule is found."""
    assert list(rule(Source("quadriga/data/x.py", text)))


@pytest.mark.parametrize(("rule", "text"), GOOD)
def test_rule_is_silent(rule, text: str) -> None:
    """A file that keeps the rule passes."""
    assert list(rule(Source("quadriga/data/x.py", text))) == []


def test_public_names_still_exist() -> None:
    """Each listed file still has its listed names."""
    names = {
        source.name: {name for _, name in arch_plain.assigned_names(source)}
        for source in package_sources()
    }
    for file, listed in arch_plain.PUBLIC_NAMES.items():
        assert listed <= names[file], file


def test_exceptions_are_still_needed() -> None:
    """Each class that is listed has more attributes than the rule allows, and a reason."""
    counts = {
        f"{source.name}:{node.name}": len(arch_plain.attributes_of(node))
        for source in package_sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    }
    for name, reason in arch_plain.MANY_ATTRIBUTES.items():
        assert reason and counts[name] > arch_plain.MAX_ATTRIBUTES, name
