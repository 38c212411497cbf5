# SPDX-License-Identifier: Apache-2.0
"""Generation by transformers' `generate`, on a copy of the model: slow, simple, and the reference.

Tokens are chosen by our sampler, as a logits processor of `generate`, so that a seed means the same
in every engine. Logits are those of transformers: a model in bfloat16 rounds them to bfloat16.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria

from quadriga.engine_traits.hf import TRAITS
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

_NO_TOKEN = -1  # id that no token has


class HFEngine(CausalModelEngine):
    """An engine on transformers' `generate`.

    Args:
        model: a model with an attention of transformers.
        options: arguments of `CausalModelEngine`.

    Raises:
        RolloutError: the model was loaded with an attention that `generate` cannot use.
    """

    name = "hf"
    traits = TRAITS
    description = "hf, transformers' generate on a copy of the weights"

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        if model.config._attn_implementation == ATTENTION_NAME:
            raise RolloutError(
                "rollout.name=hf",
                got=f"a model with {ATTENTION_NAME} attention",
                expected="one with an attention of transformers",
                fix='Load it with load_causal_lm(path, attention="sdpa").',
            )
        super().__init__(model.eval(), **options)

    @classmethod
    def from_config(cls, setup: EngineSetup) -> "HFEngine":
        """Make the engine of a configuration, on a copy of the model with "sdpa" attention."""
        setup.require_no_options()
        model = setup.load_copy("sdpa")
        return cls(model, **cls.options_of(setup, model))

    def generate_batch(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> list[Completion]:
        """Generate a response for each prompt.

        Requests with the same `max_tokens` and stop tokens are computed together.

        Args:
            prompts: token ids of each prompt.
            sampling: how each response is sampled.
            images: images of each prompt.

        Returns:
            The responses, in order.

        Raises:
            RolloutError: this engine or its model cannot serve a request.
        """
        row_images = images or [None] * len(prompts)
        self._require_ready(prompts, sampling, row_images)
        model_type = self.model.config.model_type
        if any(row_images) and getattr(self.model.config, "vision_config", None) is None:
            raise RolloutError(
                f"{self.name}.generate",
                got=f"a prompt with images, for a model of type {model_type}",
                expected="a vision-language model",
                fix="Leave out the images, or take another actor_rollout_ref.model.path.",
            )
        self._require_room(prompts, sampling)
        require_tokenizer(self.name, sampling, self.tokenizer)
        self._is_aborting = False

        # One call of `generate` has one `max_tokens` and one set of stop tokens, and for models
        # with one token for images and videos (`ONE_TOKEN`) one kind of media.
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for row, params in enumerate(sampling):
            media = self._media_of(row, row_images[row]) if model_type in ONE_TOKEN else ()
            groups[params.max_tokens, params.stops(self.eos_token_ids), media].append(row)

        completions = {}
        for group in groups.values():
            for start in range(0, len(group), self.max_num_seqs):
                rows = group[start : start + self.max_num_seqs]
                responses = self._generate_together(
                    [prompts[row] for row in rows],
                    [sampling[row] for row in rows],
                    [row_images[row] for row in rows],
                )
                completions.update(zip(rows, responses, strict=True))
                if self.count_ended is not None:
                    self.count_ended(len(rows))
        return [completions[row] for row in range(len(prompts))]

    def _media_of(self, row: int, images: Images | None) -> tuple[str, ...]:
        """Kind of media in a prompt, for a model with the same token for images and videos.

        In a batch with both kinds, transformers could not tell which tokens are of which kind.

        Args:
            row: number of the prompt, for errors.
            images: images and videos of the prompt.

        Returns:
            A tuple with the name of the model's input for the pixels; empty for a prompt of text.

        Raises:
            RolloutError: the prompt itself has both kinds.
        """
        if images is None:
            return ()
        media = tuple(name for name in PIXELS if name in images.inputs)
        if len(media) > 1:
            model_type = self.model.config.model_type
            raise RolloutError(
                f"{self.name}.generate, prompt {row}",
                got="images and videos in one prompt",
                expected=f"only images or only videos: transformers cannot tell their tokens"
                f" apart in {model_type}",
                fix="Set actor_rollout_ref.rollout.name=native, or leave one of them out.",
            )
        return media

    @torch.no_grad()
    def _generate_together(
        self, prompts: Prompts, sampling: Sampling, images: Sequence[Images | None]
    ) -> list[Completion]:
        """Generate responses to requests with the same stop tokens and `max_tokens`, in one batch.

        Args:
            prompts: token ids of each prompt.
            sampling: how each response is sampled.
            images: images of each prompt.
        """
        width = max(map(len, prompts))
        device = self.model.device
        max_tokens = sampling[0].max_tokens
        stop_tokens = sampling[0].stops(self.eos_token_ids)
        # Padded on the left, so that all rows continue in the same column.
        input_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            attention_mask[row, width - len(prompt) :] = 1

        chooser = _TokenChooser(sampling, device)
        strings = [StopStrings(params.stop, self.tokenizer) for params in sampling]
        config = GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            # Without stop tokens, [] or None would mean the model's own end-of-text tokens.
            eos_token_id=sorted(stop_tokens) or [_NO_TOKEN],
            pad_token_id=0,
        )
        self.model.generate(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            **_image_arguments(prompts, images, width, device),
            generation_config=config,
            logits_processor=[chooser],
            stopping_criteria=[_StopOrAbort(self, chooser, strings)],
        )

        completions = []
        for row, tokens in enumerate(chooser.token_ids):
            # A row that is shorter than `max_tokens`, and has no stop below, was ended by `abort`.
            reason: FinishReason = "length" if len(tokens) == max_tokens else "abort"
            length = len(tokens)
            # `generate` goes on until every row has ended, so the row is cut at its first stop.
            for end in range(1, len(tokens) + 1):
                if tokens[end - 1] in stop_tokens or strings[row].is_reached(tokens[:end]):
                    reason = "stop"
                    length = end
                    break
            completions.append(
                Completion(
                    token_ids=tokens[:length],
                    log_probs=chooser.log_probs[row][:length],
                    finish_reason=reason,
                    weight_version=self.weight_version,
                    sampling_log_probs=chooser.sampling_log_probs[row][:length],
                )
            )
        return completions


def _image_arguments(
    prompts: Prompts, images: Sequence[Images | None], width: int, device: torch.device
) -> dict[str, Tensor]:
    """Images and positions of all rows, as arguments of the model; empty if no row has images.

    Args:
        prompts: token ids of each row.
        images: images of each row.
        width: length of the rows with padding.
        device: device of the model.
    """
    with_images = [row_images for row_images in images if row_images is not None]
    if not with_images:
        return {}
    # The first axis has the positions as in a text, the others those along time, height and width.
    positions = torch.zeros(4, len(prompts), width, dtype=torch.int64)
    for row, (prompt, row_images) in enumerate(zip(prompts, images, strict=True)):
        text_positions = torch.arange(len(prompt))
        axis_positions = text_positions.expand(3, -1)
        if row_images is not None:
            axis_positions = row_images.position_ids.cpu()
        start = width - len(prompt)
        positions[:, row, start:] = torch.cat((text_positions[None], axis_positions))
    arguments = {"position_ids": positions.to(device)}

    # The model takes the pixels of all rows one after the other.
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for row_images in with_images:
        for name, part in row_images.inputs.items():
            parts[name].append(part)
    for name, row_parts in parts.items():
        arguments[name] = torch.cat(row_parts).to(device)
    return arguments


class _TokenChooser(LogitsProcessor):
    """Chooses tokens by our sampler, and changes the logits so that `generate` takes these tokens.

    Attributes:
        token_ids: tokens that were chosen for each row.
        log_probs: log-probabilities of these tokens before filters.
        sampling_log_probs: log-probabilities of these tokens after filters.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self.rules = SamplingRules.from_params(sampling, device)
        self.draws = [Draws(params.seed) for params in sampling]
        self.token_ids: list[list[int]] = [[] for _ in sampling]
        self.log_probs: list[list[float]] = [[] for _ in sampling]
        self.sampling_log_probs: list[list[float]] = [[] for _ in sampling]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Choose the next token of each row.

        Args:
            input_ids: [B, tokens], not used.
            scores: [B, V], logits.

        Returns:
            [B, V]: 0 for the chosen token, -inf for all others.
        """
        numbers = np.stack([draws.next() for draws in self.draws])
        uniforms = torch.from_numpy(numbers).to(scores.device)
        # The sampler overwrites its logits.
        tokens, log_probs, sampling_log_probs = sample(scores.float().clone(), self.rules, uniforms)
        rows = zip(tokens.tolist(), log_probs.tolist(), sampling_log_probs.tolist(), strict=True)
        for row, (token, log_prob, sampling_log_prob) in enumerate(rows):
            self.token_ids[row].append(token)
            self.log_probs[row].append(log_prob)
            self.sampling_log_probs[row].append(sampling_log_prob)
        # `generate` takes the likeliest token, which can only be the chosen one.
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


@dataclass
class _StopOrAbort(StoppingCriteria):
    """Ends rows at their stop strings, and all of them on `abort`."""

    engine: HFEngine
    chooser: _TokenChooser
    strings: Sequence[StopStrings]  # of each row

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """Say whether each row has ended, [B] bool.

        Args:
            input_ids: [B, tokens], of which only the device is used.
            scores: not used.
            options: not used.
        """
        rows = zip(self.chooser.token_ids, self.strings, strict=True)
        is_aborting = self.engine._is_aborting
        has_ended = [is_aborting or strings.is_reached(tokens) for tokens, strings in rows]
        return torch.tensor(has_ended, device=input_ids.device)
