# SPDX-License-Identifier: Apache-2.0
"""The pages on verl: their tables match the code, and the script means the same in each of its three steps.

`python tests/unit/verl/test_page.py` writes the tables of docs/from_verl.md and docs/verl_names.md.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quadriga.config.keys import leaf_keys
from quadriga.config.loader import load_config
from quadriga.config.yaml_text import as_text
from quadriga_verl.cli import RUNS
from quadriga_verl.commands.entries import ENTRIES, find_entry
from quadriga_verl.commands.hydra import MISSING, VERSIONS, verl_defaults
from quadriga_verl.commands.shell import find_commands, find_program
from quadriga_verl.commands.translate import translate
from quadriga_verl.shim import TABLE

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "from_verl.md"
NAMES_PAGE = DOCS / "verl_names.md"
NAMES_PER_ROW = 20
BLOCK = re.compile(
    r"(<!-- (\w+): written by tests/unit/verl/test_page.py -->\n)(.*?)(?=<!-- end -->)", re.DOTALL
)
REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]*\.\w+)")
RUN_HERE = {"sft": "`quadriga sft`"} | {name: f"`quadriga {name}`" for name in RUNS}


def table(*rows: tuple[str, ...]) -> str:
    """Rows of cells, the first of which is the head, as Markdown."""
    head, *rest = (
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows
    )
    return "\n".join(("", head, f"|{'---|' * len(rows[0])}", *rest, "", ""))


def programs() -> str:
    supported: dict[str, list[str]] = defaultdict(list)
    refused: dict[str, list[str]] = defaultdict(list)
    for entry in ENTRIES:
        command = RUN_HERE[entry.task if entry.task == "sft" else entry.run]
        programs_of_row = refused[entry.refused] if entry.refused else supported[command]
        programs_of_row.append(f"`{entry.name}`")
    return table(
        ("program", "here"), *((", ".join(names), command) for command, names in supported.items())
    ) + table(
        ("unsupported program", "reason, and what to use"),
        *((", ".join(names), reason) for reason, names in refused.items()),
    )


def differing(program: str, task: str) -> Iterator[tuple[str, ...]]:
    """Our keys whose default verl has otherwise, or takes from another key."""
    entry, theirs = find_entry(program), verl_defaults(find_entry(program).tree, VERSIONS[-1])
    words = [f"{key}={json.dumps(value)}" for key, value in theirs.items() if value != MISSING]
    found = translate(entry, words, VERSIONS[-1])
    for key, leaf in leaf_keys(task).items():
        ours = list(leaf.default) if isinstance(leaf.default, tuple) else leaf.default
        value, written = found.settings.get(key, ours), theirs.get(found.sources.get(key, key))
        source = REFERENCE.match(str(written))
        if value != ours and value is not None:
            yield f"`{key}`", f"`{as_text(value)}`", f"`{as_text(ours)}`"
        elif source is not None and value is not None:
            other = (
                f"{key.rpartition('.')[0]}{source[1]}" if source[1].startswith(".") else source[1]
            )
            yield f"`{key}`", f"that of `{other}`", f"`{as_text(ours)}`"


def default_values() -> str:
    head = ("key", "verl 0.10", "`quadriga train`")
    return table(head, *differing("main_ppo", "rl")) + table(
        ("key", "`sft_trainer` of verl 0.10", "`quadriga sft`"), *differing("sft_trainer", "sft")
    )


def imports() -> str:
    names: dict[str, list[str]] = defaultdict(list)
    missing = []
    for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]:
        if line.startswith("#"):
            continue
        module, home, rest = line.split("\t")
        if home:
            names[module] += [f"`{name.partition('=')[0]}`" for name in rest.split()]
        else:
            missing.append((f"`{module}`", rest))
    rows = []
    for module, module_names in names.items():
        for start in range(0, len(module_names), NAMES_PER_ROW):
            some_names = module_names[start : start + NAMES_PER_ROW]
            rows.append((f"`{module}`", ", ".join(some_names)))
    return table(("module", "names"), *rows) + table(("missing name", "use instead"), *missing)


TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "programs": (PAGE, programs),
    "defaults": (NAMES_PAGE, default_values),
    "imports": (NAMES_PAGE, imports),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_that_of_the_code(name: str) -> None:
    page, make_table = TABLES[name]
    written = {name: text for _, name, text in BLOCK.findall(page.read_text(encoding="utf-8"))}
    assert written[name] == make_table(), "run python tests/unit/verl/test_page.py"


def test_the_script_means_the_same_in_our_words(tmp_path: Path) -> None:
    """The short YAML is the configuration that the line becomes, but for what the page says of it."""
    page = PAGE.read_text(encoding="utf-8")
    script, yaml = (
        re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("bash", "yaml")
    )
    (line,) = (
        found
        for text in script
        for one in find_commands(text, {"HOME": "~"})
        if (found := find_program(one.words))
    )
    found = translate(find_entry(line[0]), line[1], "0.6.1")
    verls = found.config
    assert verls is not None
    assert f"Not on this machine:\n  {found.machine[0]}\n" in page
    (tmp_path / "short.yaml").write_text(yaml[-1], encoding="utf-8")
    ours = load_config(files=[tmp_path / "short.yaml"]).config
    left, right = (dict(leaves(one.model_dump())) for one in (verls, ours))
    other = {key for key, value in left.items() if value != right[key]}
    assert other == {
        "actor_rollout_ref.actor.optim.zero_indexed_step",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.rollout.max_num_seqs",
        "critic.model.path",
        "critic.optim.zero_indexed_step",
        "trainer.default_local_dir",
    }


def leaves(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


if __name__ == "__main__":
    for page in (PAGE, NAMES_PAGE):
        text = page.read_text(encoding="utf-8")
        text = BLOCK.sub(lambda match: match[1] + TABLES[match[2]][1](), text)
        page.write_text(text, encoding="utf-8")
