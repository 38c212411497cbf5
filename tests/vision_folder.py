# SPDX-License-Identifier: Apache-2.0
"""The folder of a tiny vision-language model, with its tokenizer and image processor, and pictures for it."""

from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    Glm4vConfig,
    Glm4vImageProcessorPil,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

COLORS = ["red", "green", "blue", "white"]
DIRECTIONS = ["left", "right", "up", "down"]
SPECIAL = [
    "<pad>",
    "<eos>",
    "<unk>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
WORDS = [
    *SPECIAL,
    "<user>",
    "<system>",
    "<assistant>",
    "which",
    "color",
    "?",
    "and",
    *COLORS,
    *(f"w{i}" for i in range(36)),
    *DIRECTIONS,
]
PAD, EOS, _, START, END, IMAGE, VIDEO = range(7)
FILM = len(WORDS), len(WORDS) + 1
"""Of GLM-4V: before and behind a video, in which the token of images stands for its embeddings."""
_GLM = [f"<|{name}|>" for name in ("begin_of_image", "end_of_image", "image", "video")]
_GLM_FILM = ["<|begin_of_video|>", "<|end_of_video|>"]
PATCH, MERGE = 4, 2
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_CONFIGS = {
    "qwen2_vl": Qwen2VLConfig,
    "qwen2_5_vl": Qwen2_5_VLConfig,
    "qwen3_vl": Qwen3VLConfig,
    "glm4v": Glm4vConfig,
    "qwen3_vl_moe": Qwen3VLMoeConfig,
}
_ENCODERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 32, "intermediate_size": 48, "window_size": 16, "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
    "glm4v": {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "image_size": 16},
}  # fmt: skip
_ENCODERS["qwen3_vl_moe"] = _ENCODERS["qwen3_vl"]
FAMILIES = tuple(name for name in _CONFIGS if name != "qwen3_vl_moe")
MIXTURE = "qwen3_vl_moe"
"""Differs from Qwen3-VL in its decoder, whose layers are mixtures of experts."""


def named(text: str, family: str) -> str:
    """A text or template with the special tokens of a family."""
    if family == "glm4v":
        film = "<|vision_start|><|video_pad|><|vision_end|>"
        text = text.replace(film, f"{_GLM_FILM[0]}<|video_pad|>{_GLM_FILM[1]}")
        for ours, theirs in zip(SPECIAL[3:], _GLM, strict=True):
            text = text.replace(ours, theirs)
    return text


def tiny_tokenizer(family: str = "qwen2_5_vl") -> PreTrainedTokenizerFast:
    """A token for each word; the prompt "which color ?" has five, those of the roles included."""
    special, words = SPECIAL[3:], WORDS
    if family == "glm4v":
        special, words = (
            [*_GLM, *_GLM_FILM],
            [*SPECIAL[:3], *_GLM, *WORDS[len(SPECIAL) :], *_GLM_FILM],
        )
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = named(TEMPLATE, family)
    return tokenizer


def tiny_image_processor(max_pixels: int = 32 * 32, family: str = "qwen2_5_vl") -> Any:
    """Patches of 4 by 4 pixels, of which 2 by 2 make an embedding."""
    if family == "glm4v":
        # It counts the pixels of both frames of a patch.
        size = {"shortest_edge": 2 * 8 * 8, "longest_edge": 2 * max_pixels}
        return Glm4vImageProcessorPil(
            patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2, size=size
        )
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        min_pixels=8 * 8,
        max_pixels=max_pixels,
    )


def tiny_model(family: str = "qwen2_5_vl", seed: int = 0, **text: Any) -> PreTrainedModel:
    """The same random model at each call, with attention of transformers; its images matter as its tokens do."""
    sizes = {
        "vocab_size": len(WORDS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD, "tie_word_embeddings": True,
    }  # fmt: skip
    if family == MIXTURE:
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if family in ("qwen3_vl", MIXTURE):
        # As published models say; transformers knows it without.
        sizes["rope_parameters"]["mrope_interleaved"] = True
    bounds = {"vision_start_token_id": START, "vision_end_token_id": END}
    if family == "glm4v":
        sizes["vocab_size"] += len(FILM)
        sizes["attention_bias"] = True  # as published models say; transformers knows it without
        sizes["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
        bounds = {"image_start_token_id": START, "image_end_token_id": END}
        bounds |= {"video_start_token_id": FILM[0], "video_end_token_id": FILM[1]}
    encoder = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    }
    config = _CONFIGS[family](
        text_config=sizes | text,
        vision_config=encoder | _ENCODERS[family],
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **bounds,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            # The weights of a fresh model are so small that no image would make a difference.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def their_processor(family: str, ours: Any, *, with_videos: bool = False) -> Any:
    """The whole processor of transformers, from the settings of a `VisionProcessor`; its half for videos, which needs
    torchvision, where it is asked for."""
    names = {
        "qwen2_vl": "Qwen2VL",
        "qwen2_5_vl": "Qwen2_5_VL",
        "qwen3_vl": "Qwen3VL",
        "glm4v": "Glm4v",
    }
    kind, videos = getattr(transformers, f"{names[family]}Processor"), None
    tokenizer = tiny_tokenizer(family)
    if family == "qwen3_vl":
        tokenizer.vision_start_token, tokenizer.vision_end_token = (
            "<|vision_start|>",
            "<|vision_end|>",
        )
    if with_videos:
        rules, name = ours.frame_rules(""), names[family].replace("2_5_VL", "2VL")
        own = (
            {}
            if rules.max_duration_s
            else {"min_frames": rules.min_frames, "max_frames": rules.max_frames}
        )
        videos = getattr(transformers, f"{name}VideoProcessor")(
            size={"shortest_edge": rules.min_pixels, "longest_edge": rules.max_pixels},
            patch_size=rules.patch_size,
            merge_size=rules.merge_size,
            temporal_patch_size=rules.temporal_patch_size,
            image_mean=list(rules.mean),
            image_std=list(rules.std),
            fps=rules.fps,
            do_sample_frames=True,
            cap_pixels_per_frame=False,
            **own,
        )
    else:
        kind = type(
            kind.__name__,
            (kind,),
            {"check_argument_for_proper_class": lambda self, name, arg: type(arg)},
        )
    return kind(image_processor=ours.image_processor, tokenizer=tokenizer, video_processor=videos)


def write_vision_folder(folder: Path, family: str = "qwen2_5_vl", seed: int = 0) -> Path:
    """What the folder of a published model has."""
    tiny_model(family, seed).save_pretrained(folder)
    tiny_tokenizer(family).save_pretrained(folder)
    tiny_image_processor(family=family).save_pretrained(folder)
    return folder


def picture(color: str, width: int = 16, height: int = 16) -> Image.Image:
    """All of one color."""
    return Image.new("RGB", (width, height), color)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Each pixel of a color of its own."""
    values = torch.randint(
        0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return Image.fromarray(values.numpy())


def moving_dot(
    direction: str, num_frames: int = 4, side: int = 16, start: int = 0
) -> list[Image.Image]:
    """Frames with a white square that moves left, right, up or down from one edge to the other.

    `start` moves it along the other axis.
    """
    frames = []
    for number in range(num_frames):
        along = number * (side - 4) // (num_frames - 1)
        along = side - 4 - along if direction in ("left", "up") else along
        corner = (along, start) if direction in ("left", "right") else (start, along)
        frame = Image.new("RGB", (side, side), "black")
        frame.paste("white", (*corner, corner[0] + 4, corner[1] + 4))
        frames.append(frame)
    return frames
