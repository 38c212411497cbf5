# SPDX-License-Identifier: Apache-2.0
"""Random models that see, of a hundred thousand weights, and images for them as their processors would cut them."""

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
)

from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.vision import attention_of

PAD, EOS, START, END, IMAGE, VIDEO = 0, 1, 3, 4, 5, 6
VOCABULARY = 64
_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "window_size": 16,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}
_CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "qwen2_vl": Qwen2VLConfig,
    "qwen2_5_vl": Qwen2_5_VLConfig,
    "qwen3_vl": Qwen3VLConfig,
}
FAMILIES = tuple(_CONFIGS)


def vision_config(family: str = "qwen2_5_vl", *, vocabulary: int = VOCABULARY, **text: Any) -> PreTrainedConfig:
    """Of a tiny model: images in patches of 4 by 4 pixels, of which 2 by 2 make an embedding.

    Args:
        family: one of `FAMILIES`.
        vocabulary: tokens.
        text: changes to the decoder's configuration.
    """
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": True,
    }
    tower = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    return _CONFIGS[family](
        text_config=sizes | text,
        vision_config=tower | _TOWERS[family],
        vision_end_token_id=END,
        tie_word_embeddings=True,
        **tokens,
    )


def vision_model(attention: str = ATTENTION_NAME, family: str = "qwen2_5_vl", seed: int = 0) -> PreTrainedModel:
    """The same random model at each call; its images matter as much as its tokens do."""
    torch.manual_seed(seed)
    config = vision_config(family)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=attention_of(config, attention))
    with torch.no_grad():
        for parameter in model.model.visual.parameters():
            # From zero, as biases are, nothing would be seen of a bias that was left out.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def save_vision_model(folder: Any, family: str = "qwen2_5_vl") -> None:
    """That model as transformers saves it."""
    vision_model("sdpa", family).save_pretrained(folder)
    assert AutoConfig.from_pretrained(folder).model_type == family


def random_image(generator: torch.Generator, height: int, width: int) -> dict[str, torch.Tensor]:
    """An image of noise as the model takes it.

    Args:
        generator: of its patches.
        height, width: in patches, even ones.
    """
    return {
        "pixel_values": torch.randn(height * width, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }


def image_tokens(inputs: dict[str, torch.Tensor]) -> list[int]:
    """The tokens that stand for images in a prompt."""
    tokens: list[int] = []
    for grid in inputs["image_grid_thw"]:
        tokens += [START, *[IMAGE] * (int(grid.prod()) // 4), END]
    return tokens


def joined(*images: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Several images as those of one prompt."""
    return {name: torch.cat([image[name] for image in images]) for name in images[0]}


def positions_of(model: PreTrainedModel, tokens: list[int], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """[3, P] as transformers computes them."""
    ids = torch.tensor([tokens])
    found, _ = model.model.get_rope_index(
        ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=inputs.get("image_grid_thw")
    )
    return found[:, 0]
