# SPDX-License-Identifier: Apache-2.0
"""Weights as transformers writes them, read as its modules have them, and back."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quadriga.models.flops import model_cost
from quadriga.models.load import load_causal_lm, skeleton_causal_lm
from quadriga.models.weight_files import WeightFiles, open_weights
from quadriga.models.weight_names import ConvertedFiles, weight_buffers
from tests.moe import CONFIGS, moe_model


class Held:
    """Tensors in memory, as files."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors, self.shapes = (
            tensors,
            {name: tensor.shape for name, tensor in tensors.items()},
        )

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def _require_equal(files: WeightFiles, expected: dict[str, torch.Tensor]) -> None:
    assert set(files.shapes) == set(expected)
    for name, tensor in expected.items():
        assert files.shapes[name] == tensor.shape, name
        assert torch.equal(files.read(name), tensor), name


@pytest.mark.parametrize("family", CONFIGS)
def test_experts_there_and_back(tmp_path: Path, family: str) -> None:
    """Bit for bit: what `save_pretrained` has written, and what is written of the module's weights."""
    model = moe_model(family)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    if family != "gpt_oss":
        assert any(".experts.0." in name for name in written), (
            "the files have a matrix for each expert"
        )
    skeleton = skeleton_causal_lm(tmp_path)
    own = model.state_dict()
    _require_equal(ConvertedFiles(open_weights(tmp_path), skeleton), own)
    _require_equal(ConvertedFiles(Held(own), skeleton, to_files=True), written)
    # A checkpoint has the module's own names and shapes.
    _require_equal(ConvertedFiles(Held(own), skeleton), own)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_what_a_router_adds_to_its_scores(tmp_path: Path, family: str) -> None:
    """It is a buffer, belongs to the weights, and stays float32; the others, as those of rotary positions, do not."""
    model = moe_model(family)
    model.save_pretrained(tmp_path)
    found = weight_buffers(model)
    assert sorted(found) == [
        f"model.layers.{number}.mlp.gate.e_score_correction_bias" for number in (1, 2)
    ]
    loaded = weight_buffers(load_causal_lm(tmp_path, dtype=torch.bfloat16))
    for name, buffer in found.items():
        assert torch.equal(loaded[name], buffer) and loaded[name].dtype == torch.float32, name


def test_the_cost_of_experts() -> None:
    """A token goes through the router and two of four experts, in each of three layers."""
    cost, rest = (model_cost(moe_model(family)) for family in ("mixtral", "gpt_oss"))
    attention, experts = 2 * 32 * 4 * 16 + 2 * 32 * 2 * 16, 2 * 3 * 32 * 40
    assert cost.num_block_parameters == 3 * (attention + 4 * 32 + experts)
    assert rest.num_block_parameters == cost.num_block_parameters
