# SPDX-License-Identifier: Apache-2.0
"""Texts that end an answer, found in its tokens."""

from collections.abc import Sequence
from typing import Any

from quadriga.errors import RolloutError
from quadriga.rollout.base import SamplingParams

_SLACK = 8  # tokens before the longest text: a decoder may treat the first tokens of a sequence in a way of its own


class StopTexts:
    """Looks for texts at the end of an answer that grows token by token.

    Args:
        texts: any of them ends the answer.
        tokenizer: decodes; a token stands for one byte at least.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any) -> None:
        self.texts, self.tokenizer = tuple(texts), tokenizer
        self.num_tokens = max((len(text.encode()) for text in texts), default=0) + _SLACK

    def is_reached(self, token_ids: Sequence[int]) -> bool:
        """Whether one of the texts stands at the end of the answer, in its last tokens."""
        if not self.texts:
            return False
        tail = self.tokenizer.decode(list(token_ids[-self.num_tokens :]), skip_special_tokens=False)
        return any(text in tail for text in self.texts)

    def length(self, token_ids: Sequence[int]) -> int | None:
        """Tokens up to and with the one that completes the first of the texts; None if there is none."""
        if not self.texts:
            return None
        ends = range(1, len(token_ids) + 1)
        return next((end for end in ends if self.is_reached(token_ids[:end])), None)


def require_tokenizer(name: str, sampling: Sequence[SamplingParams], tokenizer: Any) -> None:
    """Refuses stop texts where nothing can decode tokens."""
    if tokenizer is None and any(params.stop for params in sampling):
        raise RolloutError(
            f"{name}.generate",
            got="stop texts, without a tokenizer",
            expected="an engine that can decode what it generates",
            fix="Make the engine with tokenizer=, or use stop_token_ids.",
        )
