# SPDX-License-Identifier: Apache-2.0
"""Rows of a program as the file that a run reads."""

import json
import math
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import quadriga
from quadriga.api import Evaluation, TrainerSettings, _draft_without_training, _frozen_defaults
from quadriga.config import load_config
from quadriga.config_draft import ConfigDraft, name_sources
from quadriga.errors import ConfigError, DataError
from quadriga.rewards.by_name import reward_of
from quadriga.user_function import NAME, write_function

NAN = float("nan")
ROW = {"prompt": "1+1=", "ground_truth": "2"}


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """The rows of the file that is written of rows; it holds JSON alone."""

    def write(rows: Any, reward: Any = None) -> list[dict[str, Any]]:
        draft = ConfigDraft(None, options={"trainer.default_local_dir": str(tmp_path)})
        draft.set_reward(reward)
        draft.set_rows("data.train_files", rows)
        lines = Path(draft.values["data.train_files"]).read_text().splitlines()
        return [json.loads(line, parse_constant=pytest.fail) for line in lines]

    return write


def test_numbers_that_json_cannot_hold_are_written_as_text(written: Callable) -> None:
    facts = {
        "list": [NAN, 1.5],
        "array": np.array([math.inf, 2.0]),
        "number": np.float64(-math.inf),
    }
    (row,) = written([ROW | {"extra_info": facts}])
    assert row["extra_info"] == {
        "list": ["NaN", 1.5],
        "array": ["Infinity", 2.0],
        "number": "-Infinity",
    }


def test_what_a_table_lacks_stays_missing(written: Callable) -> None:
    rows = written(pd.DataFrame([ROW, {"prompt": NAN, "ground_truth": NAN}]))
    assert rows[0]["reward_model"]["ground_truth"] == "2"
    assert rows[1]["prompt"] is None
    assert "ground_truth" not in rows[1]["reward_model"]


def test_chats_lose_the_nulls_that_arrow_adds(written: Callable, tmp_path: Path) -> None:
    arguments = [{"x": 1}, {"y": "q"}]
    rows = [
        ROW | {"prompt": [{"role": "user", "content": "", "tool_calls": [one]}]}
        for one in arguments
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")

    def reward(prompt: Any) -> float:  # names a column: the rows are written anew
        return 0.0

    sources = (
        import_module("datasets").Dataset.from_list(rows),
        pd.read_parquet(tmp_path / "t.parquet"),
        tmp_path / "t.parquet",
    )
    for source in sources:
        assert [row["prompt"] for row in written(source, reward)] == [row["prompt"] for row in rows]


def reward(prompts: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(prompts)


def test_errors_about_rows_name_what_the_caller_gave(tmp_path: Path) -> None:
    """Its file or argument and its columns, not the file that is written for the run."""
    options = {"trainer.default_local_dir": str(tmp_path)}
    rows = [{"question": "1+1=", "answer": "2"}]
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps(rows[0]))
    words = r": got the columns question, answer, expected a column 'prompt'.*data\.prompt_key"
    for source, label in ((rows, "data"), (file, str(file))):
        draft = ConfigDraft(None, options=options)
        draft.set_reward(reward)
        with pytest.raises(DataError, match=re.escape(label) + words):
            draft.set_rows("data.train_files", source)
    options["data.prompt_key"] = "question"
    draft = ConfigDraft(None, options=options)
    draft.set_reward(reward)
    draft.set_rows("data.train_files", rows)
    (written,) = draft.sources
    assert json.loads(Path(written).read_text())["extra_info"]["row"]["prompt"] == "1+1="
    error = name_sources(DataError(f"{written} row 0", got="a list"), draft.sources)
    assert str(error) == "data row 0: got a list."


@pytest.mark.parametrize(
    ("options", "num_responses"),
    [({}, 8), ({"algorithm.adv_estimator": "gae"}, 1), ({"actor_rollout_ref.rollout.n": 2}, 2)],
)
def test_groups_have_eight_responses_unless_a_number_is_given(
    options: dict[str, Any], num_responses: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = ConfigDraft("model", options=options | {"trainer.default_local_dir": str(tmp_path)})
    draft.set_rows("data.train_files", [ROW] * 1000)
    draft.set_defaults(num_rows=1000)
    output = capsys.readouterr().out
    # The batch size depends on the number of responses.
    assert f"{num_responses} responses each" in output
    assert draft.values.get("actor_rollout_ref.rollout.n", 1) == num_responses
    assert ("rollout.n: 8 responses" in output) == (num_responses == 8)


class SomeModel:
    def save_pretrained(self, folder: str) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("model", "words"),
    [(SomeModel(), r"SomeModel, expected .* quadriga\.Run\. .*tokenizer"), ({}, "the class dict")],
)
def test_objects_that_are_no_model_of_a_run_are_refused(model: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"model: got an object of .*{words}"):
        quadriga.generate(model, "1+1=")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a folder without config\.yaml, expected the directory"):
        quadriga.Run(tmp_path)


def test_a_run_shows_its_last_steps(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    lines = [{"step": 0, "val-core/sums/reward/mean@1": 0.25}]
    lines += [{"step": step, "critic/rewards/mean": step / 10} for step in range(1, 8)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = quadriga.Run(tmp_path)
    assert str(run).splitlines() == [
        f"{tmp_path}: 7 steps",
        *(f"step {step}  reward 0.{step}00" for step in range(3, 8)),
        "validation of step 0  val-core/sums/reward/mean@1 0.250",
    ]
    assert "reward 0.700" in run._repr_html_()


@pytest.mark.parametrize("is_in_memory", [False, True])
def test_a_run_has_the_defaults_of_its_evaluation(is_in_memory: bool, tmp_path: Path) -> None:
    """Unless files, options or a reward of the caller replace them; hidden secrets are left out."""
    (tmp_path / "config.yaml").write_text(
        "task: rl\ndata: {prompt_key: question, max_response_length: 9}\n"
        "actor_rollout_ref: {rollout: {n: 4, temperature: 0.5}}\n"
        "trainer: {log_val_generations: 0, validation_data_dir: rows}\n"
        "custom_reward_function: {path: old.py, reward_kwargs: {api_key: <hidden>}}\n"
        "reward_model: {reward_manager: in_process}\n"
    )
    run = quadriga.Run(tmp_path)
    if is_in_memory:
        run.config = load_config(values=_frozen_defaults(run)).config
    (tmp_path / "more.yaml").write_text("data: {max_response_length: 5}")
    (tmp_path / "model").mkdir()
    draft = _draft_without_training(run, tmp_path / "more.yaml", None)
    config = draft.load()
    assert (config.data.prompt_key, config.data.max_response_length) == ("question", 5)
    assert (config.actor_rollout_ref.rollout.n, config.trainer.validation_data_dir) == (1, None)
    assert config.custom_reward_function.path == "old.py"
    options = {"actor_rollout_ref.rollout.temperature": 1}
    draft = _draft_without_training(run, (), options)
    draft.set_reward("new.py")
    config = draft.load()
    assert config.actor_rollout_ref.rollout.temperature == 1
    assert config.custom_reward_function.path == "new.py"
    assert config.reward_model.reward_manager == "naive"


@pytest.mark.parametrize(
    ("name", "advice"),
    [("step", "Did you mean 'steps'"), ("reward_weights", "[(function, weight)")],
)
def test_an_unknown_argument_is_answered(name: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(advice)):
        quadriga.train("model", [ROW], reward, **{name: 1})


def test_an_evaluation_has_the_reward_of_its_run(tmp_path: Path) -> None:
    """Its functions get the columns of new rows as in training."""
    file, _ = write_function(reward_of([reward]), tmp_path / "functions", "reward")
    options = {
        "custom_reward_function.path": str(file),
        "custom_reward_function.name": NAME,
        "trainer.default_local_dir": str(tmp_path),
    }
    draft = ConfigDraft(None, options=options, is_frozen=True)
    draft.set_reward(None)
    draft.set_rows("data.val_files", [ROW])
    row = json.loads(Path(draft.values["data.val_files"]).read_text())
    assert row["extra_info"]["row"] == ROW
    assert draft.load().custom_reward_function.path == str(file)


def test_an_evaluation_shows_its_metrics() -> None:
    evaluation = Evaluation({"val-core/sums/reward/mean@1": 0.25}, pd.DataFrame([ROW, ROW]))
    assert str(evaluation) == "2 prompts\nval-core/sums/reward/mean@1 0.250"


def test_the_package_shows_its_public_names_alone() -> None:
    assert set(quadriga.__all__) == {
        name for name in dir(quadriga) if not name.startswith("__")
    } | {"__version__"}


def test_help_lists_every_argument_with_its_default() -> None:
    assert quadriga.train.__doc__
    entries = dict(re.findall(r"- `(\w+)`: (.*)", quadriga.train.__doc__))
    assert entries.keys() == TrainerSettings.__annotations__.keys()
    assert all("efault" in meaning for meaning in entries.values())
