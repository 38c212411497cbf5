# SPDX-License-Identifier: Apache-2.0
"""The native rollout engine: continuous batching in the trainer's process, on the trainer's own module.

A prompt is computed once for all of its responses (prefix sharing); the KV cache is written in place; a request that
ends makes room at once. Norms, attention, softmax and logits are float32, so that the log-probabilities are those of
training.

    generate, generate_batch ──> inbox ──> one runner: takes the inbox, starts requests, steps ──> futures ──> callers
    begin, between_steps                   (the thread of generate_batch, or a worker)
         (any thread)

Consumes: requests and work between two steps from the inbox. Waits for: that work, such as newer weights; without a
request it ends. Unblocked by: the next request, which makes a new runner.

In a rollout group the leader has requests and runner, and tells the members before each step what the runner took from
the inbox, what was given up, and which weights are to be taken. They do the same with the same seeds, so all ranks have
the same tokens; a checksum of them is compared with new weights, and when the batch is over.
"""

import asyncio
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from quadriga.errors import EngineError, RolloutError
from quadriga.models.adapter_files import factor_names, is_factor, merge
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.experts import RouteRecorder, mixtures
from quadriga.models.lora import adapter_of, add_adapter
from quadriga.models.vision import ImageTokens
from quadriga.observe.timing import PhaseTimer
from quadriga.rollout.causal_model import CausalModelEngine, cache_bytes_per_token
from quadriga.rollout.group import RolloutGroup
from quadriga.rollout.interface import (
    BatchImages,
    Completion,
    Images,
    Prompt,
    Prompts,
    Sampling,
    SamplingParams,
)
from quadriga.rollout.manifest import Manifest
from quadriga.rollout.native.attention import cache_dtype
from quadriga.rollout.native.generation import Generation, Request
from quadriga.rollout.native.network import (
    Network,
    PlainNetwork,
    description_of,
    is_plain,
    shards_of,
    state_of,
)
from quadriga.rollout.native.scheduler import Scheduler
from quadriga.rollout.sampler import require_tokenizer
from quadriga.rollout.setup import EngineSetup
from quadriga.weight_sync.reshard import Piece, Wanted

_GIBIBYTE = 2**30
_OVER = "over"
"""The message that ends a batch, with the checksum of its tokens."""
_RENEW = "renew"
"""The message that newer weights are taken, or the KV cache is computed anew, with the same checksum."""
_CACHE_SHARE = 0.7
"""Of a GPU's free memory; the rest is for activations and logits, and for a layer that is copied as the cache grows."""


class NativeEngine(CausalModelEngine):
    """Continuous batching with a model of transformers; see `RolloutEngine` for its methods.

    Args:
        model: any causal model of transformers that was loaded with our attention. It may be the trainer's.
        max_num_batched_tokens: prompt tokens of one prefill, unless one prompt alone has more.
        cache_gigabytes: memory of the KV cache, in GiB, of each rank; None: as much as the responses need, on a GPU up
            to 70 % of what is free when a batch begins. Where it is full, the requests that started last are preempted;
            they go on later, with the same tokens.
        group: the ranks that hold the model together; it is then on "meta", until `hold_shards`.
        dtype: of the shards of a group.
        adapted: the model with the trainer's adapter, which a group merges into the shards as they come.
        uses_graphs: whether decode steps on a GPU become CUDA graphs.
        records_routes: whether completions say which experts their tokens went through.
        options: those of `CausalModelEngine`.

    Raises RolloutError: the model computes something that this engine does not."""

    name = "native"
    needs_packed_rows = reports_routes = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_num_batched_tokens: int = 8192,
        cache_gigabytes: float | None = None,
        group: RolloutGroup | None = None,
        dtype: torch.dtype | None = None,
        adapted: PreTrainedModel | None = None,
        uses_graphs: bool = True,
        records_routes: bool = False,
        **options: Any,
    ) -> None:
        if (found := model.config._attn_implementation) != ATTENTION_NAME:
            expected = f"one loaded with attention {ATTENTION_NAME}"
            fix = "Load it with quadriga.models.load.load_causal_lm; if its rows cannot be packed, set rollout.name=hf."
            raise RolloutError(
                "rollout.name=native",
                got=f"a model with {found} attention",
                expected=expected,
                fix=fix,
            )
        super().__init__(model, **options)
        self.description = f"native, {description_of(model)}"
        self.max_num_batched_tokens, self.uses_graphs = max_num_batched_tokens, uses_graphs
        self._recorder = RouteRecorder(model) if records_routes else None
        self.group, self.dtype = group, dtype or model.dtype
        self.token_bytes = cache_bytes_per_token(
            model.config, cache_dtype(self.dtype, model.device)
        )
        if group is not None:
            if (
                not is_plain(model)
                or ImageTokens.of(model.config) is not None
                or any(mixtures(model))
            ):
                got, expected = (
                    f"{type(model).__name__}, in groups of {group.size}",
                    "Llama, Qwen2 or Qwen3 for text",
                )
                fix = "Set actor_rollout_ref.rollout.tensor_model_parallel_size=1."
                raise RolloutError("rollout.name=native", got=got, expected=expected, fix=fix)
            whole = cache_bytes_per_token(model.config, cache_dtype(self.dtype, group.device))
            self.token_bytes = whole // min(
                group.size, model.config.num_key_value_heads
            )  # a rank has one at least
            self._manifest, self._pieces = Manifest.of(model), shards_of(model, group)
            self._adapter = adapter_of(adapted or model)
            self._factors = Manifest.of(adapted or model).part(is_factor).shapes
            self.merged_shards = {
                name for name in self._pieces if factor_names(name)[0] in self._factors
            }
            self.weight_version = -1
        room = (
            None if cache_gigabytes is None else int(cache_gigabytes * _GIBIBYTE / self.token_bytes)
        )
        self.max_cache_tokens: int | None = room
        # Of the requests of the batch that the group has: those that are told and not done, all by number.
        self._told: dict[int, Request] = {}
        self._num_told = self._checksum = 0
        self._has_failed = False
        self.take_weights: Callable[[int], None] | None = (
            None  # of a member, of the version that its leader has taken
        )
        self._network: Network | None = None
        self._lock = threading.Lock()
        self._inbox: list[Request] = []
        self._open: list[Request] = []  # taken by a runner, perhaps done
        self._is_running = self._is_between_steps = False
        self._work: list[tuple[Callable[[], None], bool, bool, Future[int]]] = []
        self.num_steps = 0  # of the engine, since it was made
        self.before_step: Callable[[int], None] | None = (
            None  # called by the runner with their number
        )
        self._worker: ThreadPoolExecutor | None = None
        self._turn: Future[None] | None = None

    @classmethod
    def from_config(cls, setup: EngineSetup) -> "NativeEngine":
        setup.require_no_options()
        rollout, group = setup.rollout, setup.group
        memory = {
            "max_num_batched_tokens": rollout.max_num_batched_tokens,
            "cache_gigabytes": rollout.cache_gigabytes,
        }
        if group is not None:
            model, section, adapted = setup.skeleton(), setup.config.actor_rollout_ref.model, None
            if section.has_adapter:
                add_adapter(adapted := setup.skeleton(), section, seed=0)
            engine = cls(
                model,
                group=group,
                dtype=setup.dtype,
                adapted=adapted,
                **memory,
                **cls.options_of(setup, model),
            )
            engine.description = (
                f"native, in groups of {group.size} ranks, each with a shard of the weights"
            )
            return engine
        model = setup.load_copy(ATTENTION_NAME) if setup.actor is None else setup.actor
        memory |= {
            "records_routes": setup.config.actor_rollout_ref.actor.router_replay == "rollout"
        }
        engine = cls(
            model, **memory, uses_graphs=not rollout.enforce_eager, **cls.options_of(setup, model)
        )
        engine.shares_weights = setup.actor is not None
        where = (
            "the actor's own weights"
            if engine.shares_weights
            else "a copy of the weights, which the actor shards"
        )
        engine.description = f"native, on {where}, {description_of(model)}"
        return engine

    def generate_batch(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> list[Completion]:
        requests = self._requests(prompts, sampling, images)
        if self._submit(requests):
            self._run()
        return [request.future.result() for request in requests]

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        """One response; the request joins those that run, and the event loop stays free."""
        (future,) = self.begin([prompt], [sampling], [images])
        return await asyncio.wrap_future(future)

    def begin(
        self,
        prompts: Prompts,
        sampling: Sampling,
        images: BatchImages = None,
        joined: Callable[[int], None] | None = None,
        earlier: Sequence[Completion] = (),
    ) -> list[Future[Completion]]:
        """As `generate_batch`, without waiting: they join what runs at its next step, all at once. `joined` is called
        then, with the number of steps before it. The first ones go on from `earlier`, aborted responses."""
        requests = self._requests(prompts, sampling, images)
        for request, response in zip(requests, earlier, strict=False):
            request.go_on_from(response)
        requests[0].joined = joined
        self._submit(requests, in_worker=True)
        return [request.future for request in requests]

    def between_steps(
        self, work: Callable[[], None], *, keeps_cache: bool, recomputes: bool = False
    ) -> Future[int]:
        """Have `work` done between two steps: it may load weights, with which unfinished responses go on; with
        `keeps_cache` on the KV cache of the older ones. With `recomputes` the KV cache is computed anew in any case.
        The future has the number of steps before it, or its error, which all unfinished responses have too."""
        done: Future[int] = Future()
        with self._lock:
            self._work.append((work, keeps_cache, recomputes, done))
        self._submit([], in_worker=True)
        return done

    def unfinished(self) -> dict[Future[Completion], Completion]:
        """Between two steps: each unfinished response so far, in the order in which they go on once the KV cache is
        computed anew."""
        with self._lock:
            requests = [*self._open, *self._inbox]
        going = [one for one in requests if not (one.future.done() or one.is_given_up)]
        return {request.future: request.completion(self.weight_version) for request in going}

    def abort(self) -> None:
        """Aborts every unfinished request, without waiting: its completion comes at the end of the current step."""
        with self._lock:
            for request in (*self._open, *self._inbox):
                request.is_given_up = True

    def follow(self) -> None:
        assert self.group is not None and not self.group.is_leader
        while (message := self.group.hear(is_idle=True)) is None or message[0] != _OVER:
            if message and message[0] == _RENEW:
                self._renew(*message[1:])
                continue
            with self._computing(message and message[2]) as generation:
                while not (self._follow(generation, message) and generation.scheduler.is_done):
                    message = self.group.hear()
            self._sum_up()
        self._require_same(message[1])
        self._num_told = self._checksum = 0

    def _follow(self, generation: Generation, message: Any) -> bool:
        """Do what the leader has told; whether that is a step."""
        if message and message[0] == _RENEW:
            self._renew(*message[1:], generation=generation)
            return False
        added, given_up, _ = message or ((), (), None)
        requests = []
        for prompt, sampling, images, earlier in added:
            requests.append(Request(prompt, sampling, self.eos_token_ids, self.tokenizer, images))
            if earlier is not None:
                requests[-1].go_on_from(earlier)
        self._told |= enumerate(requests, start=self._num_told)
        self._num_told += len(requests)
        generation.scheduler.add(requests)
        generation.advance([self._told[number] for number in given_up])
        return True

    def _renew(
        self, checksum: int, version: int, keeps_cache: bool, generation: Generation | None = None
    ) -> None:
        """Go on with the weights that the leader has."""
        self._sum_up(generation)
        self._require_same(checksum)
        if version != self.weight_version:
            assert self.take_weights is not None
            self.take_weights(version)
        if generation is not None:
            generation.renew(self._packed_network(), version, keeps_cache=keeps_cache)

    def _require_same(self, checksum: int) -> None:
        if checksum != self._checksum:
            got, fix = (
                "other tokens than the leader's",
                "The ranks compute with other weights, or on other devices.",
            )
            raise EngineError(
                f"native, {self.group}", got=got, expected="the same on all ranks", fix=fix
            )

    def release(self) -> None:
        if self.group is None or not self.group.is_leader:
            return
        self.abort()
        self._finish_turn()
        # A step that fails does so on all ranks, whose members then do not listen any more.
        if not self._has_failed:
            self.group.tell((_OVER, self._checksum))
        self._num_told, self._checksum, self._has_failed = 0, 0, False

    def _sum_up(self, generation: Generation | None = None) -> None:
        """Tokens of all requests but those that are under way go into the checksum."""
        going = (
            []
            if generation is None
            else [*generation.scheduler.running, *generation.scheduler.waiting]
        )
        kept = set(map(id, going))
        for number in [number for number, request in self._told.items() if id(request) not in kept]:
            self._checksum = zlib.crc32(
                repr(self._told.pop(number).token_ids).encode(), self._checksum
            )

    def _tell(
        self, added: list[Request], given_up: list[Request], max_cache_tokens: int | None
    ) -> None:
        """Let the members make the same step. They preempt where the leader does, whatever memory each has free."""
        assert self.group is not None
        self._told |= enumerate(added, start=self._num_told)
        self._num_told += len(added)
        if not (added or given_up):
            self.group.tell(None)
            return
        numbers = {id(request): number for number, request in self._told.items()}
        version = self.weight_version
        begun = [one.completion(version) if one.token_ids else None for one in added]
        specs = [
            (one.prompt, one.sampling, one.images, own)
            for one, own in zip(added, begun, strict=True)
        ]
        self.group.tell((specs, [numbers[id(request)] for request in given_up], max_cache_tokens))

    def wanted_shards(self) -> Wanted:
        """The shards of a group's rank, by the trainer's names."""
        factors = {name: Piece((0, 0), shape) for name, shape in self._factors.items()}
        return {name: (piece, self.dtype) for name, piece in (self._pieces | factors).items()}

    def hold_shards(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Compute with these tensors from now on: memory of its own, or the trainer's. They are written to while the
        engine is at rest; `merged_shards` it changes after they have come, so they are its own memory."""
        assert self.group is not None
        parts = {name: buffer.to(self.group.device) for name, buffer in self.model.named_buffers()}
        for name in self._pieces:
            parts |= dict.fromkeys(
                self._manifest.same[name], torch.nn.Parameter(shards[name], requires_grad=False)
            )
        for name, tensor in parts.items():
            place, _, kind = name.rpartition(".")
            setattr(self.model.get_submodule(place), kind, tensor)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._require_idle("load_weights")
        self._network = None
        super().load_weights(
            weights if self.group is None else self._merged(dict(weights)), version
        )

    def _merged(self, shards: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """A group's shards, in their own memory, with the adapter's whole matrices A [r, in] and B [out, r] merged."""
        for name, piece in self._pieces.items():
            if self._adapter is not None and name in self.merged_shards:
                factor_a, factor_b = (shards[factor] for factor in factor_names(name))
                (row, column), (height, width) = piece
                parts = factor_a.narrow(1, column, width), factor_b.narrow(0, row, height)
                shards[name].copy_(merge(shards[name], *parts, self._adapter.scale))
            yield name, shards[name]

    def sleep(self) -> None:
        """Frees the packed weights; an engine at rest holds no KV cache."""
        self._require_idle("sleep")
        super().sleep()
        self._network = None

    def close(self) -> None:
        self.abort()
        self._finish_turn()
        super().close()
        self._network = None
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    def _requests(self, prompts: Prompts, sampling: Sampling, images: BatchImages) -> list[Request]:
        image_tokens = ImageTokens.of(self.model.config)
        self._require_ready(prompts, sampling, images)
        self._require_room(prompts, sampling)
        require_tokenizer(self.name, sampling, self.tokenizer)
        images = [None] * len(prompts) if images is None else images
        requests = []
        for row, (prompt, params, own) in enumerate(zip(prompts, sampling, images, strict=True)):
            where = f"native.generate, prompt {row}"
            if (
                self.max_cache_tokens is not None
                and len(prompt) + params.max_tokens > self.max_cache_tokens
            ):
                got = f"{len(prompt)} prompt tokens and up to {params.max_tokens} new ones"
                expected = f"at most {self.max_cache_tokens}, for which the KV cache has memory"
                size = f"a token takes {self.token_bytes} bytes"
                fix = f"Raise actor_rollout_ref.rollout.cache_gigabytes; {size}."
                raise RolloutError(where, got=got, expected=expected, fix=fix)
            if own is not None and image_tokens is None:
                raise RolloutError(
                    where, got="images", expected="text: the model is no vision-language model"
                )
            if own is not None and image_tokens is not None:
                # There may be more: a model may write one in an earlier turn.
                found, problem = image_tokens.places(np.array(prompt), own.inputs)
                if len(found) < image_tokens.count(own.inputs):
                    raise RolloutError(
                        where, got=problem, expected="at least one for each embedding"
                    )
            requests.append(Request(prompt, params, self.eos_token_ids, self.tokenizer, own))
        return requests

    def _submit(self, requests: list[Request], *, in_worker: bool = False) -> bool:
        """Puts requests into the inbox; whether the caller must be the runner. With `in_worker` a thread is."""
        with self._lock:
            self._inbox += requests
            starts = bool(requests or self._work) and not self._is_running
            self._is_running |= starts
        if starts and in_worker:
            if self._worker is None:
                num_threads = torch.get_num_threads()
                self._worker = ThreadPoolExecutor(
                    1, "native", initializer=partial(torch.set_num_threads, num_threads)
                )
            self._turn = self._worker.submit(self._run)
        return starts

    def _work_between_steps(self, generation: Generation) -> None:
        """What others want done now; the generation goes on with the weights that are there afterwards."""
        scheduler = generation.scheduler
        while True:
            if self.before_step is not None:
                self.before_step(self.num_steps)
            if not self._work:
                break
            with self._lock:
                work, keeps_cache, recomputes, done = self._work.pop(0)
                self._open = [*scheduler.running, *scheduler.waiting]
            before = self.weight_version
            try:
                self._is_between_steps = True
                with PhaseTimer.mark("new weights"):
                    work()
                if recomputes or self.weight_version != before:
                    if self.group is not None:
                        self._sum_up(generation)
                        self.group.tell((_RENEW, self._checksum, self.weight_version, keeps_cache))
                    generation.renew(
                        self._packed_network(), self.weight_version, keeps_cache=keeps_cache
                    )
            except BaseException as error:
                done.set_exception(error)
                raise
            finally:
                self._is_between_steps = False
            done.set_result(self.num_steps)

    @contextmanager
    def _computing(self, max_cache_tokens: int | None) -> Iterator[Generation]:
        """A generation without dropout and gradient checkpointing, on the model's device in whatever thread."""
        was_training = self.model.training
        try:
            self.model.eval()
            if self._recorder is not None:
                self._recorder.is_on = True
            with torch.inference_mode(), torch.cuda.device_of(next(self.model.parameters())):
                limits = (self.max_num_seqs, self.max_num_batched_tokens, max_cache_tokens)
                made = (self._packed_network(), Scheduler(*limits), self.weight_version)
                yield Generation(*made, uses_graphs=self.uses_graphs, recorder=self._recorder)
        finally:
            if self._recorder is not None:
                self._recorder.is_on = False
            self.model.train(was_training)

    def _packed_network(self) -> Network:
        """Of the parameters as they are; a packed copy of earlier ones is not used again."""
        if self._network is None or self._network.state != state_of(self.model):
            self._network = None
            is_own = is_plain(self.model)
            self._network = PlainNetwork(self.model, self.group) if is_own else Network(self.model)
        return self._network

    def _take_inbox(
        self, scheduler: Scheduler[Request]
    ) -> tuple[list[Request], list[Request], bool]:
        """New requests, those that are given up, and whether there is anything to do."""
        with self._lock:
            added, self._inbox = self._inbox, []
            scheduler.add(added)
            self._open = [*scheduler.running, *scheduler.waiting]
            goes_on = self._is_running = bool(self._work) or not scheduler.is_done
            given_up = [request for request in self._open if request.is_given_up]
        for request in added:
            if request.joined is not None:
                request.joined(self.num_steps)
        return added, given_up, goes_on

    def _run(self) -> None:
        """Generates until there is no request left."""
        try:
            with self._computing(self._cache_limit()) as generation:
                scheduler = generation.scheduler
                while True:
                    self._work_between_steps(generation)
                    added, given_up, goes_on = self._take_inbox(scheduler)
                    if not goes_on:
                        break
                    if scheduler.is_done:
                        continue
                    if self.group is not None:
                        self._tell(added, given_up, scheduler.max_cache_tokens)
                    self.num_steps += (
                        1  # first: what follows from a response that ends in the step counts it
                    )
                    with PhaseTimer.mark(f"step of version {self.weight_version}"):
                        generation.advance(given_up)
                    if scheduler.is_done:
                        self._sum_up()
                        # What comes next finds an empty KV cache on all ranks, whether or not it is here already.
                        generation.renew(generation.network, self.weight_version, keeps_cache=False)
        except BaseException as error:
            with self._lock:
                self._has_failed = True
                failed = [
                    request for request in (*self._open, *self._inbox) if not request.future.done()
                ]
                self._open, self._inbox, self._is_running = [], [], False
                undone, self._work = self._work, []
            for *_, done in undone:
                done.set_exception(error)
            for request in failed:  # every caller gets the error, raised where it waits
                if request.future.set_running_or_notify_cancel():
                    request.future.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def _cache_limit(self) -> int | None:
        """Tokens of the KV cache; None: any number. One request alone runs with whatever is free."""
        device = self.model.device
        if self.max_cache_tokens is not None or device.type != "cuda":
            return self.max_cache_tokens
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(_CACHE_SHARE * (torch.cuda.mem_get_info(device)[0] + unused) / self.token_bytes)

    def _require_idle(self, action: str) -> None:
        if self._is_between_steps:
            return
        with self._lock:
            open_requests = [*self._open, *self._inbox]
            unfinished = [
                one for one in open_requests if not (one.future.done() or one.is_given_up)
            ]
        if unfinished:
            got, fix = (
                f"{len(unfinished)} responses that are not finished",
                "Wait for them, or call abort() first.",
            )
            raise RolloutError(f"native.{action}", got=got, expected="an engine at rest", fix=fix)
        self._finish_turn()

    def _finish_turn(self) -> None:
        if self._turn is not None:
            wait([self._turn])
            self._turn = None
