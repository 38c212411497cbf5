# SPDX-License-Identifier: Apache-2.0
"""A tokenizer whose chat template knows tools, prompts for it, and an engine that remembers what it was asked."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quadriga.config.rollout import RolloutConfig
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.rollout import Completion, SamplingParams, ScriptedEngine
from quadriga.rollout.agent_loop import AgentLoopManager

SPECIAL = ["<pad>", "<|im_end|>", "<|im_start|>", "<|observation|>", "<|call|>", "<|message|>"]
CHARACTERS = [chr(code) for code in range(32, 127)]
# Three merges, so that text can be tokenized in another way than the model wrote it.
MERGES = [("t", "o"), ("o", "l"), ("4", "2")]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of characters with three merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        token: number for number, token in enumerate([*SPECIAL, *letters, *map("".join, MERGES)])
    }
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Recorder(ScriptedEngine):
    """A scripted engine that remembers what it was asked and what it said."""

    def __init__(self, responses: Any, **options: Any) -> None:
        super().__init__(responses, **options)
        self.seen: list[tuple[list[int], list[int], SamplingParams]] = []

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        images: Any = None,
    ) -> list[Completion]:
        completions = super().generate_batch(prompts, sampling)
        for prompt, completion, params in zip(prompts, completions, sampling, strict=True):
            self.seen.append((list(prompt), completion.token_ids, params))
        # Log-probabilities that are not 0, so that a test can see where they stand.
        return [
            Completion(
                one.token_ids, [-1.0] * len(one.token_ids), one.finish_reason, one.weight_version
            )
            for one in completions
        ]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A fresh tokenizer, whose template a test may change."""
    return build_tokenizer()


@pytest.fixture
def recorder(tokenizer: PreTrainedTokenizerFast) -> Callable[..., Recorder]:
    """`recorder(answers)`: see `ScriptedEngine`."""
    return lambda answers: Recorder(answers, tokenizer=tokenizer)


@pytest.fixture
def make_prompts(tokenizer: PreTrainedTokenizerFast) -> Callable[..., DataProto]:
    """`make_prompts(texts, length=200, **columns)`: a batch of prompts, a row for each text."""

    def make(
        texts: list[str], length: int = 200, meta_info: dict[str, Any] | None = None, **columns: Any
    ) -> DataProto:
        chats = [[{"role": "user", "content": text}] for text in texts]
        ids = [
            tokenizer(
                tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
                add_special_tokens=False,
            )["input_ids"]
            for chat in chats
        ]
        input_ids = torch.tensor(
            [[tokenizer.pad_token_id] * (length - len(one)) + one for one in ids]
        )
        mask = torch.tensor([[0] * (length - len(one)) + [1] * len(one) for one in ids])
        non_tensors = {
            "uid": object_array(f"u{row}" for row in range(len(texts))),
            "raw_prompt": object_array(chats),
            **{name: object_array(values) for name, values in columns.items()},
        }
        tensors = {
            "input_ids": input_ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        }
        return DataProto.from_dict(
            tensors=tensors, non_tensors=non_tensors, meta_info=meta_info or {}
        )

    return make


@pytest.fixture
def converse(tokenizer: PreTrainedTokenizerFast) -> Callable[..., DataProto]:
    """`converse(engine, prompts, turns={...}, **rollout)`: conversations of at most 1000 + 400 tokens."""

    def run(
        engine: Any,
        prompts: DataProto,
        turns: dict[str, Any] | None = None,
        grade: Any = None,
        **rollout: Any,
    ) -> DataProto:
        lengths = {
            "prompt_length": rollout.pop("prompt_length", 1000),
            "response_length": rollout.pop("T", 400),
        }
        if turns is not None:
            rollout = {"agent": {"default_agent_loop": "tool_agent"}, "mode": "async", **rollout}
            rollout["multi_turn"] = {"enable": True, **turns}
        config = RolloutConfig.model_validate(rollout)
        manager = AgentLoopManager(config, tokenizer, **lengths)
        try:
            return manager.generate(engine, prompts, seed=1, grade=grade)
        finally:
            manager.close()

    return run


@pytest.fixture
def tool_file(tmp_path) -> Callable[[str], str]:
    """`tool_file(text)`: a Python file in which `function_tool`, `Tool`, ... are known."""

    def write(text: str, name: str = "my_tools.py") -> str:
        path = tmp_path / name
        path.write_text(
            "import asyncio, time\nfrom quadriga.rollout.agent_loop import *\n\n\n" + text
        )
        return str(path)

    return write
