# SPDX-License-Identifier: Apache-2.0
"""A request and what is generated for it, from the call that asks to the one that is answered."""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from quadriga.errors import RolloutError
from quadriga.rollout.base import Completion, FinishReason, Images, SamplingParams
from quadriga.rollout.native.context import context_of
from quadriga.rollout.sampler import Draws
from quadriga.rollout.stop_texts import StopTexts


class Answer:
    """One answer that grows.

    Args:
        prompt: its tokens.
        sampling: how it is sampled.
        eos_token_ids: the model's own end-of-text tokens.
        tokenizer: needed where `sampling` has stop texts.
        images: of the prompt.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        eos_token_ids: Iterable[int],
        tokenizer: Any,
        images: Images | None = None,
    ) -> None:
        self.prompt, self.sampling, self.images = tuple(prompt), sampling, images
        self.stops = sampling.stops(eos_token_ids)
        self.stop_texts = StopTexts(sampling.stop, tokenizer)
        self.draws = Draws(sampling.seed)
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.sampling_log_probs: list[float] = []
        self.finish_reason: FinishReason | None = None
        self.is_given_up = False
        self.future: Future[Completion] = Future()
        self.context = context_of(self.prompt, images)

    @property
    def num_left(self) -> int:
        """Tokens whose keys and values it may come to hold besides those of its context; the last one needs none."""
        return max(1, self.sampling.max_tokens - 1 - (len(self.context) - len(self.prompt)))

    @property
    def num_written(self) -> int:
        """Tokens after the context whose keys and values are computed, once a token was sampled."""
        return max(0, len(self.prompt) + len(self.token_ids) - len(self.context) - 1)

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for it."""
        return self.is_given_up or self.future.cancelled()

    def restart(self) -> None:
        """Its keys and values are lost: what it has so far becomes part of its context."""
        self.context = context_of((*self.prompt, *self.token_ids), self.images)

    def add(self, token: int, log_prob: float, sampling_log_prob: float) -> None:
        """One more token."""
        if not math.isfinite(log_prob):
            raise RolloutError(
                f"native.generate: token {len(self.token_ids)} of an answer",
                got=f"a log-probability of {log_prob}",
                expected="finite logits",
                fix="The weights hold NaN or infinity; look at actor/grad_norm of the steps before.",
            )
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        self.sampling_log_probs.append(sampling_log_prob)
        if token in self.stops or self.stop_texts.is_reached(self.token_ids):
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.sampling.max_tokens:
            self.finish_reason = "length"

    def close(self, weight_version: int) -> None:
        """Hands the answer to who waits for it; unfinished it is given up."""
        reason = self.finish_reason or "abort"
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(
                Completion(self.token_ids, self.log_probs, reason, weight_version, self.sampling_log_probs)
            )

    def fail(self, error: BaseException) -> None:
        """Hands an error to who waits for it."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
