# SPDX-License-Identifier: Apache-2.0
"""What a row begins with: its prompt, or, after it had to give way to others, its prompt with the answer so far.

Without images a context is the tuple of its tokens. With images it is a `SeenContext`, which has a length and goes
through its tokens as a tuple does, and equals another one where images are equal, too.

Legend: P prompt tokens, N packed tokens of several contexts.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch

from quadriga.models.vision import ImageTokens, PackedImages, packed_images
from quadriga.rollout.base import Images


class SeenContext:
    """Tokens, the first P of which are a prompt with images, and perhaps what was said behind them.

    Args:
        tokens: of the prompt, and of the answer so far.
        images: of the prompt.
    """

    def __init__(self, tokens: Sequence[int], images: Images) -> None:
        self.tokens, self.images = tuple(tokens), images
        self._key = (self.tokens, images.key)

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SeenContext) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def next_position(self) -> int:
        """Of the token that follows, on all axes."""
        prompt = self.images.position_ids
        return int(prompt[:, -1].max()) + 1 + len(self.tokens) - prompt.shape[1]

    def positions(self) -> torch.Tensor:
        """[3, tokens]"""
        prompt = self.images.position_ids
        num_after = len(self.tokens) - prompt.shape[1]
        after = torch.arange(self.next_position - num_after, self.next_position)
        return torch.cat([prompt, after.expand(3, -1)], 1)

    def places(self, tokens: ImageTokens) -> np.ndarray:
        """Of the tokens that stand for images: the first ones with their id, for what was written behind the images
        is text."""
        found = np.flatnonzero(np.array(self.tokens) == tokens.token_id)
        return found[: tokens.count(self.images.inputs["image_grid_thw"])]


Context = tuple[int, ...] | SeenContext


def context_of(tokens: Sequence[int], images: Images | None) -> Context:
    """Of a prompt, and what was answered so far."""
    return tuple(tokens) if images is None else SeenContext(tokens, images)


def next_position(context: Context) -> int:
    """Of the token that follows."""
    return context.next_position if isinstance(context, SeenContext) else len(context)


def packed_positions(contexts: Sequence[Context], device: torch.device) -> torch.Tensor:
    """[1, N], or [3, 1, N] where one of the contexts has images."""
    if not any(isinstance(context, SeenContext) for context in contexts):
        return torch.tensor([[place for context in contexts for place in range(len(context))]], device=device)
    rows = [
        context.positions() if isinstance(context, SeenContext) else torch.arange(len(context)).expand(3, -1)
        for context in contexts
    ]
    return torch.cat(rows, 1)[:, None].to(device)


def images_of(contexts: Sequence[Context], tokens: ImageTokens | None, device: torch.device) -> PackedImages | None:
    """Those of packed contexts; `tokens` of a model that sees."""
    if tokens is None:
        return None
    starts = accumulate((len(context) for context in contexts), initial=0)
    return packed_images(
        [
            (context.images.inputs, start + context.places(tokens))
            for start, context in zip(starts, contexts, strict=False)
            if isinstance(context, SeenContext)
        ],
        device,
    )
