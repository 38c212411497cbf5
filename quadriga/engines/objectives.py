# SPDX-License-Identifier: Apache-2.0
"""Objectives: from a model's outputs on some rows to a loss over the whole mini-batch.

Every loss is normalised by counts of the whole mini-batch, so the losses of its micro-batches add up to it.

Legend: B rows of a batch, b of a micro-batch, T response positions, k likeliest tokens of a teacher.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial

import torch

from quadriga.algorithms.aggregate import LossCounts, agg_loss
from quadriga.algorithms.distillation import forward_kl
from quadriga.algorithms.kl import kl_penalty
from quadriga.algorithms.losses import clipped_value_loss
from quadriga.algorithms.masked import log_prob_mismatch
from quadriga.algorithms.registry import Algorithm, check_losses, choose_policy_loss, options
from quadriga.config import ActorConfig, CriticConfig, DistillationConfig
from quadriga.config.algorithm import RolloutCorrectionConfig
from quadriga.errors import ConfigError, EngineError
from quadriga.models.experts import ROUTES
from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto

LossAndMetrics = tuple[torch.Tensor, dict[str, Metric]]


class Objective(ABC):
    """A loss over a mini-batch, given in pieces."""

    name: str  # with which the names of its metrics begin
    columns: tuple[str, ...] = ("response_mask",)  # of the batch, which the loss reads
    router_aux_loss_coef = router_z_loss_coef = 0.0  # of a mixture of experts
    other_targets = (
        ""  # column [B, T, k] of tokens whose log-probs are wanted beside those of the response
    )

    def fields(self, data: DataProto) -> tuple[str, ...]:
        """Columns [B, ...] of this batch that the loss reads."""
        return self.columns

    def rows_with_gradient(self, data: DataProto) -> torch.Tensor:
        """[B] bool: rows whose computation can change the gradient; the others count, but need not be computed."""
        return data.batch["response_mask"].bool().any(-1)

    @abstractmethod
    def __call__(
        self, rows: DataProto, outputs: Mapping[str, torch.Tensor], counts: LossCounts
    ) -> LossAndMetrics:
        """This micro-batch's share of the loss, from outputs [b, T], and its metrics."""


TEACHER_LOG_PROB, TEACHER_TOP_LOG_PROBS = "teacher_log_prob", "teacher_top_log_probs"
TEACHER_TOP_IDS = "teacher_top_ids"
BYPASS = "bypass_mode"
SCORE_SLOPE = "score_slope"
"""Column [B]: by how much the loss of a batch rises when the score of a row does, to first order."""


def policy_loss_of(
    config: ActorConfig, correction: RolloutCorrectionConfig | None = None
) -> Algorithm:
    """The policy loss that an actor's section chooses, its options bound: from columns [b, T] to losses [b, T]. The
    bypass form of `correction` brings a loss of its own.
    Raises ConfigError: an unknown loss, an option that it does not have, or another loss beside the bypass form."""
    name, shared = config.policy_loss.loss_mode, {**dict(config), "config": config}
    if correction is not None and correction.bypass_mode and name not in ("vanilla", BYPASS):
        got, expected = (
            f"{name!r}, with algorithm.rollout_correction.bypass_mode=True",
            "vanilla, or the key left out",
        )
        fix = "The bypass form has a loss of its own: choose it with algorithm.rollout_correction.loss_type."
        raise ConfigError(
            "actor_rollout_ref.actor.policy_loss.loss_mode", got=got, expected=expected, fix=fix
        )
    if correction is not None and (correction.bypass_mode or name == BYPASS):
        name, shared = BYPASS, {**shared, "correction": correction}
    return choose_policy_loss(name, config.policy_loss.options, shared)


class PolicyObjective(Objective):
    """A policy loss, less an entropy bonus, plus a divergence from the reference; that from a teacher is taken off the
    advantages, or added to the loss."""

    name = "actor"

    def __init__(
        self,
        config: ActorConfig,
        correction: RolloutCorrectionConfig | None = None,
        distillation: DistillationConfig | None = None,
    ) -> None:
        self.config, self.router_aux_loss_coef = config, config.router_aux_loss_coef
        self.router_z_loss_coef = config.router_z_loss_coef
        self.policy_loss = policy_loss_of(config, correction)
        self.teacher = distillation if distillation is not None and distillation.enable else None
        self._reward_weight = self._teacher_weight = (
            0.0  # of the divergence from a teacher: as a reward, as a loss
        )
        self._diverge: Callable[..., LossAndMetrics] = lambda rows, outputs: (
            rows.batch["response_mask"],
            {},
        )
        if self.teacher is not None:
            self._require_advantages(self.teacher)
            self._diverge = self._from_teacher
            self.other_targets = TEACHER_TOP_IDS if self.teacher.num_top_tokens else ""
            weights = (self.teacher.loss_coef, 0.0)
            self._reward_weight, self._teacher_weight = (
                weights if self.teacher.use_policy_gradient else weights[::-1]
            )
        self._needs_old_log_prob = "old_log_prob" in self.policy_loss.fields
        self._takes_weights = "rollout_is_weights" in options(self.policy_loss.function)
        """Whether the loss itself multiplies by the importance weights of the rollout."""
        function = getattr(self.policy_loss.function, "func", self.policy_loss.function)
        self._is_users = not function.__module__.startswith("quadriga.algorithms.")
        """Whether what the loss returns is looked at: a user's."""
        self._columns = set(self.policy_loss.fields) - {"log_prob", "old_log_prob"}
        """What the loss reads of the batch; `log_prob` and, where it has no old log-probs, those are the model's."""

    def _require_advantages(self, teacher: DistillationConfig) -> None:
        """Refuse a policy gradient of a loss without advantages, or that chooses tokens by those of the whole batch."""
        if teacher.use_policy_gradient and (
            self.policy_loss.columns or "advantages" not in self.policy_loss.fields
        ):
            got = f"{self.policy_loss.name!r}, with distillation.use_policy_gradient=True"
            expected = "a loss that reads the advantages of each token alone"
            fix = "Set it to vanilla, or distillation.use_policy_gradient=False."
            where = "actor_rollout_ref.actor.policy_loss.loss_mode"
            raise ConfigError(where, got=got, expected=expected, fix=fix)

    def fields(self, data: DataProto) -> tuple[str, ...]:
        if self.config.router_replay != "off" and ROUTES not in data.batch.keys():
            got, fix = (
                f"a batch without {ROUTES}",
                "Responses of the rollout cache that were kept without it need off.",
            )
            raise EngineError(
                "actor_rollout_ref.actor.router_replay",
                got=got,
                expected="the experts to take",
                fix=fix,
            )
        names = {"response_mask", "advantages", *self._columns}
        optional = {"old_log_probs", "rollout_log_probs", "rollout_is_weights", ROUTES} & set(
            data.batch.keys()
        )
        if self.teacher is not None:
            optional |= {
                TEACHER_LOG_PROB,
                *((TEACHER_TOP_LOG_PROBS, TEACHER_TOP_IDS) if self.other_targets else ()),
            }
        return tuple(names | optional | ({"ref_log_prob"} if self.config.use_kl_loss else set()))

    def add_batch_columns(self, data: DataProto) -> None:
        """Compute the columns [B, ...] that the loss reads of the whole batch, before its rows are split over ranks,
        and add them to `data`. Raises EngineError: a column that it is computed from is not there."""
        if not self.policy_loss.columns:
            return
        columns = dict(data.batch.items())
        # Without a pass of their own, old log-probs are those of the rollout: the same policy.
        if "old_log_probs" in columns or "rollout_log_probs" in columns:
            columns["old_log_prob"] = columns.get("old_log_probs", columns.get("rollout_log_probs"))
        if missing := self.policy_loss.column_fields - columns.keys():
            self._miss(missing, data)
        for name, column in self.policy_loss.compute_columns(columns).items():
            data.batch[name] = column

    def _miss(self, names: set[str] | frozenset[str], data: DataProto) -> None:
        got = f"a batch without {', '.join(sorted(names))}"
        expected = f"it beside {', '.join(sorted(data.batch.keys()))}"
        fix = "Name fields of the batch as positional parameters, and options behind a `*`."
        raise EngineError(
            f"policy loss {self.policy_loss.name}", got=got, expected=expected, fix=fix
        )

    def rows_with_gradient(self, data: DataProto) -> torch.Tensor:
        """[B] bool: most losses move a row without an advantage by a divergence or an entropy bonus only. With
        `calculate_entropy` all rows are computed: metrics are then of all of them."""
        mask, config = data.batch["response_mask"].bool(), self.config
        moves_all = (
            config.use_kl_loss
            or config.entropy_coeff
            or not self.policy_loss.needs_advantage
            or self.teacher
        )
        if (
            moves_all
            or config.calculate_entropy
            or config.router_aux_loss_coef
            or config.router_z_loss_coef
        ):
            return mask.any(-1)
        return ((data.batch["advantages"] != 0) & mask).any(-1)

    def __call__(
        self, rows: DataProto, outputs: Mapping[str, torch.Tensor], counts: LossCounts
    ) -> LossAndMetrics:
        log_prob, entropy = outputs["log_probs"], outputs["entropy"]
        mask = rows.batch["response_mask"]
        if missing := self._columns - set(rows.batch.keys()):
            self._miss(missing, rows)
        fields = {name: rows.batch[name] for name in self._columns}
        weights = rows.batch.get("rollout_is_weights", None)
        # Without old log-probs in the batch this is the only update since it was sampled: they are the current ones.
        old = rows.batch.get("old_log_probs", log_prob.detach())
        optional = (
            ("old_log_prob", old, self._needs_old_log_prob),
            ("rollout_is_weights", weights, self._takes_weights),
        )
        fields |= {
            name: values for name, values, is_read in optional if is_read and values is not None
        }
        divergence, metrics = self._diverge(rows, outputs)
        if self._reward_weight:
            fields["advantages"] = fields["advantages"] - self._reward_weight * divergence.detach()
        result = self.policy_loss.function(**fields, log_prob=log_prob)
        losses, diagnostics = (
            check_losses(self.policy_loss.name, result, mask) if self._is_users else result
        )
        if weights is not None and not self._takes_weights:
            losses = losses * weights
        settings = {"loss_scale_factor": self.config.loss_scale_factor, **asdict(counts)}
        aggregate = partial(
            agg_loss, loss_mask=mask, loss_agg_mode=self.config.loss_agg_mode, **settings
        )
        loss = policy = aggregate(losses)
        metrics["actor/pg_loss"] = Metric(policy.detach(), "sum")
        num_tokens = mask.sum()
        for name, per_token in diagnostics.items():
            metrics[f"actor/{name}"] = Metric(
                (per_token.detach() * mask).sum() / num_tokens, "mean", num_tokens
            )
        if "old_log_probs" not in rows.batch.keys():
            # The pass for old log-probs has measured it, over all rows.
            metrics["actor/entropy"] = Metric(
                (entropy.detach() * mask).sum() / num_tokens, "mean", num_tokens
            )
            sampled = rows.batch.get("rollout_log_probs", old)
            mismatch = log_prob_mismatch(old, sampled, mask) if sampled is not old else {}
            for name, value in mismatch.items():
                metrics[f"rollout/{name}"] = Metric(
                    value, "max" if name.endswith("max") else "mean", num_tokens
                )
        if self.config.entropy_coeff:
            loss = loss - self.config.entropy_coeff * aggregate(entropy)
        if self.config.use_kl_loss:
            kl_loss = aggregate(
                kl_penalty(log_prob, rows.batch["ref_log_prob"], self.config.kl_loss_type)
            )
            loss = loss + self.config.kl_loss_coef * kl_loss
            metrics["actor/kl_loss"] = Metric(kl_loss.detach(), "sum")
        if self._teacher_weight:
            teacher_loss = aggregate(divergence)
            loss = loss + self._teacher_weight * teacher_loss
            metrics["actor/distillation_loss"] = Metric(teacher_loss.detach(), "sum")
        return loss, metrics

    def _from_teacher(self, rows: DataProto, outputs: Mapping[str, torch.Tensor]) -> LossAndMetrics:
        """The divergence from the teacher, [b, T], and metrics."""
        teacher, log_prob, mask = self.teacher, outputs["log_probs"], rows.batch["response_mask"]
        told, limit = rows.batch[TEACHER_LOG_PROB], teacher.loss_max_clamp
        found = {"teacher_kl": log_prob - told}
        if self.other_targets:
            own, of_teacher = outputs["other_log_probs"], rows.batch[TEACHER_TOP_LOG_PROBS]
            divergence = forward_kl(own, of_teacher, floor=teacher.log_prob_min_clamp)
            found |= {
                "student_top_mass": own.exp().sum(-1),
                "teacher_top_mass": of_teacher.exp().sum(-1),
            }
        else:
            divergence = kl_penalty(log_prob, told, teacher.loss_mode)
        if limit is not None:
            divergence = divergence.clamp(-limit, limit)
        num_tokens = mask.sum()
        means = {
            name: (values.detach() * mask).sum() / num_tokens for name, values in found.items()
        }
        metrics = {
            f"actor/{name}": Metric(mean, "mean", num_tokens) for name, mean in means.items()
        }
        return divergence, metrics


class ValueObjective(Objective):
    """Clipped squared error of values against returns."""

    name = "critic"
    columns = ("response_mask", "values", "returns")

    def __init__(self, config: CriticConfig) -> None:
        self.config = config

    def __call__(
        self, rows: DataProto, outputs: Mapping[str, torch.Tensor], counts: LossCounts
    ) -> LossAndMetrics:
        mask, predicted = rows.batch["response_mask"], outputs["values"]
        losses, diagnostics = clipped_value_loss(
            predicted,
            rows.batch["returns"],
            rows.batch["values"],
            mask,
            cliprange_value=self.config.cliprange_value,
        )
        settings = {"loss_scale_factor": self.config.loss_scale_factor, **asdict(counts)}
        loss = agg_loss(losses, mask, self.config.loss_agg_mode, **settings)
        num_tokens = mask.sum()
        return loss, {
            "critic/vf_loss": Metric(loss.detach(), "sum"),
            "critic/vf_clipfrac": Metric(
                (diagnostics["vf_clipfrac"] * mask).sum() / num_tokens, "mean", num_tokens
            ),
            "critic/vpred_mean": Metric(
                (predicted.detach() * mask).sum() / num_tokens, "mean", num_tokens
            ),
        }


class LikelihoodObjective(Objective):
    """The negative log-likelihood of the tokens under the mask."""

    name = "train"

    def __init__(self, config: ActorConfig) -> None:
        self.config = config

    def __call__(
        self, rows: DataProto, outputs: Mapping[str, torch.Tensor], counts: LossCounts
    ) -> LossAndMetrics:
        mask = rows.batch["response_mask"]
        settings = {"loss_scale_factor": self.config.loss_scale_factor, **asdict(counts)}
        loss = agg_loss(-outputs["log_probs"], mask, self.config.loss_agg_mode, **settings)
        num_tokens = mask.sum()
        entropy = (outputs["entropy"].detach() * mask).sum() / num_tokens
        return loss, {
            "train/loss": Metric(loss.detach(), "sum"),
            "train/entropy": Metric(entropy, "mean", num_tokens),
        }


class ScoreObjective(Objective):
    """Moves the score of each row against its slope: the derivative of the loss by its score, taken at the scores
    before the step. The gradient of slope x score is then that of the loss itself, and the responses that a loss
    compares need not be in one micro-batch, nor on one rank."""

    name = "train"
    columns = ("response_mask", SCORE_SLOPE)

    def rows_with_gradient(self, data: DataProto) -> torch.Tensor:
        """[B] bool: rows whose score matters to the loss."""
        return super().rows_with_gradient(data) & (data.batch[SCORE_SLOPE] != 0)

    def __call__(
        self, rows: DataProto, outputs: Mapping[str, torch.Tensor], counts: LossCounts
    ) -> LossAndMetrics:
        # The value means nothing, its gradient is what counts.
        scores = (outputs["scores"] * rows.batch["response_mask"]).sum(-1)
        return (rows.batch[SCORE_SLOPE] * scores).sum(), {}
