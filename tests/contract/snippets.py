# SPDX-License-Identifier: Apache-2.0
"""What the calls of `test_specification.py` need, and the list of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quadriga.config import DataConfig

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
WORDS = ["<pad>", "<eos>", "<unk>", "<user>", *(f"w{number}" for number in range(20))]
SNIPPETS: list[Callable[..., None]] = []


def snippet(function: Callable[..., None]) -> Callable[..., None]:
    """One group of calls."""
    SNIPPETS.append(function)
    return function


class Place:
    """What the calls need: a tokenizer, a file of rows, and the section `data`."""

    def __init__(self, folder: Path) -> None:
        backend = Tokenizer(
            models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
        )
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)
        self.tokenizer.chat_template = TEMPLATE
        self.folder, self.file = folder, str(folder / "rows.jsonl")
        rows = [
            {
                "data_source": "exact_match",
                "prompt": [
                    {"role": "user", "content": " ".join(f"w{i}" for i in range(1, length + 1))}
                ],
                "reward_model": {"style": "rule", "ground_truth": "w1"},
                "extra_info": {"split": "train", "index": length},
            }
            for length in (1, 2, 3, 9)
        ]
        Path(self.file).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(self, **values: Any) -> DataConfig:
        given = {
            "max_prompt_length": 6,
            "filter_overlong_prompts": True,
            "cache_dir": str(self.folder / "cache"),
        }
        return DataConfig(**{**given, **values})

    def words(self, name: str) -> list[str]:
        """The words of a run of one step with a model of a few weights."""
        torch.manual_seed(0)
        sizes = {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
        LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **sizes, **tokens)).save_pretrained(
            self.folder / "model"
        )
        keys = [f"data.{key}_files={self.file}" for key in ("train", "val")] + [
            "data.train_batch_size=2"
        ]
        keys += [
            "data.max_prompt_length=6",
            "data.max_response_length=4",
            "data.filter_overlong_prompts=True",
        ]
        keys += [
            f"data.cache_dir={self.folder / 'cache'}",
            f"actor_rollout_ref.model.path={self.folder / 'model'}",
        ]
        keys += [
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.fsdp_config.model_dtype=float32",
        ]
        keys += [
            "critic.fsdp_config.model_dtype=float32",
            "trainer.device=cpu",
            "trainer.total_training_steps=1",
        ]
        return [
            *keys,
            "trainer.val_before_train=False",
            f"trainer.default_local_dir={self.folder / name}",
            "trainer.save_freq=-1",
        ]

    def batch(self) -> Any:
        """Two prompts of two responses each, the second of a group two tokens long."""
        from verl import DataProto

        masks = torch.tensor([[1, 1, 1], [1, 1, 0]] * 2)
        tensors = {
            "responses": torch.tensor([[4, 5, 1], [6, 1, 0]] * 2),
            "attention_mask": torch.cat([torch.ones(4, 2, dtype=torch.int64), masks], dim=1),
            "old_log_probs": torch.full((4, 3), -1.0),
            "ref_log_prob": torch.full((4, 3), -1.5),
            "token_level_scores": torch.tensor([[0.0, 0, 1], [0, 0, 0]] * 2),
            "values": torch.zeros(4, 3),
        }
        uids = np.array(["a", "a", "b", "b"], dtype=object)
        return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})
