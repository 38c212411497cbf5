# SPDX-License-Identifier: Apache-2.0
"""What every test shares: those for an accelerator are skipped where there is none; how tests spread over processes.

What tests start ends with the process of pytest, also where that one is killed: see `quadriga.descendants.Guardian`.
Temporary files lie in a folder that goes with it; the folders of `tmp_path` stay, as pytest keeps them.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from quadriga.descendants import Guardian
from quadriga.lazy import collector_paused

# Processes of pytest-xdist take whole files, these folders first: a long file that starts last keeps one waiting.
LONGEST_FIRST = ("tests/e2e/ray/", "tests/e2e/", "tests/numerics/", "tests/contract/")
FREE_BYTES = 2 * 10**9
"""What the temporary files of a whole run may take."""


GUARDIAN = pytest.StashKey[Guardian]()


def pytest_configure(config: pytest.Config) -> None:
    """A guardian for each process of pytest; that of pytest-xdist's controller removes the temporary files."""
    folder = ""
    if not hasattr(config, "workerinput"):
        _require_room(os.environ.get("TMPDIR", "/tmp"))
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        # A short name: sockets lie in it, whose paths have a limit. Tests act as other users, too.
        folder = tempfile.mkdtemp(prefix="qt-")
        os.chmod(folder, 0o1777)
        # Ray's tests of clusters write an address there, whatever folder their clusters have.
        os.mkdir(f"{folder}/ray")
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        config.pluginmanager.register(FailuresAtOnce(config))
    config.stash[GUARDIAN] = Guardian(folder)
    # The controller of pytest-xdist runs no tests, and the import takes a second.
    runs_tests = hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None)
    if runs_tests and config.pluginmanager.hasplugin("hypothesispytest"):
        # A machine that others keep busy is slow, and what is tested is right on it.
        from hypothesis import HealthCheck, settings

        settings.register_profile(
            "busy", deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("busy")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect the tests, which imports everything, without the garbage collector."""
    with collector_paused():
        return (yield)


def _require_room(folder: str) -> None:
    """Raise pytest.UsageError if the temporary folder has too little room.

    Python looks for another folder where the one that is named is full, so this looks at the name itself.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < FREE_BYTES:
        raise pytest.UsageError(
            f"temporary folder {folder}: got {free_bytes / 1e9:.1f} GB free, expected at least "
            f"{FREE_BYTES / 1e9:.0f} GB. Remove something there, or name another folder: TMPDIR=DIR scripts/test"
        )


class FailuresAtOnce:
    """Names a test when it fails, not at the end: a run may be ended before."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._plugins.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            terminal.write_line(
                f"\nFAILED {report.nodeid}: {crash.message if crash else report.longrepr}"
            )
            terminal.flush()


def pytest_unconfigure(config: pytest.Config) -> None:
    """The end of the tests."""
    if GUARDIAN in config.stash:
        config.stash[GUARDIAN].close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no accelerator; torch is loaded only if there are any."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not import_module("torch").accelerator.is_available():
        reason = f"no accelerator here: {len(marked)} tests of code for one did not run"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
    if config.pluginmanager.hasplugin("xdist"):
        items.sort(
            key=lambda item: next(
                (n for n, path in enumerate(LONGEST_FIRST) if item.nodeid.startswith(path)), 9
            )
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A process takes all tests that share a Ray cluster, or else a file."""

    class ByFile(import_module("xdist.scheduler").LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if nodeid.startswith(LONGEST_FIRST[0]) else nodeid.partition("::")[0]

    return ByFile(config, log)


@pytest.fixture(scope="module", autouse=True)
def _algorithms_as_before() -> Iterator[None]:
    """What a file's tests register ends with them."""
    known, managers = {id(one): set(one) for one in _registries()}, set(_managers())
    yield
    # Those stay: each is registered where it is imported first.
    built_in = getattr(sys.modules.get("quadriga.rewards.registry"), "BUILT_IN", {})
    for name in set(_managers()) - managers - set(built_in):
        del _managers()[name]
    for one in _registries():
        for name in set(one) - known.get(id(one), set(one)):
            del one[name]


def _registries() -> tuple[dict[str, Any], ...]:
    # Not imported for this: tests of what needs no torch run without it.
    if "quadriga.algorithms.registry" not in sys.modules:
        return ()
    registry = sys.modules["quadriga.algorithms.registry"]
    return registry.ADVANTAGES, registry.POLICY_LOSSES


def _managers() -> dict[str, Any]:
    """Reward managers by name."""
    registry = sys.modules.get("quadriga.rewards.registry")
    return {} if registry is None else registry._classes


@pytest.fixture
def sigint_raises() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, as in a shell's foreground job: one in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def verl_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`import verl` finds our names."""
    monkeypatch.setenv("QUADRIGA_VERL", "1")
    # Its import alone would leave them on.
    verl = import_module("quadriga_verl.shim")
    verl.install()
    yield
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, verl.Finder)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]
    os.environ.pop("QUADRIGA_VERL_TOLD", None)
