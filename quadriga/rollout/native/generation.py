# SPDX-License-Identifier: Apache-2.0
"""The loop of the engine: new contexts are computed, first tokens sampled, then one token of every row at a time.

    add ──> scheduler: who starts? ──> contexts that are new: prefill ──> first tokens of the rows that start
                 ^                                                            │
                 └── rows that ended, were given up, or gave way ── step: one token per row <──┘

Requests may come at any time between two steps. Everything here is gone when no request is left: an engine at rest
holds no cache.

Legend: R rows, U different contexts of the rows that start, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from quadriga.errors import RolloutError
from quadriga.rollout.native.answer import Answer
from quadriga.rollout.native.attention import CompiledPlan, DecodePlan, PrefillPlan, plan_decoding
from quadriga.rollout.native.cache import AnswerCache, ContextCache
from quadriga.rollout.native.context import Context, images_of, next_position, packed_positions
from quadriga.rollout.native.network import Network
from quadriga.rollout.native.scheduler import Scheduler
from quadriga.rollout.sampler import NUM_DRAWS, SamplingRules, sample

_FIRST_ROOM = 64
_NEXT_ROOM = 16  # tokens by which answers get more room when the cache is nearly full
_KEPT_SHARE = 0.5  # of the contexts in the cache are in use, or the others are dropped


class Generation:
    """Answers that are generated together.

    Args:
        network: the model.
        scheduler: without a sequence so far.
        weight_version: of the model's weights.
    """

    def __init__(self, network: Network, scheduler: Scheduler[Answer], weight_version: int) -> None:
        self.network, self.scheduler, self.weight_version = network, scheduler, weight_version
        self.device = network.device
        self.contexts = ContextCache()
        self.own = AnswerCache()
        self.plan: DecodePlan | CompiledPlan | None = None
        self.rules: SamplingRules | None = None

    @property
    def is_done(self) -> bool:
        """Whether every answer was handed out."""
        return self.scheduler.is_done

    @property
    def open_answers(self) -> list[Answer]:
        """Those that are not handed out."""
        return [*self.scheduler.running, *self.scheduler.waiting]

    def add(self, answers: Iterable[Answer]) -> None:
        """More requests."""
        self.scheduler.add(answers)

    def advance(self) -> None:
        """Starts what can be started, and computes one token of every row."""
        self._drop_cancelled()
        if self.scheduler.waiting:
            self._admit()
        if self.scheduler.running:
            self._step()

    def _drop_cancelled(self) -> None:
        for row in reversed(range(len(self.scheduler.running))):
            if self.scheduler.running[row].is_cancelled:
                self._end(row)
        given_up = [answer for answer in self.scheduler.waiting if answer.is_cancelled]
        if given_up:
            self.scheduler.waiting = [answer for answer in self.scheduler.waiting if not answer.is_cancelled]
        for answer in given_up:
            answer.close(self.weight_version)

    def _end(self, row: int) -> None:
        """The answer of this row is handed out; the last row takes its place."""
        answer = self.scheduler.running[row]
        last = self.scheduler.finish(row)
        if last != row and self.scheduler.running[row].num_written:
            self.own.move(last, row, self.scheduler.running[row].num_written)
        self.plan = None
        answer.close(self.weight_version)

    def _admit(self) -> None:
        running = self.scheduler.running
        num_before = len(running)
        room = max(self.own.room if num_before else 0, self._first_room())
        started = self.scheduler.admit(room)
        if not started:
            return
        room = min(room, self._limit())
        length = max((answer.num_written for answer in running[:num_before]), default=0)
        self.own.resize(len(running), max(room, length), num_before, length)
        self._keep_contexts()
        held = set(self.contexts.contexts)
        new = list(dict.fromkeys(answer.context for answer in started if answer.context not in held))
        if new:
            self.contexts.extend(self._prefill(new))
        self.plan = None
        self._start_rows(num_before)

    def _first_room(self) -> int:
        return min(
            _FIRST_ROOM, max(answer.num_left for answer in self.scheduler.waiting[: self.scheduler.max_num_seqs])
        )

    def _limit(self) -> int:
        """Tokens that an answer of this batch can come to hold."""
        return max(answer.num_left for answer in self.scheduler.running)

    def _keep_contexts(self) -> None:
        """Leaves the contexts of the rows in the cache, and no others."""
        needed = {answer.context for answer in self.scheduler.running}
        self.contexts.keep([place for place, context in enumerate(self.contexts.contexts) if context in needed])

    def _prefill(self, contexts: Sequence[Context]) -> ContextCache:
        cache = ContextCache(contexts, [len(context) for context in contexts], [*map(next_position, contexts)])
        last_hidden = []
        for places in _portions(cache.lengths, self.scheduler.max_num_batched_tokens):
            plan = PrefillPlan(cache, places, self.device)
            packed = contexts[places]
            tokens = torch.tensor([[token for context in packed for token in context]], device=self.device)
            images = images_of(packed, self.network.image_tokens, self.device)
            hidden = self.network.hidden(tokens, packed_positions(packed, self.device), plan, images)[0]
            last_hidden.append(hidden.index_select(0, plan.last))
        cache.last_hidden = torch.cat(last_hidden)
        self._require_all_layers(len(cache.keys))
        return cache

    def _require_all_layers(self, num_seen: int) -> None:
        if num_seen != self.network.num_layers:
            raise RolloutError(
                f"native.generate with {type(self.network.body).__name__}",
                got=f"{num_seen} layers with plain attention",
                expected=f"{self.network.num_layers}, all of them",
                fix="Use rollout.name=hf: layers of another kind keep a state that this engine does not know.",
            )

    def _start_rows(self, first: int) -> None:
        """Samples the first token of the rows from `first` on."""
        place_of = {context: place for place, context in enumerate(self.contexts.contexts)}
        answers = self.scheduler.running[first:]
        places = [place_of[answer.context] for answer in answers]
        started = sorted(set(places))
        assert self.contexts.last_hidden is not None
        logits = self.network.logits(self.contexts.last_hidden[torch.tensor(started, device=self.device)])  # [U, V]
        order = {place: number for number, place in enumerate(started)}
        logits = logits[torch.tensor([order[place] for place in places], device=self.device)]
        rules = SamplingRules.from_params([answer.sampling for answer in answers], self.device)
        self._sample(logits, rules, first)

    def _step(self) -> None:
        self._make_room()
        plan, rules = self._prepare()
        rows = self.scheduler.running
        positions = plan.start_step([answer.num_written for answer in rows])
        inputs = torch.tensor([answer.token_ids[-1] for answer in rows], device=self.device)[:, None]
        hidden = self.network.hidden(inputs, positions, plan)[:, 0]
        self._sample(self.network.logits(hidden), rules, 0)

    def _make_room(self) -> None:
        """Room for one more token of every row; rows that find none give way."""
        rows = self.scheduler.running
        longest = max(answer.num_written for answer in rows)
        if longest < self.own.room:
            return
        limit = self._limit()
        room = min(limit, 2 * longest)
        if not self.scheduler.fits(room):
            room = min(limit, longest + _NEXT_ROOM)
        while not self.scheduler.fits(room) and len(rows) > 1:
            self.scheduler.preempt().restart()
            self.plan = None
            longest = max(answer.num_written for answer in rows)
            room = min(self._limit(), max(self.own.room, longest + _NEXT_ROOM))
        self._keep_contexts()
        self.plan = None
        self.own.resize(len(rows), max(room, longest + 1), len(rows), longest)

    def _prepare(self) -> tuple[DecodePlan | CompiledPlan, SamplingRules]:
        if self.plan is None or self.rules is None:
            rows = self.scheduler.running
            if len({answer.context for answer in rows}) <= _KEPT_SHARE * len(self.contexts.contexts):
                self._keep_contexts()
            place_of = {context: place for place, context in enumerate(self.contexts.contexts)}
            places = [place_of[answer.context] for answer in rows]
            self.plan = plan_decoding(self.contexts, self.own, places, self.device)
            self.rules = SamplingRules.from_params([answer.sampling for answer in rows], self.device)
        return self.plan, self.rules

    def _sample(self, logits: torch.Tensor, rules: SamplingRules, first: int) -> None:
        """One token of each row from `first` on."""
        answers = self.scheduler.running[first:]
        uniforms = np.empty((len(answers), NUM_DRAWS))
        for index, answer in enumerate(answers):
            uniforms[index] = answer.draws.next()
        results = sample(logits, rules, torch.from_numpy(uniforms).to(self.device))
        for answer, *numbers in zip(answers, *(column.tolist() for column in results), strict=True):
            answer.add(*numbers)
        for row in reversed(range(first, len(self.scheduler.running))):
            if self.scheduler.running[row].finish_reason is not None:
                self._end(row)


def _portions(lengths: Sequence[int], max_tokens: int) -> Iterator[slice]:
    """Consecutive contexts that have at most `max_tokens` together, or are one context."""
    start, total = 0, 0
    for index, length in enumerate(lengths):
        if index > start and total + length > max_tokens:
            yield slice(start, index)
            start, total = index, 0
        total += length
    yield slice(start, len(lengths))
