# SPDX-License-Identifier: Apache-2.0
"""One override: which key, which value."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.config.loader import interpolation_problem, parse_override
from quadriga.errors import ConfigError


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("data.seed=3", "data.seed", 3),
        ("+data.seed=3", "data.seed", 3),
        ("++data.seed=3", "data.seed", 3),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "actor_rollout_ref.actor.optim.lr", 1e-6),
        ("data.shuffle=True", "data.shuffle", True),
        ("data.val_batch_size=null", "data.val_batch_size", None),
        ("actor_rollout_ref.rollout.stop_token_ids=[1,2]", "actor_rollout_ref.rollout.stop_token_ids", [1, 2]),
        ('trainer.logger=["console","wandb"]', "trainer.logger", ["console", "wandb"]),
        ("trainer.logger=[console,wandb]", "trainer.logger", ["console", "wandb"]),
        ("trainer.logger=console", "trainer.logger", "console"),
        # Text stays as it stands, whatever YAML would make of it.
        ("trainer.experiment_name=007", "trainer.experiment_name", "007"),
        ("trainer.experiment_name=1e-6", "trainer.experiment_name", "1e-6"),
        ("trainer.experiment_name=a: b #1", "trainer.experiment_name", "a: b #1"),
        ("trainer.experiment_name='quoted'", "trainer.experiment_name", "quoted"),
        ("data.train_files=*/a=b.parquet", "data.train_files", "*/a=b.parquet"),
        ("data.train_files=['a.parquet', 'b.parquet']", "data.train_files", ["a.parquet", "b.parquet"]),
        ("data.tokenizer=null", "data.tokenizer", None),
        ("data.tokenizer=", "data.tokenizer", ""),
        ("actor_rollout_ref.model.custom_chat_template={% for m in messages %}{{ m }}{% endfor %}",
         "actor_rollout_ref.model.custom_chat_template", "{% for m in messages %}{{ m }}{% endfor %}"),
        ("data.apply_chat_template_kwargs={a: 1}", "data.apply_chat_template_kwargs", {"a": 1}),
    ],
)  # fmt: skip
def test_reads(argument: str, key: str, value: Any) -> None:
    found = parse_override(argument)
    assert found == (key, value)
    assert type(found[1]) is type(value)


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("data.seed", "equals sign"),
        ("~data.seed", "cannot be removed"),
        ("--data.seed=3", "without dashes"),
        ("run.yaml", "--config run.yaml"),
        ("=3", "equals sign"),
        ("data seed=3", "equals sign"),
        ("data.apply_chat_template_kwargs={a:1}", "space after the colon"),
        ("actor_rollout_ref.rollout.stop_token_ids=[1,", "quotes"),
    ],
)
def test_says_how_to_write_it(argument: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_override(argument)
    assert hint in caught.value.fix


def test_another_task_says_what_its_keys_take() -> None:
    assert parse_override("engine.loss_agg_mode=007") == ("engine.loss_agg_mode", 7)
    assert parse_override("engine.loss_agg_mode=007", "sft") == ("engine.loss_agg_mode", "007")


@given(number=st.floats(allow_nan=False, allow_infinity=False))
@settings(deadline=None, max_examples=50)
def test_every_way_python_prints_a_number_is_a_number(number: float) -> None:
    assert parse_override(f"actor_rollout_ref.actor.entropy_coeff={number!r}")[1] == number


@given(number=st.integers(-(10**12), 10**12))
@settings(deadline=None, max_examples=30)
def test_whole_numbers_stay_whole(number: int) -> None:
    value = parse_override(f"data.seed={number}")[1]
    assert (value, type(value)) == (number, int)


def test_references_are_found_wherever_they_hide() -> None:
    assert interpolation_problem("a", {"b": ["x", "${c.d}"]}).where == "a.b"
    assert interpolation_problem("a", {"b": ["$x", "{c}", "$ {c}"]}) is None
