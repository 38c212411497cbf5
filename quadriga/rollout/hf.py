# SPDX-License-Identifier: Apache-2.0
"""Generation by transformers' `generate`, on a copy of the model: slow, simple, and the reference for other engines.

Tokens are chosen by our sampler, which sits in `generate` as a logits processor, so that a seed means the same in
every engine. Logits are those that transformers gives: a model in bfloat16 rounds them to bfloat16.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria

from quadriga.errors import RolloutError
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.vision import ONE_TOKEN, PIXELS
from quadriga.rollout.causal_model import CausalModelEngine
from quadriga.rollout.interface import (
    BatchImages,
    Completion,
    FinishReason,
    Images,
    Prompts,
    Sampling,
)
from quadriga.rollout.sampler import Draws, SamplingRules, StopStrings, require_tokenizer, sample
from quadriga.rollout.setup import EngineSetup

_NO_TOKEN = -1


class HFEngine(CausalModelEngine):
    """Transformers' `generate`.

    Its arguments are those of `CausalModelEngine`, the model with an attention of transformers.
    Raises RolloutError: the model was loaded with an attention that `generate` cannot use.
    """

    name = "hf"
    description = "hf, transformers' generate on a copy of the weights"

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        if model.config._attn_implementation == ATTENTION_NAME:
            got = f"a model with {ATTENTION_NAME} attention"
            fix = 'Load it with load_causal_lm(path, attention="sdpa").'
            raise RolloutError(
                "rollout.name=hf",
                got=got,
                expected="one with an attention of transformers",
                fix=fix,
            )
        super().__init__(model.eval(), **options)

    @classmethod
    def from_config(cls, setup: EngineSetup) -> "HFEngine":
        setup.require_no_options()
        model = setup.load_copy("sdpa")
        return cls(model, **cls.options_of(setup, model))

    def generate_batch(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> list[Completion]:
        """Requests with the same limit and stop tokens are computed together."""
        given = images or [None] * len(prompts)
        self._require_ready(prompts, sampling, given)
        if any(given) and getattr(self.model.config, "vision_config", None) is None:
            got = f"a prompt with images, for a model of type {self.model.config.model_type}"
            fix = "Leave out the images, or take another actor_rollout_ref.model.path."
            raise RolloutError(
                f"{self.name}.generate", got=got, expected="a vision-language model", fix=fix
            )
        self._require_room(prompts, sampling)
        require_tokenizer(self.name, sampling, self.tokenizer)
        self._is_aborting = False
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for row, params in enumerate(sampling):
            kinds = (
                ()
                if given[row] is None
                else tuple(one for one in PIXELS if one in given[row].inputs)
            )
            is_apart = self.model.config.model_type in ONE_TOKEN
            if is_apart and len(kinds) > 1:
                got, fix = (
                    "images and videos in one prompt",
                    "Take native, or leave one of them out.",
                )
                expected = f"one of both: transformers cannot tell their tokens apart in {self.model.config.model_type}"
                raise RolloutError(
                    f"{self.name}.generate, prompt {row}", got=got, expected=expected, fix=fix
                )
            alike[params.max_tokens, params.stops(self.eos_token_ids), kinds * is_apart].append(row)
        completions: dict[int, Completion] = {}
        for rows in alike.values():
            for start in range(0, len(rows), self.max_num_seqs):
                part = rows[start : start + self.max_num_seqs]
                done = self._generate(
                    [prompts[row] for row in part],
                    [sampling[row] for row in part],
                    [given[row] for row in part],
                )
                completions.update(zip(part, done, strict=True))
        return [completions[row] for row in range(len(prompts))]

    @torch.no_grad()
    def _generate(
        self, prompts: Prompts, sampling: Sampling, images: Sequence[Images | None]
    ) -> list[Completion]:
        """Responses to requests with the same stop tokens and length, prompts padded on the left."""
        width, device = max(map(len, prompts)), self.model.device
        stops = sampling[0].stops(self.eos_token_ids)
        padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        chooser = _Chooser(sampling, device)
        strings = [StopStrings(params.stop, self.tokenizer) for params in sampling]
        self.model.generate(
            input_ids=torch.tensor(padded, device=device),
            attention_mask=torch.tensor(mask, device=device),
            **_image_arguments(prompts, images, width, device),
            generation_config=GenerationConfig(
                max_new_tokens=sampling[0].max_tokens,
                do_sample=False,
                eos_token_id=sorted(stops) or [_NO_TOKEN],  # None would mean the model's own
                pad_token_id=0,
            ),
            logits_processor=[chooser],
            stopping_criteria=[_Ends(self, chooser, strings)],
        )
        completions = []
        for row, tokens in enumerate(chooser.token_ids):
            # What comes before and with the first end; `generate` goes on until every row of a batch has one.
            at_token = next(
                (place + 1 for place, token in enumerate(tokens) if token in stops), None
            )
            ends = [end for end in (at_token, strings[row].length(tokens)) if end is not None]
            length = min(ends, default=len(tokens))
            unfinished: FinishReason = "abort" if length < chooser.max_tokens else "length"
            log_probs, drawn = (
                chooser.log_probs[row][:length],
                chooser.sampling_log_probs[row][:length],
            )
            reason = "stop" if ends else unfinished
            completions.append(
                Completion(tokens[:length], log_probs, reason, self.weight_version, drawn)
            )
        return completions


def _image_arguments(
    prompts: Prompts, images: Sequence[Images | None], width: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Arguments of the model: images and videos of all rows, and positions on every axis; none without any."""
    if not (given := [one for one in images if one is not None]):
        return {}
    positions = torch.zeros(
        4, len(prompts), width, dtype=torch.int64
    )  # the place in the row, and the three axes
    for row, (prompt, one) in enumerate(zip(prompts, images, strict=True)):
        places = torch.arange(len(prompt))
        axes = places.expand(3, -1) if one is None else one.position_ids
        positions[:, row, width - len(prompt) :] = torch.cat((places[None], axes.cpu()))
    names = {name for one in given for name in one.inputs}
    inputs = {
        name: torch.cat([one.inputs[name] for one in given if name in one.inputs]).to(device)
        for name in names
    }
    return {**inputs, "position_ids": positions.to(device)}


class _Chooser(LogitsProcessor):
    """Chooses a token by our sampler and leaves `generate` no other choice."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self.rules = SamplingRules.from_params(sampling, device)
        self.draws = [Draws(params.seed) for params in sampling]
        self.token_ids: list[list[int]] = [[] for _ in sampling]
        self.log_probs: list[list[float]] = [[] for _ in sampling]
        self.sampling_log_probs: list[list[float]] = [[] for _ in sampling]
        self.max_tokens = sampling[0].max_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        uniforms = torch.from_numpy(np.stack([draws.next() for draws in self.draws])).to(
            scores.device
        )
        tokens, *log_probs = sample(scores.float().clone(), self.rules, uniforms)
        columns = zip(tokens.tolist(), *(column.tolist() for column in log_probs), strict=True)
        for row, (token, log_prob, sampling_log_prob) in enumerate(columns):
            self.token_ids[row].append(token)
            self.log_probs[row].append(log_prob)
            self.sampling_log_probs[row].append(sampling_log_prob)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


class _Ends(StoppingCriteria):
    """Ends rows at their stop strings, and all of them on `abort`."""

    def __init__(self, engine: HFEngine, chooser: _Chooser, strings: Sequence[StopStrings]) -> None:
        self.engine, self.chooser, self.strings = engine, chooser, strings

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        """[B] bool"""
        rows = zip(self.chooser.token_ids, self.strings, strict=True)
        ends = [self.engine._is_aborting or strings.is_reached(tokens) for tokens, strings in rows]
        return torch.tensor(ends, device=input_ids.device)
