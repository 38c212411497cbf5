# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: new prefixes are prefilled, first tokens sampled, then one token of every slot at a time.

    scheduler admits requests ──> prefill of new prefixes ──> first token of each new slot
        ^                                                            │
        └── slots that ended, were aborted or preempted ── decode: one token per slot <──┘

Requests may come between any two steps. An engine without requests holds no KV cache.

A *prefix* is what a request begins with: its prompt, and after a preemption the response so far. Text is a tuple of
tokens; with images it is an `ImagePrefix`, which behaves like one and compares the images, too.

Legend: R slots (rows of the batch), U different prefixes of the slots that start, N packed tokens of several prefixes,
V vocabulary.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from quadriga.errors import RolloutError
from quadriga.models.experts import RouteRecorder
from quadriga.models.heads import HAS_TRITON, launches_triton
from quadriga.models.vision import PackedImages, packed_images
from quadriga.partition import buckets
from quadriga.rollout.interface import Completion, FinishReason, Images, SamplingParams
from quadriga.rollout.native.attention import (
    AnyDecodePlan,
    PrefillPlan,
    PrefixCache,
    ResponseCache,
    plan_decoding,
)
from quadriga.rollout.native.graphs import GraphedSteps
from quadriga.rollout.native.network import Network
from quadriga.rollout.native.scheduler import Scheduler
from quadriga.rollout.sampler import NUM_DRAWS, Draws, SamplingRules, StopStrings, sample

if HAS_TRITON:
    from quadriga.rollout.native.kernels_triton import draw

_FIRST_ROOM = 64
_NEXT_ROOM = 16  # tokens by which responses get more room when the KV cache is nearly full
_KEPT_SHARE = 0.5  # of the prefixes in the KV cache are in use, or the others are dropped


@dataclass(frozen=True)
class ImagePrefix:
    """A prompt with images, and the response so far. Prefixes are equal whose tokens and `Images.key` are."""

    tokens: tuple[int, ...]
    key: str
    images: Images = field(compare=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens)

    @cached_property
    def next_position(self) -> int:
        """Of the token that follows, on all axes."""
        prompt = self.images.position_ids
        return int(prompt[:, -1].max()) + 1 + len(self.tokens) - prompt.shape[1]

    def positions(self) -> torch.Tensor:
        """[3, tokens]"""
        prompt, end = self.images.position_ids, self.next_position
        after = torch.arange(end - len(self.tokens) + prompt.shape[1], end)
        return torch.cat([prompt, after.expand(3, -1)], 1)


@dataclass(frozen=True)
class OlderPrefix:
    """A prefix in the KV cache that weights of an older version computed: it serves nothing that starts later."""

    prefix: "tuple[int, ...] | ImagePrefix"
    version: int

    def __len__(self) -> int:
        return len(self.prefix)

    def __iter__(self) -> Iterator[int]:
        return iter(self.prefix)

    @property
    def next_position(self) -> int:
        """As `ImagePrefix.next_position`; of text the number of tokens."""
        return getattr(self.prefix, "next_position", len(self.prefix))


Prefix = tuple[int, ...] | ImagePrefix | OlderPrefix


class Request:
    """A prompt, and the response that is generated for it. The tokenizer is needed where there are stop strings."""

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
        self.stop_strings = StopStrings(sampling.stop, tokenizer)
        self.draws = Draws(sampling.seed)
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self.sampling_log_probs: list[float] = []
        self.routes: list[np.ndarray] = []  # [tokens, L, k] of the prefix, then of one token each
        self.finish_reason: FinishReason | None = None
        self.is_given_up = False  # it was aborted, or its caller does not wait any more
        self.joined: Callable[[int], None] | None = None
        self.future: Future[Completion] = Future()
        self.future.add_done_callback(self._note_a_cancel)
        self.restart()

    def _note_a_cancel(self, future: Future[Completion]) -> None:
        self.is_given_up |= future.cancelled()

    def restart(self) -> None:
        """Its KV cache is lost, or there is none yet: all tokens that there are become its prefix."""
        tokens = (*self.prompt, *self.token_ids)
        self.prefix: Prefix = (
            tokens if self.images is None else ImagePrefix(tokens, self.images.key, self.images)
        )

    @property
    def num_left(self) -> int:
        """Tokens that it may come to hold in the KV cache besides those of its prefix; the last one needs none."""
        return max(1, self.sampling.max_tokens - 1 - (len(self.prefix) - len(self.prompt)))

    @property
    def num_written(self) -> int:
        """Tokens after the prefix that are in the KV cache, once a token was sampled."""
        return max(0, len(self.prompt) + len(self.token_ids) - len(self.prefix) - 1)

    def add(self, token: int, log_prob: float, sampling_log_prob: float) -> None:
        """One more token."""
        if not math.isfinite(log_prob):
            where = f"native.generate: token {len(self.token_ids)} of a response"
            fix = "The weights hold NaN or infinity; look at actor/grad_norm of the steps before."
            raise RolloutError(
                where, got=f"a log-probability of {log_prob}", expected="finite logits", fix=fix
            )
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        self.sampling_log_probs.append(sampling_log_prob)
        if token in self.stops or self.stop_strings.is_reached(self.token_ids):
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.sampling.max_tokens:
            self.finish_reason = "length"

    def go_on_from(self, earlier: Completion) -> None:
        """Begin behind the tokens of a response that was aborted."""
        self.token_ids, self.log_probs = list(earlier.token_ids), list(earlier.log_probs)
        self.sampling_log_probs, self.versions = (
            list(earlier.sampling_log_probs),
            list(earlier.versions),
        )
        for _ in self.token_ids:
            self.draws.next()
        self.restart()

    def completion(self, weight_version: int) -> Completion:
        """The response so far; an unfinished one as if it was aborted."""
        numbers = (self.finish_reason or "abort", weight_version, list(self.sampling_log_probs))
        routes = np.concatenate(self.routes) if self.routes else None
        return Completion(
            list(self.token_ids), list(self.log_probs), *numbers, routes, list(self.versions)
        )

    def close(self, weight_version: int) -> None:
        """Gives the caller its completion."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self.completion(weight_version))


class Generation:
    """Requests that are generated together, on a GPU by graphs, if `uses_graphs`; with a `recorder`, they are told the
    experts of their tokens. Weights may change between two steps."""

    def __init__(
        self,
        network: Network,
        scheduler: Scheduler[Request],
        weight_version: int,
        *,
        uses_graphs: bool = True,
        recorder: RouteRecorder | None = None,
    ) -> None:
        self.recorder, self.routes = (
            recorder,
            dict[Prefix, np.ndarray](),
        )  # of the prefixes in the cache
        self.network, self.scheduler, self.weight_version = network, scheduler, weight_version
        self.device = network.device
        self.prefixes = PrefixCache()
        self.responses = ResponseCache()
        self.plan: AnyDecodePlan | None = None
        self.uses_graphs = uses_graphs
        self.graphs = (
            GraphedSteps(network) if uses_graphs and GraphedSteps.can_capture(network) else None
        )
        self.rules: SamplingRules | None = None

    def advance(self, given_up: Collection[Request] = ()) -> None:
        """Drops what was given up, starts what can be started, and computes one token of every slot."""
        scheduler = self.scheduler
        if given_up:
            for slot in reversed(range(len(scheduler.running))):
                if scheduler.running[slot] in given_up:
                    self._end(slot)
            waiting, scheduler.waiting = scheduler.waiting, []
            for request in waiting:
                if request in given_up:
                    request.close(self.weight_version)
                else:
                    scheduler.waiting.append(request)
        if scheduler.waiting:
            self._admit()
        if scheduler.running:
            self._step()

    def renew(self, network: Network, weight_version: int, *, keeps_cache: bool) -> None:
        """Go on with newer weights; with `keeps_cache` on the KV cache of the older ones, else it is computed anew."""
        older, running = self.weight_version, self.scheduler.running
        self.network, self.weight_version, self.plan = network, weight_version, None
        self.graphs = (
            GraphedSteps(network)
            if self.uses_graphs and GraphedSteps.can_capture(network)
            else None
        )
        if keeps_cache:
            kept = {
                prefix: prefix if isinstance(prefix, OlderPrefix) else OlderPrefix(prefix, older)
                for prefix in self.prefixes.prefixes
            }
            self.prefixes.prefixes = [kept[prefix] for prefix in self.prefixes.prefixes]
            self.routes = {kept[prefix]: routes for prefix, routes in self.routes.items()}
            for request in running:
                request.prefix = kept[request.prefix]
            return
        while running:
            self.scheduler.preempt().restart()
        self.prefixes, self.responses, self.routes = PrefixCache(), ResponseCache(), {}

    def _end(self, slot: int) -> None:
        """The request of this slot is done; that of the last slot takes its place."""
        running = self.scheduler.running
        request, last = running[slot], self.scheduler.finish(slot)
        if last != slot and running[slot].num_written:
            self.responses.move(last, slot, running[slot].num_written)
        self.plan = None
        request.close(self.weight_version)

    def _admit(self) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        num_before = len(running)
        first_room = min(
            _FIRST_ROOM, max(request.num_left for request in waiting[: self.scheduler.max_num_seqs])
        )
        room = max(self.responses.room if num_before else 0, first_room)
        if not (started := self.scheduler.admit(room)):
            return
        length = max((request.num_written for request in running[:num_before]), default=0)
        self.responses.resize(
            len(running), max(min(room, self._limit()), length), num_before, length
        )
        self._keep_prefixes()
        held = set(self.prefixes.prefixes)
        new = list(
            dict.fromkeys(request.prefix for request in started if request.prefix not in held)
        )
        if new:
            self.prefixes.extend(self._prefill(new))
        self.plan = None
        for request in started if self.recorder else ():
            request.routes = [self.routes[request.prefix]]
        # The first token of the slots that start.
        places = self._places(started)
        order = {place: number for number, place in enumerate(sorted(set(places)))}
        assert self.prefixes.last_hidden is not None
        logits = self.network.logits(
            self.prefixes.last_hidden[torch.tensor([*order], device=self.device)]
        )  # [U, V]
        logits = logits[torch.tensor([order[place] for place in places], device=self.device)]
        rules = SamplingRules.from_params([request.sampling for request in started], self.device)
        self._sample(logits, rules, num_before)

    def _limit(self) -> int:
        """Tokens that a response of this batch can come to hold."""
        return max(request.num_left for request in self.scheduler.running)

    def _keep_prefixes(self) -> None:
        """Drops the prefixes of the cache that no slot has."""
        needed = {request.prefix for request in self.scheduler.running}
        self.prefixes.keep(
            [place for place, prefix in enumerate(self.prefixes.prefixes) if prefix in needed]
        )
        self.routes = {prefix: routes for prefix, routes in self.routes.items() if prefix in needed}

    def _prefill(self, prefixes: Sequence[Prefix]) -> PrefixCache:
        """The KV cache of prefixes, computed by as many of them at a time as `max_num_batched_tokens` lets."""
        cache, last_hidden = PrefixCache(prefixes), []
        limit = self.scheduler.max_num_batched_tokens
        for numbers in buckets(
            range(len(prefixes)), cache.lengths.__getitem__, limit, lambda number, _: number
        ):
            places = slice(numbers[0], numbers[-1] + 1)
            plan = PrefillPlan(cache, places, self.device)
            hidden = self.network.hidden(*self._packed(prefixes[places]), plan=plan)[0]
            last_hidden.append(hidden.index_select(0, plan.last))
            if self.recorder is not None:
                ends = np.cumsum(cache.lengths[places])[:-1]
                self.routes |= zip(
                    prefixes[places], np.split(self.recorder.take().numpy(), ends), strict=True
                )
        cache.last_hidden = torch.cat(last_hidden)
        if len(cache.keys) != self.network.num_layers:
            where = f"native.generate with {type(self.network.body).__name__}"
            got = f"{len(cache.keys)} layers with plain attention"
            fix = "Use rollout.name=hf: layers of another kind keep a state that this engine does not know."
            raise RolloutError(
                where, got=got, expected=f"{self.network.num_layers}, all of them", fix=fix
            )
        return cache

    def _packed(
        self, prefixes: Sequence[Prefix]
    ) -> tuple[torch.Tensor, torch.Tensor, PackedImages | None]:
        """Tokens [1, N], their positions [1, N], or [3, 1, N] where a prefix has images, and the images."""
        start, rows, images = 0, [], []
        for prefix in prefixes:
            if isinstance(prefix, ImagePrefix):
                tokens, inputs = self.network.image_tokens, prefix.images.inputs
                assert tokens is not None, "the engine refuses images for a language model"
                # The first tokens with their id stand for images; later ones were generated.
                found, _ = tokens.places(np.array(prefix.tokens), inputs)
                images.append((inputs, start + found))
                rows.append(prefix.positions())
            else:
                rows.append(torch.arange(len(prefix)).expand(3, -1))
            start += len(prefix)
        packed = torch.tensor(
            [[token for prefix in prefixes for token in prefix]], device=self.device
        )
        positions = torch.cat(rows, 1)
        positions = (positions[:, None] if images else positions[:1]).to(self.device)
        return packed, positions, packed_images(images, self.device)

    def _places(self, requests: Sequence[Request]) -> list[int]:
        """The place of each request's prefix in the cache."""
        place_of = {prefix: place for place, prefix in enumerate(self.prefixes.prefixes)}
        return [place_of[request.prefix] for request in requests]

    def _step(self) -> None:
        requests = self.scheduler.running
        written = [request.num_written for request in requests]
        if max(written) >= self.responses.room:
            self._make_room(max(written))
            written = [request.num_written for request in requests]
        if self.plan is None or self.rules is None:  # they last until a slot starts or ends
            if len({request.prefix for request in requests}) <= _KEPT_SHARE * len(
                self.prefixes.prefixes
            ):
                self._keep_prefixes()
            self.plan = plan_decoding(
                self.prefixes, self.responses, self._places(requests), self.device
            )
            self.rules = SamplingRules.from_params(
                [request.sampling for request in requests], self.device
            )
        tokens = [request.token_ids[-1] for request in requests]
        if (
            self.graphs is None
            or (logits := self.graphs.logits(self.plan, tokens, written)) is None
        ):
            positions = self.plan.start_step(written)
            inputs = torch.tensor(tokens, device=self.device)[:, None]
            logits = self.network.logits(
                self.network.hidden(inputs, positions, plan=self.plan)[:, 0]
            )
            if self.recorder is not None:
                for request, route in zip(requests, self.recorder.take().numpy(), strict=True):
                    request.routes.append(route[None])
        self._sample(logits, self.rules, 0)

    def _make_room(self, longest: int) -> None:
        """Room for one more token of every slot, of which the longest has so many; requests that find none are
        preempted."""
        running = self.scheduler.running
        limit = self._limit()
        room = min(limit, 2 * longest)
        if not self.scheduler.fits(room):
            room = min(limit, longest + _NEXT_ROOM)
        while not self.scheduler.fits(room) and len(running) > 1:
            self.scheduler.preempt().restart()
            longest = max(request.num_written for request in running)
            room = min(self._limit(), max(self.responses.room, longest + _NEXT_ROOM))
        self._keep_prefixes()
        self.plan = None
        self.responses.resize(len(running), max(room, longest + 1), len(running), longest)

    def _sample(self, logits: torch.Tensor, rules: SamplingRules, first: int) -> None:
        """One token of each slot from `first` on."""
        requests = self.scheduler.running[first:]
        is_cuda = self.device.type == "cuda"
        drawn = torch.empty(len(requests), NUM_DRAWS, dtype=torch.float64, pin_memory=is_cuda)
        for uniforms, request in zip(drawn.numpy(), requests, strict=True):
            uniforms[:] = request.draws.next()
        uniforms = drawn.to(self.device, non_blocking=True)  # a wait would be for the logits
        # Float64 holds all three exactly, so the host waits for the device once.
        if rules.has_no_filters and launches_triton(self.device):
            results = draw(logits, rules.temperature, rules.is_greedy, uniforms)
        else:
            results = torch.stack([one.double() for one in sample(logits, rules, uniforms)], 1)
        for request, numbers in zip(requests, results.tolist(), strict=True):
            request.add(int(numbers[0]), *numbers[1:])
            request.versions.append(self.weight_version)
        for slot in reversed(range(first, len(self.scheduler.running))):
            if self.scheduler.running[slot].finish_reason is not None:
                self._end(slot)
