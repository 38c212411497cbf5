# SPDX-License-Identifier: Apache-2.0
"""A server in front of an engine whose log-probabilities tell filters apart, and a client."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest

from quadriga.config import Config
from quadriga.config.loader import load_config
from quadriga.data import VisionProcessor
from quadriga.rollout import Completion, RolloutEngine, SamplingParams
from quadriga.rollout.call_queue import CallQueue
from quadriga.rollout.interface import Images
from quadriga.serve.policy import ServedPolicy
from quadriga.serve.server import PolicyServer
from tests.limits import SOON_S
from tests.unit.rollout.agent_loop.conftest import build_tokenizer

SERVE = "actor_rollout_ref.rollout.serve"


class Halves(RolloutEngine):
    """Writes a text, each token with a log-probability of -1, or -0.5 under the filtered distribution.

    It blocks until `goes_on` is set, and fails for a batch with token 0.
    """

    name = "halves"
    takes_images = True

    def __init__(self, text: str = "hi") -> None:
        super().__init__()
        self.tokenizer = build_tokenizer()
        self.text = text
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.batches: list[list[tuple[list[int], SamplingParams]]] = []
        self.images: list[Images | None] = []
        self.processor: VisionProcessor | None = None

    def generate_batch(
        self, prompts: Sequence[Any], sampling: Sequence[SamplingParams], images: Any = None
    ) -> list[Completion]:
        self._require_ready(prompts, sampling, images)
        self.batches.append(list(zip(prompts, sampling, strict=True)))
        self.images += images or [None] * len(prompts)
        assert self.goes_on.wait(SOON_S)
        if any(0 in prompt for prompt in prompts):
            raise RuntimeError("token 0")
        ids = [*self.tokenizer.encode(self.text), self.tokenizer.eos_token_id]
        completions = []
        for params in sampling:
            tokens = ids[: params.max_tokens]
            reason = "stop" if len(tokens) == len(ids) else "length"
            log_probs = [-1.0] * len(tokens)
            completions.append(Completion(tokens, log_probs, reason, 3, [-0.5] * len(tokens)))
        return completions

    def load_weights(self, weights: Any, version: int) -> None:
        """Not needed."""


class Served:
    """A running server, its engine and a client."""

    def __init__(
        self, stack: ExitStack, engine: Halves, key: str, overrides: Sequence[str]
    ) -> None:
        self.engine = engine
        self.config: Config = load_config(
            overrides=[
                f"{SERVE}.model_name=m",
                "actor_rollout_ref.rollout.max_model_len=1000",
                *overrides,
            ]
        ).config
        policy = ServedPolicy.of(
            self.config,
            engine.tokenizer,
            vocabulary_size=len(engine.tokenizer),
            positions=None,
            processor=engine.processor,
        )
        self.queue = CallQueue(engine)
        stack.callback(self.queue.close)
        self.queue.accept()
        self.server = PolicyServer(self.config, policy, [self.queue.exchange], key)
        stack.callback(self.server.close)
        self.client = httpx2.Client(base_url=self.server.url, timeout=SOON_S)
        stack.callback(self.client.close)

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        """Send a call."""
        return self.client.post(path, json=body, **options)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """`serve(engine, key, overrides)`: a server that ends with the test."""
    with ExitStack() as stack:
        yield lambda engine=None, key="", overrides=(): Served(
            stack, engine or Halves(), key, overrides
        )
