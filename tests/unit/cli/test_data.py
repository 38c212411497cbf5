# SPDX-License-Identifier: Apache-2.0
"""`quadriga data inspect`: what is shown of files that are right and of files that are not."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quadriga.cli.main import main
from tests.vision_folder import noise, write_vision_folder

TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
WORDS = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>", "one", "two"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    options = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **options)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def inspected(capsys: pytest.CaptureFixture, *words: str) -> str:
    assert main(["data", "inspect", *words]) == 0
    return capsys.readouterr().out


def test_prompts(folder: Path, capsys: pytest.CaptureFixture):
    rows = [{"prompt": "one " * (1 + i % 3), "level": None if i else 7} for i in range(8)]
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, {"prompt": 5}]) + "{\n")
    said = inspected(
        capsys,
        str(file),
        "--row",
        "1",
        "--rows",
        "1",
        f"data.tokenizer={folder}",
        "data.max_prompt_length=3",
    )
    for part in (
        "9 rows, 3",  # hundred bytes
        "  prompt: str, int\n  level: int, null in 8 rows",
        "row 0\n  prompt: 'one '\n  level: 7\n",
        "tokens: 2 to 4, median 3,",
        "\n        2 to       2         3  █",
        "\n        4 to       4         2  █",
        "over data.max_prompt_length=3: 2 of 9 rows\n  row 2: 4 tokens\n  row 5: 4 tokens\n",
        f"bad: 2 rows\n  {file} line 10: got text that is no JSON",
        f"{file} row 8, column 'prompt': got the prompt 5",
        "row 1 as the model gets it:\n<user> one one",
        "3 tokens:\n<user>|one|one\n",
    ):
        assert part in said
    assert "characters of JSON (tokens with --model): " in inspected(capsys, str(file))
    said = inspected(capsys, str(file), "--row", "8", f"data.tokenizer={folder}")
    assert (
        "row 8 is one of the bad rows; show another by --row N\n" in said
        and "as the model gets it" not in said
    )


def test_images_and_videos(tmp_path: Path, capsys: pytest.CaptureFixture):
    """What stands for them, and how many tokens that is."""
    model, file = write_vision_folder(tmp_path / "model"), tmp_path / "rows.jsonl"
    noise(16, 16).save(tmp_path / "a.png")
    row = {"prompt": "<image> <video> ?", "images": ["a.png"], "videos": [["a.png"] * 4]}
    file.write_text(json.dumps({"data_source": "", "reward_model": {"ground_truth": ""}, **row}))
    said = inspected(capsys, str(file), "--model", str(model))
    assert "<|image_pad|>" in said and "9 tokens:\n" in said
    assert "\n19 tokens with those of all patches of images and videos\n" in said
    assert said.endswith("video 0: 4 of 4 frames, 16 x 16\nimage 0: 16 x 16\n")


def test_conversations(folder: Path, capsys: pytest.CaptureFixture):
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    pq.write_table(pa.Table.from_pylist([{"messages": chat}]), folder / "rows.parquet")
    said = inspected(capsys, str(folder / "rows.parquet"), f"data.tokenizer={folder}")
    assert "  messages: list<element: struct<" in said
    assert (
        "5 tokens, of which 3, marked *, are learned:\n<user>|one|*<assistant>|*two|*<eos>\n"
        in said
    )


def test_what_cannot_be_shown(folder: Path, capsys: pytest.CaptureFixture):
    (folder / "rows.jsonl").write_text('{"question": "one"}\n')
    assert "no column 'prompt'" in inspected(capsys, str(folder / "rows.jsonl"))
    assert main(["data", "inspect", str(folder / "rows.jsonl"), "--row", "3"]) == 1
    assert "--row: got 3 of" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "two " * 1100])
def test_conversations_of_which_none_can_be_learned(
    folder: Path, capsys: pytest.CaptureFixture, content: str
):
    """Each of them is bad, or too long."""
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": content}]
    file = folder / "rows.jsonl"
    file.write_text(f"{json.dumps({'messages': chat})}\n" * 4)
    said = inspected(capsys, str(file), f"data.tokenizer={folder}", "--rows", "0")
    assert f"bad: {0 if content else 4} rows" in said
    assert ("row 3, message 1: got an empty turn" in said) is not bool(content)
    assert ("4 of 4 rows are over 1024 tokens" in said) is bool(content)
