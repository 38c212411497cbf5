# SPDX-License-Identifier: Apache-2.0
"""verl's command lines: Hydra's words, verl's defaults, and what becomes of each key."""

import json
from pathlib import Path

import pytest

from quadriga.config.keys import leaf_of
from quadriga.verl.entries import find_entry
from quadriga.verl.hydra import MISSING, VERSIONS, defaults, parse_word
from quadriga.verl.translate import Translation, translate

PUBLISHED = [
    tuple(line.split("\t"))
    for line in Path(__file__).with_name("published_keys.tsv").read_text().splitlines()
    if not line.startswith("#")
]
VLLM = "actor_rollout_ref.rollout.name=vllm"


def translated(*words: str, program: str = "main_ppo", version: str = VERSIONS[-1]) -> Translation:
    return translate(find_entry(program), [*words], version)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-6", 1e-6),
        ("-1", -1),
        (".5", 0.5),
        ("True", True),
        ("NULL", None),
        ("yes", "yes"),
        ("", ""),
        ("'3'", "3"),
        ("[console,wandb]", ["console", "wandb"]),
        ("[\"a b\", 'c', 1.0, []]", ["a b", "c", 1.0, []]),
        ("{a:1, b: {c:[x,y]}}", {"a": 1, "b": {"c": ["x", "y"]}}),
        ("/data/a=b.parquet", "/data/a=b.parquet"),
        ("a\\,b", "a,b"),
    ],
)
def test_values_are_read_by_hydras_rules(text: str, value: object) -> None:
    read = parse_word(f"++a.b={text}").value
    assert read == value
    assert type(read) is type(value)


def test_verls_defaults_hold_where_nothing_is_said() -> None:
    config = translated(VLLM, "trainer.n_gpus_per_node=1").config
    assert config is not None
    assert (config.algorithm.adv_estimator, config.trainer.total_epochs) == ("gae", 30)
    assert config.actor_rollout_ref.model.enable_gradient_checkpointing
    assert config.actor_rollout_ref.rollout.mode == "async"
    assert config.trainer.backend == "local"


def test_several_processes_mean_ray() -> None:
    config = translated(VLLM).config
    assert config is not None
    assert (config.trainer.n_gpus_per_node, config.trainer.backend) == (8, "ray")


@pytest.mark.parametrize("version", VERSIONS)
def test_each_default_is_taken_without_a_notice(version: str) -> None:
    words = [
        f"{key}={json.dumps(value)}"
        for key, value in defaults("ppo", version).items()
        if value != MISSING and "${" not in str(value)
    ]
    found = translated(VLLM, *words, version=version)
    assert not found.refused
    assert not found.notices


@pytest.mark.parametrize(("key", "value"), PUBLISHED, ids=[key for key, _ in PUBLISHED])
def test_a_published_key_is_known(key: str, value: str) -> None:
    found = translated(f"{key}={value}")
    assert leaf_of(key) is not None or not any("neither verl" in str(one) for one in found.refused)
