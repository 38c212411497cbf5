# SPDX-License-Identifier: Apache-2.0
"""The native rollout engine: continuous batching in the trainer's process, on the trainer's module.

A prompt is computed once for all of its responses (prefix sharing). The KV cache is written in
place, and a request that ends makes room at once. Norms, attention, softmax and logits are float32,
so that the log-probabilities are those of training.

    generate, generate_batch ──> inbox ──> one runner: takes the inbox, starts requests, ──> futures
    begin, between_steps                   steps (in the thread of generate_batch, or
         (any thread)                      in a worker thread)

The runner consumes requests, and work to be done between two steps, from the inbox. It waits while
such work runs, for example loading newer weights. It ends when there is neither a request nor work;
the next one starts a new runner.

In a rollout group the leader has the requests and the runner. Before each step it sends the changes
to the members (see `group_steps`). They make the same step with the same seeds, so all ranks draw
the same tokens.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from quadriga.engine_traits.native import TRAITS
from quadriga.errors import RolloutError
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.experts import RouteRecorder, mixtures
from quadriga.models.lora import add_adapter
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
from quadriga.rollout.native.attention import cache_dtype
from quadriga.rollout.native.cache_memory import CacheMemory
from quadriga.rollout.native.generation import Generation, GenerationRequest
from quadriga.rollout.native.graphs import obstacle_to_graphs
from quadriga.rollout.native.group_steps import BatchEnd, GroupSteps, NewWeights, StepMessage
from quadriga.rollout.native.inbox import Inbox, RunnerThread, Work
from quadriga.rollout.native.network import (
    Network,
    PlainNetwork,
    description_of,
    is_plain,
    state_of,
)
from quadriga.rollout.native.scheduler import Scheduler
from quadriga.rollout.native.shards import GroupShards
from quadriga.rollout.sampler import require_tokenizer
from quadriga.rollout.setup import EngineSetup
from quadriga.weight_sync.publish import NamedWeights
from quadriga.weight_sync.reshard import Wanted


class NativeEngine(CausalModelEngine):
    """Continuous batching with a model of transformers; see `RolloutEngine` for its methods.

    Args:
        model: any causal model of transformers that was loaded with our attention. It may be the
            trainer's. With a group it is on "meta" until `hold_shards`.
        max_num_batched_tokens: prompt tokens of one prefill. A single prompt may have more.
        cache_gigabytes: memory of the KV cache of each rank, in GiB. None: as much as the responses
            need, on a GPU up to 70 % of the memory that is free when a batch begins. If the cache
            is full, the requests that started last are preempted; they go on later, with the same
            tokens.
        group: the ranks that hold the model together.
        dtype: dtype of a group's shards.
        adapted: the model with the trainer's adapter, which a group merges into its shards.
        uses_graphs: whether decode steps on a GPU become CUDA graphs.
        records_routes: whether completions contain the experts of their tokens.
        options: arguments of `CausalModelEngine`.

    Attributes:
        merged_shards: names of a group's shards into which the engine merges the adapter, so that
            they must not share the trainer's memory.
        take_weights: set on a group's members; called with the version that the leader has loaded.
        num_steps: steps since the engine was made.
        before_step: called by the runner with `num_steps` before each step.

    Raises:
        RolloutError: the model was loaded with another attention, or a group cannot share it.
    """

    name = "native"
    traits = TRAITS
    needs_packed_rows = True

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
        attention = model.config._attn_implementation
        if attention != ATTENTION_NAME:
            raise RolloutError(
                "rollout.name=native",
                got=f"a model with {attention} attention",
                expected=f"one loaded with attention {ATTENTION_NAME}",
                fix="Load it with quadriga.models.load.load_causal_lm; if its rows cannot be"
                " packed, set rollout.name=hf.",
            )
        super().__init__(model, **options)
        self.description = f"native, {description_of(model)}"
        self.max_num_batched_tokens = max_num_batched_tokens
        self.uses_graphs = uses_graphs
        self.group = group
        self._recorder = RouteRecorder(model) if records_routes else None

        # Both are None without a group.
        self._shards: GroupShards | None = None
        self._steps: GroupSteps | None = None
        device = model.device if group is None else group.device
        dtype = dtype or model.dtype
        token_bytes = cache_bytes_per_token(model.config, cache_dtype(dtype, device))
        if group is not None:
            _require_shardable(model, group)
            # If there are fewer key-value heads than ranks, each rank still has one.
            token_bytes //= min(group.size, model.config.num_key_value_heads)
            self._shards = GroupShards(model, group, dtype, adapted or model)
            self._steps = GroupSteps(group)
            self.merged_shards = self._shards.merged
            self.weight_version = -1  # a version that no weights have: none have arrived yet
        self.cache_memory = CacheMemory(token_bytes, cache_gigabytes)
        # The model with packed weights; None until they are needed.
        self._network: Network | None = None

        self._inbox = Inbox()
        self._thread = RunnerThread()
        self._is_between_steps = False  # whether work runs, which may load weights

    @classmethod
    def from_config(cls, setup: EngineSetup) -> "NativeEngine":
        """Make the engine of a configuration, in one process or for a rank of a rollout group.

        A rank of a group begins with a model on "meta", whose shards arrive later. Otherwise the
        engine computes with the actor's own model, or with a copy if this process has no actor or
        only a part of its weights.

        Args:
            setup: configuration, device, actor and group.
        """
        setup.require_no_options()
        rollout = setup.rollout
        section = setup.config.actor_rollout_ref
        limits: dict[str, Any] = {
            "max_num_batched_tokens": rollout.max_num_batched_tokens,
            "cache_gigabytes": rollout.cache_gigabytes,
            "uses_graphs": not rollout.enforce_eager,
        }
        if setup.group is not None:
            # A second model, with the adapter, tells which matrices a rank merges into its shards.
            model = setup.skeleton()
            adapted = None
            if section.model.has_adapter:
                adapted = setup.skeleton()
                add_adapter(adapted, section.model, seed=0)
            engine = cls(
                model,
                group=setup.group,
                dtype=setup.dtype,
                adapted=adapted,
                **limits,
                **cls.options_of(setup, model),
            )
            ranks = f"groups of {setup.group.size} ranks"
            engine.description = f"native, in {ranks}, each with a shard of the weights"
            engine.description += _describe_graphs(setup, model)
            return engine

        model = setup.load_copy(ATTENTION_NAME) if setup.actor is None else setup.actor
        engine = cls(
            model,
            records_routes=section.actor.router_replay == "rollout",
            **limits,
            **cls.options_of(setup, model),
        )
        engine.shares_weights = setup.actor is not None
        weights = "a copy of the weights, which the actor shards"
        if engine.shares_weights:
            weights = "the actor's own weights"
        engine.description = f"native, on {weights}, {description_of(model)}"
        engine.description += _describe_graphs(setup, model)
        return engine

    # ---- requests -------------------------------------------------------------------------------

    def generate_batch(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> list[Completion]:
        """Generate a response for each prompt. If there is no runner, this thread becomes it.

        Args:
            prompts: token ids of each prompt.
            sampling: how each response is sampled.
            images: images of each prompt.

        Returns:
            The completion of each prompt.
        """
        requests = self._make_requests(prompts, sampling, images)
        self._count_when_done([request.future for request in requests])
        if self._inbox.put(requests):
            self._run_generation()
        return [request.future.result() for request in requests]

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        """Generate one response, in the batch of the running requests, without blocking the loop.

        Args:
            prompt: token ids.
            sampling: how the response is sampled.
            images: images of the prompt.
        """
        # The runner works in a thread, so requests can join while it computes.
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
        """Start requests without waiting for them. All of them join the batch at its next step.

        Args:
            prompts: token ids of each request.
            sampling: how each response is sampled.
            images: images of each prompt.
            joined: called once, when all of them join the batch, with the number of steps made
                until then.
            earlier: aborted responses, which the first requests continue.

        Returns:
            A future of each request's completion.
        """
        requests = self._make_requests(prompts, sampling, images)
        # Requests without a response in `earlier` are new.
        for request, response in zip(requests, earlier, strict=False):
            request.continue_from(response)
        # All join at the same step, so one of them reports it.
        requests[0].joined = joined
        if self._inbox.put(requests):
            self._thread.start(self._run_generation)
        return [request.future for request in requests]

    def between_steps(
        self, work: Callable[[], None], *, keeps_cache: bool, recomputes: bool = False
    ) -> Future[int]:
        """Run a function between two steps.

        It may load weights; unfinished responses then go on with these.

        Args:
            work: the function.
            keeps_cache: whether unfinished responses go on with the KV cache of the older weights.
            recomputes: whether the KV cache is computed anew even if the weights stay the same.

        Returns:
            Future of the number of steps made before the function ran. If the function raises, the
            future and all unfinished responses get the error.
        """
        done: Future[int] = Future()
        if self._inbox.put(work=[Work(work, keeps_cache, recomputes, done)]):
            self._thread.start(self._run_generation)
        return done

    def unfinished(self) -> dict[Future[Completion], Completion]:
        """The unfinished responses so far, by their futures. Only call it between two steps.

        They are in the order in which the requests start again if the KV cache is dropped.
        """
        version = self.weight_version
        return {request.future: request.completion(version) for request in self._inbox.unfinished()}

    def abort(self) -> None:
        """Abort all unfinished requests without waiting. They end after the current step."""
        self._inbox.abort()

    def _make_requests(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages
    ) -> list[GenerationRequest]:
        """Make the requests of a batch, after checking the caller's arguments.

        Args:
            prompts: token ids of each prompt.
            sampling: how each response is sampled.
            images: images of each prompt; None if no prompt has any.

        Raises:
            RolloutError: the engine is not ready, or cannot serve a request.
        """
        self._require_ready(prompts, sampling, images)
        self._require_room(prompts, sampling)
        require_tokenizer(self.name, sampling, self.tokenizer)
        image_tokens = ImageTokens.of(self.model.config)
        images = [None] * len(prompts) if images is None else images
        requests = []
        rows = zip(prompts, sampling, images, strict=True)
        for row, (prompt, params, prompt_images) in enumerate(rows):
            where = f"native.generate, prompt {row}"
            self.cache_memory.require(where, len(prompt), params.max_tokens)
            if prompt_images is not None:
                _require_image_places(where, prompt, prompt_images, image_tokens)
            requests.append(
                GenerationRequest(prompt, params, self.eos_token_ids, self.tokenizer, prompt_images)
            )
        return requests

    # ---- a rollout group ------------------------------------------------------------------------

    def follow(self) -> None:
        """Make the leader's steps until the batch is over. Called on members of a rollout group.

        Raises:
            EngineError: this rank generated other tokens than the leader.
            PeerLostError: the leader is gone.
        """
        assert self._steps is not None and self.group is not None and not self.group.is_leader
        while True:
            # A step that changes no requests is sent as None.
            message = self.group.receive(is_idle=True) or StepMessage()
            if isinstance(message, BatchEnd):
                break
            if isinstance(message, NewWeights):
                self._follow_new_weights(message)
            else:
                # Returns when all requests have ended, to wait for further ones.
                self._follow_requests(message)
        self._steps.require_same(message.checksum)
        self._steps.reset()

    def _follow_requests(self, first_step: StepMessage) -> None:
        """Make the leader's steps until no request is left, in a generation of this rank.

        Args:
            first_step: the leader's first message.
        """
        assert self._steps is not None
        message: StepMessage | NewWeights | BatchEnd = first_step
        with self._new_generation(first_step.max_cache_tokens) as generation:
            while True:
                if isinstance(message, NewWeights):
                    self._follow_new_weights(message, generation)
                else:
                    # The leader ends a batch only after all of its requests.
                    assert isinstance(message, StepMessage)
                    self._follow_step(message, generation)
                    if generation.scheduler.is_done:
                        break
                message = self._steps.group.receive() or StepMessage()
        self._steps.add_finished_to_checksum()

    def _follow_step(self, step: StepMessage, generation: Generation) -> None:
        """Make the same step as the leader.

        Args:
            step: the leader's message.
            generation: the generation of this rank.
        """
        assert self._steps is not None
        requests = []
        for prompt, sampling, images, earlier in step.added:
            request = GenerationRequest(
                prompt, sampling, self.eos_token_ids, self.tokenizer, images
            )
            if earlier is not None:
                request.continue_from(earlier)
            requests.append(request)
        self._steps.add(requests)
        generation.scheduler.add(requests)
        generation.advance([self._steps.requests[number] for number in step.aborted])

    def _follow_new_weights(
        self, new_weights: NewWeights, generation: Generation | None = None
    ) -> None:
        """Take over the leader's weights.

        Args:
            new_weights: the leader's message.
            generation: the running generation, which goes on with them; None between two batches.
        """
        assert self._steps is not None
        self._steps.add_finished_to_checksum(_requests_of(generation))
        self._steps.require_same(new_weights.checksum)
        if new_weights.version != self.weight_version:
            assert self.take_weights is not None
            self.take_weights(new_weights.version)
        if generation is not None:
            network = self._current_network()
            generation.switch_weights(
                network, new_weights.version, keeps_cache=new_weights.keeps_cache
            )

    def release(self) -> None:
        """End the batch on all ranks of a rollout group; does nothing except on the leader."""
        if self._steps is None or self.group is None or not self.group.is_leader:
            return
        self.abort()
        self._thread.finish()
        # After a failed step the members wait for no further message.
        if not self._steps.has_failed:
            self.group.broadcast(BatchEnd(self._steps.checksum))
        self._steps.reset()

    def wanted_shards(self) -> Wanted:
        """The shards that this rank of a group needs, by the trainer's names."""
        assert self._shards is not None
        return self._shards.wanted_shards()

    def hold_shards(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Compute with these tensors from now on.

        Later weights are written into the same tensors, while the engine is at rest.

        Args:
            shards: tensors by name. They may be shared with the trainer, except those named in
                `merged_shards`, which the engine changes after they have arrived.
        """
        assert self._shards is not None
        self._shards.hold_shards(shards)

    # ---- weights, sleep -------------------------------------------------------------------------

    def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Load a complete set of weights, or the shards of a group's rank.

        Args:
            weights: names and tensors. On a rank of a group: its shards and the adapter's matrices.
            version: their version.

        Raises:
            RolloutError: responses are generated at this moment.
            WeightSyncError: the set is incomplete or does not fit the model.
        """
        self._require_idle("load_weights")
        # Free the packed copy of the old weights before the new ones arrive.
        self._network = None
        if self._shards is not None:
            weights = self._shards.merge_adapter(dict(weights))
        super().load_weights(weights, version)

    def sleep(self) -> None:
        """Free the packed weights and, on an accelerator, the engine's own copy of the weights.

        There is no KV cache to free: an engine at rest holds none.

        Raises:
            RolloutError: responses are generated at this moment.
        """
        self._require_idle("sleep")
        super().sleep()
        self._network = None  # the packed weights

    def close(self) -> None:
        """Abort unfinished responses, and end the engine and its thread."""
        self.abort()
        self._thread.finish()
        super().close()
        self._network = None
        self._thread.close()

    def _require_idle(self, action: str) -> None:
        """Refuse an action while responses are generated, except as work between two steps.

        Otherwise waits for the runner to end.

        Args:
            action: name of the called method, for the error.

        Raises:
            RolloutError: responses are generated.
        """
        if self._is_between_steps:
            return
        num_unfinished = len(self._inbox.unfinished())
        if num_unfinished:
            raise RolloutError(
                f"native.{action}",
                got=f"{num_unfinished} responses that are not finished",
                expected="an engine at rest",
                fix="Wait for them, or call abort() first.",
            )
        self._thread.finish()

    # ---- the runner -----------------------------------------------------------------------------

    def _run_generation(self) -> None:
        """Generate until there is neither a request nor work. This function is the runner.

        An error goes to the futures of all requests, and of all work that was not done.
        """
        try:
            max_cache_tokens = self.cache_memory.max_tokens(self.model.device)
            with self._new_generation(max_cache_tokens) as generation:
                self._generate_all(generation)
        except BaseException as error:
            # An Exception is not raised here: the callers get it from their futures.
            if self._steps is not None:
                self._steps.has_failed = True
            self._inbox.fail(error)
            if not isinstance(error, Exception):
                raise

    def _generate_all(self, generation: Generation) -> None:
        """Make steps until there is neither a request nor work."""
        scheduler = generation.scheduler
        while True:
            self._do_work_between_steps(generation)
            added, aborted, goes_on = self._inbox.take(scheduler)
            # Not in `take`, which holds the lock of the inbox: a callback may submit requests.
            for request in added:
                if request.joined is not None:
                    request.joined(self.num_steps)
            if not goes_on:
                break
            # Without requests, only work is left, which the next round does.
            if scheduler.is_done:
                continue
            # Send the step before the leader computes it: each layer needs all ranks of the group.
            if self._steps is not None:
                self._steps.send_step(
                    added, aborted, scheduler.max_cache_tokens, self.weight_version
                )
            # Count the step before it is made: callbacks of responses that end in it read the
            # number.
            self.num_steps += 1
            with PhaseTimer.mark(f"step of version {self.weight_version}"):
                generation.advance(aborted)
            if scheduler.is_done:
                if self._steps is not None:
                    self._steps.add_finished_to_checksum()
                # The next requests find an empty KV cache on all ranks, even if they are in the
                # leader's inbox already.
                generation.switch_weights(
                    generation.network, self.weight_version, keeps_cache=False
                )

    def _do_work_between_steps(self, generation: Generation) -> None:
        """Do all submitted work. The generation goes on with the weights that the work has loaded.

        If work fails, its future gets the error, which also ends the runner.

        Args:
            generation: the running generation.
        """
        while True:
            # The callback may submit work, so call it before each look for work.
            if self.before_step is not None:
                self.before_step(self.num_steps)
            work = self._inbox.next_work(partial(_requests_of, generation))
            if work is None:
                break
            # Work need not load weights: it may only save the unfinished responses.
            version = self.weight_version
            try:
                self._is_between_steps = True
                with PhaseTimer.mark("new weights"):
                    work.function()
                if work.recomputes or self.weight_version != version:
                    self._switch_weights(generation, keeps_cache=work.keeps_cache)
            except BaseException as error:
                work.done.set_exception(error)
                raise
            finally:
                self._is_between_steps = False
            work.done.set_result(self.num_steps)

    def _switch_weights(self, generation: Generation, *, keeps_cache: bool) -> None:
        """Continue a generation with the loaded weights, on all ranks of a group.

        Args:
            generation: the running generation.
            keeps_cache: whether unfinished responses keep the KV cache of the older weights.
        """
        steps = self._steps
        if steps is not None:
            steps.add_finished_to_checksum(_requests_of(generation))
            steps.group.broadcast(NewWeights(steps.checksum, self.weight_version, keeps_cache))
        network = self._current_network()
        generation.switch_weights(network, self.weight_version, keeps_cache=keeps_cache)

    @contextmanager
    def _new_generation(self, max_cache_tokens: int | None) -> Iterator[Generation]:
        """Context manager: a generation without requests, with the model in evaluation mode.

        Evaluation mode switches off dropout and gradient checkpointing. The trainer's mode is
        restored on exit.

        Args:
            max_cache_tokens: most tokens in the KV cache; None: any number.
        """
        was_training = self.model.training
        try:
            self.model.eval()
            if self._recorder is not None:
                self._recorder.is_on = True
            # A new thread has the default device as its current one, so set the model's.
            with torch.inference_mode(), torch.cuda.device_of(next(self.model.parameters())):
                network = self._current_network()
                scheduler = Scheduler[GenerationRequest](
                    self.max_num_seqs, self.max_num_batched_tokens, max_cache_tokens
                )
                yield Generation(
                    network,
                    scheduler,
                    self.weight_version,
                    uses_graphs=self.uses_graphs,
                    recorder=self._recorder,
                )
        finally:
            if self._recorder is not None:
                self._recorder.is_on = False
            self.model.train(was_training)

    def _current_network(self) -> Network:
        """Return the network of the current parameters, made anew if they have changed."""
        if self._network is None or self._network.state != state_of(self.model):
            # Free the packed copy of earlier weights before the next one is made.
            self._network = None
            # A plain model is computed layer by layer, any other one by the model's own module.
            if is_plain(self.model):
                self._network = PlainNetwork(self.model, self.group)
            else:
                self._network = Network(self.model)
        return self._network


def _describe_graphs(setup: EngineSetup, model: PreTrainedModel) -> str:
    """Say whether decode steps on a GPU become CUDA graphs, and if not, why.

    Returns:
        Text that begins with a comma, to be appended to a description; "" on a CPU.
    """
    if setup.device.type != "cuda":
        return ""
    obstacle = obstacle_to_graphs(model, setup.device, setup.dtype, setup.group)
    if setup.rollout.enforce_eager:
        obstacle = "rollout.enforce_eager is true"
    if obstacle:
        return f", decode steps without CUDA graphs ({obstacle})"
    return ", decode steps in CUDA graphs"


def _requests_of(generation: Generation | None) -> list[GenerationRequest]:
    """The unfinished requests of a generation, running ones first."""
    if generation is None:
        return []
    return [*generation.scheduler.running, *generation.scheduler.waiting]


def _require_shardable(model: PreTrainedModel, group: RolloutGroup) -> None:
    """Refuse a model that cannot be sharded over a rollout group.

    Args:
        model: the model, which may be on "meta".
        group: the rank's group.

    Raises:
        RolloutError: the model is not a plain decoder for text without experts.
    """
    has_images = ImageTokens.of(model.config) is not None
    if is_plain(model) and not has_images and not any(mixtures(model)):
        return
    raise RolloutError(
        "rollout.name=native",
        got=f"{type(model).__name__}, in groups of {group.size}",
        expected="Llama, Qwen2 or Qwen3 for text",
        fix="Set actor_rollout_ref.rollout.tensor_model_parallel_size=1.",
    )


def _require_image_places(
    where: str, prompt: Prompt, images: Images, image_tokens: ImageTokens | None
) -> None:
    """Check that a prompt has a token for each embedding of its images.

    Args:
        where: the prompt, for the error.
        prompt: token ids.
        images: images of the prompt.
        image_tokens: the model's tokens for images; None: the model reads no images.

    Raises:
        RolloutError: the model reads no images, or the prompt has too few tokens for them.
    """
    if image_tokens is None:
        expected = "text: the model is not a vision-language model"
        raise RolloutError(where, got="images", expected=expected)
    # Only too few tokens are an error: the model may have written further ones in an earlier turn.
    # `problem` is a text such as "3 tokens with id 7 for 4 embeddings of images".
    places, problem = image_tokens.locate(np.array(prompt), images.inputs)
    if len(places) < image_tokens.count(images.inputs):
        raise RolloutError(where, got=problem, expected="at least one for each embedding")
