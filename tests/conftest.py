# SPDX-License-Identifier: Apache-2.0
"""What every test shares: a test marked `gpu` is skipped with a sentence where there is no accelerator."""

from importlib import import_module

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` on a machine without an accelerator; torch is loaded only if there are any."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not import_module("torch").accelerator.is_available():
        reason = f"no accelerator here: {len(marked)} tests of code for one did not run"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
