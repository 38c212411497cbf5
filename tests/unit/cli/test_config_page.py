# SPDX-License-Identifier: Apache-2.0
"""docs/configuration.md: each command on it is run, and prints what the page says that it prints."""

import re
import shlex
from pathlib import Path

import pytest

from quadriga.cli.config import main
from quadriga.errors import ConfigError

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(bash|text|yaml)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def shown() -> list[tuple[str, str]]:
    """Each command of the page with the output that follows it."""
    commands = [text for kind, text in BLOCKS if kind == "bash"]
    return list(zip(commands, [text for kind, text in BLOCKS if kind == "text"], strict=True))


@pytest.fixture
def _at_the_readers_desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the repository's configurations and the files that the page shows."""
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    for kind, text in BLOCKS:
        if kind == "yaml":
            (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_at_the_readers_desk")
@pytest.mark.parametrize(("command", "output"), shown())
def test_a_command_prints_what_the_page_says(
    command: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files that do not exist and other things to know may follow what is shown."""
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["quadriga", "config"]
    try:
        # Of a plan without its files: they are what keeps it from starting.
        assert main(words[2:]) == (2 if words[2] == "explain" else 0)
        printed = capsys.readouterr()
        said = f"{printed.err}{printed.out}"
    except ConfigError as error:
        said = f"{error}\n"
    assert said.startswith(output)


def test_the_page_shows_a_plan_a_refusal_and_a_key() -> None:
    """So that the test above cannot run dry."""
    outputs = [output for _, output in shown()]
    assert len(outputs) == 4
    for start in ("Step\n", "3 things", "actor_rollout_ref."):
        assert any(output.startswith(start) for output in outputs), start


PROGRAMS = r"main_|sft_trainer|fsdp_sft|model_merger|fully_async_main|one_step_off_ppo"


@pytest.mark.parametrize(
    "key", re.findall(rf"`(?!key=|{PROGRAMS})([a-z_]+(?:\.[a-z_]+)*)(?:=[^`]*)?`", PAGE)
)
def test_a_key_in_the_text_exists(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys may be named by their last part."""
    assert main(["keys", key]) == 0
    assert re.search(rf"^(\S+\.)?{re.escape(key)} = ", capsys.readouterr().out, flags=re.MULTILINE)
