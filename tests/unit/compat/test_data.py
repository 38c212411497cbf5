# SPDX-License-Identifier: Apache-2.0
"""Single functions for data and generation by verl's names; data sets and loops run in tests/e2e."""

import asyncio
import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quadriga.config import DataConfig
from quadriga.data import load_processor
from quadriga_verl.shim.loops import AsyncLLMServerManager
from tests.vision_folder import IMAGE, tiny_tokenizer, write_vision_folder

pytestmark = pytest.mark.usefixtures("verl_names")


def test_a_prompt_becomes_ids_of_one_length() -> None:
    def tokenizer(text: str, **options: Any) -> dict[str, torch.Tensor]:
        assert options == {"return_tensors": "pt", "add_special_tokens": False}
        ids = torch.tensor([[ord(letter) for letter in text]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    function = import_module("verl.utils.torch_functional").tokenize_and_postprocess_data
    ids, mask = function(
        "ab", tokenizer, max_length=4, pad_token_id=0, left_pad=True, truncation="error"
    )
    assert (ids.tolist(), mask.tolist()) == ([[0, 0, 97, 98]], [[0, 0, 1, 1]])
    assert function("abcde", tokenizer, max_length=2, pad_token_id=0, truncation="left")[
        0
    ].tolist() == [[100, 101]]


def test_a_picture_is_read_in_colours() -> None:
    picture = import_module("verl.utils.dataset.vision_utils").process_image(
        Image.new("RGBA", (3, 2), (9, 8, 7, 255))
    )
    assert picture.mode == "RGB" and np.asarray(picture).tolist() == [[[9, 8, 7]] * 3] * 2


def test_images_stand_in_the_chat_that_loops_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As parts, from which a loop may render the prompt anew."""
    monkeypatch.chdir(write_vision_folder(tmp_path))
    Image.new("RGB", (16, 16)).save("a.png")
    row = {
        "prompt": [{"role": "user", "content": "<image> which"}],
        "images": ["a.png"],
        "data_source": "",
    }
    Path("rows.jsonl").write_text(json.dumps(row))
    config = DataConfig(max_prompt_length=16)
    rows = import_module("verl.utils.dataset.rl_dataset").RLHFDataset(
        "rows.jsonl", tiny_tokenizer(), config, processor=load_processor(tmp_path)
    )
    [row] = rows.__getitems__([0])
    assert [part["type"] for part in row["raw_prompt"][0]["content"]] == ["image", "text"]
    assert (row["input_ids"] == IMAGE).sum() == 4


@pytest.mark.parametrize("version", ["0.5", "0.6.1"])
def test_what_the_engine_answers_a_loop(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 0.5 token ids alone."""
    monkeypatch.setenv("QUADRIGA_VERL", version)

    async def complete(ids: list[int], images: Any, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(token_ids=[*ids, 3], log_probs=[-0.5], finish_reason="stop")

    limits, text = SimpleNamespace(response_tokens=4, total_tokens=9), SimpleNamespace(images=None)
    chat: Any = SimpleNamespace(
        limits=limits, complete=complete, images_in=lambda ids: None, sample=text
    )
    manager = AsyncLLMServerManager(chat, SimpleNamespace())  # type: ignore[arg-type]
    found = asyncio.run(manager.generate("id", prompt_ids=[7], sampling_params={}))
    assert (found if version == "0.5" else found.token_ids) == [7, 3]
    assert (manager.token_ids, manager.log_probs) == ([7, 3], [-0.5])
