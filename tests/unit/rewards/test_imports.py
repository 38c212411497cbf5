# SPDX-License-Identifier: Apache-2.0
"""The package is light to import, and says where its names are."""

import subprocess
import sys

import pytest

import quadriga.rewards as rewards


@pytest.mark.parametrize("name", rewards.__all__)
def test_every_public_name_resolves(name):
    assert getattr(rewards, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = rewards.no_such_name


def test_what_a_grading_process_needs_loads_no_torch():
    code = (
        "import sys; sys.path[:] = sys.argv[1:]\n"
        "from quadriga.rewards import default_compute_score, GradingPool, register\n"
        "import quadriga.rewards.graders.math, quadriga.rewards.graders.gsm8k\n"
        "print([name for name in ('torch', 'pydantic', 'tensordict', 'transformers', 'ray') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *sys.path], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
