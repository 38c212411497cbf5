# SPDX-License-Identifier: Apache-2.0
"""docs/python.md is what the docstrings say, and has every name of the package."""

import re

import quadriga
from python_page import PAGE, SECTIONS, definition_of, markdown_of, methods_of, render
from quadriga.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from quadriga.rollout import RolloutEngine


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run scripts/python_page.py"


def test_every_name_of_the_package_is_on_the_page() -> None:
    listed = {name for section in SECTIONS for name in section.names.split()}
    assert set(quadriga.__all__) - listed == {"__version__"}


def test_every_algorithm_is_listed() -> None:
    """The page has each function once; docs/configuration.md has each name of a configuration."""
    listed = {section.module: section.names.split() for section in SECTIONS}
    text = (PAGE.parent / "configuration.md").read_text(encoding="utf-8")
    paragraph = text.partition("\nEstimators: ")[2].partition("\n\n")[0]
    estimators, _, losses = paragraph.partition("Losses: ")
    for registry, package, names in (
        (ADVANTAGES, "quadriga.algorithms.advantages", estimators),
        (POLICY_LOSSES, "quadriga.algorithms.losses", losses.partition(".")[0]),
    ):
        functions = {registry[name].__name__ for name in registry.built_in}
        assert set(listed[package]) - {"clipped_value_loss"} == functions
        others = {"episode_agents"}  # an option
        assert set(re.findall(r"\*(\w+)\*", names)) - others == registry.built_in


def test_abstract_methods_come_first() -> None:
    """Those of the base classes too: an engine must have them."""
    methods = methods_of(RolloutEngine, definition_of(RolloutEngine))
    names = [re.findall(r"\w+", line)[0] for line in methods]
    assert names[:2] == ["load_weights", "generate_batch"] and "generate" in names[2:]


def test_sections_of_a_docstring_become_lists() -> None:
    docstring = """Add numbers.

    Args:
        first: a number
            that may be negative.
        *others: more.

    Returns:
        The sum.
    """
    assert markdown_of(docstring) == (
        "Add numbers.\n\n**Args**\n\n- `first`: a number\n    that may be negative.\n"
        "- `*others`: more.\n\n**Returns**\n\nThe sum."
    )
