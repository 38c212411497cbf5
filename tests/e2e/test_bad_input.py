# SPDX-License-Identifier: Apache-2.0
"""What a person sees who gives a run something wrong: one clear error, no traceback, and nothing lost on the disk."""

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from quadriga.cli.main import main
from quadriga.trainer.run_lock import LOCK, run_lock


@pytest.fixture
def refused(
    arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """`refused(*overrides, status=1)`: a run that must fail with that status and one error; returns the error.

    With `shows_users_code` the traceback of a user's own function may be part of it.
    """

    def run(*overrides: str, status: int = 1, shows_users_code: bool = False) -> str:
        capsys.readouterr()
        assert main(["train", *arguments(*overrides)]) == status
        captured = capsys.readouterr()
        assert shows_users_code or "Traceback" not in captured.out + captured.err
        lines = [line for line in captured.err.splitlines() if not line.startswith("notice: ")]
        assert lines[0].startswith("quadriga train: ")
        assert sum(line.startswith("quadriga train: ") for line in lines) == 1
        return "\n".join(lines)

    return run


@pytest.fixture
def reward_file(tmp_path: Path) -> Callable[[str], str]:
    """`reward_file(body)`: the override that names a file with this score function."""

    def build(body: str) -> str:
        path = tmp_path / "user_reward.py"
        path.write_text(
            f"import time\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n"
        )
        return f"custom_reward_function.path={path}"

    return build


LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"


def assert_says(error: str, *parts: str) -> None:
    """All parts stand in the error, which has the form `where: got X, expected Y. What to do.`"""
    assert [part for part in parts if part not in error] == [], error


# --- data ------------------------------------------------------------------------------------------------------------


def test_directory_of_a_run_that_goes_on(refused: Callable[..., str], tmp_path: Path) -> None:
    """Nothing in it is touched: neither its configuration nor the log that a run begun anew moves aside."""
    (tmp_path / "run").mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / "run" / name).write_text('{"step": 1}\n')
    with run_lock(tmp_path / "run"):
        error = refused()
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
            LOCK,
            "config.yaml",
            "metrics.jsonl",
        ]
    assert_says(
        error,
        f"default_local_dir={tmp_path / 'run'}",
        f"process {os.getpid()} on ",
        "Wait for its end",
    )
    assert {path.read_text() for path in (tmp_path / "run").iterdir()} == {'{"step": 1}\n'}


@pytest.mark.parametrize("key", ["train_files", "val_files"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_row_without_ground_truth_is_found_at_the_start(
    key: str,
    mode: str,
    refused: Callable[..., str],
    make_rows: Callable,
    write: Callable,
    tmp_path: Path,
) -> None:
    """Behind a good file, and the last of its rows; no step is made."""
    truths = [{"style": "rule", "ground_truth": "a"}] * 5 + [
        {"style": "rule", "ground_truth": None}
    ]
    rows = [
        row | {"reward_model": truth, "data_source": "math"}
        for row, truth in zip(make_rows(6), truths, strict=True)
    ]
    files = [write(tmp_path / "good.parquet", rows[:4]), write(tmp_path / "bad.parquet", rows)]
    rollout = f"actor_rollout_ref.rollout.mode={mode}"
    given = (
        f"data.train_files={files[0]}",
        f"data.val_files={files[0]}",
        f"data.{key}=[{files[0]},{files[1]}]",
    )
    error = refused(*given, "custom_reward_function.path=null", rollout)
    assert_says(
        error,
        f"{files[1]} row 5, column 'reward_model': got the ground truth None",
        "Correct the data file",
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_explain_finds_what_keeps_a_run_from_starting(
    arguments: Callable[..., list[str]],
    write: Callable,
    tmp_path: Path,
    home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All of it at once, without a model in memory and without a run's directory; nothing where nothing is wrong."""
    good = ("algorithm.adv_estimator=gae", "trainer.total_training_steps=5")
    assert main(["config", "explain", *arguments(*good)]) == 0
    told = capsys.readouterr().out
    assert "5 steps: 2 batches per epoch, 3 epochs" in told and "critic: one pass per step" in told
    assert "Before training" not in told and not (tmp_path / "run").exists()
    (tmp_path / "reward.py").write_text("def compute_score(text):\n    return 1\n")
    val = write(tmp_path / "val.parquet", [{"prompt": "a", "data_source": "letters"}])
    wrong = (
        "algorithm.adv_estimator=grpoo",
        "data.train_batch_size=11",
        f"data.val_files={val}",
        f"{LOSS}=vanila",
    )
    assert (
        main(
            [
                "config",
                "explain",
                *arguments(*wrong, f"custom_reward_function.path={tmp_path / 'reward.py'}"),
            ]
        )
        == 2
    )
    told = capsys.readouterr().out
    assert (
        "Did you mean 'grpo'" in told and "Did you mean 'vanilla'" in told and "leaves" not in told
    )
    assert "got 11 prompts a batch from a data set of 10" in told
    assert (
        f"{val}: got the columns" in told
        and "expected a function that takes the keyword arguments" in told
    )
    (tmp_path / "reward.py").write_text("def compute_score(**kwargs):\n    return 1 / 0\n")
    assert (
        main(
            [
                "config",
                "explain",
                *arguments(f"custom_reward_function.path={tmp_path / 'reward.py'}"),
            ]
        )
        == 2
    )
    told = capsys.readouterr().out
    assert (
        f"{home / 'train.parquet'} row 0, graded with its ground truth" in told
        and "ZeroDivisionError" in told
    )


READS_ALL = """
def compute_score(data_source, solution_str, ground_truth, extra_info, solution_with_special_tokens, solution_messages):
    assert solution_with_special_tokens.startswith(solution_str) and solution_messages[-1]["role"] == "assistant"
    return extra_info["num_turns"] + len(extra_info["finish_reason"]) + extra_info["tool_rewards"].get("x", 0)
"""


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_explain_grades_with_what_a_run_passes(
    arguments: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    mode: str,
) -> None:
    """Facts of the conversation, which a run has where an agent loop leads it; and the rows that were looked at."""
    (tmp_path / "reward.py").write_text(READS_ALL)
    given = (
        f"custom_reward_function.path={tmp_path / 'reward.py'}",
        f"actor_rollout_ref.rollout.mode={mode}",
    )
    status = main(["config", "explain", *arguments(*given)])
    told = capsys.readouterr().out
    assert (status, "KeyError: 'num_turns'" in told) == (
        (0, False) if mode == "async" else (2, True)
    )
    assert "data.train_files: 10 prompts measured: the longest has " in told


def test_a_padding_token_beyond_the_embedding(
    train: Callable[..., Path], home: Path, tmp_path: Path, metric_lines: Callable
) -> None:
    """Padding is not computed, so its id changes no number."""
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    few = ("trainer.total_training_steps=1", "algorithm.adv_estimator=gae")
    plain = metric_lines(train(*few, run="plain"))
    padded = metric_lines(train(*few, f"data.tokenizer={tmp_path / 'tokenizer'}", run="padded"))
    for name in ("actor/grad_norm", "critic/grad_norm", "critic/score/mean", "rollout/log_prob"):
        assert padded[0][name] == plain[0][name], name


def test_missing_column(
    refused: Callable[..., str], make_rows: Callable, write: Callable, tmp_path: Path
) -> None:
    rows = [
        {name: value for name, value in row.items() if name != "prompt"} for row in make_rows(8)
    ]
    path = write(tmp_path / "bad.parquet", rows)
    assert_says(
        refused(f"data.train_files={path}"), str(path), "expected", "'prompt'", "data.prompt_key"
    )


def test_missing_reward_column(
    refused: Callable[..., str], make_rows: Callable, write: Callable, tmp_path: Path
) -> None:
    rows = [
        {name: value for name, value in row.items() if name != "reward_model"}
        for row in make_rows(8)
    ]
    path = write(tmp_path / "bad.parquet", rows)
    assert_says(refused(f"data.train_files={path}"), "reward_model")


def test_missing_data_source(
    refused: Callable[..., str], make_rows: Callable, write: Callable, tmp_path: Path
) -> None:
    rows = [
        {name: value for name, value in row.items() if name != "data_source"}
        for row in make_rows(8)
    ]
    path = write(tmp_path / "bad.parquet", rows)
    assert_says(refused(f"data.train_files={path}"), "data_source", "data.reward_fn_key")


def test_file_without_rows(
    refused: Callable[..., str], make_rows: Callable, tmp_path: Path, write: Callable
) -> None:
    path = tmp_path / "empty.parquet"
    pq.write_table(pa.Table.from_pylist(make_rows(1)).slice(0, 0), path)
    assert_says(refused(f"data.train_files={path}"), "got", "expected")


@pytest.mark.parametrize(
    "content", [b"", b"PAR1 and then nothing of the kind", b"PAR1\x00\x00\x00\x00PAR1"]
)
def test_corrupt_file(content: bytes, refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "corrupt.parquet"
    path.write_bytes(content)
    assert_says(refused(f"data.train_files={path}"), str(path), "got", "expected")


def test_prompt_longer_than_allowed(refused: Callable[..., str]) -> None:
    assert_says(
        refused("data.max_prompt_length=8", "data.truncation=error"),
        "tokens", "data.max_prompt_length", "data.truncation",
    )  # fmt: skip


def test_every_prompt_longer_than_allowed(refused: Callable[..., str]) -> None:
    error = refused("data.max_prompt_length=2", "data.filter_overlong_prompts=True")
    assert_says(error, "data.max_prompt_length")


def test_batch_larger_than_the_data(refused: Callable[..., str]) -> None:
    assert_says(refused("data.train_batch_size=11"), "data.train_batch_size", "11", "at most 10")


# --- tokenizer and model ---------------------------------------------------------------------------------------------


def test_tokenizer_without_chat_template(
    refused: Callable[..., str], make_tokenizer: Callable, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert_says(
        refused(f"data.tokenizer={tmp_path / 'tokenizer'}"),
        "no chat template", "actor_rollout_ref.model.custom_chat_template",
    )  # fmt: skip


def test_tokenizer_without_pad_token_pads_with_the_end(
    train: Callable[..., Path],
    make_tokenizer: Callable,
    tmp_path: Path,
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is said, and the numbers are those of a run with a pad token: padding takes part in nothing."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    run = train(f"data.tokenizer={tmp_path / 'tokenizer'}", run="without")
    assert "no pad token" in capsys.readouterr().out
    assert metric_lines(run) == metric_lines(train(run="with"))


def test_tokenizer_without_pad_and_end(
    refused: Callable[..., str], make_tokenizer: Callable, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert_says(
        refused(f"data.tokenizer={tmp_path / 'tokenizer'}"), "neither a pad token", "pad_token"
    )


def test_model_without_weights(refused: Callable[..., str], home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (home / "model").iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    assert_says(refused(f"actor_rollout_ref.model.path={folder}"), f"model {folder}", "expected")


def test_model_with_damaged_weights(
    refused: Callable[..., str], home: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (home / "model").iterdir():
        content = path.read_bytes()
        (folder / path.name).write_bytes(
            content[: len(content) // 2] if path.suffix == ".safetensors" else content
        )
    assert_says(refused(f"actor_rollout_ref.model.path={folder}"), f"model {folder}", "expected")


def test_tokenizer_of_another_model(
    refused: Callable[..., str], make_tokenizer: Callable, home: Path, tmp_path: Path
) -> None:
    """Its tokens would lie outside the model's vocabulary."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["x" * length for length in range(2, 50)] + ["say"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    error = refused(f"data.tokenizer={tmp_path / 'tokenizer'}")
    place = f"{home / 'train.parquet'} row 0, column 'prompt'"
    assert_says(
        error, f"{place}: got the token 'say' with the id 93", "ids below 45", "data.tokenizer"
    )


@pytest.mark.parametrize("device", ["banana", "xpu"])
def test_device_that_is_not_there(device: str, refused: Callable[..., str]) -> None:
    assert_says(
        refused(f"trainer.device={device}", status=2),
        f"trainer.device: got '{device}'",
        "trainer.device=auto",
    )


def test_sampler_that_yields_nothing(refused: Callable[..., str], tmp_path: Path) -> None:
    """Not a run that waits forever."""
    path = tmp_path / "sampler.py"
    path.write_text(
        "from torch.utils.data import Sampler\n\n"
        "class Nothing(Sampler):\n"
        "    def __init__(self, data_source, data_config):\n        pass\n"
        "    def __len__(self):\n        return 10\n"
        "    def __iter__(self):\n        return iter(())\n"
    )
    error = refused(f"data.sampler.class_path={path}", "data.sampler.class_name=Nothing")
    assert_says(error, "two passes in a row without a batch", "data.sampler")


# --- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError('no such key')", ["KeyError", "no such key"]),
        ("return 'correct'", ["str", "correct"]),
        ("return float('nan')", ["nan"]),
        ("return None", ["None"]),
        ("return {'acc': 1.0}", ["score"]),
        ("while True: time.sleep(60)", ["0.3 s"]),
    ],
    ids=["raises", "returns a text", "returns NaN", "returns nothing", "returns no score", "hangs"],
)
def test_reward_function_that_always_fails(
    body: str,
    words: list[str],
    refused: Callable[..., str],
    reward_file: Callable[[str], str],
    tmp_path: Path,
) -> None:
    """Above reward_model.max_error_rate the run stops, and what was logged before it stays."""
    error = refused(reward_file(body), "reward_model.timeout_s=0.3", shows_users_code=True)
    assert_says(error, *words, "reward_model.max_error_rate")


def test_reward_function_that_sometimes_fails(
    train: Callable[..., Path], reward_file: Callable[[str], str], tmp_path: Path
) -> None:
    """A few failures are counted, reported and stored with their samples; the run goes on."""
    function = reward_file("return 1 / (len(solution_str) - 7)")
    run = train(
        function,
        "reward_model.max_error_rate=1.0",
        f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
    )
    rows = [
        json.loads(line) for step in (1, 2) for line in (tmp_path / f"rollouts/{step}.jsonl").open()
    ]
    failed = [row for row in rows if row["reward_error"]]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert sum(line["reward/errors"] for line in lines) == len(failed) > 0
    assert all("ZeroDivisionError" in row["reward_error"] and row["score"] == 0 for row in failed)


def test_reward_file_that_cannot_be_imported(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_this_name\n")
    assert_says(
        refused(f"custom_reward_function.path={path}", status=2, shows_users_code=True),
        "nothing_of_this_name",
    )


# --- the disk --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["default_local_dir", "rollout_data_dir", "validation_data_dir"])
def test_directory_that_cannot_be_written(
    key: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    """Said before anything is loaded. A path below a file, for root may write everywhere else."""
    (tmp_path / "file").write_text("in the way")
    assert_says(
        refused(f"trainer.{key}={tmp_path / 'file' / 'run'}", status=2),
        f"trainer.{key}",
        "is a file",
    )


def test_directory_of_a_file_system_that_takes_nothing(refused: Callable[..., str]) -> None:
    assert_says(
        refused("trainer.default_local_dir=/proc/quadriga"), "trainer.default_local_dir", "expected"
    )


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    """Every write behind so many bytes of a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [15_000, 600_000], ids=["at the model", "at the optimizer"])
def test_full_disk_during_a_checkpoint(
    num_bytes: int,
    refused: Callable[..., str],
    train: Callable[..., Path],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
) -> None:
    """The earlier checkpoint and the log stay whole, nothing half-written stays, and the run can go on from them."""
    run = train("trainer.save_freq=2", "trainer.total_training_steps=2")
    kept = files_of_checkpoints(run)
    more = ("trainer.save_freq=2", "trainer.total_training_steps=4")
    with no_file_larger_than(num_bytes):
        error = refused(*more)
    assert_says(
        error,
        "checkpoint of step 4",
        "File too large",
        "Free space",
        "Step 2 is still there to resume from",
    )
    assert files_of_checkpoints(run) == kept
    assert [line["step"] for line in metric_lines(run)] == [1, 2, 3, 4]
    train(*more)
    assert metric_lines(run) == metric_lines(train(*more, run="alone"))


def files_of_checkpoints(run: Path) -> dict[Path, bytes]:
    """Contents of the files in the folders of a run, without the rollouts that it records beside training."""
    files = [path for path in run.rglob("*") if path.is_file()]
    beside = (run, run / "rollouts")
    return {path: path.read_bytes() for path in files if path.parent not in beside}


def test_full_disk_at_checkpoints_that_nobody_asked_for(
    train: Callable[..., Path],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run goes on without them. With room, the last step has one from which the run can go on."""
    by_default = "trainer.save_minutes=1e-6"
    with no_file_larger_than(15_000):
        run = train(by_default)
    output = capsys.readouterr().out
    assert "File too large" in output and "goes on without this checkpoint" in output
    assert "without a checkpoint" in output.splitlines()[-1] and not [*run.glob("*step*")]
    train(by_default)
    assert (run / "global_step_2").is_dir()
    more = "trainer.total_training_steps=4"
    train(by_default, more)
    assert metric_lines(run) == metric_lines(train(more, run="alone"))
    assert main(["show", str(run)]) == 0
    output = capsys.readouterr().out
    assert "finished, step 4 of 4" in output and "Responses of step 4" in output


def test_full_disk_at_the_start(refused: Callable[..., str]) -> None:
    with no_file_larger_than(100):
        error = refused()
    assert_says(error, "trainer.default_local_dir", "Free space")


def test_full_disk_at_the_dumps(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    refused_with_dumps = f"trainer.rollout_data_dir={tmp_path / 'rollouts'}"
    with no_file_larger_than(12_000):
        error = refused(
            refused_with_dumps, "data.train_batch_size=10", "actor_rollout_ref.rollout.n=8"
        )
    assert_says(error, "rollouts/1.jsonl", "Free some space")
    assert list((tmp_path / "rollouts").iterdir()) == []


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_damaged_checkpoint(train: Callable[..., Path], refused: Callable[..., str]) -> None:
    """It is not trained from; the file is named."""
    run = train("trainer.save_freq=2")
    (file,) = (run / "global_step_2" / "actor" / "optimizer").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert_says(
        refused("trainer.save_freq=2", "trainer.total_training_steps=4"),
        str(file),
        "SHA-256",
        "resume_path",
    )


def test_model_of_another_shape(refused: Callable[..., str], home: Path) -> None:
    error = refused("+actor_rollout_ref.model.override_config.intermediate_size=48")
    assert_says(error, f"model {home / 'model'}", "expected", "actor_rollout_ref.model.path")


def test_checkpoint_of_another_model(
    train: Callable[..., Path], refused: Callable[..., str], home: Path, tmp_path: Path
) -> None:
    """One layer fewer than the checkpoint has."""
    train("trainer.save_freq=2")
    model = AutoModelForCausalLM.from_pretrained(home / "model", num_hidden_layers=1)
    model.save_pretrained(tmp_path / "smaller")
    AutoTokenizer.from_pretrained(home / "model").save_pretrained(tmp_path / "smaller")
    error = refused(
        f"actor_rollout_ref.model.path={tmp_path / 'smaller'}",
        "trainer.save_freq=2",
        "trainer.total_training_steps=4",
    )
    assert_says(error, "unknown", "expected the tensors of this model", "Resume with the model")


def test_run_is_no_checkpoint(train: Callable[..., Path], refused: Callable[..., str]) -> None:
    run = train("trainer.save_freq=2")
    error = refused("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run}")
    assert_says(
        error,
        str(run),
        "expected a complete checkpoint",
        f"resume_from_path={run / 'global_step_2'}",
    )
