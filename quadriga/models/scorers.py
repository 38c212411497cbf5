# SPDX-License-Identifier: Apache-2.0
"""A causal model as a policy, a value function or a reward model of packed tokens.

Legend: N packed tokens, n of them on this rank, M predicted tokens, m of them scored by this rank, D hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from quadriga.models.architecture import backbone, is_packed
from quadriga.models.attention import AttentionPlan, PackedBatch
from quadriga.models.experts import RoutedTokens, Routers
from quadriga.models.heads import LogitRule, VocabularyShard, token_scores
from quadriga.models.vision import decoder_inputs


@dataclass(frozen=True)
class Question:
    """The outputs wanted of each predicted token, at a temperature; the last two have no gradient."""

    temperature: float = 1.0
    with_entropy: bool = False
    with_sum_pi_squared: bool = False
    top_k: int | None = None


Scored: TypeAlias = tuple[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]
"""The predicted tokens that this rank scores: hidden states [m, D] of the tokens before them, targets [m] or [m, K],
and what makes of [m, ...] numbers of each rank all [M, ...], the same on all of them."""


class Sharing:
    """How the ranks with the same rows share the work on them: here one does all of it."""

    has_embedding = has_head = True
    vocabulary: VocabularyShard | None = None

    def inputs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, AttentionPlan]:
        """The tokens [1, n] of this rank, their positions [1, n] or [3, 1, n], and how they attend."""
        return batch.input_ids, batch.position_ids, batch.plan

    def first_token(self, batch: PackedBatch) -> int | None:
        """The packed index of the first token that this rank has embeddings of; None: it has all of them."""
        return None

    def scored(self, hidden: torch.Tensor, batch: PackedBatch, *, in_parts: bool) -> Scored:
        """What this rank scores, given the last hidden states [n, D] of its tokens.
        `in_parts`: whether the head is cut by tensor parallelism, so that every rank scores all tokens of its group.
        """
        return hidden.index_select(0, batch.predictors), batch.targets, lambda values: values

    def routed(self, batch: PackedBatch, num_tokens: int) -> RoutedTokens:
        """The tokens [1, num_tokens] of this rank for the routers of a mixture of experts."""
        return RoutedTokens(
            batch.routing, 0, batch.predictors, batch.rows, batch.num_predicted, lambda values: None
        )

    def joined(self, values: torch.Tensor) -> torch.Tensor:
        """[n, ...] of each rank -> [N, ...] on all."""
        return values


class Scorer(nn.Module, ABC):
    """A model and its outputs for each predicted token: a subclass for each kind of head."""

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.sharing, self.routers = Sharing(), Routers(model if is_packed(model) else nn.Module())
        # In a tuple: a module is a part of its parent under one name.
        self._backbone = (backbone(model),)

    @abstractmethod
    def output_names(self, question: Question) -> tuple[str, ...]:
        """The names of the outputs, which are [M] each, or [M, k] of the likeliest tokens."""

    @abstractmethod
    def score(
        self, hidden: torch.Tensor, batch: PackedBatch, question: Question
    ) -> dict[str, torch.Tensor]:
        """Float32 [M] by name, of hidden states [n, D]."""

    def forward(
        self, batch: PackedBatch, question: Question, *, received: torch.Tensor | None = None
    ) -> "torch.Tensor | dict[str, torch.Tensor]":
        """Float32 [M] by name; the hidden states [1, n, D] of a pipeline stage that has no head.
        `received`: [1, n, D] of the stage before, where this one has no embedding.
        """
        input_ids, position_ids, plan = self.sharing.inputs(batch)
        tokens: dict[str, Any] = (
            {"input_ids": input_ids} if received is None else {"inputs_embeds": received}
        )
        if batch.images is not None and received is None:
            tokens = decoder_inputs(
                self.model, input_ids, batch.images, self.sharing.first_token(batch)
            )
        (body,) = self._backbone
        if is_packed(self.model):
            tokens["attention_plan"] = plan
        routed = None if batch.routing is None else self.sharing.routed(batch, input_ids.shape[1])
        if routed is not None:
            tokens["routed_tokens"] = routed
        hidden = body(
            **tokens, position_ids=position_ids, attention_mask=None, use_cache=False
        ).last_hidden_state
        if routed is not None:
            self.keep_routes(routed)
        return self.score(hidden[0], batch, question) if self.sharing.has_head else hidden

    def keep_routes(self, routed: RoutedTokens) -> None:
        """After a call: what its tokens went through, where that is asked for."""
        if routed.routing.keeps:
            routed.routing.chosen = self.sharing.joined(torch.stack([*routed.chosen.values()], 1))


class PolicyScorer(Scorer):
    """`log_probs` of the response tokens under the model, and where wanted `entropy`, `sum_pi_squared`, and of the
    likeliest tokens `top_log_probs` and `top_ids` [M, k]. Of a batch with several targets a token, `other_log_probs`
    [M, K - 1] are those of all but the first."""

    def output_names(self, question: Question) -> tuple[str, ...]:
        wanted = {
            "entropy": question.with_entropy,
            "sum_pi_squared": question.with_sum_pi_squared,
            "top_log_probs": question.top_k,
            "top_ids": question.top_k,
        }
        return ("log_probs", *(name for name, is_wanted in wanted.items() if is_wanted))

    def score(
        self, hidden: torch.Tensor, batch: PackedBatch, question: Question
    ) -> dict[str, torch.Tensor]:
        head = cast(Any, self.model.get_output_embeddings())
        states, targets, join = self.sharing.scored(hidden, batch, in_parts=True)
        scores = token_scores(
            states,
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
        found = {name: values for name, values in vars(scores).items() if values is not None}
        if targets.dim() > 1:
            found |= {
                "log_probs": scores.log_probs[:, 0],
                "other_log_probs": scores.log_probs[:, 1:],
            }
        return {name: join(values) for name, values in found.items()}


class NumberScorer(Scorer):
    """One number for each predicted token, which a linear head [1, D] reads at the token before it."""

    output: str  # the name of the numbers
    head: str  # the path of the head in the model

    def output_names(self, question: Question) -> tuple[str, ...]:
        return (self.output,)

    def score(
        self, hidden: torch.Tensor, batch: PackedBatch, question: Question
    ) -> dict[str, torch.Tensor]:
        states, _, join = self.sharing.scored(hidden, batch, in_parts=False)
        head = cast(Any, self.model.get_submodule(self.head))
        # In float32 whatever the model computes in: a bfloat16 score of 10 is off by up to 0.03.
        bias = None if head.bias is None else head.bias.float()
        return {self.output: join(linear(states.float(), head.weight.float(), bias)[:, 0])}


class ValueScorer(NumberScorer):
    """`values`: the return expected before each response token is drawn. A value head [1, D] takes the place of the
    vocabulary head, so a checkpoint of the model holds it too. It starts at zero, so the first values are zero."""

    output, head = "values", "value_head.linear"

    def __init__(self, model: PreTrainedModel) -> None:
        size, dtype = model.config.get_text_config().hidden_size, next(model.parameters()).dtype
        model.set_output_embeddings(nn.Identity())
        model.value_head = nn.ModuleDict(
            {"linear": nn.Linear(size, 1, dtype=dtype, device=model.device)}
        )
        nn.init.zeros_(model.value_head["linear"].weight)
        nn.init.zeros_(model.value_head["linear"].bias)
        super().__init__(model)


class RewardScorer(NumberScorer):
    """`scores`: the reward of each sequence, read by the head `score` [1, D] before the predicted token."""

    output, head = "scores", "score"

    def __init__(self, model: PreTrainedModel) -> None:
        # Nothing projects to the vocabulary: the output embeddings that every engine looks for are empty here.
        model.lm_head = nn.Identity()
        super().__init__(model)
