# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in several processes are those in one, over gloo: what is loaded, saved, and learned.

What none of this proves: the same on NCCL.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.moe import CONFIGS, moe_model
from tests.numerics.expert_layouts import CASES, LEARNED
from tests.numerics.launching import run_ranks

PROGRAM = Path(__file__).with_name("expert_layouts.py")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each family as transformers saves it, and what was made of it."""
    folder = tmp_path_factory.mktemp("expert_layouts")
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    )
    for family in CONFIGS:
        moe_model(family).save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
    run_ranks(PROGRAM, 4, folder, num_ports=2)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "1.pt") | torch.load(folder / "2.pt") | torch.load(folder / "4.pt")


@pytest.mark.parametrize(("family", "layout"), [case for cases in CASES.values() for case in cases])
def test_what_is_loaded_and_saved(
    folder: Path, results: dict[str, Any], family: str, layout: str
) -> None:
    """Bit for bit: the weights of `save_pretrained`, also out of a checkpoint; and the same files in `huggingface`."""
    own, found = moe_model(family).state_dict(), results[f"{family}, {layout}"]
    for kind in ("loaded", "resumed"):
        assert set(found[kind]) == set(own)
        for name, tensor in own.items():
            assert torch.equal(found[kind][name], tensor), f"{kind}: {name}"
    place = folder / f"{family}, {layout}" / "huggingface"
    written = {
        name: tensor
        for file in place.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    expected = load_file(folder / family / "model.safetensors")
    assert set(written) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(written[name], tensor), name
    _, info = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.parametrize(
    ("family", "layout"), [case for case in LEARNED if case[1] != "one process"]
)
def test_several_processes_are_one(results: dict[str, Any], family: str, layout: str) -> None:
    """Weights after four steps, with experts that are told and losses of the router; the routers learn, and what they
    add to their scores does not."""
    got, expected = (results[f"{family}, {name}"]["learned"] for name in (layout, "one process"))
    for name, tensor in expected.items():
        assert (got[name] - tensor).abs().max() <= TOLERANCE * tensor.abs().max(), name
        is_moved = not torch.equal(tensor, results[f"{family}, one process"]["loaded"][name])
        assert is_moved == (not name.endswith("e_score_correction_bias")), name
    said, alone = (results[f"{family}, {name}"]["said"] for name in (layout, "one process"))
    assert said == pytest.approx(alone, abs=1e-4) and len(said) == (
        7 if family == "qwen3_moe" else 6
    )
    if "pp" not in layout:
        rows, routes = results[f"{family}, {layout}"]["routes"]
        assert torch.equal(routes, results[f"{family}, one process"]["routes"][1][rows])
