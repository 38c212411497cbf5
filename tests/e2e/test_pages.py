# SPDX-License-Identifier: Apache-2.0
"""The lines of the front page and of docs/data.md, run one after the other, with a tiny model."""

import json
import re
from pathlib import Path

import pytest

from quadriga.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[2]
QUICK = (
    "data.train_batch_size=4",
    "data.max_prompt_length=32",
    "data.max_response_length=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.fsdp_config.model_dtype=float32",
    "actor_rollout_ref.rollout.n=2",
    "reward_model.num_workers=1",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
)


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in a language."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def block(page: str, word: str) -> str:
    """The Python block of a page that has a word in it."""
    (found,) = [text for text in blocks(page, "python") if word in text]
    return found


@pytest.fixture
def folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model, and the data, the reward function and the configuration of the pages."""
    monkeypatch.chdir(tmp_path)
    exec(block("docs/data.md", "train.jsonl"), {})
    (tmp_path / "reward.py").write_text(block("docs/data.md", "def compute_score"))
    text = (REPOSITORY / "configs" / "mine.yaml").read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(re.sub(r"data/(train|val)\.parquet", "train.jsonl", text))
    assert main(["prepare", "model", str(home / "model"), "--output", "outputs/models/mine"]) == 0
    return tmp_path


def test_the_row_of_the_page() -> None:
    """The row that docs/data.md shows has the columns that its table lists, and a chat with a system prompt."""
    row = json.loads(
        next(text for text in blocks("docs/data.md", "json") if "ground_truth" in text)
    )
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["reward_model"]["ground_truth"] == "5" and row["data_source"] == "my_sums"


def test_a_task_of_ones_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prepare, explain, train: the front page's lines with configs/mine.yaml."""
    assert main(["config", "explain", "--config", "mine.yaml", *QUICK]) == 0
    assert "4 prompts x 2" in capsys.readouterr().out
    assert main(["train", "--config", "mine.yaml", *QUICK]) == 0
    lines = (
        (folder / "outputs" / "mine" / "first" / "metrics.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    last = json.loads(lines[-1])
    assert last["training/global_step"] == 2 and last["reward/errors"] == 0


def test_a_data_set_and_a_sampler_of_ones_own(folder: Path) -> None:
    """The classes of docs/data.md: rows are changed, the sampler sees each batch, and the same command goes on."""
    (folder / "my_data.py").write_text(block("docs/data.md", "class MyData"))
    (folder / "my_sampler.py").write_text(block("docs/data.md", "class Hardest"))
    own = (
        "data.custom_cls.path=my_data.py",
        "data.custom_cls.name=MyData",
        "data.sampler.class_path=my_sampler.py",
        "data.sampler.class_name=Hardest",
        "trainer.rollout_data_dir=responses",
        "trainer.save_freq=2",
    )
    assert main(["train", "--config", "mine.yaml", *QUICK, *own]) == 0
    assert (
        main(["train", "--config", "mine.yaml", *QUICK, *own, "trainer.total_training_steps=3"])
        == 0
    )
    steps = (
        (folder / "outputs" / "mine" / "first" / "metrics.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    assert [json.loads(line)["training/global_step"] for line in steps] == [1, 2, 3]
