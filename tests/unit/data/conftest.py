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
from quadriga.data import RLHFDataset, VisionProcessor, load_processor
from tests.vision_folder import FAMILIES, tiny_tokenizer, write_vision_folder

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% if shout is defined %}! {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = [
    "<pad>",
    "<eos>",
    "<unk>",
    "<system>",
    "<user>",
    "<assistant>",
    "!",
    *(f"w{i}" for i in range(40)),
]


def build_tokenizer(
    *, pad: str | None = "<pad>", eos: str | None = "<eos>", template: str | None = TEMPLATE
):
    """A word-level tokenizer: the prompt "w1 w2" becomes <user> w1 w2 <assistant>, four tokens."""
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {
        name: token for name, token in (("pad_token", pad), ("eos_token", eos)) if token is not None
    }
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


@pytest.fixture(scope="session")
def processors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VisionProcessor]:
    """Of a tiny vision-language model of each family."""
    folder = tmp_path_factory.mktemp("models")
    return {
        family: load_processor(write_vision_folder(folder / family, family)) for family in FAMILIES
    }


@pytest.fixture
def shown(
    write: Callable[..., str],
    config: Callable[..., DataConfig],
    processors: dict[str, VisionProcessor],
) -> Callable[..., RLHFDataset]:
    """A data set of rows with images and videos; of a language model where `family` is None."""

    def make(
        *rows: dict[str, Any], name: str, family: str | None = "qwen2_5_vl", **values: Any
    ) -> RLHFDataset:
        facts = {
            "data_source": "exact_match",
            "reward_model": {"style": "rule", "ground_truth": "red"},
        }
        path, processor = (
            write(name, [facts | row for row in rows]),
            None if family is None else processors[family],
        )
        return RLHFDataset(
            path, tiny_tokenizer(family or "qwen2_5_vl"), config(**values), processor
        )

    return make


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
    return lambda **values: DataConfig(
        **({"max_prompt_length": 8, "cache_dir": str(tmp_path / "cache")} | values)
    )


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
