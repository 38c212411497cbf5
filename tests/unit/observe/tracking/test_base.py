# SPDX-License-Identifier: Apache-2.0
"""What all backends share."""

import pytest

from quadriga.errors import ConfigError
from quadriga.observe.tracking import services
from quadriga.observe.tracking.base import RecordedSteps, sample_columns
from quadriga.observe.tracking.services import flatten


def test_a_missing_package_is_answered_with_how_to_get_it(monkeypatch):
    monkeypatch.setitem(services._MODULES, "wandb", "surely_not_a_module")
    with pytest.raises(ConfigError) as caught:
        services.import_package("wandb")
    assert str(caught.value) == (
        "trainer.logger=wandb: got no usable package surely_not_a_module (No module named 'surely_not_a_module'), "
        "expected an installed package. Install it with: pip install wandb; or take wandb out of trainer.logger."
    )


def test_columns_come_in_the_usual_order_then_as_found(samples):
    assert sample_columns(samples) == ["input", "output", "score", "step_in_game"]
    assert sample_columns([{"z": 1, "score": 2}, {"data_source": "x", "a": 1}]) == [
        "data_source",
        "score",
        "z",
        "a",
    ]


def test_a_nested_configuration_is_flattened_and_an_empty_part_stays_visible():
    assert dict(flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": {}})) == {
        "a.b": 1,
        "a.c.d": [2],
        "e": {},
    }


def test_an_identity_is_known_to_a_continued_run_only(make_run):
    assert make_run().load_id("wandb") is None
    make_run().save_id("wandb", "abc")
    assert make_run(resume_step=2).load_id("wandb") == "abc"
    assert make_run(is_restart=True).load_id("wandb") == "abc"
    assert make_run(resume_step=2).load_id("mlflow") is None
    assert make_run().load_id("wandb") is None


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "restarted from its beginning"])
def test_what_a_service_has_is_not_sent_again(is_killed, make_run, capsys):
    """Metrics and samples each up to where they came; steps that are not repeated always."""
    steps = RecordedSteps(make_run(), "wandb", None)
    for step in range(5):
        assert not steps.has("log", step)
        steps.add("log", step)
    steps.add("log_samples", 3)
    assert capsys.readouterr().out == ""
    facts = make_run(resume_step=2) if is_killed else make_run(is_restart=True)
    again = RecordedSteps(facts, "wandb", "abc")
    first = 3 if is_killed else 0
    assert (
        f"wandb has the run up to step 4: steps from {first} on are not recorded"
        in capsys.readouterr().out
    )
    assert [step for step in range(7) if not again.has("log", step)] == [*range(first), 5, 6]
    assert [step for step in range(7) if not again.has("log_samples", step)] == [
        *range(first),
        4,
        5,
        6,
    ]
    again.add("log", 3)
    assert RecordedSteps(facts, "wandb", "abc").has("log", 4)
    assert not RecordedSteps(facts, "wandb", None).has("log", 4)
