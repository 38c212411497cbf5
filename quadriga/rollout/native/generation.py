# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: prefill of new prefixes, their first tokens, then a token per slot and step.

    scheduler admits requests ──> prefill of new prefixes ──> first token of each new slot
        ^                                                            │
        └── slots that ended, were aborted or preempted ── decode: one token per slot <──┘

Requests may come between any two steps. An engine without requests holds no KV cache.

A *prefix* is the part of a sequence that is computed by a prefill: the prompt, and after a
preemption also the response so far. For text it is a tuple of tokens. With images it is an
`ImagePrefix`, which behaves like a tuple of tokens, but is only equal if the images are, too.

Legend: R slots (rows of the batch), U different prefixes of the slots that start, N packed tokens
of several prefixes, V vocabulary.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quadriga.errors import RolloutError
from quadriga.models.experts import RouteRecorder
from quadriga.models.heads import HAS_TRITON, can_launch_triton
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
from quadriga.rollout.native.graphs import GraphedSteps, obstacle_to_graphs
from quadriga.rollout.native.network import Network
from quadriga.rollout.native.scheduler import Scheduler
from quadriga.rollout.sampler import NUM_DRAWS, Draws, SamplingRules, StopStrings, sample

if HAS_TRITON:
    from quadriga.rollout.native.kernels_triton import draw

# Room of the KV cache for the tokens of each response: at first, and added when memory is scarce.
_FIRST_ROOM = 64
_NEXT_ROOM = 16
# Unused prefixes are dropped from the KV cache if at most this share is in use.
_USED_SHARE = 0.5


@dataclass(frozen=True)
class ImagePrefix:
    """A prompt with images, and the response so far.

    Two of them are equal if they have the same tokens and the same images, compared by key.

    Attributes:
        tokens: token ids of the prompt and of the response so far.
        key: `Images.key`, equal for equal images.
        images: images of the prompt.
    """

    tokens: tuple[int, ...]
    key: str
    images: Images = field(compare=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens)

    @cached_property
    def next_position(self) -> int:
        """Position of the token that follows, the same on all axes."""
        prompt_positions = self.images.position_ids
        num_generated = len(self.tokens) - prompt_positions.shape[1]
        return int(prompt_positions[:, -1].max()) + 1 + num_generated

    def positions(self) -> Tensor:
        """Position of each token along time, height and width, [3, tokens]."""
        prompt_positions = self.images.position_ids
        num_generated = len(self.tokens) - prompt_positions.shape[1]
        end = self.next_position
        generated = torch.arange(end - num_generated, end)
        return torch.cat([prompt_positions, generated.expand(3, -1)], 1)


@dataclass(frozen=True)
class OlderPrefix:
    """A prefix whose KV cache is from older weights.

    It is not equal to the plain prefix, so that requests that start later do not share its cache.
    """

    prefix: "tuple[int, ...] | ImagePrefix"
    version: int  # version of the older weights

    def __len__(self) -> int:
        return len(self.prefix)

    def __iter__(self) -> Iterator[int]:
        return iter(self.prefix)

    @property
    def next_position(self) -> int:
        """Position of the token that follows; for text the number of tokens."""
        return getattr(self.prefix, "next_position", len(self.prefix))


Prefix = tuple[int, ...] | ImagePrefix | OlderPrefix


class GenerationRequest:
    """A prompt, and the response that is generated for it.

    Args:
        prompt: token ids.
        sampling: how the response is sampled.
        eos_token_ids: end-of-text tokens of the model.
        tokenizer: decodes the response; needed if there are stop strings.
        images: images of the prompt.

    Attributes:
        prefix: the tokens that a prefill computes; see the head of this file.
        token_ids: the response so far; `log_probs`, `versions` and `sampling_log_probs` have a
            value for each of its tokens.
        routes: experts of the tokens in the KV cache: [tokens, L, k] of the prefix, then [1, L, k]
            of each token behind it.
        finish_reason: why the response has ended; None: it has not.
        is_aborted: whether the request was aborted.
        joined: called when the request joins a batch, with the number of steps before that.
        times: when the request arrived, and each time it was admitted, in seconds since 1970.
        future: gets the completion.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        eos_token_ids: Iterable[int],
        tokenizer: Any,
        images: Images | None = None,
    ) -> None:
        self.prompt = tuple(prompt)
        self.sampling = sampling
        self.images = images
        self.stop_tokens = sampling.stops(eos_token_ids)
        self.stop_strings = StopStrings(sampling.stop, tokenizer)
        self.draws = Draws(sampling.seed)
        # The response so far, with a value for each token.
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self.sampling_log_probs: list[float] = []
        self.routes: list[np.ndarray] = []
        self.finish_reason: FinishReason | None = None
        self.is_aborted = False
        self.joined: Callable[[int], None] | None = None
        self.times = [time.time()]
        self.future: Future[Completion] = Future()
        self.reset_prefix()

    def reset_prefix(self) -> None:
        """Make all tokens so far the prefix, which a prefill computes: none is in the KV cache."""
        tokens = (*self.prompt, *self.token_ids)
        self.prefix: Prefix = tokens
        if self.images is not None:
            self.prefix = ImagePrefix(tokens, self.images.key, self.images)

    @property
    def num_left(self) -> int:
        """Most tokens that may follow the prefix in the KV cache, at least 1.

        The last token of a response is never written to it, because nothing attends to that token.
        """
        num_in_prefix = len(self.prefix) - len(self.prompt)
        return max(1, self.sampling.max_tokens - 1 - num_in_prefix)

    @property
    def num_written(self) -> int:
        """Number of tokens behind the prefix that are in the KV cache.

        The latest token is not: the next step writes it.
        """
        num_tokens = len(self.prompt) + len(self.token_ids)
        return max(0, num_tokens - len(self.prefix) - 1)

    def add(self, token: int, log_prob: float, sampling_log_prob: float) -> None:
        """Append a token, and set `finish_reason` if the response ends with it.

        Args:
            token: id of the token.
            log_prob: log-probability of the token before top-k, top-p and min-p.
            sampling_log_prob: log-probability of the token after these filters.

        Raises:
            RolloutError: the log-probability is not finite.
        """
        if not math.isfinite(log_prob):
            raise RolloutError(
                f"native.generate: token {len(self.token_ids)} of a response",
                got=f"a log-probability of {log_prob}",
                expected="finite logits",
                fix="The weights contain NaN or infinity; check actor/grad_norm of earlier steps.",
            )
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        self.sampling_log_probs.append(sampling_log_prob)
        # The stop token stays in the response.
        if token in self.stop_tokens or self.stop_strings.is_reached(self.token_ids):
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.sampling.max_tokens:
            self.finish_reason = "length"

    def continue_from(self, earlier: Completion) -> None:
        """Continue a response that was aborted, with a prefill of its tokens.

        Later tokens get the random numbers that they would have got without the abort.

        Args:
            earlier: the aborted response.
        """
        self.token_ids = list(earlier.token_ids)
        self.log_probs = list(earlier.log_probs)
        self.sampling_log_probs = list(earlier.sampling_log_probs)
        self.versions = list(earlier.versions)
        # Skip the random numbers of the tokens that exist.
        for _ in self.token_ids:
            self.draws.next()
        self.reset_prefix()

    def completion(self, weight_version: int) -> Completion:
        """Make the completion of the response so far; an unfinished response counts as aborted.

        Args:
            weight_version: version of the current weights.
        """
        # A request that was aborted before it was admitted has only one time; NaN: it was not
        # admitted.
        arrived_at, first_admitted_at, *_ = (*self.times, math.nan)
        return Completion(
            token_ids=list(self.token_ids),
            log_probs=list(self.log_probs),
            finish_reason=self.finish_reason or "abort",
            weight_version=weight_version,
            sampling_log_probs=list(self.sampling_log_probs),
            routes=np.concatenate(self.routes) if self.routes else None,
            versions=list(self.versions),
            times=(arrived_at, first_admitted_at, time.time()),
        )

    def resolve(self, weight_version: int) -> None:
        """Give the completion to the caller, unless the caller has cancelled the future."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self.completion(weight_version))


class Generation:
    """Requests that are generated together. Weights may change between two steps.

    Args:
        network: the model.
        scheduler: holds the requests.
        weight_version: version of the network's weights.
        uses_graphs: whether decode steps on a GPU become CUDA graphs.
        recorder: records the experts of each token, for the requests' `routes`.

    Attributes:
        prefixes: KV cache of the prefixes.
        responses: KV cache of the responses; slot r is row r.
        plan: attention of the current slots; None: the slots have changed since the last step.
        rules: sampling of the current slots, made together with `plan`.
        routes: experts of the tokens of each prefix in the KV cache, [tokens, L, k].
        graphs: CUDA graphs of decode steps; None: decode steps are computed without graphs.
    """

    def __init__(
        self,
        network: Network,
        scheduler: Scheduler[GenerationRequest],
        weight_version: int,
        *,
        uses_graphs: bool = True,
        recorder: RouteRecorder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.uses_graphs = uses_graphs
        self.recorder = recorder
        self.device = network.device
        self.prefixes = PrefixCache()
        self.responses = ResponseCache()
        self.routes: dict[Prefix, np.ndarray] = {}
        self.rules: SamplingRules | None = None
        self._set_network(network, weight_version)

    def _set_network(self, network: Network, weight_version: int) -> None:
        """Compute with a network from now on, and drop plan and graphs of the old network.

        Args:
            network: the model with the new weights.
            weight_version: version of these weights.
        """
        self.network = network
        self.weight_version = weight_version
        self.plan: AnyDecodePlan | None = None
        self.graphs: GraphedSteps | None = None
        model = network.model
        # The reason why steps cannot be graphs; "" if they can.
        obstacle = obstacle_to_graphs(model, network.device, model.dtype, network.group)
        if self.uses_graphs and not obstacle:
            self.graphs = GraphedSteps(network)

    def advance(self, aborted: Collection[GenerationRequest] = ()) -> None:
        """Make a step: end aborted requests, start waiting ones, compute a token of every slot.

        Args:
            aborted: requests to end.
        """
        scheduler = self.scheduler
        for request in aborted:
            if request in scheduler.waiting:
                scheduler.waiting.remove(request)
                request.resolve(self.weight_version)
            elif request in scheduler.running:
                self._end_request(scheduler.running.index(request))
        if scheduler.waiting:
            self._admit()
        if scheduler.running:
            self._decode_step()

    def switch_weights(self, network: Network, weight_version: int, *, keeps_cache: bool) -> None:
        """Continue with newer weights.

        Args:
            network: the model with the newer weights.
            weight_version: version of the newer weights.
            keeps_cache: whether running requests go on with the KV cache of the older weights.
                Otherwise they are preempted, and a prefill computes all of their tokens anew.
        """
        older_version = self.weight_version
        running = self.scheduler.running
        self._set_network(network, weight_version)
        if not keeps_cache:
            # From the last slot to the first, so that they wait in the order of their slots.
            while running:
                self.scheduler.preempt().reset_prefix()
            self.prefixes = PrefixCache()
            self.responses = ResponseCache()
            self.routes = {}
            return

        # Mark the prefixes as old, so that requests that start later do not share them. A prefix
        # that is older than one change of weights is marked already.
        marked = {}
        for prefix in self.prefixes.prefixes:
            is_marked = isinstance(prefix, OlderPrefix)
            marked[prefix] = prefix if is_marked else OlderPrefix(prefix, older_version)
        self.prefixes.prefixes = list(marked.values())
        self.routes = {marked[prefix]: routes for prefix, routes in self.routes.items()}
        for request in running:
            request.prefix = marked[request.prefix]

    def _end_request(self, slot: int) -> None:
        """End the request of a slot. The request of the last slot moves to this slot."""
        running = self.scheduler.running
        request = running[slot]
        last = self.scheduler.finish(slot)
        if last != slot:
            self.responses.move(last, slot, running[slot].num_written)
        self.plan = None
        # This comes last, because callbacks of the caller run in it.
        request.resolve(self.weight_version)

    def _admit(self) -> None:
        """Start waiting requests: prefill of their prefixes, and the first token of each.

        Does nothing if the scheduler starts none.
        """
        running = self.scheduler.running
        num_before = len(running)

        # All slots have the same room, so new slots get at least the room of the running ones.
        candidates = self.scheduler.waiting[: self.scheduler.max_num_seqs]
        room = min(_FIRST_ROOM, max(request.num_left for request in candidates))
        if running:
            room = max(self.responses.room, room)
        started = self.scheduler.admit(room)
        if not started:
            return
        admitted_at = time.time()
        for request in started:
            request.times.append(admitted_at)
        # Tokens of the longest response in the KV cache, which the resized memory must keep.
        length = max((request.num_written for request in running[:num_before]), default=0)
        # The requests that have started may need less room than the candidates.
        room = max(min(room, self._max_room()), length)
        self.responses.resize(len(running), room, num_before, length)

        # Prefill of the prefixes that are not in the cache, each once for all samples of a prompt.
        self._drop_unused_prefixes()
        new_prefixes = dict.fromkeys(request.prefix for request in started)
        for prefix in self.prefixes.prefixes:
            new_prefixes.pop(prefix, None)
        if new_prefixes:
            self.prefixes.extend(self._prefill(list(new_prefixes)))
        self.plan = None
        # All samples of a prompt share its routes.
        if self.recorder is not None:
            for request in started:
                request.routes = [self.routes[request.prefix]]

        self._sample_first_tokens(started, num_before)

    def _sample_first_tokens(self, started: Sequence[GenerationRequest], first: int) -> None:
        """Sample the first token of new slots, from the last hidden states of their prefixes.

        Logits are computed once for each prefix, however many samples share it.

        Args:
            started: the requests that start, in the order of their slots.
            first: slot of the first of them.
        """
        # On the host, because torch's `unique` waits for the device.
        places = self._prefix_places(started)
        unique_places, rows = map(torch.from_numpy, np.unique(places, return_inverse=True))
        hidden = self.prefixes.last_hidden[unique_places.to(self.device)]
        logits = self.network.logits(hidden)  # [U, V]
        rules = SamplingRules.from_params([request.sampling for request in started], self.device)
        # Indexing copies the logits, which the sampler overwrites.
        self._sample(logits[rows.to(self.device)], rules, first)

    def _max_room(self) -> int:
        """Most tokens that a response of this batch may add to the KV cache."""
        return max(request.num_left for request in self.scheduler.running)

    def _drop_unused_prefixes(self) -> None:
        """Drop all prefixes from the KV cache except those of the current slots."""
        needed = {request.prefix for request in self.scheduler.running}
        self.prefixes.keep(needed)
        self.routes = {prefix: routes for prefix, routes in self.routes.items() if prefix in needed}

    def _prefill(self, prefixes: Sequence[Prefix]) -> PrefixCache:
        """Compute the KV cache of new prefixes, in rounds of at most `max_num_batched_tokens`.

        Also adds the prefixes to `routes` if there is a recorder.

        Args:
            prefixes: the prefixes.

        Returns:
            A cache of these prefixes, with the last hidden state of each.

        Raises:
            RolloutError: a layer has no KV cache.
        """
        cache = PrefixCache(prefixes)
        last_hidden = []
        # `buckets` makes lists of consecutive indices of prefixes, each with at most so many tokens
        # together. It is written to copy tensors of so many bytes: here it counts tokens, and `put`
        # takes an index as it is.
        rounds = buckets(
            range(len(prefixes)),
            num_bytes=cache.lengths.__getitem__,
            max_bytes=self.scheduler.max_num_batched_tokens,
            put=lambda index, _: index,
        )
        for indices in rounds:
            places = slice(indices[0], indices[-1] + 1)
            plan = PrefillPlan(cache, places, self.device)
            tokens, positions, images = self._pack(prefixes[places])
            hidden = self.network.hidden(tokens, positions, images, plan=plan)[0]
            last_hidden.append(hidden.index_select(0, plan.last))
            # The routes of all packed tokens, split by prefix.
            if self.recorder is not None:
                ends = np.cumsum(cache.lengths[places])
                routes = np.split(self.recorder.take().numpy(), ends[:-1])
                self.routes |= zip(prefixes[places], routes, strict=True)
        cache.last_hidden = torch.cat(last_hidden)

        # Layers that did not call our attention have no KV cache. Decode steps would compute them
        # without their context, and nobody would notice.
        if len(cache.keys) != self.network.num_layers:
            raise RolloutError(
                f"native.generate with {type(self.network.body).__name__}",
                got=f"{len(cache.keys)} layers with plain attention",
                expected=f"{self.network.num_layers}, all of them",
                fix="Use rollout.name=hf: this engine cannot keep the state of other layers.",
            )
        return cache

    def _pack(self, prefixes: Sequence[Prefix]) -> tuple[Tensor, Tensor, PackedImages | None]:
        """Pack prefixes into one row of tokens.

        Args:
            prefixes: the prefixes.

        Returns:
            Token ids [1, N]; positions of the tokens, [1, N], or [3, 1, N] if a prefix has images;
            and the images, None if there are none.
        """
        tokens = []
        axis_positions = []  # [3, tokens] of each prefix
        images = []
        for prefix in prefixes:
            if isinstance(prefix, ImagePrefix):
                image_tokens = self.network.image_tokens
                inputs = prefix.images.inputs
                assert image_tokens is not None, "the engine refuses images for a language model"
                # Only the first tokens with the id of images, one for each embedding, stand for
                # images. Later ones were generated.
                image_places, _ = image_tokens.locate(np.array(prefix.tokens), inputs)
                images.append((inputs, len(tokens) + image_places))
                axis_positions.append(prefix.positions())
            else:
                axis_positions.append(torch.arange(len(prefix)).expand(3, -1))
            tokens += prefix
        positions = torch.cat(axis_positions, 1)
        # For text, all three axes have the same positions.
        positions = positions[:, None] if images else positions[:1]
        packed = torch.tensor([tokens], device=self.device)
        return packed, positions.to(self.device), packed_images(images, self.device)

    def _prefix_places(self, requests: Sequence[GenerationRequest]) -> list[int]:
        """Index of each request's prefix in the prefix cache."""
        place_of = {prefix: place for place, prefix in enumerate(self.prefixes.prefixes)}
        return [place_of[request.prefix] for request in requests]

    def _decode_step(self) -> None:
        """Compute and sample one token of every slot."""
        longest = max(request.num_written for request in self.scheduler.running)
        if longest >= self.responses.room:
            self._make_room(longest)
        # The slots of this step: `_make_room` may have preempted requests.
        requests = self.scheduler.running
        written = [request.num_written for request in requests]

        # Plan and rules stay valid until a slot starts or ends.
        if self.plan is None or self.rules is None:
            # Dropping copies the used prefixes, so it has to save enough memory.
            num_used = len({request.prefix for request in requests})
            if num_used <= _USED_SHARE * len(self.prefixes.prefixes):
                self._drop_unused_prefixes()
            places = self._prefix_places(requests)
            self.plan = plan_decoding(self.prefixes, self.responses, places, self.device)
            params = [request.sampling for request in requests]
            self.rules = SamplingRules.from_params(params, self.device)

        # The latest token of each slot is the input of the step.
        tokens = [request.token_ids[-1] for request in requests]
        logits = self.graphs.logits(self.plan, tokens, written) if self.graphs else None
        # None: there are no graphs, or none for the current memory yet.
        if logits is None:
            positions = self.plan.start_step(written)
            inputs = torch.tensor(tokens, device=self.device)[:, None]
            hidden = self.network.hidden(inputs, positions, plan=self.plan)
            logits = self.network.logits(hidden[:, 0])
            if self.recorder is not None:
                for request, route in zip(requests, self.recorder.take().numpy(), strict=True):
                    request.routes.append(route[None])
        self._sample(logits, self.rules, 0)

    def _make_room(self, longest: int) -> None:
        """Make room for one more token of every slot. Preempts requests if the KV cache is full.

        Args:
            longest: tokens of the longest response in the KV cache.
        """
        running = self.scheduler.running
        max_room = self._max_room()
        # Doubling keeps the number of copies small. If it does not fit, the room grows slowly.
        room = min(max_room, 2 * longest)
        if not self.scheduler.fits(room):
            room = min(max_room, longest + _NEXT_ROOM)
        # A single request may exceed the limit: otherwise it could never finish.
        while not self.scheduler.fits(room) and len(running) > 1:
            self.scheduler.preempt().reset_prefix()
            longest = max(request.num_written for request in running)
            room = min(self._max_room(), max(self.responses.room, longest + _NEXT_ROOM))
        self._drop_unused_prefixes()
        self.plan = None
        self.responses.resize(len(running), max(room, longest + 1), len(running), longest)

    def _sample(self, logits: Tensor, rules: SamplingRules, first: int) -> None:
        """Sample a token of each slot from `first` on, and end the requests that are finished.

        Args:
            logits: [slots, V] float32, which may be overwritten.
            rules: how each of these slots is sampled.
            first: the first of these slots.
        """
        running = self.scheduler.running
        requests = running[first:]
        is_cuda = self.device.type == "cuda"
        # Pinned, because a copy from other memory would wait until the logits are computed.
        draws = torch.empty(len(requests), NUM_DRAWS, dtype=torch.float64, pin_memory=is_cuda)
        for row, request in zip(draws.numpy(), requests, strict=True):
            row[:] = request.draws.next()
        uniforms = draws.to(self.device, non_blocking=True)

        # Token, log-prob and sampling log-prob, [slots, 3]. Float64 holds all three exactly, so a
        # single tensor brings them to the host, which waits for the device only once.
        if rules.has_no_filters and can_launch_triton(self.device):
            results = draw(logits, rules.temperature, rules.is_greedy, uniforms)
        else:
            columns = sample(logits, rules, uniforms)
            results = torch.stack([column.double() for column in columns], 1)
        for request, numbers in zip(requests, results.tolist(), strict=True):
            token, log_prob, sampling_log_prob = numbers
            request.add(int(token), log_prob, sampling_log_prob)
            request.versions.append(self.weight_version)
        # From the last slot to the first: the end of a request moves the request of the last slot,
        # which has been looked at already, to this slot.
        for slot in reversed(range(first, len(running))):
            if running[slot].finish_reason is not None:
                self._end_request(slot)
