# SPDX-License-Identifier: Apache-2.0
"""A role's part of a checkpoint: which contents become which files, and what is read back."""

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quadriga.config.actor import HF_FOLDER
from quadriga.engines.process_group import ALONE
from quadriga.errors import CheckpointError
from quadriga.models.weight_files import open_weights
from quadriga.workers.checkpoint import RoleCheckpoint

MODEL_FILES = ["config.json", "generation_config.json", "tokenizer.json"]


class Engine:
    """A model with one moment per weight; notes what it is told was loaded."""

    world = ALONE

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=11,
        )
        self.model = LlamaForCausalLM(config)
        self.moments = {name: weight.detach() * 2 for name, weight in self.model.named_parameters()}
        self.loaded: list[frozenset[str]] = []

    def state(self, contents: frozenset[str]) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        if "model" in contents:
            state |= {
                f"model.{name}": weight.detach() for name, weight in self.model.named_parameters()
            }
        if "optimizer" in contents:
            state |= {f"optimizer.exp_avg.{name}": moment for name, moment in self.moments.items()}
        return state

    def awake(self, *kinds: str) -> AbstractContextManager[None]:
        return nullcontext()

    def apply_loaded_state(self, contents: frozenset[str]) -> None:
        self.loaded.append(contents)


class Tokenizer:
    """Writes one file, or fails as the tokenizers library does."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def save_pretrained(self, directory: Path) -> None:
        if self.error:
            raise self.error
        (directory / "tokenizer.json").write_text("{}")


def checkpoint_of(engine: Engine, tokenizer: Tokenizer | None = None) -> RoleCheckpoint:
    return RoleCheckpoint(engine, tokenizer or Tokenizer())


@pytest.mark.parametrize(
    ("contents", "folders", "with_model_files"),
    [
        ({"model", "optimizer", "extra"}, ["model", "optimizer"], [""]),
        ({"optimizer"}, ["optimizer"], []),
        ({"model", "hf_model"}, [HF_FOLDER, "model"], ["", HF_FOLDER]),
        ({"hf_model"}, [HF_FOLDER], [HF_FOLDER]),
        ({"extra"}, [], []),
    ],
)
def test_parts(
    contents: set[str], folders: list[str], with_model_files: list[str], tmp_path: Path
) -> None:
    """Distributed parts, the small files of a model, and a Hugging Face folder; no more than was asked for."""
    checkpoint = checkpoint_of(Engine())
    checkpoint.start(tmp_path / "actor", frozenset(contents))
    assert checkpoint.writer.is_written(wait=True)
    assert sorted(path.name for path in (tmp_path / "actor").iterdir() if path.is_dir()) == folders
    for place in ("", HF_FOLDER):
        found = [name for name in MODEL_FILES if (tmp_path / "actor" / place / name).is_file()]
        assert found == (MODEL_FILES if place in with_model_files else [])
    sizes = checkpoint.sizes(frozenset(contents))
    for folder in folders:
        files = (tmp_path / "actor" / folder).rglob("*")
        num_written = sum(path.stat().st_size for path in files if path.is_file())
        num_expected = sum(sizes[name] for name in sizes if name.startswith(f"{folder}/"))
        assert 0 < num_expected <= num_written


def test_hugging_face_folder_is_the_model(tmp_path: Path) -> None:
    """Transformers loads it alone, in float32 to the bit; so it does after the engine has trained on."""
    engine = Engine()
    expected = {name: weight.detach().clone() for name, weight in engine.model.named_parameters()}
    checkpoint = checkpoint_of(engine)
    checkpoint.start(tmp_path, frozenset({"hf_model"}))
    with torch.no_grad():
        for weight in engine.model.parameters():
            weight.zero_()
    assert checkpoint.writer.is_written(wait=True)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / HF_FOLDER)
    assert loaded.dtype == torch.float32
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, expected[name]), name
    assert json.loads((tmp_path / HF_FOLDER / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    """Only the parts that are asked for; the engine is told which."""
    written, engine = Engine(), Engine(seed=1)
    checkpoint = checkpoint_of(written)
    checkpoint.start(tmp_path, frozenset({"model", "optimizer"}))
    assert checkpoint.writer.is_written(wait=True)
    before = {name: moment.clone() for name, moment in engine.moments.items()}
    checkpoint_of(engine).load(tmp_path, frozenset({"model", "extra"}))
    assert all(
        torch.equal(*pair)
        for pair in zip(engine.model.parameters(), written.model.parameters(), strict=True)
    )
    assert all(torch.equal(engine.moments[name], before[name]) for name in before)
    checkpoint_of(engine).load(tmp_path, frozenset({"optimizer"}))
    assert all(torch.equal(engine.moments[name], written.moments[name]) for name in before)
    assert engine.loaded == [{"model"}, {"optimizer"}]
    assert sorted(open_weights(tmp_path).shapes) == sorted(before)


def test_part_that_is_not_there(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(Engine())
    checkpoint.start(tmp_path, frozenset({"model"}))
    assert checkpoint.writer.is_written(wait=True)
    with pytest.raises(
        CheckpointError, match=r"optimizer: got no such part of the checkpoint.*load_contents"
    ):
        checkpoint.load(tmp_path, frozenset({"model", "optimizer"}))


def test_failed_save_is_one_error(tmp_path: Path) -> None:
    """The tokenizers library raises a bare Exception when the disk is full."""
    checkpoint = checkpoint_of(Engine(), Tokenizer(Exception("No space left")))
    with pytest.raises(CheckpointError, match="Exception: No space left"):
        checkpoint.start(tmp_path, frozenset({"model"}))
