# SPDX-License-Identifier: Apache-2.0
"""A causal model as a policy, a value function or a reward model of packed tokens.

Legend: N packed tokens, n of them on this rank, M predicted tokens, m of them scored by this rank, D hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from quadriga.models.attention import AttentionPlan, PackedBatch
from quadriga.models.heads import VocabularyShard, token_scores
from quadriga.models.load import backbone, head_of
from quadriga.models.vision import decoder_inputs


@dataclass(frozen=True)
class Question:
    """Which outputs are wanted of each predicted token.

    Attributes:
        temperature: of the distribution.
        with_entropy: whether its entropy is wanted too.
        with_sum_pi_squared: whether its sum of squared probabilities is wanted too, which has no gradient.
    """

    temperature: float = 1.0
    with_entropy: bool = False
    with_sum_pi_squared: bool = False


@dataclass(frozen=True)
class ModelInputs:
    """What the backbone reads on this rank: `input_ids` and `position_ids` [1, n], the latter perhaps [3, 1, n],
    and the plan of attention."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    plan: AttentionPlan


@dataclass(frozen=True)
class Scored:
    """The predicted tokens that this rank scores.

    Attributes:
        states: [m, D] hidden states of the tokens before them.
        targets: [m]
        join: from [m] numbers of each rank to all [M], the same on all of them.
    """

    states: torch.Tensor
    targets: torch.Tensor
    join: Callable[[torch.Tensor], torch.Tensor]


class Sharing:
    """How the ranks with the same rows share the work on them: here one does all of it."""

    has_embedding = has_head = True
    vocabulary: VocabularyShard | None = None

    def inputs(self, batch: PackedBatch) -> ModelInputs:
        """The tokens [1, n] of this rank."""
        return ModelInputs(batch.input_ids, batch.position_ids, batch.plan)

    def scored(self, hidden: torch.Tensor, batch: PackedBatch, *, is_vocabulary: bool) -> Scored:
        """What this rank scores, given the hidden states [n, D] of its tokens.

        Args:
            hidden: after the last layer and its norm.
            batch: they are of.
            is_vocabulary: whether the score reads the head's part of the vocabulary on every rank.
        """
        return Scored(hidden.index_select(0, batch.predictors), batch.targets, lambda values: values)


class Scorer(nn.Module, ABC):
    """A model and its outputs for each predicted token: a subclass for each kind of head.

    Args:
        model: the causal model.

    Attributes:
        sharing: how the ranks with the same rows share the work.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.sharing = Sharing()

    @abstractmethod
    def output_names(self, question: Question) -> tuple[str, ...]:
        """The names of the outputs, which are [M] each."""

    @abstractmethod
    def score(self, hidden: torch.Tensor, batch: PackedBatch, question: Question) -> dict[str, torch.Tensor]:
        """Float32 [M] by name, of hidden states [n, D]."""

    def forward(
        self, batch: PackedBatch, question: Question, *, received: torch.Tensor | None = None
    ) -> "torch.Tensor | dict[str, torch.Tensor]":
        """Float32 [M] by name; the hidden states [1, n, D] of a pipeline stage that has no head.

        Args:
            batch: packed tokens.
            question: which outputs are wanted.
            received: [1, n, D] of the stage before, where this one has no embedding.
        """
        inputs = self.sharing.inputs(batch)
        if batch.images is not None:
            tokens = decoder_inputs(self.model, inputs.input_ids, batch.images)
        else:
            tokens = {"input_ids": inputs.input_ids} if received is None else {"inputs_embeds": received}
        hidden = backbone(self.model)(
            **tokens,
            position_ids=inputs.position_ids,
            attention_mask=None,
            use_cache=False,
            attention_plan=inputs.plan,
        ).last_hidden_state
        if not self.sharing.has_head:
            return hidden
        return self.score(hidden[0], batch, question)


class PolicyScorer(Scorer):
    """`log_probs` of the response tokens under the model, and where wanted `entropy` and `sum_pi_squared`."""

    def output_names(self, question: Question) -> tuple[str, ...]:
        entropy = ("entropy",) if question.with_entropy else ()
        return ("log_probs", *entropy, *(("sum_pi_squared",) if question.with_sum_pi_squared else ()))

    def score(self, hidden: torch.Tensor, batch: PackedBatch, question: Question) -> dict[str, torch.Tensor]:
        head, part = head_of(self.model), self.sharing.scored(hidden, batch, is_vocabulary=True)
        scores = token_scores(
            part.states,
            head.weight,
            getattr(head, "bias", None),
            part.targets,
            temperature=question.temperature,
            with_entropy=question.with_entropy,
            with_sum_pi_squared=question.with_sum_pi_squared,
            shard=self.sharing.vocabulary,
        )
        return {name: part.join(getattr(scores, name)) for name in self.output_names(question)}


class ValueHead(nn.Module):
    """One number per hidden state, in float32: [..., D] -> [...]. It starts at zero, so the first values are zero."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=dtype)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden.float(), self.linear.weight.float(), self.linear.bias.float())[..., 0]


class ValueScorer(Scorer):
    """`values`: the return expected before each response token is drawn.

    The vocabulary head is replaced by a value head, so a checkpoint of the model holds it too.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        hidden_size = model.config.get_text_config().hidden_size
        model.set_output_embeddings(nn.Identity())
        model.value_head = ValueHead(hidden_size, next(model.parameters()).dtype).to(model.device)
        super().__init__(model)

    def output_names(self, question: Question) -> tuple[str, ...]:
        return ("values",)

    def score(self, hidden: torch.Tensor, batch: PackedBatch, question: Question) -> dict[str, torch.Tensor]:
        part = self.sharing.scored(hidden, batch, is_vocabulary=False)
        return {"values": part.join(self.model.value_head(part.states))}


class RewardScorer(Scorer):
    """`scores`: what the model says of each sequence, read at the token before the predicted one.

    Args:
        model: a decoder with the head `score` [1, D], as `reward_model.load_reward_model` gives it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        # Nothing projects to the vocabulary: the output embeddings that every engine looks for are empty here.
        model.lm_head = nn.Identity()
        super().__init__(model)

    def output_names(self, question: Question) -> tuple[str, ...]:
        return ("scores",)

    def score(self, hidden: torch.Tensor, batch: PackedBatch, question: Question) -> dict[str, torch.Tensor]:
        part = self.sharing.scored(hidden, batch, is_vocabulary=False)
        head = self.model.score
        # In float32 whatever the model computes in: a bfloat16 score of 10 is off by up to 0.03.
        bias = None if head.bias is None else head.bias.float()
        return {"scores": part.join(linear(part.states.float(), head.weight.float(), bias)[:, 0])}
