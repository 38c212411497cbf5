# SPDX-License-Identifier: Apache-2.0
"""The tests of the engine on Megatron-core run where it is installed: `pip install -e '.[megatron]'`."""

from importlib.util import find_spec

import pytest

from tests.numerics.conftest import make_batch  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder in an environment without Megatron-core."""
    if find_spec("megatron") is None:
        for item in items:
            if item.path.is_relative_to(__file__.rpartition("/")[0]):
                item.add_marker(
                    pytest.mark.skip(reason="no megatron-core here: pip install -e '.[megatron]'")
                )
