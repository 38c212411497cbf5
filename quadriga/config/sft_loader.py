# SPDX-License-Identifier: Apache-2.0
"""From files and a command line to an `SFTConfig`, and the checks between its keys, in the words of its tree."""

from collections.abc import Sequence
from pathlib import Path

from quadriga.config.check_layout import check_layouts
from quadriga.config.check_lora import check_lora
from quadriga.config.check_paths import check_paths
from quadriga.config.findings import Findings
from quadriga.config.loader import Loaded, Tree, load_tree
from quadriga.config.sft import SFTConfig, in_sft_words
from quadriga.errors import ConfigError


def load_sft_config(
    overrides: Sequence[str] = (), files: Sequence[str | Path] = (), *, for_training: bool = False
) -> Loaded[SFTConfig]:
    """Reads the tree of `quadriga sft`, as `load_config` does that of `quadriga train`."""
    return load_tree(SFT, overrides, files, for_training=for_training)


def sft_findings(config: SFTConfig) -> tuple[list[ConfigError], list[str]]:
    """What is wrong with a run (files, layout, adapter, keys that need each other), and what its user should know."""
    theirs, found = Findings(), Findings()
    run = config.as_run()
    for check in (check_paths, check_layouts, check_lora):
        check(run, theirs)
    for problem in theirs.problems:
        words = {name: in_sft_words(getattr(problem, name)) for name in ("got", "expected", "fix")}
        found.problems.append(ConfigError(in_sft_words(problem.where), **words))
    found.notices += map(in_sft_words, theirs.notices)
    if config.model.has_adapter and config.model.lora_merge is not None:
        fix = "Leave the key out; `quadriga export` merges an adapter."
        found.refuse("model.lora_merge", got=f"{config.model.lora_merge}", expected="null: nothing generates", fix=fix)
    if config.objective == "reward_model":
        _check_reward_model(config, found)
    return found.problems, found.notices


def _check_reward_model(config: SFTConfig, found: Findings) -> None:
    if config.data.truncation == "right":
        fix = (
            "Set data.truncation=left, which takes from the prompt, or leave long pairs out with data.filter_overlong."
        )
        found.refuse("data.truncation", got="'right', for pairs", expected="error or left", fix=fix)
    if config.model.has_adapter:
        fix = "Leave lora_rank and lora_adapter_path out: a reward model is trained as a whole."
        found.refuse("model.lora_rank", got="an adapter", expected="none, for objective=reward_model", fix=fix)
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        if (size := getattr(config.engine, name)) > 1:
            fix = "Share weights with engine.fsdp_config.fsdp_size."
            found.refuse(f"engine.{name}", got=f"{size}, for objective=reward_model", expected="1", fix=fix)


SFT = Tree(SFTConfig, sft_findings, "quadriga sft --keys")
