# SPDX-License-Identifier: Apache-2.0
"""Padded rows become one packed run of tokens.

A packed micro-batch holds no padding, holds the prompt of a group of samples once, and leaves out what nothing is
predicted from: the last token of every response and all that follows the last trained one.

Legend: b rows, P prompt positions, T response positions, L tokens of a row, N packed tokens, M predicted tokens.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from quadriga.engines.batches import RowLength
from quadriga.errors import EngineError
from quadriga.models.attention import PackedBatch, Segment
from quadriga.models.experts import ROUTES
from quadriga.models.vision import ImageTokens, packed_images
from quadriga.protocol import DataProto
from quadriga.protocol.memory import images_key

Outputs = Mapping[str, torch.Tensor]
"""Of a packed batch, for each predicted token, float32 [M] each: `values`, or `log_probs` and what else is wanted."""
LossFunction = Callable[[Outputs], torch.Tensor]
"""From outputs to a scalar that is already normalised over the whole mini-batch."""


@dataclass(frozen=True)
class RowImages:
    """The images of one row: of its prompt, and of what others said behind it."""

    # As the model takes them: `pixel_values` [patches, values], `image_grid_thw` [images, 3], and those of videos.
    inputs: Mapping[str, torch.Tensor]
    places: np.ndarray  # their tokens' indices in the row, among those that nothing is learned from
    key: bytes  # equal for equal images


@dataclass(frozen=True)
class RowTokens(RowLength):
    """One padded row without its padding."""

    # Token ids.
    prompt: np.ndarray
    response: np.ndarray
    positions: np.ndarray  # [L] of both, or [3, L]
    trained: np.ndarray  # the response positions that are predicted
    images: RowImages | None = None


def row_tokens(data: DataProto, image_tokens: ImageTokens | None = None) -> list[RowTokens]:
    """The rows of a batch without their padding; `num_response_tokens` are those that something is predicted from.
    `data`: input_ids, attention_mask, position_ids [b, P + T], response_mask [b, T], and perhaps multi_modal_inputs
    and routed_experts [b, P + T, L, k]. Raises EngineError: a prompt is empty, or a row does not fit its images."""
    input_ids, attention, positions, trained = (
        data.batch[key].cpu().numpy()
        for key in ("input_ids", "attention_mask", "position_ids", "response_mask")
    )
    width = input_ids.shape[1] - trained.shape[1]
    column = data.non_tensor_batch.get("multi_modal_inputs")
    routes = data.batch[ROUTES].cpu().numpy() if ROUTES in data.batch.keys() else None
    keys: dict[int, bytes] = {}  # the samples of a prompt hold the same object
    rows = []
    for row, valid in enumerate(attention != 0):
        prompt, response = (
            input_ids[row, :width][valid[:width]],
            input_ids[row, width:][valid[width:]],
        )
        size, predicted = len(prompt), np.flatnonzero(trained[row])
        num_response_tokens = int(predicted[-1]) if len(predicted) else 0
        if not len(prompt):
            raise EngineError(
                f"row {row} of a batch", got="an empty prompt", expected="at least one prompt token"
            )
        images = None
        if image_tokens is not None or column is not None:
            # What the model wrote is a token like others.
            given = np.concatenate([prompt, np.where(trained[row][: len(response)], -1, response)])
            images = _row_images(
                row, {} if column is None else column[row] or {}, given, size, image_tokens, keys
            )
        # A prompt is computed once for those rows whose routes through it are the same.
        told = b"" if routes is None else routes[row, :width][valid[:width]].tobytes()
        if images is not None and (last := int(images.places.max())) >= size:
            # It has its prompt for itself, and is read as far as its last image.
            told, num_response_tokens = (
                told + row.to_bytes(8),
                max(num_response_tokens, last + 1 - size),
            )
        rows.append(
            RowTokens(
                prompt_key=prompt.tobytes() + (images.key if images else b"") + told,
                num_prompt_tokens=size,
                num_response_tokens=num_response_tokens,
                prompt=prompt,
                response=response,
                positions=positions[row][..., valid],
                trained=predicted,
                images=images,
            )
        )
    return rows


def _row_images(
    row: int,
    inputs: dict[str, Any],
    given: np.ndarray,
    size: int,
    tokens: ImageTokens | None,
    keys: dict[int, bytes],
) -> RowImages | None:
    """The images of a row out of `multi_modal_inputs`, in `given` tokens, the prompt's `size` first; None: none."""
    where = f"row {row} of a batch"
    if tokens is None:
        if inputs:
            raise EngineError(
                where, got="images", expected="text: the model is no vision-language model"
            )
        return None
    places, problem = tokens.places(given, inputs, size)
    if problem:
        fix = "Let data.image_key and video_key name the columns; a row is never cut inside of an image or a video."
        raise EngineError(where, got=problem, expected="one for each embedding", fix=fix)
    if not inputs:
        return None
    if id(inputs) not in keys:
        keys[id(inputs)] = images_key(inputs).encode()
    return RowImages(inputs, places, keys[id(inputs)])


def pack(
    rows: Sequence[RowTokens], num_columns: int, *, share_prompts: bool, device: torch.device
) -> PackedBatch:
    """Pack b rows into tokens [1, N] and targets [M]; rows without a trained token are left out and unpack to zeros.
    `num_columns`: T. `share_prompts`: compute a prompt once for all rows that have it."""
    groups: dict[Hashable, list[int]] = {}
    for number, row in enumerate(rows):
        if len(row.trained):
            groups.setdefault(row.prompt_key if share_prompts else number, []).append(number)
    run, tokens_of = _Run(), {}
    sources, targets, places, columns = [], [], [], []
    for members in groups.values():
        first, size = rows[members[0]], rows[members[0]].num_prompt_tokens
        if len(members) == 1:
            # A prompt that no other row has: one causal segment.
            length = size + first.num_response_tokens
            tokens = np.concatenate([first.prompt, first.response])[:length]
            prompt = run.append(tokens, first.positions[..., :length])
        else:
            # The prompt once, then each response as its continuation.
            prompt = run.append(first.prompt, first.positions[..., :size])
        if first.images is not None:
            run.images.append((first.images.inputs, prompt.start + first.images.places))
        for number in members:
            row, stop = rows[number], rows[number].num_response_tokens
            before = np.arange(
                prompt.start + size - 1, prompt.start + prompt.length
            )  # of each response token
            if len(members) > 1 and stop:
                segment = run.append(
                    row.response[:stop], row.positions[..., size : size + stop], prompt
                )
                before = np.concatenate([before, np.arange(segment.start, segment.start + stop)])
            tokens_of[number] = np.concatenate(
                [np.arange(prompt.start, prompt.start + size), before[1:]]
            )
            sources.append(before[row.trained])
            targets.append(row.response[row.trained])
            places.append(np.full(len(row.trained), number))
            columns.append(row.trained)
    parts = (run.input_ids, run.positions, sources, targets, places, columns)
    tensors = (
        torch.from_numpy(np.concatenate(arrays, axis=-1)).long().to(device) for arrays in parts
    )
    tokens, positions, predictors, targets, places, columns = tensors
    return PackedBatch(
        input_ids=tokens[None],
        position_ids=positions.unsqueeze(-2),
        segments=tuple(run.segments),
        predictors=predictors,
        host_predictors=np.concatenate(sources),
        targets=targets,
        rows=places,
        columns=columns,
        shape=(len(rows), num_columns),
        sum_of_squared_lengths=run.sum_of_squares,
        images=packed_images(run.images, device) if run.images else None,
        places=tokens_of,
    )


@dataclass
class _Run:
    """Segments, one after the other: token ids [N], positions [N] or [3, N], and images with their packed places."""

    num_tokens: int = 0
    sum_of_squares: int = 0
    segments: list[Segment] = field(default_factory=list)
    input_ids: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    images: list[tuple[Mapping[str, torch.Tensor], np.ndarray]] = field(default_factory=list)

    def append(
        self, input_ids: np.ndarray, positions: np.ndarray, prefix: Segment | None = None
    ) -> Segment:
        """A segment of these tokens, which may continue a prefix."""
        segment = Segment(self.num_tokens, len(input_ids), prefix)
        self.segments.append(segment)
        self.input_ids.append(input_ids)
        self.positions.append(positions)
        self.num_tokens += segment.length
        # What attention computes: a token sees those before it in its segment, and all of the prefix.
        self.sum_of_squares += segment.length * (
            segment.length + 2 * (prefix.length if prefix else 0)
        )
        return segment
