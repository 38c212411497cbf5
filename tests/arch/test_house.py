# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: its size only falls, no function costs a name for nothing, and the words are the field's."""

import pytest

import arch_house
from arch_tree import REPOSITORY, Source, package_sources, tracked_files

PAGES = [name for name in tracked_files() if name.endswith(".md")]
SHORT = "def used():\n    return 1\n\ndef other():\n    return used() + used\n\nother(other)\n"


def test_sizes_only_fall() -> None:
    """No package has more tokens than its row in the table."""
    complaints = list(arch_house.grown_package(package_sources()))
    assert not complaints, "\n".join(complaints)


def test_no_new_function_for_three_lines() -> None:
    """No function of at most three lines has a single caller, but those listed with a reason and a few older ones."""
    found = dict(arch_house.short_functions_used_once(package_sources()))
    listed = arch_house.SHORT_AND_WORTH_IT
    assert all(listed.values()) and set(listed) <= set(found), "a function that is listed is gone"
    others = [complaint for name, complaint in found.items() if name not in listed]
    assert len(others) <= arch_house.MAX_SHORT_USED_ONCE, "\n".join(others)


def test_docstrings_say_something() -> None:
    """No docstring only points elsewhere."""
    complaints = [
        complaint for source in package_sources() for complaint in arch_house.see_docstring(source)
    ]
    assert not complaints, "\n".join(complaints)


def test_words_are_the_fields() -> None:
    """Docstrings, messages and pages use the field's words."""
    complaints = [
        complaint
        for source in package_sources()
        for complaint in arch_house.private_words(source.name, arch_house.prose_of(source))
    ]
    for name in PAGES:
        lines = enumerate((REPOSITORY / name).read_text(encoding="utf-8").splitlines(), start=1)
        complaints += arch_house.private_words(name, lines)
    assert not complaints, "\n".join(complaints)


def test_names_are_the_fields() -> None:
    """Files, classes and functions are called by the field's words."""
    complaints = [
        complaint for source in package_sources() for complaint in arch_house.private_names(source)
    ]
    assert not complaints, "\n".join(complaints)


def test_a_grown_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The complaint has both sizes."""
    source = Source("quadriga/data/x.py", "a = 1\nb = 2\n")
    monkeypatch.setitem(arch_house.SIZES, "data", 6)
    assert list(arch_house.grown_package([source])) == []
    monkeypatch.setitem(arch_house.SIZES, "data", 5)
    (complaint,) = arch_house.grown_package([source])
    assert "quadriga/data: got 6 tokens, expected at most 5" in complaint


def test_a_short_function_is_found() -> None:
    """With one use it is found; with two, or with a decorator, it is not."""
    once = SHORT.replace(" + used", "")
    assert [
        name for name, _ in arch_house.short_functions_used_once([Source("quadriga/x.py", once)])
    ] == ["quadriga/x.py:used"]
    assert list(arch_house.short_functions_used_once([Source("quadriga/x.py", SHORT)])) == []
    decorated = "@register\n" + once
    in_table = once.replace("return used()", "return 1") + "TABLE = {'used': used}\n"
    assert list(arch_house.short_functions_used_once([Source("quadriga/x.py", in_table)])) == []
    assert list(arch_house.short_functions_used_once([Source("quadriga/x.py", decorated)])) == []


def test_private_words_are_found() -> None:
    """In a docstring and in a message, but not in a name in backticks or in code; names by their parts."""
    text = '"""It deals with stop texts."""\nstop_text = "a"\nraise E(f"no whole weights of {x}")\n'
    source = Source("quadriga/x.py", text)
    complaints = list(arch_house.private_words(source.name, arch_house.prose_of(source)))
    assert (
        len(complaints) == 2 and "stop strings" in complaints[0] and "replicated" in complaints[1]
    )
    assert list(
        arch_house.private_names(Source("quadriga/x.py", "class WorkerCrew: ...\ndef fine(): ..."))
    )
    assert not list(arch_house.private_names(Source("quadriga/x.py", "class WorkerProcesses: ...")))
