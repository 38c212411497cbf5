# SPDX-License-Identifier: Apache-2.0
"""A tiny vision-language model learns to name the color of a picture, through the configuration.

Without the picture the best that it could do is one color for all, which is right for a quarter of them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForImageTextToText

from quadriga.cli.main import main
from quadriga.config import load_config
from quadriga.data.vision import load_processor
from quadriga.models.reward_model import add_score_head
from tests.e2e.colors import of_studio, write_studio
from tests.vision_folder import noise, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `write_studio`."""
    return write_studio(tmp_path_factory.mktemp("studio"))


@pytest.fixture
def paint(
    studio: Path, tmp_path: Path, arguments: Callable[..., list[str]]
) -> Callable[..., list[dict[str, Any]]]:
    """`paint(*overrides, run="run")`: a run that must succeed; returns its lines of metrics."""

    def paint_here(*overrides: str, run: str = "run") -> list[dict[str, Any]]:
        own = of_studio(studio)
        assert main(["train", *arguments(*own, *overrides, run=run)]) == 0
        lines = (tmp_path / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    return paint_here


TWO_STEPS = ("trainer.total_training_steps=2", "actor_rollout_ref.rollout.n=4")


@pytest.mark.usefixtures("verl_names")
def test_a_loop_written_for_verl_sees_images(
    paint: Callable[..., list[dict[str, Any]]],
    studio: Path,
    arguments: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The configured reward manager grades, and all passes of a model get the images."""
    import written_loop

    words = (*TWO_STEPS, "actor_rollout_ref.actor.use_kl_loss=True")
    lines = paint(*words, "trainer.val_before_train=False")
    config = load_config(arguments(*of_studio(studio), *words, run="written")).config
    ids = (f"{step}-{row}" for step in (1, 2) for row in range(config.data.train_batch_size))
    monkeypatch.setattr(written_loop, "uuid", SimpleNamespace(uuid4=ids.__next__))
    trainer = written_loop.WrittenOut(config=config)
    trainer.init_workers()
    trainer.fit()
    steps = [line for line in lines if "critic/score/mean" in line]
    assert len(steps) == 2
    for theirs, ours in zip(trainer.history, steps, strict=True):
        for name in ("actor/grad_norm", "actor/kl_loss", "critic/score/mean"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_it_learns_to_see(paint: Callable[..., list[dict[str, Any]]]) -> None:
    """From a quarter of a hit in a hundred answers to nearly all; the rollout's log-probs are the trainer's to float32
    rounding at every step, and what it does in validation, greedily, is right for each picture."""
    lines = paint("trainer.total_training_steps=64", "trainer.test_freq=64")
    steps = [line for line in lines if "critic/score/mean" in line]
    rewards = [line["critic/score/mean"] for line in steps]
    assert len(rewards) == 64 and rewards[0] < 0.05 and sum(rewards[-8:]) / 8 > 0.9
    assert all(line["rollout/log_prob_diff_max"] < 2e-5 for line in steps)
    (validated,) = [
        value
        for line in lines
        for name, value in line.items()
        if name.startswith("val-core/colors")
    ]
    assert validated == 1.0


@pytest.mark.slow
def test_engines_and_critics(paint: Callable[..., list[dict[str, Any]]]) -> None:
    """Transformers' engine gives the native one's tokens, and so the same steps; a value function sees too, and
    conversations of one turn are what batches are."""
    by_native = paint(*TWO_STEPS, run="native")
    by_hf = paint(*TWO_STEPS, "actor_rollout_ref.rollout.name=hf", run="hf")
    in_turns = paint(*TWO_STEPS, "actor_rollout_ref.rollout.mode=async", run="turns")
    for other in (by_hf, in_turns):
        for one, line in zip(by_native, other, strict=True):
            for name in (
                "critic/score/mean",
                "actor/grad_norm",
                "actor/entropy",
                "prompt_length/mean",
            ):
                assert line[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    with_critic = paint(*TWO_STEPS, "algorithm.adv_estimator=gae", run="gae")
    assert all(line["critic/grad_norm"] >= 0 and "critic/vf_loss" in line for line in with_critic)


def test_a_reward_model_that_sees(
    paint: Callable[..., list[dict[str, Any]]], studio: Path, tmp_path: Path
) -> None:
    """It scores each response with its picture, beside the grader."""
    model = add_score_head(tiny_model())
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(tmp_path / "judge")
    model.config.architectures = ["Qwen2_5_VLForSequenceClassification"]
    model.config.save_pretrained(tmp_path / "judge")
    tiny_tokenizer().save_pretrained(tmp_path / "judge")
    rewards = ("reward_model.enable=True", f"reward_model.model.path={tmp_path / 'judge'}")
    (line,) = paint(*TWO_STEPS[1:], "trainer.total_training_steps=1", *rewards)
    assert line["reward/rm_score/max"] > line["reward/rm_score/min"]
    whole = line["reward/rm_score/mean"] + line["reward/rule_score/mean"]
    assert line["critic/score/mean"] == pytest.approx(whole, abs=1e-5)


@pytest.mark.slow
def test_a_run_that_was_broken_off_goes_on(
    paint: Callable[..., list[dict[str, Any]]],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    """With a frozen vision encoder, bit for bit."""
    frozen = "actor_rollout_ref.actor.freeze_vision_tower=True"
    paint("trainer.total_training_steps=4", frozen, run="whole")
    paint("trainer.total_training_steps=4", frozen, "trainer.save_freq=2", run="saved")
    (tmp_path / "cut").mkdir()
    (tmp_path / "saved" / "global_step_2").rename(tmp_path / "cut" / "global_step_2")
    (tmp_path / "cut" / "latest_checkpointed_iteration.txt").write_text("2")
    paint("trainer.total_training_steps=4", frozen, run="cut")
    whole, cut = (metric_lines(tmp_path / run) for run in ("whole", "cut"))
    assert [line for line in whole if line.get("training/global_step", 0) > 2] == cut


@pytest.mark.slow
def test_what_was_trained_answers_elsewhere(
    paint: Callable[..., list[dict[str, Any]]], studio: Path, tmp_path: Path
) -> None:
    """An export has all that transformers reads of a vision-language model, and the trained weights."""
    paint(
        *TWO_STEPS,
        "trainer.save_freq=2",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
    )
    actor, out = tmp_path / "run" / "global_step_2" / "actor", tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), "--output", str(out), "--dtype", "float32"]) == 0
    before = AutoModelForImageTextToText.from_pretrained(studio / "model").state_dict()
    trained = AutoModelForImageTextToText.from_pretrained(out)
    beside = AutoModelForImageTextToText.from_pretrained(actor / "huggingface").state_dict()
    for name, weight in trained.state_dict().items():
        assert torch.equal(weight, beside[name]), name
    assert any(
        not torch.equal(weight, before[name])
        for name, weight in beside.items()
        if ".visual." in name
    )
    inputs = [
        load_processor(str(place)).inputs([noise(16, 24)], where="here")
        for place in (studio / "model", out)
    ]
    assert torch.equal(inputs[0]["pixel_values"], inputs[1]["pixel_values"])


@pytest.mark.slow
def test_cached_responses_are_those_to_the_same_pictures(
    paint: Callable[..., list[dict[str, Any]]],
    arguments: Callable[..., list[str]],
    studio: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A second run takes them; with other pictures in prompts of the same tokens they are refused."""
    skip = (
        "actor_rollout_ref.rollout.skip.enable=True",
        f"actor_rollout_ref.rollout.skip.dump_dir={tmp_path / 'cached'}",
        "data.shuffle=False",
    )
    first, second = (paint(*TWO_STEPS, *skip, run=run) for run in ("first", "second"))
    assert [line["rollout/replayed"] for line in second] == [1.0, 1.0]
    assert [line["actor/grad_norm"] for line in second] == [
        line["actor/grad_norm"] for line in first
    ]
    rows = pq.read_table(studio / "train.parquet").to_pylist()
    rows[0]["images"], rows[1]["images"] = rows[1]["images"], rows[0]["images"]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "other.parquet")
    others = f"data.train_files={tmp_path / 'other.parquet'}"
    assert (
        main(["train", *arguments(*of_studio(studio), *TWO_STEPS, *skip, others, run="third")]) == 1
    )
    assert "got responses to other prompts" in capsys.readouterr().err
