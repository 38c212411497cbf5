# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of a few dozen words and files of a few rows: enough to see every path of the data layer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quadriga.config import DataConfig

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% if shout is defined %}! {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ["<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>", "!", *(f"w{i}" for i in range(40))]


def build_tokenizer(*, pad: str | None = "<pad>", eos: str | None = "<eos>", template: str | None = TEMPLATE):
    """A word-level tokenizer: the prompt "w1 w2" becomes <user> w1 w2 <assistant>, four tokens."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {name: token for name, token in (("pad_token", pad), ("eos_token", eos)) if token is not None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **special)
    tokenizer.chat_template = template
    return tokenizer


def make_row(num_words: int = 2, index: int | None = 0, **changes: Any) -> dict[str, Any]:
    """A row whose rendered prompt has `num_words` + 2 tokens; its first word tells rows apart."""
    words = " ".join(f"w{((index or 0) + i) % 40}" for i in range(num_words))
    row = {
        "data_source": "exact_match",
        "prompt": [{"role": "user", "content": words}],
        "ability": "words",
        "reward_model": {"style": "rule", "ground_truth": "w1"},
        "extra_info": {"split": "train", "index": index},
    }
    return row | changes


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return build_tokenizer


@pytest.fixture
def row() -> Callable[..., dict[str, Any]]:
    return make_row


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., DataConfig]:
    """A section `data` with a cache of its own."""
    return lambda **values: DataConfig(**({"max_prompt_length": 8, "cache_dir": str(tmp_path / "cache")} | values))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write rows to a file in the format of its suffix."""

    def write_file(name: str, rows: list[dict[str, Any]]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows))
        else:
            path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        return path

    return write_file
