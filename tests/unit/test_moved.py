# SPDX-License-Identifier: Apache-2.0
"""Old import paths yield the modules at the new ones, and the core works without the package of verl."""

import os
import pickle
import subprocess
import sys
from importlib import import_module

import pytest

from quadriga.moved import MOVED

MODULES = [*MOVED, "quadriga.compat.verl.scores", "quadriga.verl.hydra"]


@pytest.mark.usefixtures("verl_names")
@pytest.mark.parametrize("name", MODULES)
def test_old_path_is_the_same_module(name: str) -> None:
    """Submodules of a package that moved are found too, once."""
    module = import_module(name)
    assert module is import_module(module.__name__)
    assert not module.__name__.startswith("quadriga.")
    assert sys.modules[name] is module


def test_object_that_was_pickled_under_an_old_path() -> None:
    """A pickle of an old version names the old module."""
    word = import_module("quadriga_verl.commands.hydra").Word("+", "key", 1)
    new_name, old_name = b"quadriga_verl.commands.hydra", b"quadriga.verl.hydra"
    data = pickle.dumps(word, protocol=0).replace(new_name, old_name)
    assert old_name in data
    assert pickle.loads(data) == word


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
