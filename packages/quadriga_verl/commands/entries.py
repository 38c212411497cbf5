# SPDX-License-Identifier: Apache-2.0
"""verl's programs: their names and defaults, and what runs in place of each."""

from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from quadriga.errors import ConfigError
from quadriga_verl.commands.tables import read_rows

MEGATRON_ENGINES = frozenset({"megatron"})
OWN_ENGINES = frozenset({"fsdp", "fsdp2"}) | MEGATRON_ENGINES
"""verl's training engines that exist here under the same names."""


@dataclass(frozen=True)
class Entry:
    """A row of programs.tsv: a program of verl, or several that read the same keys.

    Attributes:
        name: the program's name for `quadriga verl NAME`. defaults.tsv may have rows for this name
            beside those for `tree`.
        modules: patterns of the program's module for `python -m`, without `verl.`.
        tree: name of the program's defaults in defaults.tsv.
        rule_names: the rows of rules.tsv for any of these names apply to the program. The first
            name also selects its functions in `meaning.FINISH`.
        task: the task whose keys the translation has: "rl" or "sft".
        run: what runs in its place, a key of `cli.RUNS`. For "train", a translation also makes the
            checks of a training run.
        refused: for a program that cannot be run, the reason and the alternative; else "".
        notice: for a program that another one replaces, the difference; else "".
    """

    name: str
    modules: tuple[str, ...]
    tree: str
    rule_names: tuple[str, ...]
    task: str
    run: str
    refused: str
    notice: str = ""


# programs.tsv separates modules by spaces, and names of rules by commas.
ENTRIES = tuple(
    Entry(name, tuple(modules.split()), tree, tuple(rule_names.split(",")), *other_cells)
    for name, modules, tree, rule_names, *other_cells in read_rows("programs.tsv")
)
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
"""Name of the tree of defaults in defaults.tsv, by name of verl's configuration file."""

TREES = frozenset(CONFIG_FILES.values())
"""Names of all trees of defaults."""


def find_entry(program: str) -> Entry:
    """Find a program of verl.

    Args:
        program: its name, its module or the path of its script.

    Raises:
        ConfigError: there is no such program.
    """
    # `./verl/trainer/main_ppo.py` and `verl.trainer.main_ppo` both become `trainer.main_ppo`.
    module = program.removesuffix(".py").replace("/", ".").lstrip(".").removeprefix("verl.")
    for entry in ENTRIES:
        if any(fnmatchcase(module, pattern) for pattern in (entry.name, *entry.modules)):
            return entry
    names = [entry.name for entry in ENTRIES]
    fix = f"There are {', '.join(names)}."
    for close_name in get_close_matches(module.rpartition(".")[2], names, n=1):
        fix = f"Did you mean {close_name}?"
    raise ConfigError(
        "verl's program", got=f"'{program}'", expected="a known program of verl", fix=fix
    )
