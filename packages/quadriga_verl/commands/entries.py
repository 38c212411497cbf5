# SPDX-License-Identifier: Apache-2.0
"""verl's programs: their names and defaults, and what runs in place of each."""

from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from quadriga.errors import ConfigError

MEGATRON_ENGINES = frozenset({"megatron"})
OWN_ENGINES = frozenset({"fsdp", "fsdp2"}) | MEGATRON_ENGINES
"""verl's training engines that exist here under the same names."""


@dataclass(frozen=True)
class Entry:
    """A row of programs.tsv: a program of verl, or several that read the same keys.

    Attributes:
        name: its name for `quadriga verl NAME`. defaults.tsv may have further defaults under it.
        modules: patterns of its module for `python -m`, without `verl.`. The path of a script is
            converted to a module before it is compared.
        tree: name of its defaults in defaults.tsv.
        rules: names by which it has rows in rules.tsv, with commas between them. The first name
            also selects its functions in `meaning.FINISH`.
        task: the task whose keys the translation has: "rl" or "sft".
        run: what runs in its place, a key of `cli.RUNS`. A training run is also checked.
        refused: for a program that cannot be run, the reason and the alternative; else "".
        notice: for a program that another one replaces, the difference; else "".
    """

    name: str
    modules: tuple[str, ...]
    tree: str
    rules: str
    task: str
    run: str
    refused: str
    notice: str = ""


def _read_entries() -> tuple[Entry, ...]:
    """Read programs.tsv."""
    lines = Path(__file__).with_name("programs.tsv").read_text(encoding="utf-8").splitlines()
    entries = []
    for line in lines:
        if not line.startswith("#"):
            name, modules, *columns = line.split("\t")
            entries.append(Entry(name, tuple(modules.split()), *columns))
    return tuple(entries)


ENTRIES = _read_entries()
"""The programs. If several match a name, the first one is used."""

CONFIG_FILES = {
    "ppo_trainer": "ppo",
    "ppo_megatron_trainer": "ppo_megatron",
    "dapo_trainer": "ppo",
    "dapo_megatron_trainer": "ppo_megatron",
    "entropy_trainer": "ppo",
    "fully_async_ppo_trainer": "ppo",
    "fully_async_dapo_trainer": "ppo",
    "one_step_off_ppo_trainer": "ppo",
    "transfer_queue_ppo_trainer": "ppo",
    "dapo_transfer_queue_trainer": "ppo",
    "transfer_queue_ppo_megatron_trainer": "ppo_megatron",
    "fully_async_ppo_megatron_trainer": "ppo_megatron",
    "one_step_off_ppo_megatron_trainer": "ppo_megatron",
    "sft_trainer_engine": "sft_trainer_engine",
    "sft_trainer": "fsdp_sft_trainer",
    "generation": "generation",
    "evaluation": "evaluation",
}
"""Trees in defaults.tsv, by name of verl's configuration file."""

TREES = frozenset(CONFIG_FILES.values())


def find_entry(program: str) -> Entry:
    """Find a program of verl.

    Args:
        program: its name, its module or the path of its script.

    Raises:
        ConfigError: there is no such program.
    """
    module = program.removesuffix(".py").replace("/", ".").lstrip(".").removeprefix("verl.")
    for entry in ENTRIES:
        if module == entry.name or any(fnmatchcase(module, pattern) for pattern in entry.modules):
            return entry
    names = [entry.name for entry in ENTRIES]
    close_names = get_close_matches(module.rpartition(".")[2], names, n=1)
    fix = f"There are {', '.join(names)}."
    if close_names:
        fix = f"Did you mean {close_names[0]}?"
    expected = "one that has an entry here"
    raise ConfigError("verl's program", got=f"'{program}'", expected=expected, fix=fix)
