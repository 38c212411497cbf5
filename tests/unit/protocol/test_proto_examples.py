# SPDX-License-Identifier: Apache-2.0
"""Examples to read: a training batch from texts, its printed layout, three samples for four workers."""

import numpy as np
import pytest
import torch

from quadriga.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto

PROMPTS = ["What is 15 + 27?", "Solve 2x + 5 = 13.", "Area of a circle of radius 3?"]
RESPONSES = ["42", "x = 4", "9 pi, about 28.27"]
REWARDS = [0.8, 0.9, 0.7]
PAD = 0


class CharacterTokenizer:
    """One token per character; 0 is padding."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(token_id) for token_id in token_ids if token_id != PAD)


@pytest.fixture
def batch() -> DataProto:
    tokenizer = CharacterTokenizer()
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    responses = [tokenizer.encode(text) for text in RESPONSES]
    prompt_length, response_length = max(map(len, prompts)), max(map(len, responses))
    left = torch.tensor([[PAD] * (prompt_length - len(ids)) + ids for ids in prompts])
    right = torch.tensor([ids + [PAD] * (response_length - len(ids)) for ids in responses])
    input_ids = torch.cat([left, right], dim=1)
    return DataProto.from_dict(
        tensors={
            "prompts": left,
            "responses": right,
            "input_ids": input_ids,
            "attention_mask": (input_ids != PAD).long(),
        },
        non_tensors={
            "raw_prompts": np.array(PROMPTS, dtype=object),
            "raw_responses": np.array(RESPONSES, dtype=object),
            "rewards": np.array(REWARDS, dtype=np.float32),
        },
        meta_info={"dataset_name": "arithmetic", "batch_size": 3, "max_length": input_ids.shape[1]},
    )


def test_the_texts_come_back_out(batch: DataProto) -> None:
    tokenizer = CharacterTokenizer()
    assert [tokenizer.decode(row) for row in batch.batch["prompts"].tolist()] == PROMPTS
    assert [tokenizer.decode(row) for row in batch.batch["responses"].tolist()] == RESPONSES
    lengths = [
        len(prompt) + len(response) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
    ]
    assert batch.batch["attention_mask"].sum(dim=1).tolist() == lengths
    # Left padding puts every prompt's last token into the same column, right before the response.
    assert batch.batch["attention_mask"][:, len(PROMPTS[2]) - 1].tolist() == [1, 1, 1]


def test_the_printed_layout(batch: DataProto) -> None:
    assert batch.get_data_info() == "\n".join(
        [
            "batch",
            "  prompts: (3, 29) (torch.int64) cpu",
            "  responses: (3, 17) (torch.int64) cpu",
            "  input_ids: (3, 46) (torch.int64) cpu",
            "  attention_mask: (3, 46) (torch.int64) cpu",
            "non_tensor_batch",
            "  raw_prompts: ndarray(3,) (object)",
            "  raw_responses: ndarray(3,) (object)",
            "  rewards: ndarray(3,) (float32)",
            "meta_info",
            "  dataset_name: str",
            "  batch_size: int",
            "  max_length: int",
        ]
    )


def test_three_samples_for_four_workers(batch: DataProto) -> None:
    padded, pad_size = pad_dataproto_to_divisor(batch, 4)
    assert (len(padded), pad_size) == (4, 1)
    chunks = padded.chunk(chunks=4)
    assert [chunk.batch["prompts"].shape for chunk in chunks] == [(1, 29)] * 4
    assert [chunk.non_tensor_batch["raw_prompts"][0] for chunk in chunks] == [*PROMPTS, PROMPTS[0]]
    answers = unpad_dataproto(DataProto.concat(chunks), pad_size)
    assert answers.non_tensor_batch["raw_responses"].tolist() == RESPONSES


def test_three_samples_for_four_workers_without_padding(batch: DataProto) -> None:
    chunks = batch.chunk(chunks=4)
    assert [len(chunk) for chunk in chunks] == [1, 1, 1, 0]
    assert chunks[3].batch["prompts"].shape == (0, 29)
    assert DataProto.concat(chunks).non_tensor_batch["raw_prompts"].tolist() == PROMPTS


def test_250_samples_for_four_workers() -> None:
    data = DataProto.from_dict({"x": torch.arange(250)})
    padded, pad_size = pad_dataproto_to_divisor(data, 4)
    assert (len(padded), pad_size, [len(chunk) for chunk in padded.chunk(4)]) == (252, 2, [63] * 4)
    assert [len(chunk) for chunk in data.chunk(4)] == [63, 63, 62, 62]
