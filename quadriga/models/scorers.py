# SPDX-License-Identifier: Apache-2.0
"""Scorers: a causal model as a policy, a value function or a reward model of packed tokens.

Legend: N packed tokens, n of them on this rank, M predicted tokens, m of them scored by this rank,
K targets of a token, k likeliest tokens, D hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from quadriga.models.architecture import backbone, is_packed
from quadriga.models.attention import AttentionPlan, PackedBatch
from quadriga.models.experts import RoutedTokens, Routers
from quadriga.models.heads import LogitRule, VocabularyShard, token_scores
from quadriga.models.vision import decoder_inputs


@dataclass(frozen=True)
class ScoreQuestion:
    """Scores that a caller needs for each predicted token, and the sampling temperature.

    Attributes:
        temperature: divides the logits.
        with_entropy: whether to return the entropy.
        with_sum_pi_squared: whether to return the sum of squared probabilities, without gradient.
        top_k: how many of the likeliest tokens to return, without gradient.
    """

    temperature: float = 1.0
    with_entropy: bool = False
    with_sum_pi_squared: bool = False
    top_k: int | None = None


ScoredTokens: TypeAlias = tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]
"""The predicted tokens that this rank scores: the hidden states [m, D] of the tokens before them,
the targets [m] or [m, K], and a function that joins the scores [m, ...] of all ranks to [M, ...] on
every rank."""


class Sharing:
    """Division of a packed batch between ranks. This base class is for a single rank."""

    has_embedding = True
    has_head = True
    vocabulary: VocabularyShard | None = None

    def inputs(self, batch: PackedBatch) -> tuple[Tensor, Tensor, AttentionPlan]:
        """Tokens [1, n] of this rank, positions [1, n] or [3, 1, n] of these, and attention plan."""
        return batch.input_ids, batch.position_ids, batch.plan

    def first_token(self, batch: PackedBatch) -> int | None:
        """Packed index of this rank's first embedding; None if it has all embeddings."""
        return None

    def select_predictors(
        self, hidden: Tensor, batch: PackedBatch, *, has_sharded_head: bool
    ) -> ScoredTokens:
        """Select the hidden states of the tokens from which this rank predicts a target.

        Args:
            hidden: last hidden states [n, D] of this rank's tokens.
            batch: the packed batch.
            has_sharded_head: whether tensor parallelism shards the head, so that every rank of a
                group scores all of the group's tokens.

        Returns:
            States, targets and a function to join scores; see `ScoredTokens`.
        """
        return hidden.index_select(0, batch.predictors), batch.targets, lambda values: values

    def routed_tokens(self, batch: PackedBatch, num_tokens: int) -> RoutedTokens:
        """Describe this rank's tokens for the routers of a mixture of experts.

        Args:
            batch: the packed batch, with its `routing`.
            num_tokens: n, number of this rank's tokens.
        """
        return RoutedTokens(
            routing=batch.routing,
            start=0,
            predictors=batch.predictors,
            rows=batch.rows,
            lengths=batch.num_predicted,
            add_up=lambda values: None,
        )

    def join_tokens(self, values: Tensor) -> Tensor:
        """Join the values [n, ...] of all ranks to [N, ...] on every rank."""
        return values


class Scorer(nn.Module, ABC):
    """Computes a model's outputs for each predicted token. There is a subclass per kind of head.

    Attributes:
        output: name of the output that is always computed.
    """

    model: PreTrainedModel
    output: str

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.sharing = Sharing()
        # Routes are replayed and counted in packed batches only. An empty module has no routers.
        self.routers = Routers(model if is_packed(model) else nn.Module())

    def output_names(self, question: ScoreQuestion) -> list[str]:
        """Names of the outputs, [M] each, or [M, k] for the likeliest tokens."""
        return [self.output]

    @abstractmethod
    def score(
        self, hidden: Tensor, batch: PackedBatch, question: ScoreQuestion
    ) -> dict[str, Tensor]:
        """Score the predicted tokens.

        Args:
            hidden: last hidden states [n, D] of this rank's tokens.
            batch: the packed batch.
            question: which scores to return.

        Returns:
            Float32 tensors [M, ...] by name.
        """

    def forward(
        self, batch: PackedBatch, question: ScoreQuestion, *, received: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Run the model on a packed batch.

        Args:
            batch: the packed batch.
            question: which scores to return.
            received: hidden states [1, n, D] of the previous pipeline stage, for a stage without
                an embedding.

        Returns:
            Float32 scores [M, ...] by name; from a pipeline stage without a head its hidden states
            [1, n, D].
        """
        input_ids, position_ids, plan = self.sharing.inputs(batch)
        # The first layer's inputs: tokens, embeddings with images, or states of another stage.
        inputs: dict[str, Any]
        if received is not None:
            inputs = {"inputs_embeds": received}
        elif batch.images is not None:
            inputs = decoder_inputs(
                self.model, input_ids, batch.images, self.sharing.first_token(batch)
            )
        else:
            inputs = {"input_ids": input_ids}
        if is_packed(self.model):
            inputs["attention_plan"] = plan
        routed = None
        if batch.routing is not None:
            routed = self.sharing.routed_tokens(batch, input_ids.shape[1])
            inputs["routed_tokens"] = routed
        output = backbone(self.model)(
            **inputs, position_ids=position_ids, attention_mask=None, use_cache=False
        )
        hidden = output.last_hidden_state  # [1, n, D]
        if routed is not None:
            self.keep_chosen_experts(routed)
        if not self.sharing.has_head:
            return hidden
        return self.score(hidden[0], batch, question)

    def keep_chosen_experts(self, routed: RoutedTokens) -> None:
        """Store the experts that a call's tokens went through in `Routing.chosen`, on request."""
        if routed.routing.records_choice:
            chosen = torch.stack([*routed.chosen.values()], 1)  # [n, L, k]
            routed.routing.chosen = self.sharing.join_tokens(chosen)


class PolicyScorer(Scorer):
    """Log-probabilities of the response tokens under the model.

    Outputs are `log_probs` [M] and, on request, `entropy` [M], `sum_pi_squared` [M], and
    `top_log_probs` and `top_ids` [M, k] of the likeliest tokens. If tokens have several targets,
    `log_probs` are those of the first and `other_log_probs` [M, K - 1] those of the others.
    """

    output = "log_probs"

    def output_names(self, question: ScoreQuestion) -> list[str]:
        """Names of the requested outputs."""
        names = [self.output]
        if question.with_entropy:
            names.append("entropy")
        if question.with_sum_pi_squared:
            names.append("sum_pi_squared")
        if question.top_k:
            names += ["top_log_probs", "top_ids"]
        return names

    def score(
        self, hidden: Tensor, batch: PackedBatch, question: ScoreQuestion
    ) -> dict[str, Tensor]:
        """Score the predicted tokens; see `Scorer.score` for shapes.

        Args:
            hidden: last hidden states [n, D] of this rank's tokens.
            batch: the packed batch.
            question: which scores to return.

        Returns:
            Float32 tensors by name.
        """
        head = self.model.get_output_embeddings()
        states, targets, join = self.sharing.select_predictors(hidden, batch, has_sharded_head=True)
        scores = token_scores(
            states,  # [m, D]
            head.weight,
            getattr(head, "bias", None),
            targets,
            temperature=question.temperature,
            with_entropy=question.with_entropy,
            with_sum_pi_squared=question.with_sum_pi_squared,
            top_k=question.top_k,
            shard=self.sharing.vocabulary,
            rule=LogitRule.of(self.model.config),
        )
        outputs = {name: values for name, values in vars(scores).items() if values is not None}
        if targets.dim() > 1:
            outputs["log_probs"] = scores.log_probs[:, 0]
            outputs["other_log_probs"] = scores.log_probs[:, 1:]
        return {name: join(values) for name, values in outputs.items()}


class NumberScorer(Scorer):
    """A number per predicted token, read by a linear head [1, D] at the token before it.

    Attributes:
        head: path of the head in the model.
    """

    head: str

    def score(
        self, hidden: Tensor, batch: PackedBatch, question: ScoreQuestion
    ) -> dict[str, Tensor]:
        """Apply the head to the tokens before the predicted ones.

        Args:
            hidden: last hidden states [n, D] of this rank's tokens.
            batch: the packed batch.
            question: not read.

        Returns:
            Float32 numbers [M] under the name `output`.
        """
        states, _, join = self.sharing.select_predictors(hidden, batch, has_sharded_head=False)
        head = self.model.get_submodule(self.head)
        # Always in float32: a bfloat16 score of 10 is off by up to 0.03.
        bias = None if head.bias is None else head.bias.float()
        numbers = linear(states.float(), head.weight.float(), bias)  # [m, 1]
        return {self.output: join(numbers[:, 0])}


class ValueScorer(NumberScorer):
    """Values: the return expected before each response token is drawn.

    A value head [1, D], initially zero, replaces the model's vocabulary head. It is a part of the
    model, so that checkpoints of the model include it.
    """

    output = "values"
    head = "value_head.linear"

    def __init__(self, model: PreTrainedModel) -> None:
        size = model.config.get_text_config().hidden_size
        dtype = next(model.parameters()).dtype
        # Remove the vocabulary head, which checkpoints would otherwise include.
        model.set_output_embeddings(nn.Identity())
        value_head = nn.Linear(size, 1, dtype=dtype, device=model.device)
        nn.init.zeros_(value_head.weight)
        nn.init.zeros_(value_head.bias)
        model.value_head = nn.ModuleDict({"linear": value_head})
        super().__init__(model)


class RewardScorer(NumberScorer):
    """Rewards: a score per sequence, read by the head `score` [1, D] before the predicted token."""

    output = "scores"
    head = "score"

    def __init__(self, model: PreTrainedModel) -> None:
        # Engines read the output embeddings, which classifiers do not have.
        model.lm_head = nn.Identity()
        super().__init__(model)
