# SPDX-License-Identifier: Apache-2.0
"""Our requests as vLLM's, and its outputs as our completions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quadriga.errors import RolloutError
from quadriga.rollout.interface import Completion, SamplingParams
from quadriga.rollout.third_party import FINISH_REASONS, SEED_BITS, LogProbsOf, split_log_probs
from quadriga.rollout.vllm.library import WHERE, Library


class Request(NamedTuple):
    """A request to vLLM.

    Attributes:
        prompt, sampling: vLLM's.
        adapter: that is applied, vLLM's `LoRARequest`; None: there is none.
        expanded: the prompt with images that vLLM is to have read; None: of text there is nothing to check.
    """

    prompt: dict[str, Any]
    sampling: Any
    adapter: Any
    expanded: Sequence[int] | None


def to_sampling(library: Library, sampling: SamplingParams, eos_token_ids: Sequence[int], *, streams: bool) -> Any:
    """vLLM's sampling parameters.

    Args:
        library: vLLM.
        sampling: ours.
        eos_token_ids: of the model. They are passed as stop tokens, so that vLLM adds none of its own.
        streams: whether each step reports its new tokens; otherwise only the last one reports, all of them.
    """
    kinds = library.sampling.RequestOutputKind
    greedy = sampling.is_greedy
    return library.sampling.SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=0.0 if greedy else sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=0 if greedy else max(sampling.top_k, 0),
        min_p=0.0 if greedy else sampling.min_p,
        seed=sampling.seed % (1 << SEED_BITS),
        stop_token_ids=sorted(sampling.stops(eos_token_ids)),
        ignore_eos=True,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        detokenize=bool(sampling.stop),  # its text decides only where stop strings are looked for
        logprobs=0,
        flat_logprobs=True,
        output_kind=kinds.DELTA if streams else kinds.FINAL_ONLY,
    )


@dataclass
class Response:
    """What has come of one response so far.

    Attributes:
        expanded: see `Request`.
        token_ids, log_probs, reason: of the response.
    """

    expanded: Sequence[int] | None = None
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    reason: str | None = None

    def add(self, output: Any) -> None:
        """Take over what a `RequestOutput` of vLLM brings.

        Raises:
            RolloutError: vLLM has repeated the tokens of images otherwise than the data, so training would see another
                prompt; or log-probabilities are missing.
        """
        if self.expanded is not None and list(output.prompt_token_ids) != list(self.expanded):
            raise RolloutError(
                WHERE,
                got=f"{len(output.prompt_token_ids)} tokens of a prompt with images, as vLLM's image processor counts "
                "them",
                expected=f"{len(self.expanded)}, as the data's does",
                fix="Both read preprocessor_config.json: set image sizes by data.mm_processor_kwargs alone, and "
                "nothing of the kind under actor_rollout_ref.rollout.engine_kwargs.vllm.",
            )
        [one] = output.outputs
        if one.token_ids:
            numbers = list(one.logprobs.logprobs)
            if len(numbers) != len(one.token_ids):
                got = f"{len(numbers)} log-probabilities of {len(one.token_ids)} tokens"
                raise RolloutError(WHERE, got=got, expected="one each")
            self.token_ids.extend(one.token_ids)
            self.log_probs.extend(numbers)
        self.reason = one.finish_reason or self.reason

    def completion(self, sampling: SamplingParams, log_probs_of: LogProbsOf, weight_version: int) -> Completion:
        """The response as ours; for its log-probabilities see `split_log_probs`.

        Raises:
            RolloutError: its finish reason is not known, or a log-probability is not a number.
        """
        reason = "abort" if self.reason is None else FINISH_REASONS.get(self.reason)
        if reason is None:
            got = f"a response that ended with {self.reason!r}"
            raise RolloutError(WHERE, got=got, expected=", ".join(FINISH_REASONS))
        if any(math.isnan(number) for number in self.log_probs):
            raise RolloutError(
                WHERE,
                got="a log-probability that is not a number",
                expected="finite logits",
                fix="The weights hold NaN or infinite values, or overflow: look at actor/grad_norm, or use float32.",
            )
        before, drawn = split_log_probs(self.log_probs, sampling, log_probs_of)
        return Completion(self.token_ids, before, reason, weight_version, drawn)
