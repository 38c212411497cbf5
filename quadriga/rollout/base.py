# SPDX-License-Identifier: Apache-2.0
"""What a generation engine is: tokens in, tokens out, with the log-probability of each and the version of the weights.

An engine knows nothing of texts, templates, turns or `DataProto`s. A new engine implements `RolloutEngine` and gets
its tests from tests/contract/test_rollout_engines.py.
"""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch

from quadriga.errors import RolloutError
from quadriga.weight_sync.fingerprint import Fingerprint

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one answer is sampled.

    Args:
        max_tokens: length of the longest answer, in tokens.
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: keeps the likeliest tokens up to this much probability, among those that top_k keeps. 1: all.
        top_k: keeps this many of the likeliest tokens. -1 or 0: all.
        min_p: drops tokens below this share of the likeliest token's probability. 0: none.
        do_sample: whether tokens are drawn; False takes the likeliest one.
        seed: the answer's own seed; the same seed gives the same answer whatever is generated beside it.
        stop_token_ids: end the answer, besides the model's own end-of-text tokens.
        stop: texts that end the answer. It keeps the token that completes one, and so perhaps text behind it.
        ignore_eos: whether the model's own end-of-text tokens do not end the answer.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    do_sample: bool = True
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("top_k", self.top_k >= -1, "-1 (all), or a number of tokens"),
            ("min_p", 0 <= self.min_p <= 1, "a number in [0, 1]"),
            ("seed", self.seed >= 0, "0 or more"),
            ("stop", all(self.stop), "texts of at least one character"),
        )
        for name, is_right, expected in checks:
            if not is_right:
                raise RolloutError(f"sampling {name}", got=str(getattr(self, name)), expected=expected)

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest one; log-probabilities are then those at temperature 1."""
        return not self.do_sample or self.temperature == 0

    def stops(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that end the answer. Each of them, where it is generated, is the answer's last token."""
        return frozenset(self.stop_token_ids if self.ignore_eos else (*self.stop_token_ids, *eos_token_ids))


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer.

    Attributes:
        token_ids: what was generated, the stop token included.
        log_probs: of each token under the temperature-scaled distribution before top-k, top-p and min-p: the number
            that training computes for it.
        finish_reason: "stop" at a stop token or text, "length" at max_tokens, "abort" when it was given up.
        weight_version: of the weights that generated it.
        sampling_log_probs: of each token under the distribution that it was drawn from, after top-k, top-p and min-p;
            empty from an engine that does not say.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_version: int
    sampling_log_probs: list[float] = field(default_factory=list)

    def require_fit(self, max_tokens: int, where: str) -> None:
        """Refuses an answer that is none.

        Args:
            max_tokens: that were asked for.
            where: it came from, for the error.

        Raises:
            RolloutError: it has too many tokens, or none, or not a log-probability for each.
        """
        length = len(self.token_ids)
        # An answer that was given up may have no token yet.
        least = 0 if self.finish_reason == "abort" else 1
        if not least <= length <= max_tokens or length != len(self.log_probs):
            raise RolloutError(
                where,
                got=f"{length} tokens with {len(self.log_probs)} log-probabilities",
                expected=f"{least} to {max_tokens} tokens, each with its own",
            )


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """The images of one prompt, in each form in which an engine may want them. Samples of a prompt share one object.

    P is the length of the prompt as an engine gets it: with a token for each embedding of an image.

    Attributes:
        pictures: `PIL.Image.Image`s, in the order of the prompt.
        inputs: what the model takes: `pixel_values` [patches, values] float32 and `image_grid_thw` [images, 3] int64,
            patches along time, height and width.
        position_ids: [3, P] int64, the position of each token along time, height and width. An answer goes on from
            the last column, one up with each token, in all three rows.
        short_prompt: the prompt with one token for each image, for engines that work out by themselves how many an
            image has.
        key: equal for equal `inputs`, and for nothing else.
    """

    pictures: tuple[Any, ...]
    inputs: Mapping[str, torch.Tensor]
    position_ids: torch.Tensor
    short_prompt: tuple[int, ...]
    key: str

    def followed_by(self, token_ids: Sequence[int]) -> "Images":
        """The same behind whose prompt text stands: what the model and others have said."""
        last = self.position_ids[:, -1:]
        following = last + torch.arange(1, len(token_ids) + 1, device=last.device)
        positions = torch.cat((self.position_ids, following), -1)
        return replace(self, position_ids=positions, short_prompt=(*self.short_prompt, *token_ids))


class RolloutEngine(Protocol):
    """Generates answers with weights of a known version. One that takes images is a `SeeingEngine`.

    Attributes:
        weight_version: of the weights; -1: none that are complete.
        has_frozen_weights: whether a load may leave out the weights below an adapter, which it has from an earlier one.
    """

    weight_version: int

    @property
    def has_frozen_weights(self) -> bool: ...

    async def generate(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        """One answer; the engine decides what is computed together. A caller that is cancelled gives it up."""
        ...

    def generate_batch(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[Completion]:
        """One answer for each prompt, in their order. Equal prompts share what they can."""
        ...

    def abort(self) -> None:
        """Ends every answer that is not finished: its caller gets what there is, with finish reason "abort"."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Takes over a complete set of weights. Afterwards `weight_version` is `version`, or -1 if loading failed.

        With `has_frozen_weights` the matrices of an adapter complete what is there.
        A tensor is only lent: its memory is overwritten once the iterator goes on, so what is kept is copied.
        """
        ...

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The weights that it generates with, under the trainer's names; none if it keeps them in another form."""
        ...

    def fingerprint(self) -> Fingerprint:
        """Of the weights that it generates with; if it keeps them in another form, of what reached it."""
        ...

    def sleep(self) -> None:
        """Gives back the memory that generation needs; generating while asleep is an error."""
        ...

    def wake(self) -> None:
        """Ends the sleep."""
        ...

    def close(self) -> None:
        """Ends the engine; it cannot be woken again."""
        ...


class SeeingEngine(RolloutEngine, Protocol):
    """An engine whose prompts may have images. They are passed only where a prompt has some."""

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        """See `RolloutEngine.generate`."""
        ...

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        images: Sequence[Images | None] | None = None,
    ) -> list[Completion]:
        """See `RolloutEngine.generate_batch`. Prompts are equal whose tokens and `Images.key` are."""
        ...


def takes_images(engine: RolloutEngine) -> bool:
    """Whether it is a `SeeingEngine`: it has the parameter."""
    return "images" in inspect.signature(engine.generate_batch).parameters


def with_images(engine: RolloutEngine, images: Sequence[Images | None]) -> dict[str, Any]:
    """The argument `images` of `generate_batch`; none where no prompt has any.

    Args:
        engine: that is to get it.
        images: of each prompt.

    Raises:
        RolloutError: there are images, and the engine does not take them.
    """
    if all(one is None for one in images):
        return {}
    if not takes_images(engine):
        name = getattr(engine, "name", type(engine).__name__)
        raise RolloutError(
            f"{name}.generate",
            got="a prompt with images",
            expected=f"text: the engine {name} takes no images",
            fix="Set actor_rollout_ref.rollout.name=native, hf or vllm, or leave out the rows with images.",
        )
    return {"images": images}


@dataclass(slots=True)
class _Request:
    """What waits for its turn."""

    prompt: Sequence[int]
    sampling: SamplingParams
    images: Images | None
    future: asyncio.Future[Completion]


class EngineBase(ABC):
    """What engines in this process share: being asleep, giving up, and `generate` on top of `generate_batch`.

    Requests that are awaited together are generated together: the first one asks the event loop for a turn, and
    those that came until then form a batch.

        generate(a) ──┐
        generate(b) ──┼─> pending ── next turn of the loop ──> generate_batch([a, b, c]) ──> a, b, c go on
        generate(c) ──┘

    The batch blocks the event loop. `abort` reaches requests that wait for their turn; a subclass that can end a batch
    that is under way looks at `_is_aborting` meanwhile.
    """

    name = "rollout"

    def __init__(self) -> None:
        self.weight_version = 0
        self._state: Literal["awake", "asleep", "closed"] = "awake"
        self._pending: list[_Request] = []
        self._is_aborting = False

    @property
    def has_frozen_weights(self) -> bool:
        """See `RolloutEngine`."""
        return False

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        """See `RolloutEngine.generate`."""
        with_images(self, [images])
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._pending.append(_Request(prompt_token_ids, sampling, images, future))
        if len(self._pending) == 1:
            loop.call_soon(self._generate_pending)
        return await future

    @abstractmethod
    def generate_batch(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[Completion]:
        """See `RolloutEngine.generate_batch`; an engine that takes images adds the parameter."""

    def abort(self) -> None:
        """See `RolloutEngine.abort`. From another thread it ends the batch that is under way there."""
        self._is_aborting = True
        pending, self._pending = self._pending, []
        for request in pending:
            if not request.future.done():
                request.future.set_result(Completion([], [], "abort", self.weight_version))

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`."""
        self._require_open("sleep")
        self._state = "asleep"

    def wake(self) -> None:
        """See `RolloutEngine.wake`."""
        self._require_open("wake")
        self._state = "awake"

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._state = "closed"

    def _generate_pending(self) -> None:
        pending, self._pending = self._pending, []
        waiting = [request for request in pending if not request.future.done()]
        if not waiting:
            return
        try:
            completions = self.generate_batch(
                [request.prompt for request in waiting],
                [request.sampling for request in waiting],
                **with_images(self, [request.images for request in waiting]),
            )
        except Exception as error:  # every caller gets it, raised where it awaits
            for request in waiting:
                request.future.set_exception(error)
            return
        for request, completion in zip(waiting, completions, strict=True):
            request.future.set_result(completion)

    def _require_open(self, action: str) -> None:
        if self._state == "closed":
            raise RolloutError(f"{self.name}.{action}", got="a closed engine", fix="Make a new one.")

    def _require_ready(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> None:
        """Checks what every engine checks before it generates."""
        self._require_open("generate")
        if self._state == "asleep":
            raise RolloutError(f"{self.name}.generate", got="an engine that is asleep", fix="Call wake() first.")
        if self.weight_version < 0:
            raise RolloutError(
                f"{self.name}.generate",
                got="weights that were not loaded completely",
                fix="Load a complete set of weights after the error of the last load.",
            )
        if len(prompts) != len(sampling):
            raise RolloutError(
                f"{self.name}.generate",
                got=f"{len(prompts)} prompts and {len(sampling)} sampling parameters",
                expected="one for each prompt",
            )
        for row, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise RolloutError(
                    f"{self.name}.generate", got=f"prompt {row} without a token", expected="at least one token"
                )


def require_length(
    name: str, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], limit: int, whose: str
) -> None:
    """Refuses requests that may become longer than a limit.

    Args:
        name: of the engine.
        prompts: token ids.
        sampling: of each prompt.
        limit: longest prompt and answer together, in tokens.
        whose: what sets the limit.

    Raises:
        RolloutError: one of them may.
    """
    for row, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        if len(prompt) + params.max_tokens > limit:
            raise RolloutError(
                f"{name}.generate, prompt {row}",
                got=f"{len(prompt)} prompt tokens and up to {params.max_tokens} new ones",
                expected=f"at most {limit} together ({whose})",
                fix="Lower data.max_prompt_length or data.max_response_length, or raise the limit if it is a setting.",
            )
