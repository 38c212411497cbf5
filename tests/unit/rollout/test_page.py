# SPDX-License-Identifier: Apache-2.0
"""docs/rollout.md: its configurations load, its keys exist."""

import re
from pathlib import Path

import pytest

from quadriga.cli.config import main

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs" / "rollout.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
DOTTED = re.findall(r"`((?!quadriga\.|chat\.)[a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", PAGE)
ROWS = re.findall(
    r"^\| (`[a-z_`, ]+`) \|",
    PAGE[PAGE.index("| key |") : PAGE.index("## On-policy or off-policy")],
    flags=re.MULTILINE,
)
SHORT = [f"rollout.{key}" for row in ROWS for key in re.findall(r"`([a-z_]+)`", row)]
KEYS = sorted({*DOTTED, *SHORT})
OPEN = ("engine_kwargs.",)
"""Dictionaries whose entries are no keys."""


def test_the_page_names_keys() -> None:
    """So that the test of keys cannot run dry."""
    assert {"rollout.n", "rollout.stop", "rollout.min_p", "algorithm.filter_groups.enable"} <= set(
        KEYS
    )


@pytest.mark.parametrize("text", BLOCKS)
def test_a_configuration_loads(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And every value of it is in the resolved tree."""
    (tmp_path / "page.yaml").write_text(text)
    assert main(["show", "--config", str(tmp_path / "page.yaml")]) == 0
    printed = capsys.readouterr().out
    for words in re.findall(r"^ *\w+: ([\w./]+) *(?:#.*)?$", text, flags=re.MULTILINE):
        assert f": {words}\n" in printed


@pytest.mark.parametrize("key", [key for key in KEYS if not key.startswith(OPEN)])
def test_a_key_in_the_text_exists(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys may be named by their last parts, or as a section; those of the table are below `rollout`."""
    assert main(["keys", key]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"^(\S+\.)?{re.escape(key)}(\.\S+)? = ", printed, flags=re.MULTILINE)
