# SPDX-License-Identifier: Apache-2.0
"""Commands that compute nothing with tensors do not load torch, which takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "datasets", "ray")


def heavy_modules_after(code: str) -> str:
    """The heavy modules that a program loads, as text; the last line of its output."""
    program = f"import sys\n{code}\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


def test_commands_load_no_torch_before_they_need_it() -> None:
    """So a help text, a wrong command line, and commands that only read files answer at once."""
    names = ["config", "data", "doctor", "env", "generate", "plan", "prepare", "replay", "show"]
    modules = [f"quadriga.cli.{name}" for name in (*names, "train", "view")]
    assert heavy_modules_after(f"import {', '.join(modules)}") == "[]"


@pytest.mark.parametrize(
    "words", [["env", "list", "openenv"], ["data", "inspect", "{rows}", "data.seed=3"]]
)
def test_commands_that_need_no_torch(words: list[str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "one"}]}) + "\n")
    words = [word.format(rows=rows) for word in words]
    run = f"from quadriga.cli.main import main\nassert main({words!r}) == 0"
    assert heavy_modules_after(run) == "[]"
