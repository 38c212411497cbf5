# SPDX-License-Identifier: Apache-2.0
"""A tokenizer, a model, data and configurations so small that every recipe runs on them in seconds.

DIR/
  model/               a character-level tokenizer, and a Qwen2 model of 0.6 M parameters with random weights
  data/                rows of supervised learning, of rewards, and pairs, of the two tasks of playground_tasks.py
  sft.yaml             supervised training on mixed habits
  sums.yaml            GRPO on sums
  largest.yaml         GRPO on the largest of three digits
  reward_model.yaml    a reward model from pairs
  over/                what the recipes need here, to be laid over sums.yaml (playground_configs.py)
  runs/                what these write
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
from quadriga_recipes.playground_configs import configurations
from quadriga_recipes.playground_tasks import TASKS, mixed_habits, preference_pairs
from quadriga_recipes.rows import Problem, write_rows

_WHERE = "prepare playground"
_ROLES = ("system", "user", "assistant", "tool")
SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>", *(f"<{role}>" for role in _ROLES))
CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
NUM_SFT_ROWS = 10_240
"""Of each task; an epoch of `sft.yaml` is all of them, once."""


def prepare_playground(output_dir: Path, *, seed: int = 0) -> dict[str, Path]:
    """Write the playground, and return what it is made of by name.

    Args:
        output_dir: is created if need be; what an earlier call wrote there is written again, `runs` are left alone.
        seed: of the model's weights and of the habits that are drawn.

    Raises:
        DataError: something cannot be written.
    """
    folder = make_directory(Path(output_dir).expanduser(), where=_WHERE)
    parts = {"model": write_model(folder / "model", seed)} | _write_data(folder / "data", seed)
    make_directory(folder / "over", where=_WHERE)
    for name, tree in configurations(folder).items():
        parts[name] = folder / name
        with written_aside(parts[name], where=_WHERE) as draft:
            draft.write_text(
                f"# SPDX-License-Identifier: Apache-2.0\n{to_yaml(tree)}", encoding="utf-8"
            )
    return parts


def build_tokenizer() -> Qwen2Tokenizer:
    """One token for each byte, so for each ASCII character, and a template in which turns are only added.

    It is the tokenizer of Qwen2 without its merges: transformers loads no other one for a model of this type.
    """
    vocabulary = {
        token: number for number, token in enumerate((*SPECIAL, *sorted(ByteLevel.alphabet())))
    }
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
    """A Qwen2 model with 3 layers of 128: about 0.6 M parameters, float32."""
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
    """The tokenizer and the untrained model as an ordinary folder."""
    tokenizer = build_tokenizer()
    with written_aside(folder, where=_WHERE) as draft:
        make_directory(draft, where=_WHERE)
        build_model(tokenizer, seed).save_pretrained(draft)
        tokenizer.save_pretrained(draft)
    return folder


def _write_data(folder: Path, seed: int) -> dict[str, Path]:
    random = Random(seed)
    chats = [pair for task in TASKS for pair in mixed_habits(task, NUM_SFT_ROWS, random)]
    rows = [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
        for question, answer in chats
    ]
    files = {"data, supervised": _write_table(folder / "sft.parquet", rows)}
    pairs: tuple[list[Any], list[Any]] = ([], [])
    for task in TASKS:
        for split, numbers in zip(("train", "val"), task.split(), strict=True):
            problems = [Problem(task.text(number), task.answers(number)[0]) for number in numbers]
            files[f"data, {task.name} {split}"] = write_rows(
                problems,
                folder / f"{task.name}_{split}.parquet",
                data_source=task.data_source,
                ability="digits",
                split=split,
            )
        for kept, new in zip(pairs, preference_pairs(task), strict=True):
            kept.extend(new)
    for split, listed in zip(("train", "val"), pairs, strict=True):
        files[f"data, pairs {split}"] = _write_table(folder / f"pairs_{split}.parquet", listed)
    return files


def _write_table(target: Path, rows: list[dict[str, Any]]) -> Path:
    with written_aside(target, where=_WHERE) as draft:
        pq.write_table(pa.Table.from_pylist(rows), draft)
    return target
