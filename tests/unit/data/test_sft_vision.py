# SPDX-License-Identifier: Apache-2.0
"""Conversations and pairs with images and videos: tokens, which are learned, positions and pixels."""

import numpy as np
import pytest
import torch

from quadriga.config import DataConfig
from quadriga.data import MultiTurnSFTDataset, RMDataset, SFTDataset, collate_fn
from quadriga.errors import DataError
from quadriga.protocol import DataProto
from quadriga.trainer.sft import conversations_batch
from tests.tiny_vision import positions_of
from tests.vision_folder import (
    END,
    FAMILIES,
    IMAGE,
    START,
    VIDEO,
    WORDS,
    noise,
    tiny_model,
    tiny_tokenizer,
)


@pytest.fixture
def rows(write, tmp_path, processors):
    """`rows(*rows, kind=..., family=..., **data)`: a data set of them."""
    for name, size in (("a", (16, 16)), ("b", (24, 8))):
        noise(*size).save(tmp_path / f"{name}.png")

    def make(*rows, kind=MultiTurnSFTDataset, family="qwen2_5_vl", **values):
        config = DataConfig(**({"max_length": 64, "cache_dir": str(tmp_path)} | values))
        processor = None if family is None else processors[family]
        return kind(
            write("rows.jsonl", list(rows)),
            tiny_tokenizer(family or "qwen2_5_vl"),
            config,
            processor=processor,
        )

    return make


def turns(*contents):
    return [
        {"role": ("user", "assistant")[i % 2], "content": one} for i, one in enumerate(contents)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_images_in_several_turns_and_a_video(rows, processors, family: str):
    """Each part is tokenized as a rollout would have it; what stands for an image is never learned, though the
    assistant shows one. Tokens, pixels and positions are those of the whole chat as a prompt."""
    film = np.stack([np.array(noise(16, 16, seed)) for seed in range(4)]).tolist()
    chat = turns("<image> which", "red", "<video> and", "w1 <image> w2")
    row = {
        "messages": [*chat, {"role": "user", "content": "never <image>"}],
        "images": ["a.png", "b.png", "b.png"],
    }
    item = rows(
        {**row, "videos": [{"frames": film, "fps": 2 if family == "glm4v" else 8}]},
        family=family,
        max_length=128,
    )[0]
    size = int(item["attention_mask"].sum())
    ids, mask = item["input_ids"][:size].tolist(), item["loss_mask"][:size].bool()
    learned = [WORDS[one] for one, is_learned in zip(ids, mask, strict=True) if is_learned]
    assert learned == ["red", "w1", WORDS[START], WORDS[END], "w2", "<eos>"]
    assert not item["loss_mask"][size:].any() and not item["input_ids"][size:].any()
    inputs = item["multi_modal_inputs"]
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 4], [1, 2, 6]]
    assert inputs["video_grid_thw"].tolist() == [[2, 4, 4]]
    assert (ids.count(IMAGE), ids.count(VIDEO)) == ((15, 0) if family == "glm4v" else (7, 8))
    assert torch.equal(
        item["position_ids"][:, :size], positions_of(tiny_model(family), ids, inputs)
    )
    whole = processors[family].inputs([noise(16, 16), noise(24, 8)], where="")
    assert torch.equal(inputs["pixel_values"], whole["pixel_values"])


def test_rows_with_images_and_without_are_one_batch(rows):
    data = rows(
        {"messages": turns("<image> which", "red"), "images": ["a.png"]},
        {"messages": turns("w1", "w2")},
    )
    batch = conversations_batch(DataProto.from_single_dict(collate_fn([data[0], data[1]])))
    assert batch.batch["position_ids"].shape == (2, 3, 11)
    assert [bool(one) for one in batch.non_tensor_batch["multi_modal_inputs"]] == [True, False]
    other = rows(
        {"messages": turns("<image> which", "red"), "images": ["b.png"]},
        {"messages": turns("w1", "w2")},
    )
    assert other.digest != data.digest


def test_a_prompt_and_its_response(rows):
    chat, pair = (
        {"messages": turns("<image> which", "red"), "images": ["a.png"]},
        {"images": ["a.png"]},
    )
    item = rows(chat)[0]
    single = rows({**pair, "prompt": "<image> which", "response": "red"}, kind=SFTDataset)[0]
    assert all(
        torch.equal(item[name], single[name]) for name in ("input_ids", "position_ids", "loss_mask")
    )
    both = {**pair, "prompt": "<image> which", "chosen": "red", "rejected": "blue w1"}
    found = rows(both, kind=RMDataset)[0]
    size = int(item["attention_mask"].sum())
    assert torch.equal(found["input_ids"][0], item["input_ids"])
    assert torch.equal(found["position_ids"][0], item["position_ids"])
    assert found["position_ids"].shape == (2, 3, 64) and int(found["num_prompt_tokens"]) == size - 2
    assert found["multi_modal_inputs"]["image_grid_thw"].tolist() == [[1, 4, 4]]


def test_what_is_refused(rows):
    chat = {"messages": turns("<image> which", "red"), "images": ["a.png"]}
    for given, options, told in [
        (chat, {"family": None}, "row 0, column 'images': got images, for a text-only model"),
        (
            {"messages": turns([{"type": "image", "image": "a.png"}], "red")},
            {"family": None},
            "row 0, column 'messages': got images or videos in a message",
        ),
        (
            {"messages": turns("<image> <image>", "red"), "images": ["a.png"]},
            {},
            "got 2 <image> in the prompt, and 1",
        ),
        (
            {"messages": turns("<image>", "red"), "images": ["none.png"]},
            {},
            "image 0: got the image 'none.png', which",
        ),
        (
            chat,
            {"max_length": 10},
            "row 0: got 11 tokens, expected .*, for a row with images or videos is not cut",
        ),
        (
            chat,
            {"max_length": 10, "truncation": "left"},
            "row 0: got 11 tokens, expected .* is not cut",
        ),
        (
            {"messages": turns("<|image_pad|> which", "red")},
            {},
            "got 1 image tokens in the rendered chat, for 0",
        ),
    ]:
        with pytest.raises(DataError, match=told):
            rows(given, **options)
    assert (
        len(
            rows(chat, {"messages": turns("w1", "w2")}, max_length=10, filter_overlong_prompts=True)
        )
        == 1
    )
    pair = {"prompt": "w1", "chosen": "<image>", "rejected": "w2", "images": ["a.png"]}
    with pytest.raises(DataError, match="row 0, rejected: got 0 <image> in the prompt"):
        rows(pair, kind=RMDataset)
    assert len(rows({"messages": turns("<video> <image>", "w2")}, family=None)) == 1, (
        "tags of HTML are text"
    )
