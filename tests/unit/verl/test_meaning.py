# SPDX-License-Identifier: Apache-2.0
"""Published scripts of different kinds mean here what verl's own configuration resolves to.

The table (meaning.tsv) was made by reading the lines (scripts.jsonl) and the defaults of their versions, not by our
translation. It does not prove that the trainer does with a value what verl's does: tests/numerics do.
"""

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from quadriga.config import load_config, show
from quadriga.config.root import spell_key
from quadriga.config.yaml_text import to_yaml
from quadriga_verl.cli import version_of
from quadriga_verl.commands.entries import find_entry
from quadriga_verl.commands.hydra import Tree
from quadriga_verl.commands.translate import translate
from quadriga_verl.config_translate import changed_keys

HERE = Path(__file__).parent
SCRIPTS = {
    one["name"]: one for one in map(json.loads, (HERE / "scripts.jsonl").read_text().splitlines())
}


def read_table() -> dict[str, dict[str, Any]]:
    """What each script resolves to, by its name."""
    table: dict[str, dict[str, Any]] = {name: {} for name in SCRIPTS}
    names: list[str] = []
    for line in (HERE / "meaning.tsv").read_text().splitlines():
        key, *cells = line.split("\t")
        if key == "# key":
            names = cells[1:]
        elif cells:
            for name, cell in zip(names, cells[1:], strict=True):
                if (value := cell or cells[0]) != "-":
                    table[name][key] = json.loads(value)
    return table


TABLE = read_table()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_means_what_it_means_to_verl(name: str) -> None:
    script = SCRIPTS[name]
    entry = find_entry(script["entry"])
    found = translate(entry, script["args"], version_of(script["set"]))
    assert found.config is not None, found.refused
    config = found.config
    ours = {
        key: attrgetter(spell_key(key, entry.task, in_full=True))(config) for key in TABLE[name]
    }
    assert {
        key: list(one) if isinstance(one, tuple) else one for key, one in ours.items()
    } == TABLE[name]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_short_yaml_of_a_script_has_its_configuration(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    line = translate(find_entry(script["entry"]), script["args"], version_of(script["set"]))
    assert line.config is not None
    changed = changed_keys(line)
    assert len(changed) < len(line.settings)
    file = tmp_path / "short.yaml"
    file.write_text(to_yaml(Tree(changed).to_nested()), encoding="utf-8")
    assert show(load_config(files=[file], task=line.entry.task).config) == show(line.config)
