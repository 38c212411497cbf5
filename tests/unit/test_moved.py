# SPDX-License-Identifier: Apache-2.0
"""Old import paths give the modules at their new paths, and the core works without the package of verl."""

import os
import pickle
import subprocess
import sys
from importlib import import_module

import pytest

from quadriga.moved import MOVED, MovedModules, install


@pytest.mark.usefixtures("verl_names")
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


def test_core_without_the_package() -> None:
    """There is no command `verl` then, and no hint that a key is one of verl's."""
    program = (
        "import sys; sys.modules['quadriga_verl'] = None\n"
        "from quadriga.cli.main import COMMANDS\n"
        "from quadriga.config.keys import is_key_of_verl\n"
        "assert 'verl' not in COMMANDS and not is_key_of_verl('critic.enable', 'rl')\n"
        "try: import quadriga.compat.verl\n"
        "except ModuleNotFoundError as error: print(error.name.split('.')[0])"
    )
    # Other tests may have turned the names of verl on.
    environment = {name: value for name, value in os.environ.items() if name != "QUADRIGA_VERL"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "quadriga_verl", done.stderr
