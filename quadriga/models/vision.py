# SPDX-License-Identifier: Apache-2.0
"""Vision-language models: a language model, and a vision encoder that makes embeddings of images and videos for it.

    prompt tokens   <start> <image> <image> <image> <image> <end> which color ?
    the encoder     patches ───> one embedding for each <image>
    language model  reads the embeddings in their places; positions have three axes: time, height, width

There the encoder is `model.visual`, the decoder `model.language_model`, and the projection onto the vocabulary
stands beside both. The decoder's attention is a plan of ours, the encoder's is torch's own.

To the encoder a video is an image of several patches along time: images and videos of a batch go through it together.

Legend: N packed tokens, I images and videos, S patches of all, X values of a patch, E embeddings, D hidden size.
"""

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from quadriga.config.actor import VISION_TYPES
from quadriga.errors import EngineError

GRIDS = ("image_grid_thw", "video_grid_thw")
PIXELS = ("pixel_values", "pixel_values_videos")
"""What the model takes of images, and the same of videos."""
ONE_TOKEN = ("glm4v",)
"""Models with one token for embeddings of images and of videos, whose encoder takes each frame as an image."""
PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def is_vision(config: PreTrainedConfig) -> bool:
    """Whether this is the configuration of a vision-language model."""
    return config.model_type in VISION_TYPES


def attention_of(config: PreTrainedConfig, attention: str) -> str | dict[str, str]:
    """Attention by part of the model: `attention` for the decoder, torch's for a vision encoder."""
    if not is_vision(config):
        return attention
    return {"": attention, "text_config": attention, "vision_config": "sdpa"}


def vision_encoder(model: PreTrainedModel) -> Any:
    """The part of a vision-language model that makes embeddings [E, D] of the patches [S, X] of images."""
    return cast(Any, model.base_model).visual


@dataclass(frozen=True)
class ImageTokens:
    """How images and videos stand in a prompt.

    Attributes:
        token_ids: that stand once for each embedding, of an image and of a video.
        patches_per_token: patches of which the encoder makes one embedding.
        video_bounds: between these tokens stand embeddings of a video, where one token stands for both (GLM-4V).
    """

    token_ids: tuple[int, int]
    patches_per_token: int
    video_bounds: tuple[int, int] | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "ImageTokens | None":
        """Those of a model; None: a text model."""
        if not is_vision(config):
            return None
        settings = cast(Any, config)
        image, merged = settings.image_token_id, settings.vision_config.spatial_merge_size**2
        if settings.model_type in ONE_TOKEN:
            return cls(
                (image, image), merged, (settings.video_start_token_id, settings.video_end_token_id)
            )
        return cls((image, settings.video_token_id), merged)

    def count(self, inputs: Mapping[str, torch.Tensor]) -> int:
        """E: embeddings of the images and videos of a prompt."""
        return (
            sum(int(inputs[name].prod(-1).sum()) for name in GRIDS if name in inputs)
            // self.patches_per_token
        )

    def places(
        self, tokens: np.ndarray, inputs: Mapping[str, torch.Tensor], size: int | None = None
    ) -> tuple[np.ndarray, str]:
        """Where the embeddings of a row's images stand, then those of its videos, [E]; and what does not fit.

        Args:
            tokens: of the prompt, and perhaps of a response, in which the model may write such a token.
            inputs: of the model, `image_grid_thw` and `video_grid_thw` [I, 3] among them.
            size: tokens of the prompt, which has no more of them than there are embeddings. None: all.

        Returns:
            The first of the tokens, as many as there are embeddings; and in words what there is too much or too little
            of, empty where all fits.
        """
        found, problems, kinds = [], [], [tokens == token for token in self.token_ids]
        if self.video_bounds is not None:
            first, last = (np.cumsum(tokens == one) for one in self.video_bounds)
            kinds = [kinds[0] & (first <= last), kinds[1] & (first > last)]
        for token, is_own, name in zip(self.token_ids, kinds, GRIDS, strict=True):
            grids, own = inputs.get(name), np.flatnonzero(is_own)
            count = 0 if grids is None else int(grids.prod(-1).sum()) // self.patches_per_token
            if (
                not np.count_nonzero(own < (len(tokens) if size is None else size))
                <= count
                <= len(own)
            ):
                problems.append(
                    f"{len(own)} tokens with id {token} for {count} embeddings of {name.split('_')[0]}s"
                )
            found.append(own[:count])
        return np.concatenate(found), ", ".join(problems)


@dataclass(frozen=True)
class PackedImages:
    """The images and videos of a packed micro-batch, each once.

    Attributes:
        pixel_values: [S, X] float32
        grids: [I, 3] int64: patches along time, height and width.
        places: [E] packed indices of the tokens that the embeddings stand for; none at all: see `unseen_image`.
    """

    pixel_values: torch.Tensor
    grids: torch.Tensor
    places: torch.Tensor


def packed_images(
    images: Sequence[tuple[Mapping[str, torch.Tensor], np.ndarray]], device: torch.device
) -> PackedImages | None:
    """Patches [S, X], grids [I, 3] and places [E] of images and videos of several prompts; None: there are none.
    `images`: for each prompt that has some, the model's inputs, and the packed indices of their tokens, those of images
    before those of videos.
    """
    if not images:
        return None
    pixels, grids = (
        [inputs[name] for inputs, _ in images for name in kinds if name in inputs]
        for kinds in (PIXELS, GRIDS)
    )
    return PackedImages(
        torch.cat(pixels).to(device),
        torch.cat(grids).to(device),
        torch.from_numpy(np.concatenate([places for _, places in images])).to(device),
    )


def unseen_image(model: PreTrainedModel, device: torch.device) -> PackedImages:
    """The smallest image, for ranks without one: those that share the encoder's weights compute at the same times.

    Its pixels are zeros [side^2, X], its grid [1, 3], and its places none: [0].
    """
    settings = cast(Any, model.config).vision_config
    side = settings.spatial_merge_size
    num_values = settings.in_channels * settings.temporal_patch_size * settings.patch_size**2
    return PackedImages(
        torch.zeros(side**2, num_values, device=device),
        torch.tensor([[1, side, side]], device=device),
        torch.zeros(0, dtype=torch.int64, device=device),
    )


def decoder_inputs(
    model: PreTrainedModel, input_ids: torch.Tensor, images: PackedImages, start: int | None = None
) -> dict[str, Any]:
    """What the decoder takes instead of tokens [1, N]: their embeddings, and in places of images the encoder's.

    With sequence or tensor parallelism embeddings are those of a part of the tokens, from packed index `start` on. Each
    rank encodes all images; what it does not use has a gradient of zero there.

    Returns:
        `inputs_embeds` [1, N, D]. For Qwen3-VL also what the encoder adds to the states after the first layers.

    Raises EngineError: the encoder makes more or fewer embeddings than there are places."""
    body = cast(Any, model.base_model)
    embeddings = model.get_input_embeddings()(input_ids)
    grids = images.grids
    if model.config.model_type in ONE_TOKEN:
        grids = grids.repeat_interleave(grids[:, 0], 0)
        grids[:, 0] = 1
    seen = body.get_image_features(images.pixel_values, grids, return_dict=True)
    features = torch.cat(seen.pooler_output).to(embeddings.dtype)
    added = [torch.cat(tuple(layer)) for layer in getattr(seen, "deepstack_features", None) or ()]
    if not len(images.places):
        # Nothing of it is read, but each rank has a gradient for the encoder: zero.
        nothing = torch.stack([part.sum() for part in (features, *added)]).sum() * 0.0
        return {"inputs_embeds": embeddings + nothing}
    if len(images.places) != len(features):
        got = f"{len(features)} embeddings for {len(images.places)} places"
        raise EngineError("images of a batch", got=got, expected="one for each image token")
    places = images.places
    if start is not None:
        here = ((places >= start) & (places < start + embeddings.shape[1])).nonzero()[:, 0]
        places = places[here] - start
        features, *added = (part.index_select(0, here) for part in (features, *added))
    filled = {"inputs_embeds": embeddings.index_copy(1, places, features[None])}
    if not added:
        return filled
    is_image = torch.zeros(embeddings.shape[:2], dtype=torch.bool, device=input_ids.device)
    is_image[0, places] = True
    return filled | {"visual_pos_masks": is_image, "deepstack_visual_embeds": added}


@dataclass(frozen=True)
class VisionEncoderCost:
    """What a vision encoder computes of an image.

    Attributes:
        num_patch_parameters, num_token_parameters: that multiply each patch, and each embedding.
        width: of the states of a patch.
        windows: for each layer the patches along the side of the windows in which it attends; None: all of the image.
    """

    num_patch_parameters: int
    num_token_parameters: int
    width: int
    windows: tuple[int | None, ...]
    patches_per_token: int
    is_frozen: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> "VisionEncoderCost | None":
        """That of a model; None: a text model."""
        if not is_vision(model.config):
            return None
        settings, body = cast(Any, model.config).vision_config, vision_encoder(model)
        mergers = [
            part for name, part in body.named_children() if "merger" in name or name == "downsample"
        ]
        of_tokens = sum(_num_multiplied(merger) for merger in mergers)
        whole = getattr(settings, "fullatt_block_indexes", None)
        merged = settings.spatial_merge_size
        side = (
            None
            if whole is None
            else settings.window_size // merged // settings.patch_size * merged
        )
        return cls(
            num_patch_parameters=_num_multiplied(body) - of_tokens,
            num_token_parameters=of_tokens,
            width=body.blocks[0].attn.qkv.out_features // 3,
            windows=tuple(
                None if whole is None or layer in whole else side for layer in range(settings.depth)
            ),
            patches_per_token=merged**2,
            is_frozen=not any(parameter.requires_grad for parameter in body.parameters()),
        )

    def forward_flops(self, grids: torch.Tensor) -> float:
        """Operations of one forward pass over images [I, 3]; each patch attends to all of its frame or window."""
        total = 0
        for time, height, width in grids.tolist():
            patches = time * height * width
            total += 2 * (self.num_patch_parameters * patches)
            total += 2 * (self.num_token_parameters * patches // self.patches_per_token)
            for window, num_layers in Counter(self.windows).items():
                # Patches see each other in squares with this side; what the sides leave over makes smaller pieces.
                side = window or max(height, width)
                rows, columns = (
                    size // side * side**2 + (size % side) ** 2 for size in (height, width)
                )
                total += 4 * self.width * num_layers * time * rows * columns
        return float(total)

    def update_flops(self, grids: torch.Tensor) -> float:
        """Operations of both passes over images [I, 3]; a frozen encoder has no backward pass."""
        return self.forward_flops(grids) * (1 if self.is_frozen else 3)


def _num_multiplied(module: nn.Module) -> int:
    """Numbers in the matrices of a module."""
    return sum(
        one.weight.numel()
        for one in module.modules()
        if isinstance(one, (nn.Linear, nn.Conv2d, nn.Conv3d))
    )


def copy_processor(
    config: PreTrainedConfig, target: Path, source: str | Path | None = None
) -> None:
    """Copy the settings by which images become patches [S, X]; of a text model there are none.

    As they are: to load and save them would need torchvision.

    Args:
        target: a folder that exists.
        source: the model's folder or hub name; None: where its configuration came from.
    """
    if not is_vision(config):
        return
    raising = {
        f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")
    }
    for name in PROCESSOR_FILES:
        found = cached_file(source or config.name_or_path, name, **raising)
        if found is not None and Path(found).resolve() != (target / name).resolve():
            shutil.copyfile(found, target / name)
