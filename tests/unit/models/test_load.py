# SPDX-License-Identifier: Apache-2.0
"""Loading a causal model: what is checked, what is made of it."""

import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from quadriga.errors import EngineError
from quadriga.models.architecture import backbone, head_of
from quadriga.models.load import (
    explain_load_errors,
    load_causal_lm,
    load_config,
    skeleton_causal_lm,
    stop_token_ids,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=31,
        tie_word_embeddings=True,
        eos_token_id=3,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def test_a_tied_model_is_complete_and_fused(folder: Path) -> None:
    model = load_causal_lm(folder, dtype=torch.float32)
    assert head_of(model).weight is backbone(model).embed_tokens.weight
    assert not model.training
    plain = LlamaForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[1, 2, 3, 4]])
    sdpa = load_causal_lm(folder, dtype=torch.float32, attention="sdpa")
    torch.testing.assert_close(
        sdpa(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("is_equal", [False, True])
def test_a_config_that_says_tied_follows_the_weights(folder: Path, is_equal: bool) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(
        {**tensors, "lm_head.weight": head if is_equal else head + 1},
        file,
        metadata={"format": "pt"},
    )
    model = load_causal_lm(folder, dtype=torch.float32)
    for loaded in (model, skeleton_causal_lm(folder)):
        assert loaded.config.tie_word_embeddings is is_equal
        assert (head_of(loaded).weight is backbone(loaded).embed_tokens.weight) is is_equal
    model.save_pretrained(folder / "saved")
    assert load_config(folder / "saved").tie_word_embeddings is is_equal
    assert ("lm_head.weight" in load_file(folder / "saved" / "model.safetensors")) is not is_equal


def test_a_pickle_that_names_code_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(re.compile))
    with pytest.raises(EngineError, match=str(folder)):
        load_causal_lm(folder, dtype=torch.float32)


def test_missing_weights_are_refused_not_made_up(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        EngineError,
        match=r"no weights for 1 parameters, first model\.layers\.1\.mlp\.up_proj\.weight",
    ):
        load_causal_lm(folder, dtype=torch.float32)


def test_weights_of_another_shape_are_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file(
        {**load_file(file), "model.norm.weight": torch.zeros(8)}, file, metadata={"format": "pt"}
    )
    with pytest.raises(
        EngineError, match=r"first model\.norm\.weight.* \[8\].* \[16\] in the model"
    ):
        load_causal_lm(folder, dtype=torch.float32)


def test_a_broken_generation_config_is_no_silent_loss_of_its_stop_tokens(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(EngineError, match="generation_config"):
        load_causal_lm(folder, dtype=torch.float32)


def test_a_file_that_was_cut_is_named(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(EngineError, match=re.escape(f"got {file}, SafetensorError")):
        load_causal_lm(folder, dtype=torch.float32)


def test_what_is_no_model_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="Check actor_rollout_ref.model.path"):  # noqa: RUF043
        load_causal_lm(tmp_path, dtype=torch.float32)


def test_an_error_without_a_message_is_named(folder: Path) -> None:
    with pytest.raises(EngineError, match="got OSError"), explain_load_errors(folder):
        raise OSError


def test_stop_tokens_are_those_of_model_and_tokenizer(folder: Path) -> None:
    GenerationConfig(eos_token_id=[3, 7]).save_pretrained(folder)
    model = load_causal_lm(folder, dtype=torch.float32)
    assert stop_token_ids(model, 7) == (3, 7)
    assert stop_token_ids(model, 9) == (3, 7, 9)
    assert stop_token_ids(model, None) == (3, 7)
