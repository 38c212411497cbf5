# SPDX-License-Identifier: Apache-2.0
"""Old import paths give the modules at their new paths."""

import pickle
import sys
from importlib import import_module

import pytest

from quadriga.moved import MOVED, MovedModules, install


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_both_paths_are_one_module(old: str, new: str) -> None:
    module = import_module(new)
    assert import_module(old) is module
    assert sys.modules[old] is module
    parent, _, name = old.rpartition(".")
    assert getattr(import_module(parent), name) is module
    # What importing it by an old path must not change.
    assert module.__name__ == module.__spec__.name == new


def test_the_row_of_a_package_holds_for_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOVED, "quadriga.gauges", "quadriga.observe")
    for name in ("quadriga.gauges", "quadriga.gauges.tracking", "quadriga.gauges.tracking.jsonl"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    old = import_module("quadriga.gauges.tracking.jsonl")
    assert old is import_module("quadriga.observe.tracking.jsonl")
    assert import_module("quadriga.gauges").tracking is import_module("quadriga.observe.tracking")
    for name in ("quadriga.gauges", "quadriga.gauges.tracking", "quadriga.gauges.tracking.jsonl"):
        monkeypatch.delitem(sys.modules, name)


def test_a_pickle_of_an_earlier_version_is_read() -> None:
    rules = import_module("quadriga.trainer.asynchronous.rules")
    content = b"cquadriga.trainer.async_rules\nRules\n."
    assert pickle.loads(content) is rules.Rules


def test_the_finder_is_installed_once() -> None:
    install()
    assert sum(isinstance(finder, MovedModules) for finder in sys.meta_path) == 1
