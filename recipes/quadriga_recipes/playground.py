# SPDX-License-Identifier: Apache-2.0
"""A tokenizer, a model, data and configurations on which every recipe runs in seconds.

DIR/
  model/               a character-level tokenizer, and a Qwen2 model of 0.6 M parameters with
                       random weights
  data/                rows for supervised training and for rewards, and preference pairs, of the
                       two tasks of playground_tasks.py
  sft.yaml             supervised training on mixed habits
  sums.yaml            GRPO on sums
  largest.yaml         GRPO on the largest of three digits
  reward_model.yaml    a reward model from pairs
  over/                changes to sums.yaml for recipes (playground_configs.py)
  runs/                what the runs write
"""

from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from quadriga.config.yaml_text import to_yaml
from quadriga.data.files import make_directory, written_aside
from quadriga_recipes.playground_configs import build_configurations
from quadriga_recipes.playground_tasks import TASKS, mixed_habits, preference_pairs
from quadriga_recipes.rows import Problem, write_rows

_WHERE = "prepare playground"
_ROLES = ("system", "user", "assistant", "tool")
SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>", *(f"<{role}>" for role in _ROLES))
CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
NUM_SFT_ROWS = 10_240
"""Rows of each task for supervised training. `sft.yaml` trains for one epoch."""


def prepare_playground(output_dir: Path, *, seed: int = 0) -> dict[str, Path]:
    """Write the playground.

    Args:
        output_dir: folder, created if it does not exist. Files of an earlier call are overwritten,
            except for `runs`.
        seed: seed of the model's weights and of the drawn habits.

    Returns:
        The written files and folders, by a description to print.

    Raises:
        DataError: a file cannot be written.
    """
    folder = make_directory(Path(output_dir).expanduser(), where=_WHERE)
    parts = {"model": write_model(folder / "model", seed)} | _write_data(folder / "data", seed)
    make_directory(folder / "over", where=_WHERE)
    for name, tree in build_configurations(folder).items():
        parts[name] = folder / name
        text = f"# SPDX-License-Identifier: Apache-2.0\n{to_yaml(tree)}"
        with written_aside(parts[name], where=_WHERE) as draft:
            draft.write_text(text, encoding="utf-8")
    return parts


def build_tokenizer() -> Qwen2Tokenizer:
    """Build a tokenizer with one token per byte, and a chat template that only appends turns.

    It is Qwen2's tokenizer without merges, because for a Qwen2 model transformers loads only this
    type of tokenizer.
    """
    tokens = (*SPECIAL, *sorted(ByteLevel.alphabet()))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=256,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<{role}>" for role in _ROLES]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    """Build a Qwen2 model with 3 layers of width 128: about 0.6 M parameters, float32.

    Args:
        tokenizer: tokenizer of the model.
        seed: seed of the weights.

    Returns:
        The untrained model.
    """
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def write_model(folder: Path, seed: int) -> Path:
    """Write the tokenizer and the untrained model.

    Args:
        folder: Hugging Face folder to write.
        seed: seed of the weights.

    Returns:
        The folder.
    """
    tokenizer = build_tokenizer()
    with written_aside(folder, where=_WHERE) as draft:
        make_directory(draft, where=_WHERE)
        build_model(tokenizer, seed).save_pretrained(draft)
        tokenizer.save_pretrained(draft)
    return folder


def _write_data(folder: Path, seed: int) -> dict[str, Path]:
    """Write the data of all tasks.

    Args:
        folder: the folder to write.
        seed: seed of the habits in the supervised data.

    Returns:
        The files, by a description.
    """
    random = Random(seed)
    chats = []
    for task in TASKS:
        for question, answer in mixed_habits(task, NUM_SFT_ROWS, random):
            user = {"role": "user", "content": question}
            assistant = {"role": "assistant", "content": answer}
            chats.append({"messages": [user, assistant]})
    files = {"data, supervised": _write_table(folder / "sft.parquet", chats)}

    splits = ("train", "val")
    pairs: dict[str, list[dict[str, str]]] = {split: [] for split in splits}
    for task in TASKS:
        for split, numbers in zip(splits, task.split(), strict=True):
            problems = [Problem(task.text(number), task.answers(number)[0]) for number in numbers]
            files[f"data, {task.name} {split}"] = write_rows(
                problems,
                folder / f"{task.name}_{split}.parquet",
                data_source=task.data_source,
                ability="digits",
                split=split,
            )
        for split, task_pairs in zip(splits, preference_pairs(task), strict=True):
            pairs[split] += task_pairs
    # Pairs of all tasks are in one file, for one reward model.
    for split, rows in pairs.items():
        files[f"data, pairs {split}"] = _write_table(folder / f"pairs_{split}.parquet", rows)
    return files


def _write_table(target: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a parquet file, whole or not at all."""
    with written_aside(target, where=_WHERE) as draft:
        pq.write_table(pa.Table.from_pylist(rows), draft)
    return target
