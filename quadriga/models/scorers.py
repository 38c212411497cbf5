# SPDX-License-Identifier: Apache-2.0
"""A causal model as a policy or as a value function of packed tokens.

Legend: N packed tokens, M predicted tokens, D hidden size.
"""

from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from quadriga.models.attention import AttentionPlan
from quadriga.models.heads import ValueHead, token_scores
from quadriga.models.load import backbone, head_of


class PackedTokens(Protocol):
    """What a scorer reads of a packed micro-batch."""

    input_ids: torch.Tensor  # [1, N]
    position_ids: torch.Tensor  # [1, N]
    plan: AttentionPlan
    predictors: torch.Tensor  # [M] indices into N
    targets: torch.Tensor  # [M]


class Scorer(Protocol):
    """A model and what it says of each predicted token."""

    model: PreTrainedModel

    def output_names(self, with_entropy: bool) -> tuple[str, ...]:
        """The names of the outputs."""
        ...

    def __call__(self, batch: PackedTokens, *, temperature: float, with_entropy: bool) -> dict[str, torch.Tensor]:
        """Float32 [M] by name."""
        ...


class PolicyScorer:
    """`log_probs` and `entropy` of the response tokens under the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def output_names(self, with_entropy: bool) -> tuple[str, ...]:
        """See `Scorer.output_names`."""
        return ("log_probs", "entropy") if with_entropy else ("log_probs",)

    def __call__(self, batch: PackedTokens, *, temperature: float, with_entropy: bool) -> dict[str, torch.Tensor]:
        scores = token_scores(
            _states(self.model, batch),
            head_of(self.model),
            batch.targets,
            temperature=temperature,
            with_entropy=with_entropy,
        )
        outputs = {"log_probs": scores.log_probs}
        return outputs if scores.entropy is None else {**outputs, "entropy": scores.entropy}


class ValueScorer:
    """`values`: the return expected before each response token is drawn.

    The vocabulary head is replaced by a value head, so a checkpoint of the model holds it too.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        hidden_size = model.config.get_text_config().hidden_size
        model.set_output_embeddings(nn.Identity())
        model.value_head = ValueHead(hidden_size, next(model.parameters()).dtype).to(model.device)
        self.model = model

    def output_names(self, with_entropy: bool) -> tuple[str, ...]:
        """See `Scorer.output_names`."""
        return ("values",)

    def __call__(self, batch: PackedTokens, *, temperature: float, with_entropy: bool) -> dict[str, torch.Tensor]:
        return {"values": self.model.value_head(_states(self.model, batch))}


def _states(model: PreTrainedModel, batch: PackedTokens) -> torch.Tensor:
    """Hidden states [M, D] of the tokens before the predicted ones."""
    hidden = backbone(model)(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=None,
        use_cache=False,
        attention_plan=batch.plan,
    ).last_hidden_state[0]
    return hidden.index_select(0, batch.predictors)
