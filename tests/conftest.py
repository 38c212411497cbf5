# SPDX-License-Identifier: Apache-2.0
"""What every test shares: those for an accelerator are skipped where there is none; how tests spread over processes."""

from importlib import import_module

import pytest

# With `scripts/test` two processes of pytest-xdist take whole files, these folders first: a long file that starts last
# keeps one process waiting. Tests that share a Ray cluster stay in one process.
LONGEST_FIRST = ("tests/e2e/ray", "tests/e2e", "tests/numerics", "tests/contract")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no accelerator (torch is loaded only if there are any); group."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not import_module("torch").accelerator.is_available():
        reason = f"no accelerator here: {len(marked)} tests of code for one did not run"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            path = item.path.relative_to(config.rootpath).as_posix()
            item.add_marker(pytest.mark.xdist_group("ray" if path.startswith(LONGEST_FIRST[0]) else path))
        items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    path = item.path.relative_to(item.config.rootpath).as_posix()
    return next((rank for rank, folder in enumerate(LONGEST_FIRST) if path.startswith(folder)), len(LONGEST_FIRST))
