# SPDX-License-Identifier: Apache-2.0
"""What every test shares: those for an accelerator are skipped where there is none; how tests spread over processes."""

from importlib import import_module
from typing import Any

import pytest

# Processes of pytest-xdist take whole files, these folders first: a long file that starts last keeps one waiting.
LONGEST_FIRST = ("tests/e2e/ray/", "tests/e2e/", "tests/numerics/", "tests/contract/")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no accelerator; torch is loaded only if there are any."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not import_module("torch").accelerator.is_available():
        reason = f"no accelerator here: {len(marked)} tests of code for one did not run"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
    if config.pluginmanager.hasplugin("xdist"):
        items.sort(
            key=lambda item: next((n for n, path in enumerate(LONGEST_FIRST) if item.nodeid.startswith(path)), 9)
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A process takes all tests that share a Ray cluster, or else a file."""

    class ByFile(import_module("xdist.scheduler").LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if nodeid.startswith(LONGEST_FIRST[0]) else nodeid.partition("::")[0]

    return ByFile(config, log)
