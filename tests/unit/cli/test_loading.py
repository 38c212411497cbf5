# SPDX-License-Identifier: Apache-2.0
"""Modules that a command loads on demand are loaded as those that it loads at its start."""

import sys
from pathlib import Path

import pytest

from quadriga import openmp
from quadriga.cli.loading import load_module


def test_a_module_on_demand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the garbage collector, and on a busy machine with threads that sleep."""
    (tmp_path / "observed_on_demand.py").write_text(
        "import gc, os\ncollects = gc.isenabled()\npolicy = os.environ.get('OMP_WAIT_POLICY')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in openmp._CHOICES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(openmp, "_num_other_threads", lambda: 1000)
    module = load_module("observed_on_demand")
    monkeypatch.delitem(sys.modules, "observed_on_demand")
    assert (module.collects, module.policy) == (False, "PASSIVE")
