# SPDX-License-Identifier: Apache-2.0
"""A rollout engine of your own: for each token it runs the whole model over the whole text.

Slow, and as simple as generation can be. It shares weights, limits and sampling with the built-in
engines, so its tokens are those of rollout.name=hf with the same seeds.
"""

from collections.abc import Sequence

import torch

from quadriga.engine_traits import EngineTraits
from quadriga.rollout import CausalModelEngine, Completion, EngineSetup, SamplingParams
from quadriga.rollout.sampler import Draws, SamplingRules, StopStrings, require_tokenizer, sample


class BruteForceEngine(CausalModelEngine):
    """Computes everything anew for each token."""

    name = "brute_force"
    traits = EngineTraits(takes_weights="between_batches")
    takes_images = False
    description = "brute force, the whole text again for each token"

    @classmethod
    def from_config(cls, setup: EngineSetup) -> "BruteForceEngine":
        setup.require_no_options()
        model = setup.load_copy("sdpa").eval()
        return cls(model, **cls.options_of(setup, model))

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], images=None
    ) -> list[Completion]:
        self._require_ready(prompts, sampling, images)
        self._require_room(prompts, sampling)
        require_tokenizer(self.name, sampling, self.tokenizer)
        self._is_aborting = False
        requests = zip(prompts, sampling, strict=True)
        return [self._respond(prompt, params) for prompt, params in requests]

    @torch.no_grad()
    def _respond(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        device = self.model.device
        rules = SamplingRules.from_params([params], device)
        draws = Draws(params.seed)
        stop_tokens = params.stops(self.eos_token_ids)
        strings = StopStrings(params.stop, self.tokenizer)
        token_ids, log_probs, sampling_log_probs = [], [], []
        reason = "length"
        while len(token_ids) < params.max_tokens and reason == "length":
            if self._is_aborting:
                reason = "abort"
                break
            text = torch.tensor([[*prompt, *token_ids]], device=device)
            logits = self.model(input_ids=text).logits[:, -1].float()
            uniforms = torch.from_numpy(draws.next())[None].to(device)
            token, log_prob, sampling_log_prob = sample(logits, rules, uniforms)
            token_ids.append(token.item())
            log_probs.append(log_prob.item())
            sampling_log_probs.append(sampling_log_prob.item())
            if token_ids[-1] in stop_tokens or strings.is_reached(token_ids):
                reason = "stop"
        return Completion(token_ids, log_probs, reason, self.weight_version, sampling_log_probs)
