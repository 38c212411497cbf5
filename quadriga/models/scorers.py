# SPDX-License-Identifier: Apache-2.0
"""A causal model as a policy or as a value function of packed tokens.

Legend: N packed tokens, n of them in this process, M predicted tokens, m of them scored by this process, D hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from quadriga.models.attention import AttentionPlan
from quadriga.models.heads import VocabularyShard, token_scores
from quadriga.models.load import backbone, head_of
from quadriga.models.value_head import ValueHead
from quadriga.models.vision import PackedImages, decoder_inputs


class PackedTokens(Protocol):
    """What a scorer reads of a packed micro-batch."""

    input_ids: torch.Tensor  # [1, N]
    position_ids: torch.Tensor  # [1, N], or [3, 1, N] for a model that sees
    images: PackedImages | None
    plan: AttentionPlan
    predictors: torch.Tensor  # [M] indices into N
    targets: torch.Tensor  # [M]


@dataclass(frozen=True)
class Question:
    """What is asked about each predicted token.

    Attributes:
        temperature: of the distribution asked about.
        with_entropy: whether its entropy is wanted too.
        with_sum_pi_squared: whether its sum of squared probabilities is wanted too, which has no gradient.
    """

    temperature: float = 1.0
    with_entropy: bool = False
    with_sum_pi_squared: bool = False


@dataclass(frozen=True)
class ModelInputs:
    """What the backbone reads in this process: `input_ids` and `position_ids` [1, n], the latter perhaps [3, 1, n],
    and the plan of attention."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    plan: AttentionPlan


@dataclass(frozen=True)
class Scored:
    """The predicted tokens that this process scores.

    Attributes:
        states: [m, D] hidden states of the tokens before them.
        targets: [m]
        join: from [m] numbers of each process to all [M], the same in all of them.
    """

    states: torch.Tensor
    targets: torch.Tensor
    join: Callable[[torch.Tensor], torch.Tensor]


class Sharing(Protocol):
    """How the processes with the same rows share the work on them."""

    has_embedding: bool
    has_head: bool
    vocabulary: VocabularyShard | None

    def inputs(self, batch: PackedTokens) -> ModelInputs:
        """The tokens of this process."""
        ...

    def scored(self, hidden: torch.Tensor, batch: PackedTokens, *, is_vocabulary: bool) -> Scored:
        """What this process scores, given the hidden states [n, D] of its tokens.

        Args:
            hidden: after the last layer and its norm.
            batch: they are of.
            is_vocabulary: whether the score reads the head's part of the vocabulary in every process.
        """
        ...


class Unshared:
    """One process does all of it."""

    has_embedding = has_head = True
    vocabulary: VocabularyShard | None = None

    def inputs(self, batch: PackedTokens) -> ModelInputs:
        """See `Sharing.inputs`."""
        return ModelInputs(batch.input_ids, batch.position_ids, batch.plan)

    def scored(self, hidden: torch.Tensor, batch: PackedTokens, *, is_vocabulary: bool) -> Scored:
        """See `Sharing.scored`."""
        return Scored(hidden.index_select(0, batch.predictors), batch.targets, lambda values: values)


UNSHARED = Unshared()


class Scorer(nn.Module, ABC):
    """A model and what it says of each predicted token: a subclass for each kind of head.

    Args:
        model: the causal model.

    Attributes:
        sharing: how the processes with the same rows share the work.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.sharing: Sharing = UNSHARED

    @abstractmethod
    def output_names(self, question: Question) -> tuple[str, ...]:
        """The names of the outputs."""

    @abstractmethod
    def score(self, hidden: torch.Tensor, batch: PackedTokens, question: Question) -> dict[str, torch.Tensor]:
        """Float32 [M] by name, of hidden states [n, D]."""

    def forward(
        self, batch: PackedTokens, question: Question, *, received: torch.Tensor | None = None
    ) -> "torch.Tensor | dict[str, torch.Tensor]":
        """Float32 [M] by name; the hidden states [1, n, D] of a pipeline stage that has no head.

        Args:
            batch: packed tokens.
            question: what is asked about each predicted token.
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
    """`log_probs` of the response tokens under the model, and where asked for `entropy` and `sum_pi_squared`."""

    def output_names(self, question: Question) -> tuple[str, ...]:
        """See `Scorer.output_names`."""
        entropy = ("entropy",) if question.with_entropy else ()
        return ("log_probs", *entropy, *(("sum_pi_squared",) if question.with_sum_pi_squared else ()))

    def score(self, hidden: torch.Tensor, batch: PackedTokens, question: Question) -> dict[str, torch.Tensor]:
        """See `Scorer.score`."""
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
        """See `Scorer.output_names`."""
        return ("values",)

    def score(self, hidden: torch.Tensor, batch: PackedTokens, question: Question) -> dict[str, torch.Tensor]:
        """See `Scorer.score`."""
        part = self.sharing.scored(hidden, batch, is_vocabulary=False)
        return {"values": part.join(self.model.value_head(part.states))}
