# SPDX-License-Identifier: Apache-2.0
"""The interface of rollout engines: tokens in, tokens out, with log-probabilities and the version of the weights.

An engine knows nothing of texts, templates, turns or `DataProto`s. A new engine implements `RolloutEngine` and gets
its tests from tests/contract/test_rollout_engines.py.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from quadriga.errors import RolloutError
from quadriga.rollout.setup import EngineSetup
from quadriga.weight_sync.fingerprint import Fingerprint
from quadriga.weight_sync.publish import WeightTarget

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one response is sampled.

    Args:
        max_tokens: length of the longest response, in tokens.
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: keeps the likeliest tokens up to this much probability, among those that top_k keeps. 1: all.
        top_k: keeps this many of the likeliest tokens. -1 or 0: all.
        min_p: drops tokens below this share of the likeliest token's probability. 0: none.
        do_sample: whether tokens are drawn; False takes the likeliest one.
        seed: of this response; the same seed gives the same response whatever else is in the batch.
        stop_token_ids: end the response, besides the model's own end-of-text tokens.
        stop: stop strings. The response keeps the token that completes one, and so perhaps text behind it.
        ignore_eos: whether the model's own end-of-text tokens do not end the response.
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
                raise RolloutError(
                    f"sampling {name}", got=str(getattr(self, name)), expected=expected
                )

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest one; log-probabilities are then those at temperature 1."""
        return not self.do_sample or self.temperature == 0

    @property
    def drawing(self) -> dict[str, float]:
        """How tokens are drawn, in the words of vLLM and SGLang; without filters where the likeliest one is taken."""
        if self.is_greedy:
            return {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or -1,
            "min_p": self.min_p,
        }

    def stops(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that end the response. Each of them, where it is generated, is the response's last token."""
        return frozenset(
            self.stop_token_ids if self.ignore_eos else (*self.stop_token_ids, *eos_token_ids)
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """One response.

    Attributes:
        token_ids: what was generated, the stop token included.
        log_probs: of each token under the temperature-scaled distribution before top-k, top-p and min-p: the number
            that training computes for it.
        finish_reason: "stop" at a stop token or stop string, "length" at max_tokens, "abort" when it was aborted.
        weight_version: of the weights that generated it.
        sampling_log_probs: of each token under the distribution that it was drawn from, after top-k, top-p and min-p;
            empty from an engine that does not say.
        routes: int8 or int16 [tokens, L, k], the experts that each token of the prompt and the response went through in
            each of L mixtures; the last token, which nothing was computed from, has none. None: they were not wanted.
        versions: of the weights that drew each token; empty from an engine that does not say, where one version did.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_version: int
    sampling_log_probs: list[float] = field(default_factory=list)
    routes: np.ndarray | None = None
    versions: list[int] = field(default_factory=list)

    def require_fit(self, max_tokens: int, where: str) -> None:
        """Raises a RolloutError if there are over `max_tokens` tokens, or none, or not a log-probability for each."""
        length = len(self.token_ids)
        # An aborted response may have no token yet.
        least = 0 if self.finish_reason == "abort" else 1
        if not least <= length <= max_tokens or length != len(self.log_probs):
            got = f"{length} tokens with {len(self.log_probs)} log-probabilities"
            raise RolloutError(
                where, got=got, expected=f"{least} to {max_tokens} tokens, each with its own"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """Images and videos of a prompt, in each form in which an engine may want them. Samples of it share one object.

    P is the length of the prompt as an engine gets it: with a token for each embedding of an image or a video.

    Attributes:
        pictures: `PIL.Image.Image`s, in the order of the prompt.
        inputs: what the model takes: `pixel_values` [patches, values] float32 and `image_grid_thw` [images, 3] int64,
            patches along time, height and width; `pixel_values_videos`, `video_grid_thw` and for some models
            `second_per_grid_ts` [videos].
        position_ids: [3, P] int64, the position of each token along time, height and width. A response goes on from
            the last column, one up with each token, in all three rows.
        short_prompt: the prompt with one token for each image and video, for engines that work out by themselves how
            many each has.
        key: equal for equal `inputs`, and for nothing else.
        videos: frames [T, 3, H, W] uint8 of each video, resized, and what is known of them as vLLM names it.
    """

    pictures: tuple[Any, ...]
    inputs: Mapping[str, torch.Tensor]
    position_ids: torch.Tensor
    short_prompt: tuple[int, ...]
    key: str
    videos: tuple[tuple[np.ndarray, Mapping[str, Any]], ...] = ()

    def followed_by(self, token_ids: Sequence[int]) -> "Images":
        """The same images, with text behind the prompt: later turns of a conversation."""
        last = self.position_ids[:, -1:]
        following = last + torch.arange(1, len(token_ids) + 1, device=last.device)
        positions = torch.cat((self.position_ids, following), -1)
        return replace(self, position_ids=positions, short_prompt=(*self.short_prompt, *token_ids))


Prompt: TypeAlias = Sequence[int]
Prompts: TypeAlias = Sequence[Prompt]
Sampling: TypeAlias = Sequence[SamplingParams]
BatchImages: TypeAlias = Sequence[Images | None] | None
"""Images of each prompt; None where no prompt has any."""


class _Request(NamedTuple):
    """A request that is not generated yet."""

    prompt: Prompt
    sampling: SamplingParams
    images: Images | None
    future: asyncio.Future[Completion]


class RolloutEngine(WeightTarget, ABC):
    """Generates responses with weights of a known version.

    Here stand `generate` on top of `generate_batch`, sleep, abort, and checks of requests. Requests that are awaited
    together are generated together: the first one schedules a turn of the event loop, and those that came until then
    form a batch.

        generate(a) ──┐
        generate(b) ──┼─> pending ── next turn of the loop ──> generate_batch([a, b, c]) ──> a, b, c go on
        generate(c) ──┘

    The batch blocks the event loop. `abort` reaches requests that are pending; a subclass that can end a batch
    that is under way checks `_is_aborting` meanwhile.

    Attributes:
        name: in configurations and errors.
        takes_images: whether prompts may have images. cuts_images: whether the engine cuts them, by the model's files.
        needs_packed_rows: whether it computes such architectures alone as training packs rows of.
        reports_routes: whether it can say which experts each token went through.
        shares_weights: whether it computes with the actor's own parameters.
        description: what was chosen at its start, for people to read.
        is_load_stable: whether the tensors of a load stay as they are until its end; else each until the next one.
        reserves_memory: whether on an accelerator it takes a share of the memory that the configuration names.
        counts: what befell it since they were last read, by the name of the metric.
    """

    name = "rollout"
    takes_images = cuts_images = needs_packed_rows = reports_routes = False
    shares_weights = is_load_stable = reserves_memory = False
    description = ""

    def __init__(self) -> None:
        self.weight_version = 0
        self._state: Literal["awake", "asleep", "closed"] = "awake"
        self._pending: list[_Request] = []
        self._is_aborting = False
        self._arrived = Fingerprint({})
        self.counts = Counter[str]()

    @classmethod
    def from_config(cls, setup: EngineSetup) -> "RolloutEngine":
        """The engine that a configuration asks for. Engines that `rollout.name` can name have it."""
        raise NotImplementedError(f"{cls.__name__}.from_config")

    @property
    def has_frozen_weights(self) -> bool:
        """Whether a load may leave out the weights below an adapter, which it has from an earlier one."""
        return False

    @property
    def has_dropped_weights(self) -> bool:
        """Whether it gave up its weights in its sleep: they have to be published before it generates."""
        return False

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        """One response; the engine decides what is batched together. A caller that is cancelled aborts its request."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._pending.append(_Request(prompt, sampling, images, future))
        if len(self._pending) == 1:
            loop.call_soon(self._generate_pending)
        return await future

    @abstractmethod
    def generate_batch(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> list[Completion]:
        """One response for each prompt, in order. Prompts with equal tokens and equal `Images.key` may share work.
        Raises RolloutError: a request cannot be served, such as images by an engine that takes none."""

    def abort(self) -> None:
        """End every unfinished response: its caller gets what there is, with finish reason "abort".

        From another thread it ends the batch that is under way there.
        """
        self._is_aborting = True
        pending, self._pending = self._pending, []
        for request in pending:
            if not request.future.done():
                request.future.set_result(Completion([], [], "abort", self.weight_version))

    def follow(self) -> None:
        """In a rollout group, as a member: make the steps that the leader tells, until it says that the batch is over.
        Engines that can span processes have it. Raises PeerLostError: the leader is gone."""
        raise NotImplementedError(f"{type(self).__name__}.follow")

    def release(self) -> None:
        """In a rollout group, as its leader: abort what is not finished, and let the members go."""

    def sleep(self) -> None:
        """Free the memory that generation needs; generating while asleep is an error. Weights may be loaded."""
        self._require_open("sleep")
        self._state = "asleep"

    def wake(self) -> None:
        """End the sleep."""
        self._require_open("wake")
        self._state = "awake"

    def close(self) -> None:
        """End the engine; it cannot be woken again."""
        self._state = "closed"

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Those that it computes with; none of an engine that packs them in its own way, or has no model."""
        return ()

    def fingerprint(self) -> Fingerprint:
        """Of what the last load has brought, weight by weight; empty before the first one."""
        return self._arrived

    def _generate_pending(self) -> None:
        pending, self._pending = self._pending, []
        if not (waiting := [request for request in pending if not request.future.done()]):
            return
        prompts, sampling, images, futures = map(list, zip(*waiting, strict=True))
        try:
            completions = self.generate_batch(prompts, sampling, images)
        except Exception as error:  # every caller gets it, raised where it awaits
            for future in futures:
                future.set_exception(error)
            return
        for future, completion in zip(futures, completions, strict=True):
            future.set_result(completion)

    def _require_open(self, action: str) -> None:
        if self._state == "closed":
            raise RolloutError(
                f"{self.name}.{action}", got="a closed engine", fix="Make a new one."
            )

    def _require_ready(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> None:
        """What every engine checks before it generates."""
        self._require_open("generate")
        where = f"{self.name}.generate"
        if self._state == "asleep":
            raise RolloutError(where, got="an engine that is asleep", fix="Call wake() first.")
        if self.has_dropped_weights:
            fix = "Publish the weights after its sleep."
            raise RolloutError(
                where, got="an engine that dropped its weights in its sleep", fix=fix
            )
        if self.weight_version < 0:
            fix = "Load a complete set of weights after the error of the last load."
            raise RolloutError(where, got="weights that were not loaded completely", fix=fix)
        if len(prompts) != len(sampling):
            got = f"{len(prompts)} prompts and {len(sampling)} sampling parameters"
            raise RolloutError(where, got=got, expected="one for each prompt")
        for row, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise RolloutError(
                    where, got=f"prompt {row} without a token", expected="at least one token"
                )
        if not self.takes_images and any(one is not None for one in images or ()):
            got = "a prompt with images"
            fix = "Set actor_rollout_ref.rollout.name=native, or leave out the rows with images."
            raise RolloutError(
                where, got=got, expected=f"text: the engine {self.name} takes no images", fix=fix
            )

    def _require_length(self, prompts: Prompts, sampling: Sampling, limit: int, whose: str) -> None:
        """Refuse a prompt that with its response may have more than `limit` tokens, as `whose` says."""
        for row, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
            if len(prompt) + params.max_tokens <= limit:
                continue
            where = f"{self.name}.generate, prompt {row}"
            got = f"{len(prompt)} prompt tokens and up to {params.max_tokens} new ones"
            fix = "Lower data.max_prompt_length or data.max_response_length, or raise the limit if it is a setting."
            raise RolloutError(
                where, got=got, expected=f"at most {limit} together ({whose})", fix=fix
            )
