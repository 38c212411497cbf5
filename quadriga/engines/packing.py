# SPDX-License-Identifier: Apache-2.0
"""The door of the training engines: padded rows become one packed run of tokens, and results become rows again.

A packed micro-batch holds no padding, holds the prompt of a group of samples once, and leaves out what nothing is
predicted from: the last token of every response and all that follows the last trained one.

Legend: b rows, P prompt positions, T response positions, N packed tokens, M predicted tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from quadriga.engines.prompt_images import PromptImages, prompt_images
from quadriga.errors import EngineError
from quadriga.models.packed_attention import PackedAttention, Segment
from quadriga.models.vision import ImageTokens, PackedImages, packed_images
from quadriga.protocol import DataProto


@dataclass(frozen=True)
class PackedBatch:
    """Rows of a DataProto as one run of tokens.

    Attributes:
        input_ids: [1, N]
        position_ids: [1, N], or [3, 1, N] along time, height and width.
        segments: which packed token sees which.
        predictors: [M] packed index of the token whose state predicts each target.
        targets: [M] token ids.
        rows, columns: [M] where each target stands in the padded [b, T] responses.
        shape: (b, T)
        sum_of_squared_lengths: what causal attention over the packed tokens costs.
        images: of the prompts.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    segments: tuple[Segment, ...]
    predictors: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    shape: tuple[int, int]
    sum_of_squared_lengths: int
    images: PackedImages | None = None

    @cached_property
    def plan(self) -> PackedAttention:
        """How its tokens attend."""
        return PackedAttention(self.segments, self.input_ids.device)

    def extended(self, num_tokens: int) -> "PackedBatch":
        """The same with N brought to `num_tokens`, by a segment that nothing is predicted from."""
        missing = num_tokens - self.num_tokens
        if missing == 0:
            return self
        return replace(
            self,
            input_ids=torch.nn.functional.pad(self.input_ids, (0, missing)),
            position_ids=torch.nn.functional.pad(self.position_ids, (0, missing)),
            segments=(*self.segments, Segment(self.num_tokens, missing)),
        )

    @property
    def num_tokens(self) -> int:
        """N"""
        return self.input_ids.shape[1]

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """[M] -> [b, T], zero where nothing was predicted."""
        return values.new_zeros(self.shape).index_put((self.rows, self.columns), values)


@dataclass(frozen=True)
class RowTokens:
    """One padded row without its padding.

    Attributes:
        prompt, response: token ids.
        positions: [L] of both, or [3, L].
        trained: the response positions that are predicted.
        images: of the prompt.
    """

    prompt: np.ndarray
    response: np.ndarray
    positions: np.ndarray
    trained: np.ndarray
    images: PromptImages | None = None

    @property
    def num_inputs(self) -> int:
        """Response tokens that something is predicted from."""
        return int(self.trained[-1]) if len(self.trained) else 0

    @property
    def prompt_key(self) -> bytes:
        """Equal for rows with the same prompt, in tokens and in images."""
        return self.prompt.tobytes() + (self.images.key if self.images else b"")


def row_tokens(data: DataProto, image_tokens: ImageTokens | None = None) -> list[RowTokens]:
    """The rows of a batch without their padding.

    Args:
        data: input_ids, attention_mask, position_ids, response_mask, and perhaps multi_modal_inputs.
        image_tokens: of a model that sees.
    """
    input_ids, attention, positions, trained = (
        data.batch[key].cpu().numpy() for key in ("input_ids", "attention_mask", "position_ids", "response_mask")
    )
    width = input_ids.shape[1] - trained.shape[1]
    valid = attention != 0
    prompts = [ids[:width][here[:width]] for ids, here in zip(input_ids, valid, strict=True)]
    if empty := [row for row, prompt in enumerate(prompts) if not len(prompt)]:
        raise EngineError(f"row {empty[0]} of a batch", got="an empty prompt", expected="at least one prompt token")
    images = prompt_images(data, prompts, image_tokens)
    return [
        RowTokens(
            prompt=prompts[row],
            response=input_ids[row, width:][valid[row, width:]],
            positions=positions[row][..., valid[row]],
            trained=np.flatnonzero(trained[row]),
            images=images[row],
        )
        for row in range(len(data))
    ]


def pack(rows: Sequence[RowTokens], num_columns: int, *, share_prompts: bool, device: torch.device) -> PackedBatch:
    """Pack rows; rows without a trained token are left out and unpack to zeros.

    Args:
        rows: b of them.
        num_columns: T.
        share_prompts: compute a prompt once for all rows that have it.
        device: of the packed tensors.
    """
    groups: dict[bytes | int, list[int]] = {}
    for number, row in enumerate(rows):
        if len(row.trained):
            groups.setdefault(row.prompt_key if share_prompts else number, []).append(number)
    builder = _Builder()
    for members in groups.values():
        if len(members) == 1:
            builder.add_sequence(members[0], rows[members[0]])
        else:
            builder.add_group(members, [rows[number] for number in members])
    return builder.build((len(rows), num_columns), device)


def filler(device: torch.device) -> PackedBatch:
    """A micro-batch for processes that have no rows left while others have: one token that predicts one."""
    nothing = torch.zeros(1, dtype=torch.int64, device=device)
    return PackedBatch(
        input_ids=nothing[None],
        position_ids=nothing[None],
        segments=(Segment(0, 1),),
        predictors=nothing,
        targets=nothing,
        rows=nothing,
        columns=nothing,
        shape=(1, 1),
        sum_of_squared_lengths=1,
    )


class _Builder:
    def __init__(self) -> None:
        self.num_tokens = 0
        self.segments: list[Segment] = []
        self.input_ids: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.predictors: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []
        self.rows: list[np.ndarray] = []
        self.columns: list[np.ndarray] = []
        self.images: list[tuple[int, PromptImages]] = []  # and where their prompt starts

    def add_sequence(self, number: int, row: RowTokens) -> None:
        """A row whose prompt nobody shares: one causal segment."""
        length = len(row.prompt) + row.num_inputs
        tokens, positions = np.concatenate([row.prompt, row.response])[:length], row.positions[..., :length]
        segment = self._append(tokens, positions, None, row.images)
        before = np.arange(segment.start + len(row.prompt) - 1, segment.start + length)
        self._predict(number, row, before)

    def add_group(self, numbers: Sequence[int], members: Sequence[RowTokens]) -> None:
        """Rows with one prompt: the prompt once, then each response as its continuation."""
        size = len(members[0].prompt)
        prompt = self._append(members[0].prompt, members[0].positions[..., :size], None, members[0].images)
        for number, row in zip(numbers, members, strict=True):
            stop = row.num_inputs
            before = np.array([prompt.start + size - 1])
            if stop:
                segment = self._append(row.response[:stop], row.positions[..., size : size + stop], prompt)
                before = np.concatenate([before, np.arange(segment.start, segment.start + stop)])
            self._predict(number, row, before)

    def _append(
        self, input_ids: np.ndarray, positions: np.ndarray, prefix: Segment | None, images: PromptImages | None = None
    ) -> Segment:
        segment = Segment(self.num_tokens, len(input_ids), prefix)
        if images is not None:
            self.images.append((segment.start, images))
        self.segments.append(segment)
        self.input_ids.append(input_ids)
        self.positions.append(positions)
        self.num_tokens += segment.length
        return segment

    def _predict(self, number: int, row: RowTokens, before: np.ndarray) -> None:
        """`before[t]` is the packed token that stands before response token t."""
        self.predictors.append(before[row.trained])
        self.targets.append(row.response[row.trained])
        self.rows.append(np.full(len(row.trained), number))
        self.columns.append(row.trained)

    def build(self, shape: tuple[int, int], device: torch.device) -> PackedBatch:
        def tensor(parts: list[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(parts, axis=-1)).long().to(device)

        cost = sum(
            segment.length * (segment.length + 2 * (segment.prefix.length if segment.prefix else 0))
            for segment in self.segments
        )
        return PackedBatch(
            input_ids=tensor(self.input_ids)[None],
            position_ids=tensor(self.positions).unsqueeze(-2),
            segments=tuple(self.segments),
            predictors=tensor(self.predictors),
            targets=tensor(self.targets),
            rows=tensor(self.rows),
            columns=tensor(self.columns),
            shape=shape,
            sum_of_squared_lengths=cost,
            images=packed_images([(images.inputs, start + images.places) for start, images in self.images], device),
        )
