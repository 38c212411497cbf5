# SPDX-License-Identifier: Apache-2.0
"""docs/python.md is what the docstrings say, and has every name of the package."""

import quadriga
from python_page import PAGE, SECTIONS, markdown_of, render


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run scripts/python_page.py"


def test_every_name_of_the_package_is_on_the_page() -> None:
    listed = {name for section in SECTIONS for name in section.names.split()}
    assert set(quadriga.__all__) - listed == {"__version__"}


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
