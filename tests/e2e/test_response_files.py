# SPDX-License-Identifier: Apache-2.0
"""Files with prompts in, files with responses out, and their grades."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from quadriga.cli.main import main
from quadriga.config import load_config
from quadriga.errors import CheckpointError, DataError
from quadriga.trainer.evaluate import RESPONSES, ResponseJournal, open_journal
from tests.limits import COMMAND_S

Write = Callable[[Path, list[dict[str, Any]]], Path]
BY_PLACE = '''
def share(data_source, response, ground_truth):
    """The share of the letter that is asked for."""
    return response.count(ground_truth) / max(1, len(response))


def spells(response, ability):
    """Whether the row is about spelling."""
    return float(ability == "spelling")
'''
# Killed as soon as the responses to the second batch are on the disk.
KILLED = """
import os, signal
from quadriga.cli.main import main
from quadriga.trainer.evaluate import ResponseJournal

add = ResponseJournal.add

def add_and_die(responses, texts):
    add(responses, texts)
    if (responses.folder / "responses.jsonl").read_bytes().count(b"\\n") == 2:
        os.kill(os.getpid(), signal.SIGKILL)

ResponseJournal.add = add_and_die
main({arguments!r})
"""


@pytest.fixture
def prompts(tmp_path: Path, write: Write) -> Path:
    """Prompts without anything to grade by."""
    rows = [
        {"question": [{"role": "user", "content": f"say a {number}"}], "id": number}
        for number in range(5)
    ]
    return write(tmp_path / "prompts.parquet", rows)


def generate(home: Path, files: Path, output: Path, *overrides: str) -> int:
    keys = [f"data.val_files={files}", "data.prompt_key=question", "data.max_response_length=6"]
    keys += ["actor_rollout_ref.rollout.n=3", "data.max_prompt_length=32", *overrides]
    return main(["generate", str(home / "model"), "--output", str(output), *keys])


def test_each_row_gets_its_responses(home: Path, prompts: Path, tmp_path: Path) -> None:
    """Texts for every row in its place, the same for any batch size, beside the columns that were there."""
    for number, size in enumerate(("null", "2")):
        assert (
            generate(home, prompts, tmp_path / f"{number}.parquet", f"data.val_batch_size={size}")
            == 0
        )
    table = pq.read_table(tmp_path / "0.parquet")
    assert table.column_names == ["question", "id", "responses"]
    rows = table.to_pylist()
    assert [row["id"] for row in rows] == list(range(5))
    assert all(len(row["responses"]) == 3 for row in rows)
    assert len({text for row in rows for text in row["responses"]}) > 5
    assert pq.read_table(tmp_path / "1.parquet") == table


def test_a_call_that_was_killed_goes_on(
    home: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that goes on and is interrupted: the file is that of a call left alone, and nothing is left beside it."""
    words = [
        "generate",
        str(home / "model"),
        "--data",
        str(prompts),
        "--n",
        "3",
        "data.prompt_key=question",
    ]
    words += ["data.val_batch_size=1", "data.max_response_length=6", "data.max_prompt_length=32"]
    assert main([*words, "--output", str(tmp_path / "alone.parquet")]) == 0
    output = tmp_path / "killed.parquet"
    journal = tmp_path / "killed.parquet.part" / RESPONSES
    program = KILLED.format(arguments=[*words, "--output", str(output)])
    killed = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.DEVNULL, timeout=COMMAND_S, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert journal.read_bytes().count(b"\n") == 2 and not output.exists()
    # Killed while it was writing.
    with journal.open("ab") as file:
        file.write(b'[["half')
    add = ResponseJournal.add

    def add_and_stop(responses: ResponseJournal, texts: list[list[str]]) -> None:
        add(responses, texts)
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(ResponseJournal, "add", add_and_stop)
        assert main([*words, "--output", str(output)]) == 130
    assert journal.read_bytes().count(b"\n") == 3
    assert main([*words, "--output", str(output)]) == 0
    assert pq.read_table(output) == pq.read_table(tmp_path / "alone.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "alone.parquet",
        "killed.parquet",
        "prompts.parquet",
    ]


def test_what_another_call_began_is_kept(
    home: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other settings, another process, damage: told, and nothing is lost."""
    output, config = tmp_path / "out.parquet", load_config([f"data.val_files={prompts}"]).config
    with open_journal(output, config) as part:
        part.add([["a"] * 3])
        words = rf"--output=.*out.parquet.part: got .*process {os.getpid()} on"
        with pytest.raises(CheckpointError, match=words), open_journal(output, config):
            pass
    assert generate(home, prompts, output) == 1
    error = capsys.readouterr().err
    assert "out.parquet.part, which was begun with other settings, expected the same" in error
    assert "data.max_response_length: 512 -> 6" in error and "data.val_files" not in error
    journal = part.folder / RESPONSES
    assert journal.read_text() == '[["a", "a", "a"]]\n'
    journal.write_text('[["a"]\n')
    words = r"responses.jsonl line 1: got .* expected the texts of a batch. Delete .*part"
    with pytest.raises(DataError, match=words), open_journal(output, config):
        pass
    (part.folder / "config.yaml").write_text("")
    with (
        pytest.raises(DataError, match=r"config.yaml: it cannot be read"),
        open_journal(output, config),
    ):
        pass


def test_rows_that_would_be_dropped_are_told(
    home: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(home, prompts, tmp_path / "out.parquet", "data.val_max_samples=2") == 1
    assert (
        "got 2 of 5 rows, by data.filter_overlong_prompts or data.val_max_samples"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out.parquet").exists()


def test_responses_of_a_file_are_graded(
    home: Path, tmp_path: Path, write: Write, make_rows: Callable[..., list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The mean over rows of the mean of a row, with arguments by place and by name."""
    (tmp_path / "share.py").write_text(BY_PLACE)
    rows = [
        row | {"texts": texts}
        for row, texts in zip(make_rows(2), (["aa", "ab"], ["b", "b"]), strict=True)
    ]
    file = write(tmp_path / "responses.parquet", rows)
    function = [
        f"custom_reward_function.path={tmp_path / 'share.py'}",
        "custom_reward_function.name=share",
    ]
    assert main(["eval", str(file), "--response-key", "texts", *function]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert (lines["test_score/letters"][0], lines["val-core/letters/reward/mean@2"][0]) == (
        "0.3750",
        "0.3750",
    )
    assert lines["val-core/letters/reward/best@2/mean"] == ["0.5000", "[0.0546,", "0.9454]"]
    by_name = [function[0], "custom_reward_function.name=spells"]
    assert main(["eval", str(file), "--response-key", "texts", *by_name]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:2] == ["test_score/letters", "1.0000"]
    assert main(["eval", str(file), *function]) == 1
    assert "expected 'responses' among them" in capsys.readouterr().err


def test_one_response_may_be_a_text(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """The built-in grader of the data source."""
    rows = [
        {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "4"}, "responses": one}
        for one in ("#### 4", "5")
    ]
    assert main(["eval", str(write(tmp_path / "r.parquet", rows))]) == 0
    printed = capsys.readouterr().out.splitlines()[0].split()
    assert printed == ["test_score/openai/gsm8k", "0.5000", "[0.0546,", "0.9454]"]


def test_verls_programs_run_here(
    home: Path, prompts: Path, tmp_path: Path, write: Write, make_rows: Callable[..., list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Its generation, its grading and its older supervised program, by their own words."""
    native = [
        "rollout.name=native",
        "rollout.prompt_length=32",
        "rollout.response_length=6",
        "rollout.top_k=-1",
    ]
    words = [
        f"data.path={prompts}",
        "data.prompt_key=question",
        "data.n_samples=2",
        f"model.path={home / 'model'}",
    ]
    output = tmp_path / "o.parquet"
    assert main(["verl", "main_generation", *words, *native, f"data.output_path={output}"]) == 0
    assert [len(one) for one in pq.read_table(output).column("responses").to_pylist()] == [2] * 5
    (tmp_path / "share.py").write_text(BY_PLACE)
    rows = [row | {"responses": ["aa", "ab"]} for row in make_rows(2)]
    words = [
        f"data.path={write(tmp_path / 'r.parquet', rows)}",
        f"custom_reward_function.path={tmp_path / 'share.py'}",
    ]
    capsys.readouterr()
    assert (
        main(
            [
                "verl",
                "python3",
                "-m",
                "verl.trainer.main_eval",
                *words,
                "custom_reward_function.name=share",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.splitlines()[0].split()[:2] == ["test_score/letters", "0.7500"]
    rows = [{"extra_info": {"q": f"say {letter}", "a": letter}} for letter in "abcdefgh"]
    file = write(tmp_path / "sft.parquet", rows)
    words = [
        f"data.train_files={file}",
        f"data.val_files={file}",
        "data.prompt_key=extra_info",
        "data.max_length=48",
    ]
    words += [
        "data.response_key=extra_info",
        "data.prompt_dict_keys=[q]",
        "data.response_dict_keys=[a]",
    ]
    words += [
        f"model.partial_pretrain={home / 'model'}",
        "data.train_batch_size=4",
        "trainer.total_training_steps=2",
    ]
    words += ["trainer.logger=console", "trainer.test_freq=after_each_epoch", "optim.lr=1e-3"]
    words += [
        f"trainer.default_local_dir={tmp_path / 'sft'}",
        "model.enable_gradient_checkpointing=False",
    ]
    assert (
        main(
            [
                "verl",
                "--verl",
                "0.6",
                "torchrun",
                "--nproc_per_node=1",
                "-m",
                "verl.trainer.fsdp_sft_trainer",
                *words,
            ]
        )
        == 0
    )
    assert (tmp_path / "sft" / "model" / "config.json").is_file()
