# SPDX-License-Identifier: Apache-2.0
"""A user's file as a module: found, loaded again, with its neighbours, and shown where it fails."""

import sys
from pathlib import Path

import pytest

from quadriga.errors import ConfigError
from quadriga.observe import watchdog
from quadriga.user_file import import_external, import_file, is_reference, load_reference, member_of


def test_a_file_is_run_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under one name, which pickle finds; relative paths count from the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "mine.py"
    file.write_text("import beside_mine\nvalue = beside_mine.value + 1\n")
    (tmp_path / "beside_mine.py").write_text("value = 1\n")
    first = import_file("mine.py", "key")
    assert (first.value, sys.modules[first.__name__]) == (2, first)
    assert import_file(f"file://{file}", "key") is first
    file.write_text("value = 30\n")
    second = import_file(file, "key")
    assert (second.value, second.__name__) == (30, first.__name__)


def test_modules_and_packages_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the working directory on the path of imports, as under the installed command."""
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "scores.py").write_text("def score(x):\n    return 2 * x\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.py").write_text("from own_package.scores import score\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))]
    )
    assert import_file("elsewhere/mine.py", "key").score(2) == 4
    assert load_reference("pkg://own_package.scores:score", "key")(3) == 6
    assert load_reference("elsewhere/mine.py:score", "key")(3) == 6
    assert [
        is_reference(name)
        for name in ("a.py:f", "pkg://a.b:f", "a.py", "pkg://a.b", "grpo", "a.b:f")
    ] == [
        *(True, True),
        *(False,) * 4,
    ]
    import_external("own_package.scores")
    import_external(["own_package.scores", "elsewhere/mine.py"])
    with pytest.raises(
        ConfigError, match=r"external_lib: got pkg://own_pakage, which raised ModuleNotFoundError"
    ):
        import_external("own_pakage")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(:\n", r"which raised SyntaxError while it was loaded:\n  File .*mine\.py., line 1"),
        (
            "raise SystemExit(3)\n",
            r"which raised SystemExit while it was loaded:\nTraceback .*\n  File .*mine\.py",
        ),
        (
            "def f():\n    return {}['x']\n\nf()\n",
            r"Traceback .*\n  File .*mine\.py., line 4, in <module>(?s:.*)line 2",
        ),
    ],
)
def test_an_error_is_shown_from_the_users_file_on(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=expected) as raised:
        import_file(file, "key")
    assert "importlib" not in str(raised.value)
    assert set(sys.modules) == before


def test_what_is_no_python_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x = 1\n")
    with pytest.raises(
        ConfigError,
        match=r"key: got .*notes\.txt, expected a Python file, with a name that ends in",
    ):
        import_file(tmp_path / "notes.txt", "key")
    with pytest.raises(
        ConfigError, match=r"key: got '.*none\.py', which is not a file.*Looked for"
    ):
        import_file(tmp_path / "none.py", "key")


def test_functions_and_classes_of_a_file(tmp_path: Path) -> None:
    """By name; what is missing or of another kind is said with what the file has."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import json\nlimit = 3\n\n\ndef centred(x):\n    return x - limit\n\n\nclass Own(dict):\n    pass\n"
    )
    module = import_file(file, "key")
    assert member_of(module, "centred", "key")(5) == 2
    assert member_of(module, "Own", "key", base=dict) is module.Own
    for name, base, expected in (
        (
            "centered",
            None,
            r"key: got no function 'centered', expected a function in .*mine\.py \(centred, Own\)\. Did",
        ),
        ("limit", None, r"got limit, which is a int, expected a function in"),
        (
            "Owm",
            dict,
            r"got no class 'Owm', expected a subclass of builtins\.dict in .*\(Own\)\. Did you mean 'Own'\?",
        ),
        (
            "Own",
            list,
            r"got Own, a subclass of dict, expected .*\(it has none\)\. Write `class Own\(list\)` there",
        ),
    ):
        with pytest.raises(ConfigError, match=expected):
            member_of(module, name, "key", base=base)


def test_an_import_that_hangs_is_named_with_its_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watchdog, "EVERY_S", 0.02)
    path = tmp_path / "slow.py"
    path.write_text("import time\n\ntime.sleep(0.3)\n")
    import_file(path, "data.custom_cls")
    assert (
        f"for {path} to be imported (data.custom_cls), at {path}:3 in <module>"
        in capsys.readouterr().out
    )
