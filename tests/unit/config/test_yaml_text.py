# SPDX-License-Identifier: Apache-2.0
"""YAML: numbers and words as people mean them; errors with file and line."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.config.yaml_text import parse_yaml, read_yaml, to_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("2E5", 2e5), ("1.", 1.0), (".5", 0.5), ("-3.5e+2", -350.0), ("1_000", 1000), ("010", 10),
        ("0x1F", 31), ("+3", 3), ("null", None), ("~", None), ("", None), ("true", True), ("False", False),
        ("yes", "yes"), ("off", "off"), ("12:30", "12:30"), ("2026-01-31", "2026-01-31"), ("1.2.3", "1.2.3"),
        ("e5", "e5"), ("1e", "1e"), ("-", [None]), ("[a, 1e-3]", ["a", 1e-3]),
    ],
)  # fmt: skip
def test_scalars(text: str, value: Any) -> None:
    found = parse_yaml(text)
    assert found == value
    assert type(found) is type(value)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(value=_VALUES)
@settings(deadline=None, max_examples=60)
def test_what_is_written_is_read_back_with_its_type(value: Any) -> None:
    def typed(one: Any) -> Any:
        if isinstance(one, list):
            return [typed(inner) for inner in one]
        if isinstance(one, dict):
            return {name: typed(inner) for name, inner in one.items()}
        return type(one), one

    assert typed(parse_yaml(to_yaml(value))) == typed(value)


@given(
    text=st.sampled_from(["yes", "on", "12:30", "2026-01-31", "1e-6", "0o7", "null", "010", "1_0"])
)
@settings(deadline=None, max_examples=9)
def test_text_that_another_reader_would_mistake_is_quoted(text: str) -> None:
    assert yaml.safe_load(to_yaml({"name": text})) == {"name": text}


def read(tmp_path: Path, text: str) -> tuple[Any, Any, list[str]]:
    file, problems = tmp_path / "run.yaml", []
    file.write_text(text)
    tree, places = read_yaml(file, problems)
    return tree, places, [str(one).replace(str(tmp_path), "") for one in problems]


def test_places(tmp_path: Path) -> None:
    tree, places, problems = read(tmp_path, "data:\n  seed: 1\n\n  sampler:\n    class_name: X\n")
    assert tree == {"data": {"seed": 1, "sampler": {"class_name": "X"}}}
    assert places["data.sampler.class_name"] == f"{tmp_path}/run.yaml, line 5"
    assert problems == []


def test_anchors_and_merges_work(tmp_path: Path) -> None:
    tree, _, problems = read(tmp_path, "a: &x {b: 1, c: 2}\nd:\n  <<: *x\n  b: 3\n")
    assert tree["d"] == {"b": 3, "c": 2}
    assert problems == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data:\n  seed: 1\n  seed: 2\n", "data.seed (/run.yaml): got it twice, in lines 2 and 3"),
        ("data:\n  seed: [1\ntrainer: 2\n", "/run.yaml, line"),
        ("data:\n\tseed: 1\n", "/run.yaml, line 2"),
        ("- 1\n- 2\n", "/run.yaml: got [1, 2], expected sections"),
        ("a: 1\n---\nb: 2\n", "/run.yaml, line 2"),
        ("a: !!python/object:os.system x\n", "/run.yaml, line 1"),
    ],
)
def test_broken_files_say_where(tmp_path: Path, text: str, said: str) -> None:
    _, _, problems = read(tmp_path, text)
    assert len(problems) == 1
    assert said in problems[0]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    problems: list[Any] = []
    read_yaml(tmp_path / "none.yaml", problems)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    read_yaml(tmp_path / "binary.yaml", problems)
    assert [one.where for one in problems] == [
        str(tmp_path / "none.yaml"),
        str(tmp_path / "binary.yaml"),
    ]


def test_an_empty_file_is_an_empty_tree(tmp_path: Path) -> None:
    assert read(tmp_path, "# nothing yet\n") == ({}, {}, [])
