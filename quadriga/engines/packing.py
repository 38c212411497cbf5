# SPDX-License-Identifier: Apache-2.0
"""Packing: padded rows become one sequence of tokens.

A packed micro-batch has no padding, and contains a prompt that several rows share only once. It
leaves out tokens from which nothing is predicted: the last trained token of every response, and all
tokens after it.

Legend: b rows, P prompt positions, T response positions, L tokens of a row, N packed tokens, M
predicted tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from quadriga.engines.batches import RowLength
from quadriga.errors import EngineError
from quadriga.models.architecture import is_packed, length_limit
from quadriga.models.attention import PackedBatch, Segment
from quadriga.models.experts import ROUTES
from quadriga.models.vision import ImageTokens, packed_images
from quadriga.protocol import DataProto
from quadriga.protocol.memory import images_key

ECHO_MASK = "echo_mask"
"""Column [B, T]: 1 on tokens of tools and users, which have a separate loss."""
Outputs = Mapping[str, Tensor]
"""Outputs for each predicted token, float32 [M] each: `values`, or `log_probs` and others."""
LossFunction = Callable[[Outputs], Tensor]
"""Computes a loss [] from outputs, normalised over the whole mini-batch."""


@dataclass(frozen=True)
class RowImages:
    """The images and videos of one row, in its prompt and in later turns of tools and users."""

    # Inputs of the model: `pixel_values` [patches, values], `image_grid_thw` [images, 3], and the
    # like for videos.
    inputs: Mapping[str, Tensor]
    token_indices: np.ndarray  # indices of the image tokens in the row; they are never trained
    key: bytes  # equal for rows with the same images


@dataclass(frozen=True)
class RowTokens(RowLength):
    """A row without its padding."""

    prompt: np.ndarray  # token ids
    response: np.ndarray  # token ids
    positions: np.ndarray  # [L] or [3, L], positions of prompt and response
    loss_indices: np.ndarray  # indices, in the response, of the tokens with a loss
    images: RowImages | None = None


@dataclass(frozen=True)
class PackingRules:
    """Limits on packing the rows of a model."""

    image_tokens: ImageTokens | None  # tokens that stand for images; None: a text model
    # Rows of at most this many tokens may share a micro-batch; longer ones may not.
    packs_up_to: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> "PackingRules":
        """Find the rules for a model."""
        # Infinite if positions never depend on the length of the row. With 0, every row is computed
        # alone.
        limit = length_limit(model.config) or math.inf
        return cls(ImageTokens.of(model.config), limit if is_packed(model) else 0)


def echo_tokens(data: DataProto) -> Tensor:
    """Find the tokens of tools and users that have a separate loss.

    Args:
        data: rows with response_mask [b, T], and echo_mask [b, T] if such tokens are learned.

    Returns:
        [b, T] bool. False in responses without any token under the response mask.
    """
    mask = data.batch["response_mask"].bool()
    if ECHO_MASK not in data.batch.keys():
        return torch.zeros_like(mask)
    return data.batch[ECHO_MASK].bool() & mask.any(-1, keepdim=True)


def row_tokens(data: DataProto, image_tokens: ImageTokens | None = None) -> list[RowTokens]:
    """Remove the padding of the rows of a batch.

    Args:
        data: input_ids, attention_mask, position_ids [b, P + T] and response_mask [b, T];
            optionally echo_mask [b, T], multi_modal_inputs and routed_experts [b, P + T, L, k].
        image_tokens: image tokens of a vision-language model.

    Returns:
        The rows. `num_response_tokens` counts only the response tokens to compute: those before the
        last token with a loss, and at least those up to the last image token.

    Raises:
        EngineError: a prompt is empty, or a row does not match its images.
    """
    input_ids = data.batch["input_ids"].cpu().numpy()
    attention_mask = data.batch["attention_mask"].cpu().numpy()
    positions = data.batch["position_ids"].cpu().numpy()
    response_mask = data.batch["response_mask"].cpu().numpy()
    num_prompt_columns = input_ids.shape[1] - response_mask.shape[1]
    has_loss = response_mask
    if ECHO_MASK in data.batch.keys():
        has_loss = response_mask.astype(bool) | echo_tokens(data).cpu().numpy()
    images_column = data.non_tensor_batch.get("multi_modal_inputs")
    routes = data.batch[ROUTES].cpu().numpy() if ROUTES in data.batch.keys() else None
    image_keys = {}  # key of images by the id of their `inputs`, which a prompt's samples share
    rows = []
    for row, is_valid in enumerate(attention_mask != 0):
        is_prompt = is_valid.copy()
        is_prompt[num_prompt_columns:] = False
        prompt = input_ids[row, is_prompt]
        response = input_ids[row, is_valid & ~is_prompt]
        num_prompt_tokens = len(prompt)
        if not num_prompt_tokens:
            raise EngineError(
                f"row {row} of a batch", got="an empty prompt", expected="at least one prompt token"
            )
        # Responses are padded on the right, so columns are also indices in the response.
        loss_indices = np.flatnonzero(has_loss[row])
        # Token i is predicted at token i - 1, so the last token with a loss is not computed itself.
        num_response_tokens = int(loss_indices[-1]) if len(loss_indices) else 0

        # Rows share the computation of a prompt if tokens, images and routes are the same.
        prompt_key = prompt.tobytes()
        images = None
        if image_tokens is not None or images_column is not None:
            # Tokens that the model generated are not images, even with the id of an image token.
            inserted = np.where(response_mask[row][: len(response)], -1, response)
            tokens = np.concatenate([prompt, inserted])
            inputs = {}
            if images_column is not None:
                inputs = images_column[row] or {}  # None in a row without images
            images = _row_images(row, inputs, tokens, num_prompt_tokens, image_tokens, image_keys)
        if routes is not None:
            prompt_key += routes[row, is_prompt].tobytes()
        if images is not None:
            prompt_key += images.key
            last_image = int(images.token_indices.max())
            if last_image >= num_prompt_tokens:
                # The images of prompt and response are encoded together, so the row must be
                # computed at least up to its last image, and cannot share its prompt.
                prompt_key += row.to_bytes(8)
                num_response_tokens = max(num_response_tokens, last_image + 1 - num_prompt_tokens)

        rows.append(
            RowTokens(
                prompt_key=prompt_key,
                num_prompt_tokens=num_prompt_tokens,
                num_response_tokens=num_response_tokens,
                prompt=prompt,
                response=response,
                positions=positions[row][..., is_valid],
                loss_indices=loss_indices,
                images=images,
            )
        )
    return rows


def _row_images(
    row: int,
    inputs: dict[str, Any],
    tokens: np.ndarray,
    num_prompt_tokens: int,
    image_tokens: ImageTokens | None,
    image_keys: dict[int, bytes],
) -> RowImages | None:
    """Find the images of a row.

    Args:
        row: number of the row, for an error.
        inputs: the row's entry of `multi_modal_inputs`; empty if the row has no images.
        tokens: [L] ids of the row's tokens, with -1 for tokens that the model generated.
        num_prompt_tokens: number of tokens of the prompt.
        image_tokens: image tokens of the model; None for a text model.
        image_keys: keys of images by the id of their `inputs`, so that the images of a prompt's
            samples are hashed once. A new key is added.

    Returns:
        The images; None if the row has none.

    Raises:
        EngineError: the tokens do not match the images.
    """
    where = f"row {row} of a batch"
    if image_tokens is None:
        if inputs:
            raise EngineError(
                where, got="images", expected="text: the model is not a vision-language model"
            )
        return None
    # The problem is a text such as "3 tokens with id 9 for 4 embeddings of images"; "": none.
    token_indices, problem = image_tokens.locate(tokens, inputs, num_prompt_tokens)
    if problem:
        raise EngineError(
            where,
            got=problem,
            expected="one for each embedding",
            fix="Let data.image_key and video_key name the columns. A row must not be cut within "
            "an image or a video.",
        )
    if not inputs:
        return None
    key = id(inputs)
    if key not in image_keys:
        image_keys[key] = images_key(inputs).encode()
    return RowImages(inputs, token_indices, image_keys[key])


def pack(
    rows: Sequence[RowTokens], num_columns: int, *, share_prompts: bool, device: torch.device
) -> PackedBatch:
    """Pack rows into tokens [1, N] and targets [M].

    Args:
        rows: b rows. Rows without a token with a loss are left out, and unpack to zeros.
        num_columns: T.
        share_prompts: whether to compute a prompt once for all rows that have it.
        device: device of the result.

    Returns:
        The packed batch.
    """
    groups = {}
    for number, row in enumerate(rows):
        if len(row.loss_indices):
            key = row.prompt_key if share_prompts else number
            groups.setdefault(key, []).append(number)

    sequence = _Sequence()
    indices_by_row = {}  # packed index of each token of a row
    predictors = []
    targets = []
    row_numbers = []
    columns = []
    for members in groups.values():
        is_shared = len(members) > 1
        first = rows[members[0]]
        num_prompt_tokens = first.num_prompt_tokens
        # A prompt that several rows share is a segment of its own, which each response continues.
        # Otherwise prompt and response are one segment.
        length = num_prompt_tokens + (0 if is_shared else first.num_response_tokens)
        tokens = np.concatenate([first.prompt, first.response])[:length]
        segment = sequence.append(tokens, first.positions[..., :length])
        segment_indices = np.arange(segment.start, segment.start + length)
        if first.images is not None:
            image_indices = segment.start + first.images.token_indices
            sequence.images.append((first.images.inputs, image_indices))

        for number in members:
            row = rows[number]
            token_indices = segment_indices
            end = row.num_response_tokens
            if is_shared and end:
                positions = row.positions[..., num_prompt_tokens : num_prompt_tokens + end]
                response = sequence.append(row.response[:end], positions, segment)
                response_indices = np.arange(response.start, response.start + end)
                token_indices = np.concatenate([segment_indices, response_indices])
            indices_by_row[number] = token_indices
            # Each response token is predicted at the token before it.
            predictors.append(token_indices[num_prompt_tokens - 1 + row.loss_indices])
            targets.append(row.response[row.loss_indices])
            row_numbers.append(np.full(len(row.loss_indices), number))
            columns.append(row.loss_indices)

    def join(parts: list[np.ndarray]) -> Tensor:
        """Concatenate the parts of all rows on the device."""
        return torch.from_numpy(np.concatenate(parts, axis=-1)).long().to(device)

    return PackedBatch(
        input_ids=join(sequence.input_ids)[None],
        position_ids=join(sequence.positions).unsqueeze(-2),  # [1, N] or [3, 1, N]
        segments=tuple(sequence.segments),
        predictors=join(predictors),
        host_predictors=np.concatenate(predictors),
        targets=join(targets),
        rows=join(row_numbers),
        columns=join(columns),
        shape=(len(rows), num_columns),
        sum_of_squared_lengths=sequence.sum_of_squares,
        images=packed_images(sequence.images, device),
        token_indices=indices_by_row,
    )


@dataclass
class _Sequence:
    """A packed sequence under construction: segments, one after the other.

    `input_ids` and `positions` hold one array per segment.
    """

    num_tokens: int = 0
    sum_of_squares: int = 0  # about twice the number of pairs of tokens that attention computes
    segments: list[Segment] = field(default_factory=list)
    input_ids: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    # Inputs of images with the packed indices of their tokens.
    images: list[tuple[Mapping[str, Tensor], np.ndarray]] = field(default_factory=list)

    def append(
        self, input_ids: np.ndarray, positions: np.ndarray, prefix: Segment | None = None
    ) -> Segment:
        """Append a segment.

        Args:
            input_ids: token ids [length].
            positions: their positions, [length] or [3, length].
            prefix: the segment that it continues; None for a sequence of its own.

        Returns:
            The segment.
        """
        segment = Segment(self.num_tokens, len(input_ids), prefix)
        self.segments.append(segment)
        self.input_ids.append(input_ids)
        self.positions.append(positions)
        self.num_tokens += segment.length
        # A token attends to the earlier tokens of its segment, and to the prefix: in a segment of n
        # tokens after p, n (n / 2 + p) pairs.
        prefix_length = prefix.length if prefix else 0
        self.sum_of_squares += segment.length * (segment.length + 2 * prefix_length)
        return segment
