# SPDX-License-Identifier: Apache-2.0
"""Generation in the trainer's process, with the trainer's own module: nothing to send.

Contexts are computed once for all of their answers; keys and values are written in place; rows that end make room at
once. Norms, attention, softmax and logits are float32, so that the log-probabilities are those of training.

    generate, generate_batch ──> inbox ──> one runner: takes the inbox, starts rows, steps ──> futures ──> callers
         (any thread)                      (the thread of generate_batch, or a worker)

Consumes: requests from the inbox, at any step. Waits for: nothing; with an empty inbox and no row left it ends.
Unblocked by: the next request, which makes a new runner.
"""

import asyncio
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from quadriga.errors import RolloutError
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.vision import ImageTokens
from quadriga.rollout.base import Completion, Images, SamplingParams
from quadriga.rollout.causal_model import CausalModelEngine, require_room
from quadriga.rollout.native.answer import Answer
from quadriga.rollout.native.cache import cache_dtype
from quadriga.rollout.native.generation import Generation
from quadriga.rollout.native.network import Network, description_of, network_of, state_of
from quadriga.rollout.native.scheduler import Scheduler
from quadriga.rollout.stop_texts import require_tokenizer

_LOGIT_OPTIONS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
_GIBIBYTE = 2**30


class NativeEngine(CausalModelEngine):
    """Our own generation engine; see `RolloutEngine` for its methods.

    Args:
        model: any causal model of transformers that was loaded with our attention. It may be the trainer's.
        tokenizer: decodes answers that end at a text; not needed otherwise.
        eos_token_ids: end-of-text tokens; None takes those of the model's generation configuration.
        max_num_seqs: answers that are generated at the same time.
        max_num_batched_tokens: prompt tokens that are computed in one call, unless one prompt alone has more.
        max_model_len: tokens of the longest prompt and answer together; None: as many as the model has positions.
        cache_gigabytes: memory for keys and values, in GiB; None: as much as the answers need. Where it is full, the
            answers that started last give way; they go on later, with the same tokens.

    Raises:
        RolloutError: the model computes something that this engine does not.
    """

    name = "native"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        cache_gigabytes: float | None = None,
    ) -> None:
        _require_supported(model)
        super().__init__(model, eos_token_ids, max_num_seqs)
        self.tokenizer = tokenizer
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_cache_tokens: int | None = None
        if cache_gigabytes is not None:
            self.max_cache_tokens = int(cache_gigabytes * _GIBIBYTE / bytes_per_token(model))
        self._network: Network | None = None
        self._lock = threading.Lock()
        self._inbox: list[Answer] = []
        self._open: list[Answer] = []  # handed to a runner, perhaps done
        self._is_running = False
        self._worker: ThreadPoolExecutor | None = None
        self._turn: Future[None] | None = None

    @property
    def description(self) -> str:
        """How it computes, and which copies of the weights that takes, for people to read."""
        return description_of(self.model)

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        images: Sequence[Images | None] | None = None,
    ) -> list[Completion]:
        """See `RolloutEngine.generate_batch`."""
        answers = self._answers(prompts, sampling, images)
        if self._submit(answers):
            self._run()
        return [answer.future.result() for answer in answers]

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        """See `RolloutEngine.generate`. It joins the requests that are under way; the event loop stays free."""
        (answer,) = self._answers([prompt_token_ids], [sampling], [images])
        waiting = asyncio.wrap_future(answer.future)
        if self._submit([answer]):
            self._turn = self._make_worker().submit(self._run)
        return await waiting

    def abort(self) -> None:
        """See `RolloutEngine.abort`. It does not wait: answers come with the end of the step that is under way."""
        with self._lock:
            for answer in (*self._open, *self._inbox):
                answer.is_given_up = True

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `RolloutEngine.load_weights`; a tensor that is the module's own parameter is not copied."""
        self._require_idle("load_weights")
        self._network = None
        super().load_weights(weights, version)

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`. The engine at rest holds no cache; packed weights go, too."""
        self._require_idle("sleep")
        super().sleep()
        self._network = None

    def close(self) -> None:
        """See `RolloutEngine.close`. Answers that are not finished are given up."""
        self.abort()
        self._finish_turn()
        super().close()
        self._network = None
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    def _answers(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        images: Sequence[Images | None] | None,
    ) -> list[Answer]:
        self._require_ready(prompts, sampling)
        require_room(self.name, self.model, prompts, sampling, self.max_model_len)
        require_tokenizer(self.name, sampling, self.tokenizer)
        self._require_cache(prompts, sampling)
        seen = [None] * len(prompts) if images is None else images
        require_places(self.name, self.model, prompts, seen)
        return [
            Answer(prompt, params, self.eos_token_ids, self.tokenizer, own)
            for prompt, params, own in zip(prompts, sampling, seen, strict=True)
        ]

    def _require_cache(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> None:
        if self.max_cache_tokens is None:
            return
        for row, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
            if len(prompt) + params.max_tokens > self.max_cache_tokens:
                raise RolloutError(
                    f"native.generate, prompt {row}",
                    got=f"{len(prompt)} prompt tokens and up to {params.max_tokens} new ones",
                    expected=f"at most {self.max_cache_tokens}, for which the cache has memory",
                    fix="Raise actor_rollout_ref.rollout.cache_gigabytes; a token takes "
                    f"{bytes_per_token(self.model)} bytes.",
                )

    def _submit(self, answers: list[Answer]) -> bool:
        """Puts requests into the inbox; whether the caller must see to a runner."""
        with self._lock:
            self._inbox += answers
            starts = bool(answers) and not self._is_running
            self._is_running |= starts
            return starts

    def _run(self) -> None:
        """Generates until there is no request left."""
        generation: Generation | None = None
        try:
            with torch.inference_mode(), evaluating(self.model):
                scheduler: Scheduler[Answer] = Scheduler(
                    self.max_num_seqs, self.max_num_batched_tokens, self.max_cache_tokens
                )
                generation = Generation(self._current_network(), scheduler, self.weight_version)
                while self._take(generation):
                    generation.advance()
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _take(self, generation: Generation) -> bool:
        """Moves the inbox to the runner; False, and the runner is none any more, where nothing is left."""
        with self._lock:
            generation.add(self._inbox)
            self._inbox = []
            self._open = generation.open_answers
            self._is_running = not generation.is_done
            return self._is_running

    def _fail(self, error: BaseException) -> None:
        """Everyone who waits gets the error, raised where he waits."""
        with self._lock:
            failed = [answer for answer in (*self._open, *self._inbox) if not answer.future.done()]
            self._open, self._inbox, self._is_running = [], [], False
        for answer in failed:
            answer.fail(error)

    def _current_network(self) -> Network:
        """The network of the parameters as they are; a packed copy of earlier ones is not used again."""
        if self._network is None or self._network.state != state_of(self.model):
            self._network = None
            self._network = network_of(self.model)
        return self._network

    def _make_worker(self) -> ThreadPoolExecutor:
        if self._worker is None:
            num_threads = torch.get_num_threads()
            self._worker = ThreadPoolExecutor(1, "native", initializer=lambda: torch.set_num_threads(num_threads))
        return self._worker

    def _require_idle(self, action: str) -> None:
        with self._lock:
            under_way = [one for one in (*self._open, *self._inbox) if not (one.future.done() or one.is_given_up)]
        if under_way:
            raise RolloutError(
                f"native.{action}",
                got=f"{len(under_way)} answers that are not finished",
                expected="an engine at rest",
                fix="Wait for them, or call abort() first.",
            )
        self._finish_turn()

    def _finish_turn(self) -> None:
        if self._turn is not None:
            wait([self._turn])
            self._turn = None


def bytes_per_token(model: PreTrainedModel) -> int:
    """Memory of the keys and values of one token in all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * cache_dtype(model.dtype, model.device).itemsize


def require_places(
    name: str, model: PreTrainedModel, prompts: Sequence[Sequence[int]], images: Sequence[Images | None]
) -> None:
    """Refuses images for a model that does not see, and prompts with fewer tokens than their images have embeddings."""
    tokens = ImageTokens.of(model.config)
    for row, (prompt, own) in enumerate(zip(prompts, images, strict=True)):
        if own is None:
            continue
        if tokens is None:
            raise RolloutError(f"{name}.generate, prompt {row}", got="images", expected="text: the model does not see")
        expected = tokens.count(own.inputs["image_grid_thw"])
        # There may be more: a model may write one in an earlier turn.
        if (found := list(prompt).count(tokens.token_id)) < expected:
            raise RolloutError(
                f"{name}.generate, prompt {row}",
                got=f"{found} image tokens",
                expected=f"at least {expected}, one for each embedding of its images",
            )


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout and gradient checkpointing, for a while."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _require_supported(model: PreTrainedModel) -> None:
    found = model.config._attn_implementation
    if found != ATTENTION_NAME:
        raise RolloutError(
            "rollout.name=native",
            got=f"a model with {found} attention",
            expected=f"one loaded with attention {ATTENTION_NAME}",
            fix="Load it with quadriga.models.load.load_causal_lm.",
        )
    for option in _LOGIT_OPTIONS:
        value = getattr(model.config, option, None)
        if value not in (None, 1, 1.0):
            raise RolloutError(
                "rollout.name=native",
                got=f"a model whose logits are changed by {option}={value}",
                expected="plain logits",
                fix="Use rollout.name=hf for this model.",
            )
