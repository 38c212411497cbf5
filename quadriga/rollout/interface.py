# SPDX-License-Identifier: Apache-2.0
"""The interface of rollout engines: tokens in; tokens, log-probabilities and a weight version out.

An engine knows nothing of texts, templates, turns or `DataProto`s. A new engine implements
`RolloutEngine` and gets its tests from tests/contract/test_rollout_engines.py.
"""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from quadriga.engine_traits import EngineTraits
from quadriga.errors import RolloutError
from quadriga.rollout.setup import EngineSetup
from quadriga.weight_sync.fingerprint import Fingerprint, fingerprint
from quadriga.weight_sync.publish import NamedWeights, WeightTarget
from quadriga.weight_sync.reshard import Wanted

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one response.

    Args:
        max_tokens: length of the longest response, in tokens.
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: keeps the likeliest tokens up to this much probability, among those that top_k
            keeps. 1: all.
        top_k: keeps this many of the likeliest tokens. -1 or 0: all.
        min_p: drops tokens below this share of the likeliest token's probability. 0: none.
        do_sample: whether tokens are drawn; False takes the likeliest one.
        seed: seed of this response. The same seed gives the same response whatever else is in the
            batch.
        stop_token_ids: tokens that end the response, besides the model's own end-of-text tokens.
        stop: stop strings. The response keeps the token that completes one of them, and with this
            token perhaps some text behind the string.
        ignore_eos: whether the response goes on after the model's own end-of-text tokens.
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
        if self.max_tokens < 1:
            self._refuse("max_tokens", "at least 1")
        # Negated comparisons refuse NaN, too.
        if not self.temperature >= 0:
            self._refuse("temperature", "0 or more")
        if not 0 < self.top_p <= 1:
            self._refuse("top_p", "a number in (0, 1]")
        if self.top_k < -1:
            self._refuse("top_k", "-1 (all), or a number of tokens")
        if not 0 <= self.min_p <= 1:
            self._refuse("min_p", "a number in [0, 1]")
        if self.seed < 0:
            self._refuse("seed", "0 or more")
        if not all(self.stop):
            self._refuse("stop", "texts of at least one character")

    def _refuse(self, name: str, expected: str) -> None:
        """Raise the error of an invalid field."""
        raise RolloutError(f"sampling {name}", got=str(getattr(self, name)), expected=expected)

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest one. Log-probabilities are then at temperature 1."""
        return not self.do_sample or self.temperature == 0

    @property
    def drawing(self) -> dict[str, float]:
        """Temperature and filters, under the names that vLLM and SGLang share.

        Greedy sampling has temperature 0 and no filters.
        """
        if self.is_greedy:
            return {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            # Here 0 and -1 mean all tokens, in both libraries only -1.
            "top_k": self.top_k or -1,
            "min_p": self.min_p,
        }

    def stops(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """Tokens that end the response, which keeps the stop token as its last one.

        Args:
            eos_token_ids: end-of-text tokens of the model. They do not count with `ignore_eos`.
        """
        if self.ignore_eos:
            return frozenset(self.stop_token_ids)
        return frozenset((*self.stop_token_ids, *eos_token_ids))


@dataclass(frozen=True, slots=True)
class Completion:
    """A response of an engine.

    Attributes:
        token_ids: the generated tokens, the stop token included.
        log_probs: log-probability of each token under the temperature-scaled distribution before
            top-k, top-p and min-p: the number that training computes for it. NaN: the engine cannot
            report it.
        finish_reason: "stop" at a stop token or stop string, "length" at max_tokens, "abort" if it
            was aborted.
        weight_version: version of the weights that generated the response, at its end.
        sampling_log_probs: log-probability of each token under the distribution that it was drawn
            from, after top-k, top-p and min-p; empty if the engine does not report it.
        routes: int8 or int16 [tokens, L, k], the k experts that each token of the prompt and the
            response was sent to in each of L mixture layers. The last token has none, because no
            layer has computed it. None: routes were not requested.
        versions: version of the weights that drew each token. Empty if the engine does not report
            it; all tokens then have `weight_version`.
        times: when the request arrived, when it was admitted to a batch (NaN: unknown), and when
            its last token was drawn, in seconds since 1970. None: the engine does not report them.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_version: int
    sampling_log_probs: list[float] = field(default_factory=list)
    routes: np.ndarray | None = None
    versions: list[int] = field(default_factory=list)
    times: tuple[float, float, float] | None = field(default=None, compare=False)

    @property
    def token_versions(self) -> list[int]:
        """Version of the weights that drew each token."""
        return self.versions or [self.weight_version] * len(self.token_ids)

    def require_fit(self, max_tokens: int, where: str) -> None:
        """Check the numbers of tokens and log-probabilities.

        Args:
            max_tokens: the most tokens that the response may have.
            where: the response, for the error.

        Raises:
            RolloutError: there are more than `max_tokens` tokens, none in a response that was not
                aborted, or not a log-probability for each.
        """
        length = len(self.token_ids)
        # An aborted response may have no token yet.
        least = 0 if self.finish_reason == "abort" else 1
        if not least <= length <= max_tokens or length != len(self.log_probs):
            got = f"{length} tokens with {len(self.log_probs)} log-probabilities"
            expected = f"{least} to {max_tokens} tokens, each with a log-probability"
            raise RolloutError(where, got, expected)


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """Images and videos of a prompt, in every form that an engine may need.

    Samples of a prompt share one object. P is the length of the expanded prompt, which has a token
    for each embedding of an image or a video.

    Attributes:
        pictures: `PIL.Image.Image`s, in the order of the prompt.
        inputs: inputs of the model: `pixel_values` [patches, values] float32 and `image_grid_thw`
            [images, 3] int64, the patches along time, height and width; `pixel_values_videos`,
            `video_grid_thw` and for some models `second_per_grid_ts` [videos].
        position_ids: [3, P] int64, the position of each token along time, height and width. Each
            token of the response adds 1 to the last column, in all three rows.
        short_prompt: the prompt with one token for each image and video, for engines that expand
            these tokens themselves.
        key: hash of `inputs`. Two keys are equal exactly when the inputs are.
        videos: frames [T, 3, H, W] uint8 of each video, resized, and its metadata as vLLM names
            them.
    """

    pictures: tuple[Any, ...]
    inputs: Mapping[str, torch.Tensor]
    position_ids: torch.Tensor
    short_prompt: tuple[int, ...]
    key: str
    videos: tuple[tuple[np.ndarray, Mapping[str, Any]], ...] = ()

    def followed_by(self, token_ids: Sequence[int]) -> "Images":
        """Return the same images for a longer prompt, to which text is appended as by a later turn.

        Args:
            token_ids: the appended text, without tokens of images.
        """
        last = self.position_ids[:, -1:]
        text_positions = last + torch.arange(1, len(token_ids) + 1, device=last.device)
        positions = torch.cat((self.position_ids, text_positions), -1)
        return replace(self, position_ids=positions, short_prompt=(*self.short_prompt, *token_ids))


Prompt: TypeAlias = Sequence[int]
Prompts: TypeAlias = Sequence[Prompt]
Sampling: TypeAlias = Sequence[SamplingParams]
BatchImages: TypeAlias = Sequence[Images | None] | None
"""Images of each prompt; None where no prompt has any."""


class _QueuedRequest(NamedTuple):
    """A request that waits for the next batch, and the future of its response."""

    prompt: Prompt
    sampling: SamplingParams
    images: Images | None
    future: asyncio.Future[Completion]


class RolloutEngine(WeightTarget, ABC):
    """Generates responses with weights of a known version.

    This base class has `generate` on top of `generate_batch`, sleep, abort, and checks of requests.
    Requests that are awaited together are generated together: the first one schedules a turn of the
    event loop, and all requests until then form a batch.

        generate(a) ──┐
        generate(b) ──┼─> pending ── next turn of the loop ──> generate_batch([a, b, c])
        generate(c) ──┘

    The batch blocks the event loop. Batches of several loops take turns (`batch_lock`). `abort` ends
    pending requests; a subclass that can end a batch in between checks `_is_aborting` meanwhile.

    Attributes:
        name: name in configurations and errors.
        traits: declares what the engine can do.
        takes_images: whether prompts may have images.
        cuts_images: whether the engine preprocesses images itself, by the model's files.
        needs_packed_rows: whether the engine only computes architectures whose rows training can
            pack.
        shares_weights: whether the engine computes with the actor's own parameters.
        has_frozen_weights: whether a load may omit the weights below an adapter, because the engine
            has kept them from an earlier load.
        has_dropped_weights: whether the engine dropped its weights in its sleep, so that a load
            must bring them.
        description: summary of the choices made at the engine's start, for people to read.
        is_load_stable: whether the sender keeps all tensors of a load unchanged until the load
            ends. Otherwise a tensor is valid only until the next one arrives.
        counts: number of events since the last reading, such as restarts, by name of the metric.
        batch_lock: held while `generate` of the base class generates a batch.
        num_steps: steps since the engine was made; 0 if it does not count them.
        before_step: called with `num_steps` before each step, if the engine is deterministic.
        take_weights: set on the members of a rollout group; called with the version that the leader
            has loaded.
        count_ended: callback that reports progress, set only while a batch is generated. It is
            called from any thread, with the number of responses that have ended since the last
            call.
    """

    name = "rollout"
    traits = EngineTraits()
    takes_images = False
    cuts_images = False
    needs_packed_rows = False
    shares_weights = False
    has_frozen_weights = False
    has_dropped_weights = False
    is_load_stable = False
    description = ""
    num_steps = 0
    before_step: Callable[[int], None] | None = None
    take_weights: Callable[[int], None] | None = None
    count_ended: Callable[[int], None] | None = None

    def __init__(self) -> None:
        self.weight_version = 0
        self._state: Literal["awake", "asleep", "closed"] = "awake"
        # Requests by event loop, because a server that shares the engine has its own loop.
        self._pending: dict[asyncio.AbstractEventLoop, list[_QueuedRequest]] = {}
        self._is_aborting = False
        self.batch_lock = threading.RLock()
        self._arrived = Fingerprint({})
        self.counts = Counter[str]()

    @classmethod
    def from_config(cls, setup: EngineSetup) -> "RolloutEngine":
        """Make the engine of a configuration, for engines that `rollout.name` can name."""
        raise NotImplementedError

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        """Generate one response, in a batch with others. Cancelling the caller aborts the request.

        Args:
            prompt: token ids.
            sampling: how the response is sampled.
            images: images of the prompt.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        # The first request schedules the batch. Those that follow before it begins join it.
        requests = self._pending.setdefault(loop, [])
        requests.append(_QueuedRequest(prompt, sampling, images, future))
        if len(requests) == 1:
            loop.call_soon(self._generate_pending, loop)
        return await future

    @abstractmethod
    def generate_batch(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> list[Completion]:
        """Generate a response for each prompt.

        Prompts with equal tokens and equal `Images.key` may share work.

        Args:
            prompts: token ids of each prompt.
            sampling: how each response is sampled.
            images: images of each prompt; None if no prompt has any.

        Returns:
            The responses, in order.

        Raises:
            RolloutError: a request cannot be served, such as images by an engine that takes none.
        """

    def abort(self) -> None:
        """End all unfinished responses. Callers get the tokens so far, with the reason "abort".

        May be called from another thread than the one that generates.
        """
        self._is_aborting = True
        # A future may only get its result in the thread of its loop. `asyncio.get_running_loop`
        # would raise an error in a thread without a loop.
        for loop in list(self._pending):
            if loop is asyncio._get_running_loop():
                self._abort_pending(loop)
            elif not loop.is_closed():
                loop.call_soon_threadsafe(self._abort_pending, loop)

    def begin(
        self,
        prompts: Prompts,
        sampling: Sampling,
        images: BatchImages = None,
        joined: Callable[[int], None] | None = None,
        earlier: Sequence[Completion] = (),
    ) -> list[Future[Completion]]:
        """Start requests without waiting for them; for engines that take weights between tokens.

        Args:
            prompts: token ids of each request.
            sampling: how each response is sampled.
            images: images of each prompt.
            joined: called once all requests have joined the batch, with the number of steps made
                until then; not called if the engine does not count its steps.
            earlier: aborted responses. The first requests, as many as there are, continue them.

        Returns:
            The completion of each request.
        """
        raise NotImplementedError

    def between_steps(
        self, work: Callable[[], None], *, keeps_cache: bool, recomputes: bool = False
    ) -> Future[int]:
        """Run a function between two steps; for engines that take weights between tokens.

        If the function loads weights, unfinished responses go on with the new weights.

        Args:
            work: the function.
            keeps_cache: whether unfinished responses go on with the KV cache of the older weights.
            recomputes: whether the KV cache is computed anew even if the weights stay the same.

        Returns:
            Future of the number of steps made before the function ran. If the function raises, the
            future and all unfinished responses get the error.
        """
        raise NotImplementedError

    def unfinished(self) -> dict[Future[Completion], Completion]:
        """Unfinished responses so far, for engines whose responses another engine can continue.

        Only to be called between two steps. The responses are in the order in which they go on if
        the KV cache is computed anew.
        """
        raise NotImplementedError

    def wanted_shards(self) -> Wanted:
        """Shards of the weights that this rank of a group needs, by the trainer's names."""
        raise NotImplementedError

    def allocate_weights(self) -> None:
        """Allocate memory for weights that a sleep has freed, before shards are written into it."""

    def hold_shards(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Compute with these tensors from now on; for engines that take shards.

        The sender writes later weights into the same tensors, while the engine is not generating.

        Args:
            shards: tensors by name. They may be shared with the trainer, except those named in
                `merged_shards`, which the engine changes after they have arrived.
        """
        raise NotImplementedError

    def follow(self) -> None:
        """Make the leader's steps until the batch is over; for a member of a rollout group.

        Only for engines that can span processes.

        Raises:
            PeerLostError: the leader is gone.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Abort unfinished responses and end the batch; for the leader of a rollout group."""

    def sleep(self) -> None:
        """Free memory that only generation needs. Weights may still be loaded in the sleep."""
        self._require_open("sleep")
        self._state = "asleep"

    def wake(self) -> None:
        """End the sleep."""
        self._require_open("wake")
        self._state = "awake"

    def close(self) -> None:
        """End the engine; it cannot be woken again."""
        self._state = "closed"

    def named_weights(self) -> NamedWeights:
        """Weights that the engine computes with. Empty if it repacks them, or has no model."""
        return ()

    def fingerprint(self) -> Fingerprint:
        """Fingerprint of each weight of the last load; empty before the first one."""
        return self._arrived

    def note_arrival(self, weights: NamedWeights, version: int) -> None:
        """Note a version and the fingerprints of its weights, but do not keep the weights.

        This is `load_weights` for an engine without a model.

        Args:
            weights: names and tensors of the weights, read to the end, as weight sync expects.
            version: version of the weights.
        """
        self.weight_version = -1
        self._arrived = fingerprint(weights)
        self.weight_version = version

    def _take_pending(self, loop: asyncio.AbstractEventLoop) -> list[_QueuedRequest]:
        """Remove the pending requests of an event loop, and return those that are still awaited."""
        # A caller that was cancelled meanwhile has cancelled its future, which is then done.
        return [request for request in self._pending.pop(loop, []) if not request.future.done()]

    def _abort_pending(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the pending requests of a loop an empty response."""
        for request in self._take_pending(loop):
            request.future.set_result(Completion([], [], "abort", self.weight_version))

    def _generate_pending(self, loop: asyncio.AbstractEventLoop) -> None:
        """Generate the pending requests of a loop as a batch."""
        requests = self._take_pending(loop)
        if not requests:
            return
        try:
            # Batches of several event loops take turns.
            with self.batch_lock:
                completions = self.generate_batch(
                    [request.prompt for request in requests],
                    [request.sampling for request in requests],
                    [request.images for request in requests],
                )
        except Exception as error:  # raised where the callers await
            for request in requests:
                request.future.set_exception(error)
            return
        for request, completion in zip(requests, completions, strict=True):
            request.future.set_result(completion)

    def _count_when_done(self, futures: Sequence[Future[Any]]) -> None:
        """Call `count_ended`, if it is set, with 1 whenever a future of the batch is done."""
        # Read now, because the attribute is None again when the last futures are done.
        count_ended = self.count_ended
        if count_ended is not None:
            for future in futures:
                future.add_done_callback(lambda _: count_ended(1))

    def _require_open(self, action: str) -> None:
        """Raise a RolloutError that names the action if the engine is closed."""
        if self._state == "closed":
            raise RolloutError(
                f"{self.name}.{action}", got="a closed engine", fix="Make a new one."
            )

    def _require_ready(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> None:
        """Check the state of the engine and the arguments of a batch before it is generated.

        Args:
            prompts: token ids of each prompt.
            sampling: how each response is sampled.
            images: images of each prompt; None if no prompt has any.

        Raises:
            RolloutError: the engine is closed, asleep or without weights, or an argument is wrong.
        """
        self._require_open("generate")
        where = f"{self.name}.generate"
        if self._state == "asleep":
            raise RolloutError(where, got="an engine that is asleep", fix="Call wake() first.")
        if self.has_dropped_weights:
            got = "an engine that dropped its weights in its sleep"
            raise RolloutError(where, got, fix="Publish the weights again before you generate.")
        if self.weight_version < 0:  # as a failed load leaves it
            fix = "Load a complete set of weights after the error of the last load."
            raise RolloutError(where, got="weights that were not loaded completely", fix=fix)
        if len(prompts) != len(sampling):
            got = f"{len(prompts)} prompts and {len(sampling)} sampling parameters"
            raise RolloutError(where, got, expected="one for each prompt")
        for row, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise RolloutError(
                    where, got=f"prompt {row} without a token", expected="at least one token"
                )
        # This is about the engine. Whether its model takes images is checked by each engine.
        has_images = any(prompt_images is not None for prompt_images in images or ())
        if has_images and not self.takes_images:
            raise RolloutError(
                where,
                got="a prompt with images",
                expected=f"text: the engine {self.name} takes no images",
                fix="Set actor_rollout_ref.rollout.name=native, or leave out the rows with images.",
            )

    def _require_length(
        self, prompts: Prompts, sampling: Sampling, limit: int, source: str
    ) -> None:
        """Refuse a prompt that may exceed a limit of tokens together with its response.

        Args:
            prompts: token ids of each prompt.
            sampling: how each response is sampled.
            limit: most tokens of a prompt and its response.
            source: setting or property that the limit comes from, for the error.

        Raises:
            RolloutError: a prompt with a response of `max_tokens` exceeds the limit.
        """
        for row, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
            if len(prompt) + params.max_tokens > limit:
                raise RolloutError(
                    f"{self.name}.generate, prompt {row}",
                    got=f"{len(prompt)} prompt tokens and up to {params.max_tokens} new ones",
                    expected=f"at most {limit} together ({source})",
                    fix="Lower data.max_prompt_length or data.max_response_length,"
                    " or raise the limit if it is a setting.",
                )
