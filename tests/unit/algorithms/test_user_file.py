# SPDX-License-Identifier: Apache-2.0
"""Functions from a user's file: found, loaded again after a change, and every way to miss one."""

from pathlib import Path

import pytest

from quadriga.algorithms.user_file import is_file_reference, load_from_file
from quadriga.errors import ConfigError

SOURCE = "def centred(rewards):\n    return rewards - {}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with one function."""
    path = tmp_path / "mine.py"
    path.write_text(SOURCE.format(1))
    return path


def test_what_points_into_a_file() -> None:
    """A registered name has no `.py` in it."""
    assert is_file_reference("a/b.py:c") and is_file_reference("b.py")
    assert not is_file_reference("grpo")


def test_load_and_load_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path counts from the working directory; a file that changed is read anew."""
    monkeypatch.chdir(file.parent)
    assert load_from_file("mine.py:centred", "key")(5) == 4
    file.write_text(SOURCE.format("20 + 0"))
    assert load_from_file(f"{file}:centred", "key")(5) == -15


def test_errors_name_the_way_out(file: Path) -> None:
    """No file, no function, a near name, a file that raises."""
    with pytest.raises(ConfigError, match=r"key: got '.*none.py', which is not a file"):
        load_from_file(f"{file.parent}/none.py:f", "key")
    with pytest.raises(ConfigError, match="Say which function to take"):
        load_from_file(str(file), "key")
    with pytest.raises(ConfigError, match="Did you mean 'centred'"):
        load_from_file(f"{file}:centered", "key")
    file.write_text("import no_such_package_anywhere\n")
    with pytest.raises(ConfigError, match="ModuleNotFoundError") as raised:
        load_from_file(f"{file}:centred", "key")
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)
