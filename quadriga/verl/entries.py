# SPDX-License-Identifier: Apache-2.0
"""verl's programs, a row each: whose defaults they start from, by which rules, and what runs here in their place."""

from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from quadriga.errors import ConfigError


@dataclass(frozen=True)
class Entry:
    """One program of verl's, or several that read the same keys."""

    name: str
    """What `quadriga verl NAME` calls it; defaults that it has beyond `tree` stand under this name in defaults.tsv."""
    modules: tuple[str, ...]
    """Patterns of the dotted module that `python -m` names, without `verl.`; a script's path is read like one."""
    tree: str
    """Its tree in defaults.tsv."""
    rules: str = "ppo"
    """Its rows in rules.tsv; of several names a row needs one, and the first has the functions of the whole line."""
    task: str = "rl"
    """The task whose keys are ours."""
    run: str = "train"
    """What runs in its place: a name in the table of the command line. Of a training the checks are made."""
    refused: str = ""
    """Of a program that cannot be taken: why, and what to use, in one sentence."""


_TABLE = Path(__file__).with_name("programs.tsv").read_text(encoding="utf-8").splitlines()
OTHERS = tuple(tuple(line.split("\t")) for line in _TABLE if not line.startswith("#"))
"""Programs with another algorithm or another way for data: name, pattern of modules, why they are not taken."""

ENTRIES: tuple[Entry, ...] = (
    Entry("main_dapo", ("*dapo.main_dapo",), "ppo"),
    Entry("main_entropy", ("*entropy.main_entropy",), "ppo"),
    Entry("main_ppo", ("trainer.main_ppo", "trainer.main_ppo_*"), "ppo"),
    Entry("sft_trainer", ("trainer.sft_trainer", "trainer.sft_trainer_ray"), "sft_trainer_engine", "sft,ppo", "sft"),
    Entry("fsdp_sft_trainer", ("trainer.fsdp_sft_trainer",), "fsdp_sft_trainer", "fsdp_sft,ppo", "sft"),
    Entry("main_generation", ("*.main_generation",), "generation", "generation,ppo", run="generate"),
    Entry("main_generation_server", ("*.main_generation_server",), "ppo", "generation_server,ppo", run="generate"),
    Entry("main_eval", ("*.main_eval",), "evaluation", "evaluation,ppo", run="eval"),
    Entry("model_merger", ("*model_merger", "model_merger.__main__", "*.model_merger.*"), "", run="export"),
    *(Entry(name, (pattern,), "ppo", refused=sentence) for name, pattern, sentence in OTHERS),
)
"""The first row with a name, or a pattern, that fits holds."""

CONFIG_FILES = {
    "ppo_trainer": "ppo", "ppo_megatron_trainer": "ppo_megatron", "dapo_trainer": "ppo", "dapo_megatron_trainer":
    "ppo_megatron", "entropy_trainer": "ppo",
    "sft_trainer_engine": "sft_trainer_engine", "sft_trainer": "fsdp_sft_trainer", "generation": "generation",
    "evaluation": "evaluation",
}  # fmt: skip
"""Name of a configuration file of verl's -> its tree in defaults.tsv."""

TREES = frozenset(CONFIG_FILES.values())


def find_entry(program: str) -> Entry:
    """The row of a program, as its name, its module or its script's path; ConfigError: there is none."""
    module = program.removesuffix(".py").replace("/", ".").lstrip(".").removeprefix("verl.")
    for entry in ENTRIES:
        if module == entry.name or any(fnmatchcase(module, pattern) for pattern in entry.modules):
            return entry
    names = [entry.name for entry in ENTRIES]
    near = get_close_matches(module.rsplit(".", 1)[-1], names, n=1)
    fix = f"Did you mean {near[0]}?" if near else f"There are {', '.join(names)}."
    raise ConfigError("verl's program", got=f"'{program}'", expected="one that has an entry here", fix=fix)
