# SPDX-License-Identifier: Apache-2.0
"""scripts/surface.py: what a comparison of two snapshots refuses, and what it only lists."""

import copy

import pytest

from surface import Snapshot, compare, report

OLD: Snapshot = {
    "modules": {"quadriga.old": ""},
    "names": {"quadriga.old.load": "function", "quadriga.old.load(path)": "number 0, required"},
    "keys": {"rl trainer.seed": "default 1"},
    "metrics": {"train: actor/lr": ""},
    "metric_literals": {"actor/lr": "", "recovery/restarts": ""},
    "wheel": {"quadriga/old.py": "", "quadriga/table.tsv": ""},
    "help": {"quadriga train": "Train."},
}

REMOVED = [
    ("names", "quadriga.old.load"),
    ("keys", "rl trainer.seed"),
    ("metrics", "train: actor/lr"),
    ("metric_literals", "recovery/restarts"),
    ("wheel", "quadriga/table.tsv"),
]
CHANGED = [
    ("keys", "rl trainer.seed", "default 2"),
    ("names", "quadriga.old.load(path)", "keyword, required"),
    ("names", "quadriga.old.load(mode)", "number 1, required"),
]
ADDED = [
    ("names", "quadriga.old.load(mode)", "number 1, default 'r'"),
    ("names", "quadriga.old.save(path)", "number 0, required"),
]


@pytest.mark.parametrize(("section", "path"), REMOVED)
def test_a_removal_is_refused(section: str, path: str) -> None:
    new = copy.deepcopy(OLD)
    del new[section][path]
    lines = compare(OLD, new)
    assert lines == {"removed": [f"{section}: {path}"], "changed": [], "added": [], "noted": []}
    assert report(lines, []) == 1


@pytest.mark.parametrize(("section", "path", "text"), CHANGED)
def test_a_change_is_refused(section: str, path: str, text: str) -> None:
    """Also a new parameter without default of a function that has callers."""
    new = copy.deepcopy(OLD)
    new[section][path] = text
    lines = compare(OLD, new)
    assert len(lines["changed"]) == 1
    assert not lines["removed"] and not lines["added"]
    assert report(lines, []) == 1
    assert report(lines, [f"changed: {section}: {path}*"]) == 0


@pytest.mark.parametrize(("section", "path", "text"), ADDED)
def test_an_addition_is_listed(section: str, path: str, text: str) -> None:
    new = copy.deepcopy(OLD)
    new[section][path] = text
    lines = compare(OLD, new)
    assert lines["added"] == [f"{section}: {path}: {text!r}"]
    assert report(lines, []) == 0


def test_what_moved_and_what_is_worded_anew_is_a_note() -> None:
    """A module that an alias keeps, data in another folder, a literal that a run still writes, a help text."""
    new = copy.deepcopy(OLD)
    new["wheel"] = {"quadriga/new/old.py": "", "quadriga/new/table.tsv": ""}
    new["metric_literals"] = {"recovery/restarts": ""}
    new["help"] = {"quadriga train": "Train a policy."}
    lines = compare(OLD, new)
    assert len(lines["noted"]) == 4
    assert report(lines, []) == 0
