# SPDX-License-Identifier: Apache-2.0
"""Tests of published environments run where these are installed: `scripts/test --agents`."""

from importlib.util import find_spec

import pytest

_LIBRARIES = ("textarena", "gem", "gymnasium", "skyrl_gym", "websockets")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder where a library is missing."""
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    for item in items:
        if missing and item.path.is_relative_to(__file__.rpartition("/")[0]):
            reason = f"no {', '.join(missing)} here: scripts/test --agents runs them where they are"
            item.add_marker(pytest.mark.skip(reason=reason))
