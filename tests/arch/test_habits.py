# SPDX-License-Identifier: Apache-2.0
"""Headers, docstrings, names, exceptions, left-overs."""

import pytest

import arch_habits
from arch_tree import Source, all_sources, package_sources

EVERYWHERE = [
    arch_habits.no_licence_line,
    arch_habits.no_module_docstring,
    arch_habits.nameless_module,
    arch_habits.swallowed_exception,
    arch_habits.left_over,
]

TRY = "def f():\n    try: ...\n    except{}: {}\n"
BAD = [
    (arch_habits.no_licence_line, "quadriga/x.py", '"""A file."""'),
    (arch_habits.no_module_docstring, "quadriga/x.py", arch_habits.SPDX + "\nimport os"),
    (arch_habits.no_public_docstring, "quadriga/x.py", "def f(): ..."),
    (arch_habits.no_public_docstring, "quadriga/x.py", "class C: ..."),
    (arch_habits.nameless_module, "quadriga/data/utils.py", ""),
    (arch_habits.nameless_module, "quadriga/common/tokens.py", ""),
    (arch_habits.swallowed_exception, "quadriga/x.py", TRY.format("", "raise")),
    (arch_habits.swallowed_exception, "quadriga/x.py", TRY.format(" Exception", "log()")),
    (
        arch_habits.swallowed_exception,
        "quadriga/x.py",
        TRY.format(" (KeyError, Exception) as error", "log(error)"),
    ),
    (arch_habits.swallowed_exception, "quadriga/x.py", TRY.format(" BaseException", "return 1")),
    (arch_habits.swallowed_exception, "quadriga/x.py", TRY.format(" KeyError", "pass")),
    (arch_habits.swallowed_exception, "quadriga/x.py", "with contextlib.suppress(Exception): f()"),
    (arch_habits.locale_encoding, "quadriga/x.py", "path.read_text()"),
    (arch_habits.locale_encoding, "quadriga/x.py", "Path('a').write_text(text, errors='replace')"),
    (arch_habits.locale_encoding, "quadriga/x.py", "open(path)"),
    (arch_habits.locale_encoding, "quadriga/x.py", "path.open()"),
    (arch_habits.locale_encoding, "quadriga/x.py", "path.open(mode='a')"),
    (arch_habits.locale_encoding, "quadriga/x.py", "gzip.open(path, 'rt')"),
    (arch_habits.locale_encoding, "quadriga/x.py", "subprocess.run(words, text=True)"),
    (arch_habits.left_over, "quadriga/x.py", "x = 1  # TO" + "DO: the rest"),
]
GOOD = [
    (
        arch_habits.swallowed_exception,
        "quadriga/x.py",
        TRY.format(" Exception as error", "raise Wrapped from error"),
    ),
    (arch_habits.swallowed_exception, "quadriga/x.py", TRY.format(" KeyError", "return None")),
    (
        arch_habits.swallowed_exception,
        "quadriga/x.py",
        "with contextlib.suppress(FileNotFoundError): f()",
    ),
    (arch_habits.locale_encoding, "quadriga/x.py", "path.read_text('utf-8')"),
    (arch_habits.locale_encoding, "quadriga/x.py", "open(path, 'w', encoding='utf-8')"),
    (
        arch_habits.locale_encoding,
        "quadriga/x.py",
        "open(path, 'rb')\nos.open(path, os.O_RDONLY)\nImage.open(file)",
    ),
    (arch_habits.no_public_docstring, "quadriga/x.py", "def _f(): ...\n@overload\ndef f(): ..."),
    (arch_habits.nameless_module, "quadriga/data/commonsense.py", ""),
]


@pytest.mark.parametrize("rule", EVERYWHERE, ids=lambda rule: rule.__name__)
def test_everything(rule) -> None:
    """No file of ours breaks the rule, tests included."""
    complaints = [complaint for source in all_sources() for complaint in rule(source)]
    assert not complaints, "\n".join(complaints)


def test_public_docstrings() -> None:
    """Each public class and function of the package says what it is for."""
    complaints = [
        complaint
        for source in package_sources()
        for complaint in arch_habits.no_public_docstring(source)
    ]
    assert not complaints, "\n".join(complaints)


def test_encodings() -> None:
    """Each text file of the package is read and written in an encoding that is named."""
    complaints = [
        complaint
        for source in package_sources()
        for complaint in arch_habits.locale_encoding(source)
    ]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(("rule", "name", "text"), BAD)
def test_rule_complains(rule, name: str, text: str) -> None:
    """A file that breaks the rule is found."""
    assert list(rule(Source(name, text)))


@pytest.mark.parametrize(("rule", "name", "text"), GOOD)
def test_rule_is_silent(rule, name: str, text: str) -> None:
    """A file that keeps the rule is left in peace."""
    assert list(rule(Source(name, text))) == []


def test_exceptions_are_still_needed() -> None:
    """Each place listed as one that catches anything still does, and has a reason."""
    found = {
        f"{source.name}:{name}"
        for source in all_sources()
        for name, _ in arch_habits.broad_handlers(source)
    }
    for name, reason in arch_habits.CATCHES_ANYTHING.items():
        assert reason and name in found, name
