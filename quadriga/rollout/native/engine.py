# SPDX-License-Identifier: Apache-2.0
"""Generation in the trainer's process, with the trainer's own module: no copy of the weights, nothing to send.

Prompts are computed once for all of their answers; keys and values are written in place; the batch is refilled and
shrunk as answers end. Norms, attention scores, softmax and logits are float32, so that the log-probabilities are
those of training.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from quadriga.errors import RolloutError
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.load import backbone, head_of
from quadriga.rollout.base import Completion, SamplingParams
from quadriga.rollout.causal_model import CausalModelEngine, require_room
from quadriga.rollout.native.generation import Answer, Generation
from quadriga.rollout.native.scheduler import Scheduler

_LOGIT_OPTIONS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class NativeEngine(CausalModelEngine):
    """Our own generation engine; see `RolloutEngine` for its methods.

    Args:
        model: any causal model of transformers that was loaded with our attention. It may be the trainer's.
        eos_token_ids: end-of-text tokens; None takes those of the model's generation configuration.
        max_num_seqs: answers that are generated at the same time.
        max_prefill_tokens: prompt tokens that are computed in one call.

    Raises:
        RolloutError: the model computes something that this engine does not.
    """

    name = "native"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Sequence[int] | None = None,
        max_num_seqs: int = 256,
        max_prefill_tokens: int = 4096,
    ) -> None:
        _require_supported(model)
        super().__init__(model, eos_token_ids, max_num_seqs)
        self.max_prefill_tokens = max_prefill_tokens

    def generate_batch(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[Completion]:
        """See `RolloutEngine.generate_batch`."""
        self._require_ready(prompts, sampling)
        require_room(self.name, self.model, prompts, sampling)
        if not prompts:
            return []
        answers = [Answer.open(*request, self.eos_token_ids) for request in zip(prompts, sampling, strict=True)]
        scheduler = Scheduler([answer.prompt for answer in answers], self.max_num_seqs)
        with torch.inference_mode(), evaluating(self.model):
            head = head_of(self.model)
            Generation(backbone(self.model), head, answers, scheduler, self.max_prefill_tokens).run()
        return [answer.close(self.weight_version) for answer in answers]


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
