# SPDX-License-Identifier: Apache-2.0
"""Generation by transformers' own `generate`, on a model of its own: slow, simple, and the reference for the others.

Tokens are chosen by our sampler, which sits in `generate` as a logits processor, so that a seed means the same in
every engine. Logits are those that transformers gives: a model in bfloat16 rounds them to bfloat16.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from quadriga.errors import RolloutError
from quadriga.models.attention import ATTENTION_NAME
from quadriga.rollout.base import Completion, SamplingParams
from quadriga.rollout.causal_model import CausalModelEngine, require_room
from quadriga.rollout.sampler import Draws, SamplingRules, sample

_NO_TOKEN = -1


class HFEngine(CausalModelEngine):
    """Transformers' `generate`; see `RolloutEngine` for its methods.

    Args:
        model: a causal model with an attention of transformers. Its weights follow the trainer's by `load_weights`.
        eos_token_ids: end-of-text tokens; None takes those of the model's generation configuration.
        max_num_seqs: answers that are generated at the same time.

    Raises:
        RolloutError: the model was loaded with an attention that `generate` cannot use.
    """

    name = "hf"

    def __init__(
        self, model: PreTrainedModel, *, eos_token_ids: Sequence[int] | None = None, max_num_seqs: int = 256
    ) -> None:
        if model.config._attn_implementation == ATTENTION_NAME:
            raise RolloutError(
                "rollout.name=hf",
                got=f"a model with {ATTENTION_NAME} attention",
                expected="one with an attention of transformers",
                fix='Load it with load_causal_lm(path, attention="sdpa").',
            )
        super().__init__(model.eval(), eos_token_ids, max_num_seqs)

    def generate_batch(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[Completion]:
        """See `RolloutEngine.generate_batch`. Requests that end alike are computed together."""
        self._require_ready(prompts, sampling)
        require_room(self.name, self.model, prompts, sampling)
        alike: dict[tuple[int, frozenset[int]], list[int]] = defaultdict(list)
        for row, params in enumerate(sampling):
            alike[params.max_tokens, params.stops(self.eos_token_ids)].append(row)
        completions: dict[int, Completion] = {}
        for rows in alike.values():
            for start in range(0, len(rows), self.max_num_seqs):
                part = rows[start : start + self.max_num_seqs]
                done = self._generate([prompts[row] for row in part], [sampling[row] for row in part])
                completions.update(zip(part, done, strict=True))
        return [completions[row] for row in range(len(prompts))]

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[Completion]:
        """Answers to requests with the same stop tokens and length, prompts padded on the left."""
        width, device = max(map(len, prompts)), self.model.device
        stops = sampling[0].stops(self.eos_token_ids)
        padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        chooser = _Chooser(sampling, device)
        self.model.generate(
            input_ids=torch.tensor(padded, device=device),
            attention_mask=torch.tensor(mask, device=device),
            generation_config=GenerationConfig(
                max_new_tokens=sampling[0].max_tokens,
                do_sample=False,
                eos_token_id=sorted(stops) or [_NO_TOKEN],  # None would mean the model's own
                pad_token_id=0,
            ),
            logits_processor=LogitsProcessorList([chooser]),
        )
        return [
            self._complete(tokens, log_probs, stops)
            for tokens, log_probs in zip(chooser.token_ids, chooser.log_probs, strict=True)
        ]

    def _complete(self, tokens: Sequence[int], log_probs: Sequence[float], stops: frozenset[int]) -> Completion:
        """What comes before and with the first stop token; `generate` goes on until every row of a batch has one."""
        length = next((place + 1 for place, token in enumerate(tokens) if token in stops), len(tokens))
        reason = "stop" if tokens[length - 1] in stops else "length"
        return Completion(list(tokens[:length]), list(log_probs[:length]), reason, self.weight_version)


class _Chooser(LogitsProcessor):
    """Chooses a token by our sampler and leaves `generate` no other choice."""

    def __init__(self, sampling: Sequence[SamplingParams], device: torch.device) -> None:
        self.rules = SamplingRules.from_params(sampling, device)
        self.draws = [Draws(params.seed) for params in sampling]
        self.token_ids: list[list[int]] = [[] for _ in sampling]
        self.log_probs: list[list[float]] = [[] for _ in sampling]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        uniforms = torch.from_numpy(np.stack([draws.next() for draws in self.draws])).to(scores.device)
        tokens, log_probs = sample(scores.float().clone(), self.rules, uniforms)
        for row, (token, log_prob) in enumerate(zip(tokens.tolist(), log_probs.tolist(), strict=True)):
            self.token_ids[row].append(token)
            self.log_probs[row].append(log_prob)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)
