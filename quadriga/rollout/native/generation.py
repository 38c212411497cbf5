# SPDX-License-Identifier: Apache-2.0
"""One call of the engine, from prompts to answers: prefill, first tokens, then one token of every row at a time.

    scheduler: which rows? ──> prompts that are new: prefill ──> first token of the rows that start
         ^                                                            │
         └───────── rows that ended ────── step: one token per row <──┘

Everything here is gone when the call ends: between two calls the engine holds no memory of its own.

Legend: R rows, U different prompts of the rows that start, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import nn

from quadriga.errors import RolloutError
from quadriga.models.projection import head_logits
from quadriga.rollout.base import Completion, FinishReason, SamplingParams
from quadriga.rollout.native.attention import DecodePlan, PrefillPlan
from quadriga.rollout.native.cache import AnswerCache, PromptCache
from quadriga.rollout.native.scheduler import Change, Scheduler
from quadriga.rollout.sampler import NUM_DRAWS, Draws, SamplingRules, sample


@dataclass(slots=True)
class Answer:
    """A request and what was generated for it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    stops: frozenset[int]
    draws: Draws
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @classmethod
    def open(cls, prompt: Sequence[int], sampling: SamplingParams, eos_token_ids: Sequence[int]) -> "Answer":
        """The answer to a request, still empty."""
        return cls(tuple(prompt), sampling, sampling.stops(eos_token_ids), Draws(sampling.seed))

    def add(self, token: int, log_prob: float) -> None:
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
        if token in self.stops:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.sampling.max_tokens:
            self.finish_reason = "length"

    def close(self, weight_version: int) -> Completion:
        """The finished answer."""
        assert self.finish_reason is not None
        return Completion(self.token_ids, self.log_probs, self.finish_reason, weight_version)


class Generation:
    """The answers to some requests.

    Args:
        backbone: from tokens to hidden states, with our attention.
        head: from hidden states to logits.
        answers: the requests.
        scheduler: over the same requests, in the same order.
        max_prefill_tokens: prompt tokens that are computed in one call, unless one prompt alone has more.
    """

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Module,
        answers: Sequence[Answer],
        scheduler: Scheduler,
        max_prefill_tokens: int,
    ) -> None:
        self.backbone, self.head = backbone, head
        self.answers, self.scheduler = answers, scheduler
        self.max_prefill_tokens = max_prefill_tokens
        self.device = cast(torch.Tensor, head.weight).device
        self.prompts = PromptCache([], [])
        self.own = AnswerCache()
        self.rows: list[Answer] = []
        self.written: list[int] = []  # tokens of each row whose keys and values are in the cache
        self.limit = 1

    def run(self) -> None:
        """Generates until every answer is finished."""
        while True:
            change = self.scheduler.change()
            if change is not None:
                self._change_rows(change)
            if self.scheduler.is_done:
                return
            if self.scheduler.num_running:
                self._step()

    def _change_rows(self, change: Change) -> None:
        self.rows = [self.answers[request] for request in self.scheduler.rows]
        num_kept = len(change.kept)
        self.written = [len(row.token_ids) - 1 for row in self.rows[:num_kept]] + [0] * len(change.admitted)
        self.limit = max(1, *(row.sampling.max_tokens - 1 for row in self.rows))
        self.own.rearrange(change.kept, len(self.rows), max(self.written[:num_kept], default=0), self.limit)
        self._change_prompts()
        place_of = {prompt: place for place, prompt in enumerate(self.prompts.prompts)}
        places = [place_of[row.prompt] for row in self.rows]
        self.plan = DecodePlan(self.prompts, self.own, places, self.device)
        self.rules = SamplingRules.from_params([row.sampling for row in self.rows], self.device)
        if change.admitted:
            self._start_rows(num_kept, places[num_kept:])

    def _change_prompts(self) -> None:
        """Leaves the prompts of the rows in the cache, and no others."""
        needed = dict.fromkeys(row.prompt for row in self.rows)
        held = set(self.prompts.prompts)
        self.prompts.keep([place for place, prompt in enumerate(self.prompts.prompts) if prompt in needed])
        new = [prompt for prompt in needed if prompt not in held]
        if new:
            self.prompts.extend(self._prefill(new))

    def _prefill(self, prompts: Sequence[tuple[int, ...]]) -> PromptCache:
        cache = PromptCache(prompts, [len(prompt) for prompt in prompts])
        last_hidden = []
        for places in _portions(cache.lengths, self.max_prefill_tokens):
            plan = PrefillPlan(cache, places, self.device)
            tokens = [token for prompt in prompts[places] for token in prompt]
            positions = [position for prompt in prompts[places] for position in range(len(prompt))]
            inputs, position_ids = torch.tensor([tokens, positions], device=self.device)[:, None]
            last_hidden.append(self._hidden(inputs, position_ids, plan)[0].index_select(0, plan.last))
        cache.last_hidden = torch.cat(last_hidden)
        self._require_all_layers(len(cache.keys))
        return cache

    def _require_all_layers(self, num_seen: int) -> None:
        expected = self.backbone.config.num_hidden_layers
        if num_seen != expected:
            raise RolloutError(
                f"native.generate with {type(self.backbone).__name__}",
                got=f"{num_seen} layers with plain attention",
                expected=f"{expected}, all of them",
                fix="Use rollout.name=hf: layers of another kind keep a state that this engine does not know.",
            )

    def _start_rows(self, first: int, places: Sequence[int]) -> None:
        """Samples the first token of the rows from `first` on, whose prompts are in these places."""
        started = sorted(set(places))
        logits = self._logits(self.prompts.last_hidden[torch.tensor(started, device=self.device)])  # [U, V]
        order = {place: number for number, place in enumerate(started)}
        logits = logits[torch.tensor([order[place] for place in places], device=self.device)]
        rules = SamplingRules.from_params([row.sampling for row in self.rows[first:]], self.device)
        self._sample(logits, rules, range(first, len(self.rows)))

    def _step(self) -> None:
        longest = max(
            count for count, is_running in zip(self.written, self.scheduler.running, strict=True) if is_running
        )
        written = [min(count, longest) for count in self.written]  # a row that ended must not ask for more room
        positions = self.plan.start_step(written, self.limit)
        inputs = torch.tensor([row.token_ids[-1] for row in self.rows], device=self.device)[:, None]
        hidden = self._hidden(inputs, positions, self.plan)[:, 0]
        self.written = [count + 1 for count in written]
        self._sample(self._logits(hidden), self.rules, range(len(self.rows)))

    def _hidden(self, inputs: torch.Tensor, positions: torch.Tensor, plan: PrefillPlan | DecodePlan) -> torch.Tensor:
        output = self.backbone(
            input_ids=inputs, position_ids=positions, attention_mask=None, use_cache=False, attention_plan=plan
        )
        return output.last_hidden_state

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden size] -> [R, V] float32, by the function that training uses too."""
        return head_logits(hidden, self.head.weight, getattr(self.head, "bias", None))

    def _sample(self, logits: torch.Tensor, rules: SamplingRules, rows: range) -> None:
        running = [self.scheduler.running[row] for row in rows]
        uniforms = np.zeros((len(rows), NUM_DRAWS))
        for index, (row, is_running) in enumerate(zip(rows, running, strict=True)):
            if is_running:
                uniforms[index] = self.rows[row].draws.next()
        tokens, log_probs = sample(logits, rules, torch.from_numpy(uniforms).to(self.device))
        results = zip(rows, running, tokens.tolist(), log_probs.tolist(), strict=True)
        for row, is_running, token, log_prob in results:
            if is_running:
                self.rows[row].add(token, log_prob)
                if self.rows[row].finish_reason is not None:
                    self.scheduler.finish(row)


def _portions(lengths: Sequence[int], max_tokens: int) -> Iterator[slice]:
    """Consecutive prompts that have at most `max_tokens` together, or are one prompt."""
    start, total = 0, 0
    for index, length in enumerate(lengths):
        if index > start and total + length > max_tokens:
            yield slice(start, index)
            start, total = index, 0
        total += length
    yield slice(start, len(lengths))
