# SPDX-License-Identifier: Apache-2.0
"""A task for a tiny model with a tool: add two numbers, by guessing or by asking a calculator."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.e2e.conftest import build_config, build_word_tokenizer

ROLES = ["<user>", "<assistant>", "<tool>"]
TAGS = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
WORDS = [*"0123456789+ab", "add"]
NUM_PROMPT_TOKENS = 6
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if tools %}{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS = '''
from quadriga.rollout.agent_loop import function_tool


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
'''
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Whether the answer, behind the last call, is the sum."""
    return float(solution_str.replace(" ", "").rpartition("<tool>")[2].rpartition("<assistant>")[2] == ground_truth)
'''


def tool_call(a: int, b: int) -> str:
    """The model's turn that asks for a sum."""
    arguments = {"a": a, "b": b}.items()
    pairs = [f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in arguments]
    return f"<tool_call>add{''.join(pairs)}</tool_call><eos>"


def sum_row(a: int, b: int) -> dict[str, Any]:
    """A prompt that asks for a sum."""
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{a}+{b}"}],
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"index": 10 * a + b},
    }


def _train_habits(tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM) -> None:
    """Teach how a call is written; the model then makes one in less than half of the cases."""
    draw = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(250):
        texts = []
        for number in range(32):
            a, b = draw.randrange(10), draw.randrange(10)
            with_call = f"{tool_call(a, b)}<tool>{a + b}<assistant>{a + b}<eos>"
            guess = f"{draw.randrange(19)}<eos>" if number >= 24 else ""
            texts.append(f"<user>{a}+{b}add<assistant>{guess or with_call}")
        batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, :NUM_PROMPT_TOKENS] = -100
        # The first token decides for the tool: most calls do not train it.
        labels[:18, NUM_PROMPT_TOKENS] = -100
        model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels
        ).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def write_calculator(folder: Path) -> None:
    """Write a model that has a tool, sums to do, the tool and the reward function."""
    torch.manual_seed(0)
    tokenizer = build_word_tokenizer([*ROLES, *TAGS, *WORDS], "add|<[a-z_/]+>|.", TEMPLATE)
    sizes = {"intermediate_size": 128, "num_key_value_heads": 4, "max_position_embeddings": 128}
    model = LlamaForCausalLM(build_config(tokenizer, **sizes))
    _train_habits(tokenizer, model)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [sum_row(a, b) for a in range(10) for b in range(10)]
    for name, chosen in (("train", rows), ("val", rows[::7])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    (folder / "tools.py").write_text(TOOLS)
    (folder / "reward.py").write_text(REWARD)


def calculator_overrides(folder: Path) -> tuple[str, ...]:
    """Overrides of a run of the tool agent in a folder of `write_calculator`."""
    rollout = "actor_rollout_ref.rollout"
    return (
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'val.jsonl'}",
        "data.return_raw_chat=True",
        "data.train_batch_size=8",
        "data.max_prompt_length=12",
        "data.max_response_length=32",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"custom_reward_function.path={folder / 'reward.py'}",
        f"{rollout}.mode=async",
        f"{rollout}.n=8",
        f"{rollout}.agent.default_agent_loop=tool_agent",
        f"{rollout}.multi_turn.enable=True",
        f"{rollout}.multi_turn.format=glm",
        f"{rollout}.multi_turn.function_tool_path={folder / 'tools.py'}",
        f"{rollout}.multi_turn.max_tool_response_length=8",
        f"{rollout}.multi_turn.max_assistant_turns=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
    )
