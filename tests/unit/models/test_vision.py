# SPDX-License-Identifier: Apache-2.0
"""Vision-language models: how they are loaded, what their weights are called, what an image costs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from quadriga.models.architecture import backbone, head_of
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.flops import model_cost
from quadriga.models.fused import fuse
from quadriga.models.load import load_causal_lm, skeleton_causal_lm
from quadriga.models.vision import ImageTokens, VisionEncoderCost, vision_encoder
from quadriga.models.weight_files import SafetensorFiles
from quadriga.models.weight_names import ConvertedFiles
from quadriga.protocol.memory import images_key
from tests.tiny_vision import (
    FAMILIES,
    IMAGE,
    MIXTURE,
    image_tokens,
    joined,
    random_image,
    save_vision_model,
    vision_model,
)
from tests.vision_folder import VIDEO


@pytest.fixture(params=[*FAMILIES, MIXTURE])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny model of each family as transformers saves it."""
    save_vision_model(tmp_path, request.param)
    return tmp_path


def test_a_loaded_model_is_that_of_transformers(folder: Path) -> None:
    """In transformers' own attention it says what transformers' says; in ours the vision encoder keeps torch's."""
    image = random_image(torch.Generator().manual_seed(0), 4, 6)
    ids = torch.tensor([[*image_tokens(image), 9, 10]])
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(), **image}
    plain = AutoModelForImageTextToText.from_pretrained(folder)
    ours = load_causal_lm(folder, dtype=torch.float32, attention="sdpa")
    with torch.no_grad():
        torch.testing.assert_close(
            ours(**inputs).logits, plain(**inputs).logits, atol=1e-5, rtol=1e-5
        )
    model = load_causal_lm(folder, dtype=torch.float32)
    assert model.config.get_text_config()._attn_implementation == ATTENTION_NAME
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert head_of(model).weight is backbone(model).embed_tokens.weight
    assert fuse(model)["norms"] >= 5


def test_a_skeleton_has_the_names_and_no_values(folder: Path) -> None:
    skeleton, model = skeleton_causal_lm(folder), load_causal_lm(folder, dtype=torch.float32)
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    assert [name for name, _ in skeleton.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    for (name, buffer), (_, other) in zip(
        skeleton.named_buffers(), model.named_buffers(), strict=True
    ):
        assert torch.equal(buffer, other), name


def test_names_in_files(folder: Path) -> None:
    """There and back, as `save_pretrained` writes them; a parameter's own name is one that files may have, too."""
    model = load_causal_lm(folder, dtype=torch.float32)
    files = SafetensorFiles([folder / "model.safetensors"])
    names = {name for name, _ in model.named_parameters()}
    own = ConvertedFiles(files, model)
    assert set(own.shapes) == names
    assert set(ConvertedFiles(own, model).shapes) == names
    assert set(ConvertedFiles(own, model, to_files=True).shapes) == set(files.shapes)


def test_the_key_of_images() -> None:
    """Equal numbers in another shape, and other numbers in the same shape, are other images."""
    generator = torch.Generator().manual_seed(0)
    image, other = random_image(generator, 4, 4), random_image(generator, 4, 4)
    assert images_key(image) == images_key({name: tensor.clone() for name, tensor in image.items()})
    wide = image | {"image_grid_thw": torch.tensor([[1, 2, 8]])}
    assert len({images_key(one) for one in (image, other, wide, joined(image, other))}) == 4


def test_the_tokens_of_images() -> None:
    tokens = ImageTokens.of(vision_model().config)
    assert tokens is not None and tokens.token_ids == (IMAGE, VIDEO)
    grids = {
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
        "video_grid_thw": torch.tensor([[3, 2, 2]]),
    }
    assert tokens.count(grids) == 9
    row = np.array([VIDEO, IMAGE, VIDEO, *[IMAGE] * 6, 9, VIDEO, VIDEO])
    places, problem = tokens.locate(row, grids)
    assert places.tolist() == [1, 3, 4, 5, 6, 7, 0, 2, 10]
    assert (
        problem
        == "7 tokens with id 5 for 6 embeddings of images, 4 tokens with id 6 for 3 embeddings of videos"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cost_of_images(family: str) -> None:
    """What torch counts while the vision encoder runs, to one operation; with windows that are cut, and without."""
    model = vision_model(family=family)
    grids = torch.tensor([[1, 4, 6], [1, 10, 4], [1, 2, 2]])
    cost = VisionEncoderCost.of(model)
    assert cost is not None
    pixels = torch.randn(int(grids.prod(-1).sum()), 96)
    # Of the fused attention on a CPU the counter knows nothing.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.model.get_image_features(pixels, grids)
    assert cost.forward_flops(grids) == counter.get_total_flops()
    assert cost.update_flops(grids) == 3 * cost.forward_flops(grids)
    vision_encoder(model).requires_grad_(False)
    frozen = model_cost(model)
    assert frozen.vision_encoder is not None and frozen.vision_encoder.update_flops(
        grids
    ) == cost.forward_flops(grids)
    # The decoder's matrices are counted apart from the vision encoder's.
    linears = [
        one
        for name, one in model.named_modules()
        if isinstance(one, nn.Linear) and "language_model" in name
    ]
    assert frozen.num_block_parameters == sum(one.weight.numel() for one in linears)
