# SPDX-License-Identifier: Apache-2.0
"""The door for Python: the command's numbers, rewards by the names of their arguments, steps one by one, resuming.

What it does not prove: GPUs, several nodes.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import quadriga
from quadriga.errors import CheckpointError, ConfigError, DataError
from quadriga.user_function import write_function

Lines = Callable[[Path], list[dict[str, Any]]]
TRUTH = "a"


@pytest.fixture
def settings(home: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`settings(run="run", **options)`: keyword arguments of a quick exact run in `tmp_path / run`."""

    def make(run: str = "run", **options: Any) -> dict[str, Any]:
        keys = {
            "data.cache_dir": tmp_path / "cache",
            "data.train_batch_size": 4,
            "data.max_prompt_length": 32,
            "data.max_response_length": 8,
            "actor_rollout_ref.actor.fsdp_config.model_dtype": "float32",
            "actor_rollout_ref.actor.optim.lr": 1e-3,
            "actor_rollout_ref.rollout.n": 2,
            "reward_model.num_workers": 1,
            "trainer.val_before_train": False,
            "trainer.logger": ["jsonl"],
            "trainer.default_local_dir": tmp_path / run,
        }
        return {"model": home / "model", "steps": 2, "options": keys | options}

    return make


def share(text: str) -> float:
    """The share of the letter, as the reward file of the command has it."""
    return text.count(TRUTH) / max(1, len(text))


def test_numbers_of_the_command(
    settings: Callable[..., dict[str, Any]],
    train: Callable[..., Path],
    make_rows: Callable[..., list[dict[str, Any]]],
    metric_lines: Lines,
) -> None:
    """From a list of rows and a lambda, bit for bit, validation too. On Ray: tests/e2e/ray/test_stopping.py."""
    lines = metric_lines(train("trainer.val_before_train=True", run="command"))
    rows = make_rows(24)
    run = quadriga.train(
        data=rows[:10],
        reward=lambda text: text.count(TRUTH) / max(1, len(text)),
        eval_data=rows[20:],
        **settings("python", **{"trainer.val_before_train": True}),
    )
    assert metric_lines(run.directory) == lines
    assert list(run.metrics.index) == [0, 1, 2]
    assert run.metrics["critic/score/mean"].loc[2] == lines[-1]["critic/score/mean"]
    samples = run.samples(step=2)
    assert len(samples) == 8
    assert samples["score"].tolist() == pytest.approx([share(text) for text in samples["output"]])


def test_rewards_by_the_names_of_their_arguments(
    settings: Callable[..., dict[str, Any]],
    make_rows: Callable[..., list[dict[str, Any]]],
    metric_lines: Lines,
) -> None:
    """verl's words, TRL's words with a column and a chat, a closure that cannot travel: all the same numbers."""
    rows, calls, lock = [{**row, "letter": "a"} for row in make_rows(10)], [], threading.Lock()

    def of_verl(solution_str, ground_truth, extra_info=None):
        return solution_str.count(ground_truth) / max(1, len(solution_str))

    async def of_trl(completions, prompts, letter, **kwargs):
        assert {len(completions), len(prompts), len(letter)} == {8}
        texts = [completion[0]["content"] for completion in completions]
        return [
            text.count(one) / max(1, len(text)) for text, one in zip(texts, letter, strict=True)
        ]

    def here(response, letter):
        with lock:
            calls.append(response)
        return response.count(letter) / max(1, len(response))

    runs = {
        function.__name__: quadriga.train(data=rows, reward=function, **settings(function.__name__))
        for function in (of_verl, of_trl, here)
    }
    first, second, third = (metric_lines(run.directory) for run in runs.values())
    assert first == second == third
    assert len(calls) == 16
    assert runs["here"].config.reward_model.reward_manager == "in_process"


def test_weights_and_components(settings: Callable[..., dict[str, Any]]) -> None:
    """Several functions: the weighted sum, each by its name; one that says None has no say. A data set of datasets."""
    rows = import_module("datasets").Dataset.from_list(
        [{"prompt": f"say a {number}", "letter": "a"} for number in range(10)]
    )

    def sometimes(response):
        return 1.0 if "b" in response else None

    arguments = settings()
    # Without validation rows there is no validation.
    del arguments["options"]["trainer.val_before_train"]
    run = quadriga.train(data=rows, reward=[(share, 2.0), sometimes], **arguments)
    samples = run.samples(step=1)
    for _, row in samples.iterrows():
        says = row["output"].count("b") > 0
        assert row["score"] == pytest.approx(2 * row["share"] + says)
        assert (row["sometimes"] == 1.0) == says


def test_steps_model_and_resume(
    settings: Callable[..., dict[str, Any]],
    make_rows: Callable[..., list[dict[str, Any]]],
    metric_lines: Lines,
    tmp_path: Path,
) -> None:
    """Steps one by one with their batch, callbacks, an estimator and a loss of the program's own; then 4 steps in all
    are those of a run that was never interrupted, and the model is the last one. The steps that are asked for hold,
    though a file names an epoch, of 2 steps."""
    seen: list[int] = []
    epoch = tmp_path / "epoch.yaml"
    epoch.write_text("trainer: {total_epochs: 1}")

    def estimator(token_level_rewards, response_mask):
        scores = token_level_rewards.sum(-1, keepdim=True) * response_mask
        seen.append(len(scores))
        return scores, scores

    def loss(log_prob, old_log_prob, advantages):
        return -(log_prob - old_log_prob).exp() * advantages, {}

    def arguments(run: str, steps: int) -> dict[str, Any]:
        return settings(run) | {
            "steps": steps,
            "estimator": estimator,
            "loss": loss,
            "data": make_rows(10),
            "config": epoch,
        }

    whole = quadriga.train(reward=share, **arguments("whole", 4))
    numbers: list[int] = []
    with quadriga.Trainer(
        reward=share, callbacks=[lambda step: numbers.append(step.number)], **arguments("b", 2)
    ) as t:
        assert t.loop.global_steps == 0
        for step in t:
            assert step.number == numbers[-1]
            assert step.metrics["critic/score/mean"] == pytest.approx(
                float(step.batch.batch["token_level_scores"].sum(-1).mean())
            )
    half = quadriga.Run(t.config.trainer.directory, t.callbacks)
    resumed = half.resume(steps=4)
    assert numbers == [1, 2, 3, 4]
    assert metric_lines(resumed.directory)[2:] == metric_lines(whole.directory)[2:]
    for left, right in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert left.equal(right)
    assert "<polyline" in resumed.plot()._repr_svg_()
    assert seen == [8] * 8


def test_in_a_running_event_loop_without_checkpoints(
    settings: Callable[..., dict[str, Any]],
    make_rows: Callable[..., list[dict[str, Any]]],
    home: Path,
    train: Callable[..., Path],
    metric_lines: Lines,
) -> None:
    """As in a notebook, of a list of files, conversations too, with the command's numbers; the model is there, and
    resuming says what it lacks."""
    options = {"actor_rollout_ref.rollout.mode": "async", "trainer.save_freq": -1}

    async def cell() -> quadriga.Run:
        return quadriga.train(data=[home / "train.parquet"], reward=share, **settings(**options))

    run = asyncio.run(cell())
    # The rollout's own log-probs depend in the last bits on which conversations meet in a batch.
    ours, command = (
        [
            {name: value for name, value in line.items() if not name.startswith("rollout/")}
            for line in metric_lines(one)
        ]
        for one in (run.directory, train("actor_rollout_ref.rollout.mode=async", run="command"))
    )
    assert ours == command
    assert sum(one.numel() for one in run.model.parameters()) > 0
    with pytest.raises(CheckpointError, match=r"no checkpoint.*trainer\.save_freq"):
        run.resume(steps=4)
    answers = quadriga.generate(
        run.model, ["say a 1", "say a 2"], options={"data.max_response_length": 4}
    )
    assert [len(texts) for texts in answers] == [1, 1]
    many = {"data.max_response_length": 16, "actor_rollout_ref.rollout.n": 16}
    chat = [{"role": "system", "content": "bbb"}, {"role": "user", "content": "say a 1"}]
    with_system, written, without = (
        quadriga.generate(run, prompts, options=many, **system)
        for prompts, system in (("say a 1", {"system": "bbb"}), ([chat], {}), ("say a 1", {}))
    )
    assert with_system == written
    assert with_system != without
    options = settings()["options"] | {"data.max_response_length": 4}
    metrics, samples = quadriga.evaluate(run, make_rows(3), share, options=options)
    assert metrics["val-core/letters/reward/mean@1"] == pytest.approx(samples["score"].mean())
    assert len(samples) == 3
    # The columns of the row, and what the reward returns beside the score.
    assert samples["ability"].tolist() == ["spelling"] * 3
    with torch.no_grad():
        next(run.model.parameters()).zero_()
    with pytest.raises(ConfigError, match="LlamaForCausalLM, expected a folder"):
        quadriga.generate(run.model, "say a 1")


def test_sft(
    settings: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Twice in one process, of a list and of a data frame: each run without a name has a directory of its own."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"say a {number}", "response": "aaa"} for number in range(8)]
    options = {"data.max_length": 40, "data.train_batch_size": 4}
    runs = [
        quadriga.sft(settings()["model"], one, steps=2, options=options)
        for one in (rows, pd.DataFrame(rows))
    ]
    assert [run.directory.name for run in runs] == ["sft-1", "sft-2"]
    assert runs[0].metrics["train/loss"].tolist() == runs[1].metrics["train/loss"].tolist()
    assert runs[0].model.num_parameters() == runs[1].model.num_parameters()


@pytest.mark.usefixtures("sigint_raises")
def test_interrupt_in_a_callback_ends_the_run(
    settings: Callable[..., dict[str, Any]],
    make_rows: Callable[..., list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C passes to the caller once the run has ended and said how it goes on; the same call goes on."""
    arguments = settings(**{"trainer.save_freq": 1}) | {
        "steps": 3,
        "data": make_rows(10),
        "reward": share,
    }

    def press(step: Any) -> None:
        if step.number == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)

    with pytest.raises(KeyboardInterrupt):
        quadriga.train(callbacks=[press], **arguments)
    assert "goes on from the checkpoint of step 2" in capsys.readouterr().out
    assert list(quadriga.train(**arguments).metrics.index) == [1, 2, 3]


BAD = {
    "argument": (
        {"reward": lambda text, letter: 1.0},
        ConfigError,
        "the argument 'text', expected one of .*letter",
    ),
    "truth": (
        {"reward": lambda ground_truth, response: 1.0},
        DataError,
        "expected the column 'ground_truth'",
    ),
    "row": ({"data": ["a prompt"], "reward": share}, DataError, "a prompt"),
    "empty list": ({"data": [], "reward": share}, DataError, "no rows"),
    "no rows": ({"data": iter(()), "reward": share}, DataError, "no rows"),
    "not a function": (
        {"reward": [share, "x"]},
        ConfigError,
        r"reward 2: got 'x', expected a function",
    ),
    "key": ({"options": {"data.train_batchsize": 3}}, ConfigError, "data.train_batch_size"),
    "unknown argument": (
        {"learning_rate": 1.0},
        ConfigError,
        "the argument 'learning_rate', expected one of steps",
    ),
    "two estimators": (
        {"algorithm": "grpo", "estimator": share},
        ConfigError,
        "expected one of them",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str, settings: Callable[..., dict[str, Any]]) -> None:
    """They are refused before anything is loaded, with what to do."""
    changes, kind, words = BAD[case]
    good = {"data": [{"prompt": "say a", "letter": "a"}] * 4, "reward": share}
    with pytest.raises(kind, match=words):
        quadriga.train(**settings() | good | changes)


def test_a_function_of_another_process(tmp_path: Path) -> None:
    """One that could not be pickled is missed in words."""
    lock = threading.Lock()
    file, obstacle = write_function(lambda: lock, tmp_path, "loss")
    assert "pickle" in obstacle
    assert "could not be pickled" not in file.read_text()


# No main guard: a start method that runs the script again in each process would train in each of them.
SCRIPT = """
import json, os, signal, sys
import quadriga

print("script runs", flush=True)
signal.signal(signal.SIGINT, signal.default_int_handler)
rows = [{"prompt": f"say a {number}", "letter": "a"} for number in range(300)]

def interrupt(step):
    print("callback of step", step.number, flush=True)
    if step.number == 2:
        os.kill(os.getpid(), signal.SIGINT)

try:
    quadriga.train(
        data=rows,
        reward=lambda text: text.count("a") / max(1, len(text)),
        callbacks=[interrupt],
        **json.loads(sys.argv[1]),
    )
except KeyboardInterrupt:
    print("the caller's except", flush=True)
    raise
"""


def test_an_interrupted_script_without_a_main_guard(
    settings: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """It counts and trains once, with two processes that count tokens and one that prepares rows.

    Interrupted, it ends without a traceback.
    """
    workers = {"data.filter_overlong_prompts_workers": 2, "data.dataloader_num_workers": 1}
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = settings(**workers, **{"trainer.save_freq": 1}) | {"steps": 3}
    command = [sys.executable, str(tmp_path / "script.py"), json.dumps(arguments, default=str)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.count("script runs") == 1
    assert [line for line in done.stdout.splitlines() if line.startswith("callback ")] == [
        "callback of step 1",
        "callback of step 2",
    ]
    assert len([*(tmp_path / "cache" / "prompt_lengths").iterdir()]) == 1
    *_, sentence, last_line = done.stdout.splitlines()
    assert last_line == "the caller's except"
    assert "run').resume(steps=3) goes on from the checkpoint of step 2." in sentence
