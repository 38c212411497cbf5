# SPDX-License-Identifier: Apache-2.0
"""Vision-language models: a language model with an encoder that embeds images and videos.

    prompt tokens   <start> <image> <image> <image> <image> <end> which color ?
    the encoder     patches ───> one embedding for each <image>
    language model  reads the embeddings at these tokens; positions have three axes: time, height,
                    width

The encoder is `model.visual`, the decoder is `model.language_model`, and the projection onto the
vocabulary is beside both. The decoder computes attention by an attention plan, the encoder by
torch.

For the encoder, a video is an image with several patches along time, so images and videos of a
batch are encoded together.

Legend: N packed tokens, I images and videos, S patches of all of them, X values of a patch, E
embeddings, D hidden size.
"""

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from quadriga.config.actor import VISION_TYPES
from quadriga.errors import EngineError

GRIDS = ("image_grid_thw", "video_grid_thw")
"""Model inputs [I, 3] with the number of patches along time, height and width."""
PIXELS = ("pixel_values", "pixel_values_videos")
"""Model inputs [S, X] with the patches of images and of videos."""
ONE_TOKEN = ("glm4v",)
"""Models with the same token for images and videos. Their encoder takes each frame as an image."""
PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def is_vision(config: PreTrainedConfig) -> bool:
    """Whether a model is a vision-language model of a supported type, by its configuration."""
    return config.model_type in VISION_TYPES


def attention_of(config: PreTrainedConfig, attention: str) -> str | dict[str, str]:
    """Attention implementations by part of the model, as transformers takes them.

    Args:
        config: configuration of the model.
        attention: implementation for the decoder. A vision encoder uses "sdpa".

    Returns:
        `attention` for a text model, else a dictionary by part, in which "" is the whole model.
    """
    if not is_vision(config):
        return attention
    return {"": attention, "text_config": attention, "vision_config": "sdpa"}


def vision_encoder(model: PreTrainedModel) -> Any:
    """Find the part of a vision-language model that turns patches [S, X] into embeddings [E, D]."""
    return model.base_model.visual


@dataclass(frozen=True)
class ImageTokens:
    """Tokens that represent images and videos in a prompt.

    Attributes:
        token_ids: id of the token that stands for an embedding of an image, and id of the token for
            an embedding of a video.
        patches_per_token: number of patches that the encoder merges into one embedding.
        video_bounds: ids of the tokens before and after the embeddings of a video, if images and
            videos have the same token (GLM-4V).
    """

    token_ids: tuple[int, int]
    patches_per_token: int
    video_bounds: tuple[int, int] | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "ImageTokens | None":
        """Find the image tokens of a model; None for a text model."""
        if not is_vision(config):
            return None
        image_id = config.image_token_id
        patches_per_token = config.vision_config.spatial_merge_size**2
        if config.model_type in ONE_TOKEN:
            bounds = (config.video_start_token_id, config.video_end_token_id)
            return cls((image_id, image_id), patches_per_token, bounds)
        return cls((image_id, config.video_token_id), patches_per_token)

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        """Number of embeddings E of the images and videos in a model's inputs."""
        num_patches = sum(int(inputs[name].prod(-1).sum()) for name in GRIDS if name in inputs)
        return num_patches // self.patches_per_token

    def locate(
        self, tokens: np.ndarray, inputs: Mapping[str, Tensor], num_prompt_tokens: int | None = None
    ) -> tuple[np.ndarray, str]:
        """Find the tokens whose embeddings are replaced by those of a row's images and videos.

        Args:
            tokens: tokens of the prompt, and perhaps of a response. In a response, the model may
                have generated image tokens that stand for no image.
            inputs: the model's inputs, with `image_grid_thw` and `video_grid_thw` [I, 3].
            num_prompt_tokens: how many of the tokens are the prompt. None: all.

        Returns:
            Indices [E] of the tokens, those of images before those of videos; and the problem if
            the numbers of tokens and embeddings do not match, such as "3 tokens with id 9 for 4
            embeddings of images", else "".
        """
        masks = [tokens == token for token in self.token_ids]
        if self.video_bounds is not None:
            # Both kinds have the same token. It belongs to a video if more videos have started
            # before it than have ended.
            starts, ends = (np.cumsum(tokens == bound) for bound in self.video_bounds)
            masks = [masks[0] & (starts <= ends), masks[1] & (starts > ends)]
        if num_prompt_tokens is None:
            num_prompt_tokens = len(tokens)
        token_indices = []
        problems = []
        for token, mask, name in zip(self.token_ids, masks, GRIDS, strict=True):
            indices = np.flatnonzero(mask)
            grids = inputs.get(name)
            num_embeddings = 0
            if grids is not None:
                num_embeddings = int(grids.prod(-1).sum()) // self.patches_per_token
            # Each image token of the prompt needs an embedding. A response may have further ones
            # with an embedding, of images that a tool or a user inserted, and then tokens that the
            # model generated, which have none.
            num_in_prompt = np.count_nonzero(indices < num_prompt_tokens)
            if not num_in_prompt <= num_embeddings <= len(indices):
                kind = name.split("_")[0]  # "image" or "video"
                problems.append(
                    f"{len(indices)} tokens with id {token} for {num_embeddings} embeddings "
                    f"of {kind}s"
                )
            token_indices.append(indices[:num_embeddings])
        return np.concatenate(token_indices), ", ".join(problems)


@dataclass(frozen=True)
class PackedImages:
    """Images and videos of a packed micro-batch. Those of a shared prompt are included once.

    Attributes:
        pixel_values: [S, X] float32.
        grids: [I, 3] int64, number of patches along time, height and width.
        token_indices: [E] packed indices of the tokens that the embeddings replace. Empty for an
            image that no token refers to; see `filler_image`.
    """

    pixel_values: Tensor
    grids: Tensor
    token_indices: Tensor


def packed_images(
    images: Sequence[tuple[Mapping[str, Tensor], np.ndarray]], device: torch.device
) -> PackedImages | None:
    """Pack the images and videos of several prompts.

    Args:
        images: for each prompt with images, the model's inputs, and the packed indices of its image
            tokens, those of images before those of videos.
        device: device of the result.

    Returns:
        The packed images; None if there are none.
    """
    if not images:
        return None
    pixels = []
    grids = []
    token_indices = []
    for inputs, indices_of_prompt in images:
        pixels += [inputs[name] for name in PIXELS if name in inputs]
        grids += [inputs[name] for name in GRIDS if name in inputs]
        token_indices.append(indices_of_prompt)
    return PackedImages(
        pixel_values=torch.cat(pixels).to(device),
        grids=torch.cat(grids).to(device),
        token_indices=torch.from_numpy(np.concatenate(token_indices)).to(device),
    )


def filler_image(model: PreTrainedModel, device: torch.device) -> PackedImages:
    """Create the smallest image, for a rank that has no image while another rank has one.

    Ranks that share the encoder's weights must run the encoder together.

    Args:
        model: a vision-language model.
        device: device of the result.

    Returns:
        Zero pixels [side^2, X], grid [1, 3] and no token indices [0].
    """
    settings = model.config.vision_config
    side = settings.spatial_merge_size
    num_values = settings.in_channels * settings.temporal_patch_size * settings.patch_size**2
    return PackedImages(
        pixel_values=torch.zeros(side**2, num_values, device=device),
        grids=torch.tensor([[1, side, side]], device=device),
        token_indices=torch.zeros(0, dtype=torch.int64, device=device),
    )


def decoder_inputs(
    model: PreTrainedModel, input_ids: Tensor, images: PackedImages, start: int | None = None
) -> dict[str, Any]:
    """Embed tokens and images, for a decoder that takes embeddings in place of tokens.

    With sequence or tensor parallelism, a rank has the embeddings of some of the tokens. Each rank
    encodes all images; embeddings of an image that it does not use get no gradient there.

    Args:
        model: a vision-language model.
        input_ids: [1, N] tokens.
        images: images of the packed batch.
        start: packed index of this rank's first embedding. None: the rank has all of them.

    Returns:
        `inputs_embeds` [1, n, D] of the rank's n tokens. For Qwen3-VL also the features that are
        added to the hidden states after the first layers.

    Raises:
        EngineError: the encoder returns another number of embeddings than there are image tokens.
    """
    embeddings = model.get_input_embeddings()(input_ids)  # [1, n, D]
    grids = images.grids
    if model.config.model_type in ONE_TOKEN:
        # Each frame of a video becomes a separate image.
        grids = grids.repeat_interleave(grids[:, 0], 0)
        grids[:, 0] = 1
    encoded = model.base_model.get_image_features(images.pixel_values, grids, return_dict=True)
    features = torch.cat(encoded.pooler_output).to(embeddings.dtype)  # [E, D]
    # Qwen3-VL also adds features [E, D] to the hidden states after its first layers.
    layers = getattr(encoded, "deepstack_features", None) or ()
    deepstack = [torch.cat(tuple(layer)) for layer in layers]
    if not len(images.token_indices):
        # Adding zero times the features gives the encoder a gradient on this rank, too.
        sums = [part.sum() for part in (features, *deepstack)]
        zero = torch.stack(sums).sum() * 0.0
        return {"inputs_embeds": embeddings + zero}
    if len(images.token_indices) != len(features):
        raise EngineError(
            "images of a batch",
            got=f"{len(features)} embeddings for {len(images.token_indices)} image tokens",
            expected="one for each image token",
        )
    token_indices = images.token_indices
    if start is not None:
        # Keep the embeddings at this rank's tokens.
        stop = start + embeddings.shape[1]
        local = ((token_indices >= start) & (token_indices < stop)).nonzero()[:, 0]
        token_indices = token_indices[local] - start
        features = features.index_select(0, local)
        deepstack = [part.index_select(0, local) for part in deepstack]
    # Replace the embeddings of image tokens by those of the images.
    inputs = {"inputs_embeds": embeddings.index_copy(1, token_indices, features[None])}
    if deepstack:
        is_image = torch.zeros(embeddings.shape[:2], dtype=torch.bool, device=input_ids.device)
        is_image[0, token_indices] = True
        inputs["visual_pos_masks"] = is_image
        inputs["deepstack_visual_embeds"] = deepstack
    return inputs


@dataclass(frozen=True)
class VisionEncoderCost:
    """Size of a vision encoder, and the operations that it needs for images.

    Attributes:
        num_patch_parameters: number of parameters that multiply each patch.
        num_token_parameters: number of parameters that multiply each embedding.
        width: size of a patch's hidden state.
        windows: for each layer, the side of the square windows within which patches attend to each
            other, in patches. None: attention spans the whole image.
        patches_per_token: number of patches that are merged into one embedding.
        is_frozen: whether no parameter is trained.
    """

    num_patch_parameters: int
    num_token_parameters: int
    width: int
    windows: tuple[int | None, ...]
    patches_per_token: int
    is_frozen: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> "VisionEncoderCost | None":
        """Find the cost of a model's vision encoder; None for a text model."""
        if not is_vision(model.config):
            return None
        settings = model.config.vision_config
        encoder = vision_encoder(model)
        # Modules that merge patches compute once per embedding, all other modules once per patch.
        num_token_parameters = 0
        for name, module in encoder.named_children():
            if "merger" in name or name == "downsample":
                num_token_parameters += _num_multiplied(module)
        merge_size = settings.spatial_merge_size
        windows: list[int | None] = [None] * settings.depth
        full_layers = getattr(settings, "fullatt_block_indexes", None)
        if full_layers is not None:
            # `window_size` is in pixels. Windows consist of whole groups of merged patches.
            side = settings.window_size // merge_size // settings.patch_size * merge_size
            layers = range(settings.depth)
            windows = [None if layer in full_layers else side for layer in layers]
        return cls(
            num_patch_parameters=_num_multiplied(encoder) - num_token_parameters,
            num_token_parameters=num_token_parameters,
            # The projection to query, key and value has three times the width.
            width=encoder.blocks[0].attn.qkv.out_features // 3,
            windows=tuple(windows),
            patches_per_token=merge_size**2,
            is_frozen=not any(parameter.requires_grad for parameter in encoder.parameters()),
        )

    def forward_flops(self, grids: Tensor) -> float:
        """Operations of one forward pass. Each patch attends to all patches of its frame or window.

        Args:
            grids: [I, 3], number of patches of each image along time, height and width.
        """
        total = 0
        for time, height, width in grids.tolist():
            num_patches = time * height * width
            # Matrix products for all patches, then for the embeddings.
            total += 2 * (self.num_patch_parameters * num_patches)
            total += 2 * (self.num_token_parameters * num_patches // self.patches_per_token)
            for window, num_layers in Counter(self.windows).items():
                # Windows divide height and width into pieces, of which the last may be smaller. Two
                # patches are in one window if their rows are in the same piece of the height, and
                # their columns in the same piece of the width. Count the pairs of both kinds.
                side = window or max(height, width)
                row_pairs = height // side * side**2 + (height % side) ** 2
                column_pairs = width // side * side**2 + (width % side) ** 2
                # For each pair of patches, two products of two operations per number.
                total += 4 * self.width * num_layers * time * row_pairs * column_pairs
        return float(total)

    def update_flops(self, grids: Tensor) -> float:
        """Operations of a forward and a backward pass. A frozen encoder has no backward pass.

        Args:
            grids: [I, 3], number of patches of each image along time, height and width.
        """
        return self.forward_flops(grids) * (1 if self.is_frozen else 3)


def _num_multiplied(module: nn.Module) -> int:
    """Number of parameters in the matrices and convolutions of a module."""
    kinds = (nn.Linear, nn.Conv2d, nn.Conv3d)
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, kinds))


def copy_processor(
    config: PreTrainedConfig, target: Path, source: str | Path | None = None
) -> None:
    """Copy the files that configure how images become patches. A text model has no such files.

    They are copied, because loading and saving a processor needs torchvision.

    Args:
        config: configuration of the model.
        target: an existing folder.
        source: folder or hub name of the model. None: where its configuration came from.
    """
    if not is_vision(config):
        return
    for name in PROCESSOR_FILES:
        file = cached_file(
            source or config.name_or_path,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        # None: the model has no such file. The model's folder may itself be the target.
        if file is not None and Path(file).resolve() != (target / name).resolve():
            shutil.copyfile(file, target / name)
