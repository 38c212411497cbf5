# SPDX-License-Identifier: Apache-2.0
"""Objectives: from a model's outputs for some rows to a loss over the whole mini-batch.

Losses are normalised by counts of the whole mini-batch, so the losses of micro-batches add up to
that of the mini-batch.

Legend: B rows of a batch, b of a micro-batch, T response positions, k likeliest tokens of a
teacher.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from quadriga.algorithms.aggregate import LossCounts, agg_loss
from quadriga.algorithms.distillation import forward_kl
from quadriga.algorithms.kl import kl_penalty
from quadriga.algorithms.losses import clipped_value_loss
from quadriga.algorithms.masked import log_prob_mismatch, masked_sum, zero_outside
from quadriga.algorithms.registry import (
    Algorithm,
    check_fields,
    check_losses,
    choose_policy_loss,
    options,
)
from quadriga.config import ActorConfig, CriticConfig, DistillationConfig
from quadriga.config.actor import BatchingConfig
from quadriga.config.algorithm import RolloutCorrectionConfig
from quadriga.engines.packing import ECHO_MASK, echo_tokens
from quadriga.errors import ConfigError, EngineError
from quadriga.models.experts import ROUTES
from quadriga.observe.metrics import Metric
from quadriga.protocol import FIELDS, DataProto

LossAndMetrics = tuple[Tensor, dict[str, Metric]]

TEACHER_LOG_PROB = "teacher_log_prob"
TEACHER_TOP_LOG_PROBS = "teacher_top_log_probs"
TEACHER_TOP_IDS = "teacher_top_ids"
BYPASS = "bypass_mode"
ROLLOUT_NUM_TOKENS = "rollout_num_tokens"
"""Column [B]: number of tokens with a loss in all rows of a row's rollout."""
SCORE_SLOPE = "score_slope"
"""Column [B]: derivative of the loss of a batch with respect to the score of a row."""
_LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"


class Objective(ABC):
    """A loss over a mini-batch, computed micro-batch by micro-batch."""

    name: str  # prefix of its metrics
    columns: tuple[str, ...] = ("response_mask",)  # columns of the batch that the loss reads
    router_aux_loss_coef = 0.0  # only for a mixture of experts
    router_z_loss_coef = 0.0  # only for a mixture of experts
    # Column [B, T, k] of further tokens whose log-probs the loss reads; "": only sampled tokens.
    other_targets = ""

    def fields(self, data: DataProto) -> tuple[str, ...]:
        """Names of columns [B, ...] that the loss reads; optional ones if this batch has them."""
        if ROLLOUT_NUM_TOKENS in data.batch.keys():
            return (*self.columns, ROLLOUT_NUM_TOKENS)
        return self.columns

    def rows_with_gradient(self, data: DataProto) -> Tensor:
        """[B] bool: rows that can change the gradient.

        The other rows are not computed, but count where losses are normalised.
        """
        return data.batch["response_mask"].bool().any(-1)

    @abstractmethod
    def __call__(
        self, rows: DataProto, outputs: Mapping[str, Tensor], counts: LossCounts
    ) -> LossAndMetrics:
        """Compute a micro-batch's share of the loss.

        Args:
            rows: b rows.
            outputs: outputs of the model [b, T], by name.
            counts: counts of the whole mini-batch.

        Returns:
            The loss [], and metrics.
        """


def add_rollout_tokens(data: DataProto) -> None:
    """Add the column `rollout_num_tokens` [B] to a batch in which rollouts have several rows.

    Args:
        data: all rows, with `response_mask` [B, T]. Without `rollout_index` [B], every row is a
            rollout, and nothing is added.
    """
    rollouts = data.batch.get("rollout_index")
    if rollouts is not None:
        num_tokens = data.batch["response_mask"].sum(-1)  # [B]
        # By rollout. There are at most as many rollouts as rows.
        sums = num_tokens.new_zeros(len(data)).scatter_add_(0, rollouts, num_tokens)
        data.batch[ROLLOUT_NUM_TOKENS] = sums[rollouts]


def aggregation_of(
    config: BatchingConfig, rows: DataProto, counts: LossCounts
) -> Callable[[Tensor], Tensor]:
    """Bind the arguments of `agg_loss`, except the losses.

    Args:
        config: the section of the trained model, with the settings of the aggregation.
        rows: b rows of the micro-batch.
        counts: counts of the whole mini-batch.

    Returns:
        A function from losses [b, T] to this micro-batch's share of the loss, [].
    """
    return partial(
        agg_loss,
        loss_mask=rows.batch["response_mask"],
        loss_agg_mode=config.loss_agg_mode,
        loss_scale_factor=config.loss_scale_factor,
        rollout_num_tokens=rows.batch.get(ROLLOUT_NUM_TOKENS),
        batch_num_tokens=counts.batch_num_tokens,
        global_batch_size=counts.global_batch_size,
        num_rollouts=counts.num_rollouts,
    )


def policy_loss_of(
    config: ActorConfig, correction: RolloutCorrectionConfig | None = None
) -> Algorithm:
    """Choose the policy loss of an actor's section, and bind its options.

    Args:
        config: the actor's section.
        correction: the rollout correction. With its `bypass_mode`, the loss is `bypass_mode`, which
            compares the policy with the one that sampled instead of with old log-probs.

    Returns:
        The loss, from columns [b, T] to losses [b, T].

    Raises:
        ConfigError: the loss or an option is unknown, the loss refuses the value of an option,
            another loss is chosen besides `bypass_mode`, or a loss returns no losses per token.
    """
    name = config.policy_loss.loss_mode
    # Options without a default take the value of the actor's key of the same name.
    shared = {**dict(config), "config": config}
    if correction is not None:
        if correction.bypass_mode and name not in ("vanilla", BYPASS):
            raise ConfigError(
                _LOSS_MODE,
                got=f"{name!r}, with algorithm.rollout_correction.bypass_mode=True",
                expected="vanilla, or the key left out",
                fix="With bypass_mode, choose the loss with "
                "algorithm.rollout_correction.loss_type.",
            )
        if correction.bypass_mode or name == BYPASS:
            name = BYPASS
            shared["correction"] = correction
    loss = choose_policy_loss(name, config.policy_loss.options, shared)
    if not loss.is_built_in:
        # A user's loss may read any tensor of the batch, and log-probs of this and the old policy.
        tensors = {field.name for field in FIELDS.values() if field.is_tensor}
        check_fields(loss, {*tensors, "log_prob", "old_log_prob"}, _LOSS_MODE)
    _try_loss(loss)
    return loss


def _try_loss(loss: Algorithm) -> None:
    """Call a loss with two responses of up to three tokens, and check its result.

    Losses check the values of their options only when they are called. This does nothing for a loss
    that reads columns of other shapes than [B, T], or columns of the user's data: the first step
    checks the result of such a loss.

    Raises:
        ConfigError: the loss refuses an option, fails, or returns no losses per token.
    """
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    fields = {}
    # Without the columns that `compute_columns` adds below.
    input_names = {*loss.fields, *loss.column_fields} - loss.columns.keys()
    for name in input_names:
        # `FIELDS` lists columns of a batch. The log-probs of a loss have the shape of this column.
        column = "old_log_probs" if name in ("log_prob", "old_log_prob") else name
        if column not in FIELDS or FIELDS[column].shape != "(B, T)":
            return
        # Any number will do that can be a log-prob, an advantage, and so on.
        fields[name] = mask if name == "response_mask" else torch.full(mask.shape, -0.5)
    if "log_prob" in fields:
        fields["log_prob"].requires_grad_()
    try:
        fields |= loss.compute_columns(fields)
        result = loss.function(**{name: fields[name] for name in loss.fields})
    except ConfigError:
        raise
    except Exception as error:
        # A user's function may raise any exception, and would raise it again in each step.
        raise ConfigError(
            f"{_LOSS_MODE} {loss.name!r}",
            got=f"{type(error).__name__}: {error}, with two responses of three tokens",
            expected="losses, and diagnostics",
        ) from error
    check_losses(loss.name, result, mask)


class PolicyObjective(Objective):
    """Policy loss with an entropy bonus, and KL divergences from a reference and from a teacher.

    The divergence from a teacher is subtracted from the advantages, or added to the loss. Tokens of
    tools and users (echo tokens) may have a cross entropy loss, averaged over them alone:

        loss = policy loss + echo_coeff x sum over echo tokens of -log p / echo tokens

    Args:
        config: the actor's section.
        correction: the rollout correction.
        distillation: the section of the teacher.

    Raises:
        ConfigError: the loss cannot be used with these settings.
    """

    name = "actor"

    def __init__(
        self,
        config: ActorConfig,
        correction: RolloutCorrectionConfig | None = None,
        distillation: DistillationConfig | None = None,
    ) -> None:
        self.config = config
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.router_z_loss_coef = config.router_z_loss_coef
        self.policy_loss = policy_loss_of(config, correction)
        self.teacher: DistillationConfig | None = None
        # Factors of the divergence from the teacher, in the advantages and in the loss.
        self._teacher_reward_coef = 0.0
        self._teacher_loss_coef = 0.0
        if distillation is not None and distillation.enable:
            self.teacher = distillation
            if distillation.use_policy_gradient:
                self._require_advantages()
                self._teacher_reward_coef = distillation.loss_coef
            else:
                self._teacher_loss_coef = distillation.loss_coef
            if distillation.num_top_tokens:
                self.other_targets = TEACHER_TOP_IDS
        # Whether the loss itself applies the importance weights of the rollout.
        self._loss_applies_weights = "rollout_is_weights" in options(self.policy_loss.function)
        # What the loss reads besides `log_prob`, which the model computes.
        self._loss_fields = set(self.policy_loss.fields) - {"log_prob"}

    def _require_advantages(self) -> None:
        """Check that the loss reads `advantages`, from which the teacher's divergence is subtracted.

        Columns that the loss computes from the whole batch would not see this subtraction.
        """
        if self.policy_loss.columns or "advantages" not in self.policy_loss.fields:
            raise ConfigError(
                _LOSS_MODE,
                got=f"{self.policy_loss.name!r}, with distillation.use_policy_gradient=True",
                expected="a loss that reads the advantages of each token alone",
                fix="Set it to vanilla, or distillation.use_policy_gradient=False.",
            )

    def fields(self, data: DataProto) -> tuple[str, ...]:
        """Names of columns [B, ...] that the loss reads; optional ones if this batch has them.

        Raises:
            EngineError: the batch lacks the routes or the echo mask that the settings need.
        """
        # Fail here, by name, instead of in a micro-batch.
        if self.config.router_replay != "off" and ROUTES not in data.batch.keys():
            raise EngineError(
                "actor_rollout_ref.actor.router_replay",
                got=f"a batch without {ROUTES}",
                expected="the experts to replay",
                fix="Set it to off for responses of a rollout cache that was stored without them.",
            )
        # Columns that are read only if the batch has them.
        optional = {"old_log_probs", "rollout_log_probs", "rollout_is_weights"}
        optional |= {ROUTES, ROLLOUT_NUM_TOKENS}
        names = {"response_mask", "advantages"} | (optional & set(data.batch.keys()))
        # `old_log_prob` is the loss's name for the optional column `old_log_probs`.
        names |= self._loss_fields - {"old_log_prob"}
        if self.config.echo_coeff:
            if ECHO_MASK not in data.batch.keys():
                raise EngineError(
                    "actor_rollout_ref.actor.echo_coeff",
                    got=f"a batch without {ECHO_MASK}",
                    expected="conversations that say which tokens tools and users wrote",
                    fix="Set it to 0 for responses of a rollout cache that was stored without it.",
                )
            names.add(ECHO_MASK)
        if self.teacher is not None:
            names.add(TEACHER_LOG_PROB)
        if self.other_targets:
            names |= {TEACHER_TOP_LOG_PROBS, TEACHER_TOP_IDS}
        if self.config.use_kl_loss:
            names.add("ref_log_prob")
        return tuple(names)

    def add_batch_columns(self, data: DataProto) -> None:
        """Add columns [B, ...] that the loss computes from the whole batch.

        Call it before the rows are split over ranks.

        Args:
            data: all rows.

        Raises:
            EngineError: a column is missing from which the loss computes others.
        """
        if not self.policy_loss.columns:
            return
        columns = dict(data.batch.items())
        # Without a pass for old log-probs, the rollout's log-probs come from the same policy. If
        # the batch has both, the later name wins.
        for name in ("rollout_log_probs", "old_log_probs"):
            if name in columns:
                columns["old_log_prob"] = columns[name]
        missing = self.policy_loss.column_fields - columns.keys()
        if missing:
            raise self._missing_error(missing, data)
        for name, column in self.policy_loss.compute_columns(columns).items():
            data.batch[name] = column

    def _missing_error(self, names: Iterable[str], data: DataProto) -> EngineError:
        """Error for a batch without columns that the policy loss reads."""
        return EngineError(
            f"policy loss {self.policy_loss.name}",
            got=f"a batch without {', '.join(sorted(names))}",
            expected=f"it besides {', '.join(sorted(data.batch.keys()))}",
            fix="Name fields of the batch as positional parameters, and options after a `*`.",
        )

    def rows_with_gradient(self, data: DataProto) -> Tensor:
        """[B] bool: rows that can change the gradient.

        With most losses, a row whose advantages are 0 has a gradient only if there is another term,
        such as a divergence or an entropy bonus. With `calculate_entropy`, all rows are included
        nevertheless, so that metrics cover all of them.
        """
        mask = data.batch["response_mask"].bool()
        config = self.config
        # Whether a row has a gradient whatever its advantages are.
        changes_all_rows = (
            not self.policy_loss.needs_advantage
            or self.teacher is not None
            or config.use_kl_loss
            or config.entropy_coeff
            or config.echo_coeff
            or config.router_aux_loss_coef
            or config.router_z_loss_coef
        )
        if changes_all_rows or config.calculate_entropy:
            return mask.any(-1)
        return ((data.batch["advantages"] != 0) & mask).any(-1)

    def __call__(
        self, rows: DataProto, outputs: Mapping[str, Tensor], counts: LossCounts
    ) -> LossAndMetrics:
        """Compute a micro-batch's share of the policy loss and its added terms.

        Args:
            rows: b rows.
            outputs: outputs of the model [b, T], by name.
            counts: counts of the whole mini-batch.

        Returns:
            The loss [], and metrics.

        Raises:
            EngineError: the batch lacks a column that the policy loss reads.
        """
        config = self.config
        mask = rows.batch["response_mask"]
        # Outputs outside of the response mask are for the loss of echo tokens only.
        log_prob = zero_outside(outputs["log_probs"], mask)
        # Without old log-probs, this is the first update since sampling, so the current ones are
        # the old ones.
        old_log_prob = rows.batch.get("old_log_probs", log_prob.detach())
        columns = dict(rows.batch.items()) | {"old_log_prob": old_log_prob}
        missing = self._loss_fields - columns.keys()
        if missing:
            raise self._missing_error(missing, rows)
        fields = {name: columns[name] for name in self._loss_fields}
        weights = columns.get("rollout_is_weights")
        if weights is not None and self._loss_applies_weights:
            fields["rollout_is_weights"] = weights

        metrics = {}
        divergence = None
        if self.teacher is not None:
            divergence, metrics = self._divergence_from(self.teacher, rows, outputs)
            if self._teacher_reward_coef:
                # A reward has no gradient: only the policy loss reaches the model.
                penalty = self._teacher_reward_coef * divergence.detach()
                fields["advantages"] = fields["advantages"] - penalty

        result = self.policy_loss.function(**fields, log_prob=log_prob)
        if not self.policy_loss.is_built_in:
            result = check_losses(self.policy_loss.name, result, mask)
        losses, diagnostics = result
        # A loss that does not apply the importance weights of a correction itself is multiplied
        # here.
        if weights is not None and not self._loss_applies_weights:
            losses = losses * weights
        loss = aggregation_of(config, rows, counts)(losses)
        metrics["actor/pg_loss"] = Metric(loss.detach(), "sum")
        for name, values in diagnostics.items():
            metrics[f"actor/{name}"] = _token_mean(values, mask)

        # If there was a pass for old log-probs, it has measured entropy and mismatch over all rows.
        if "old_log_probs" not in columns:
            metrics["actor/entropy"] = _token_mean(outputs["entropy"], mask)
            sampled = columns.get("rollout_log_probs")
            if sampled is not None:
                num_tokens = mask.sum()
                for name, value in log_prob_mismatch(old_log_prob, sampled, mask).items():
                    reduction = "max" if name == "log_prob_diff_max" else "mean"
                    metrics[f"rollout/{name}"] = Metric(value, reduction, num_tokens)
        loss, added_metrics = self._add_loss_terms(loss, rows, outputs, counts, divergence)
        return loss, metrics | added_metrics

    def _add_loss_terms(
        self,
        loss: Tensor,
        rows: DataProto,
        outputs: Mapping[str, Tensor],
        counts: LossCounts,
        divergence: Tensor | None,
    ) -> LossAndMetrics:
        """Add entropy bonus, KL loss, echo loss and distillation loss to the policy loss.

        Args:
            loss: the micro-batch's share of the policy loss, [].
            rows: b rows.
            outputs: outputs of the model [b, T], by name.
            counts: counts of the whole mini-batch.
            divergence: divergence from the teacher [b, T], if there is one.

        Returns:
            The total loss [], and metrics of the added terms.
        """
        config = self.config
        aggregate = aggregation_of(config, rows, counts)
        log_prob = outputs["log_probs"]
        metrics = {}
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * aggregate(outputs["entropy"])
        if config.use_kl_loss:
            kl = kl_penalty(log_prob, rows.batch["ref_log_prob"], config.kl_loss_type)
            kl_loss = aggregate(kl)
            loss = loss + config.kl_loss_coef * kl_loss
            metrics["actor/kl_loss"] = Metric(kl_loss.detach(), "sum")
        if config.echo_coeff:
            echo_sum = masked_sum(-log_prob, echo_tokens(rows))
            echo_loss = echo_sum / max(counts.num_echo_tokens, 1)
            loss = loss + config.echo_coeff * echo_loss
            metrics["actor/echo_loss"] = Metric(echo_loss.detach(), "sum")
        if divergence is not None and self._teacher_loss_coef:
            teacher_loss = aggregate(divergence)
            loss = loss + self._teacher_loss_coef * teacher_loss
            metrics["actor/distillation_loss"] = Metric(teacher_loss.detach(), "sum")
        return loss, metrics

    def _divergence_from(
        self, teacher: DistillationConfig, rows: DataProto, outputs: Mapping[str, Tensor]
    ) -> LossAndMetrics:
        """Compute the divergence from the teacher [b, T], and metrics.

        It is the forward KL over the teacher's `num_top_tokens` likeliest tokens if that is set,
        otherwise an estimate from the sampled tokens.
        """
        mask = rows.batch["response_mask"]
        log_prob = outputs["log_probs"]
        teacher_log_prob = rows.batch[TEACHER_LOG_PROB]
        # The log-ratio of sampled tokens, whose mean estimates the reverse KL (k1).
        metrics = {"actor/teacher_kl": _token_mean(log_prob - teacher_log_prob, mask)}
        if self.other_targets:
            student_top = outputs["other_log_probs"]  # [b, T, k]
            teacher_top = rows.batch[TEACHER_TOP_LOG_PROBS]  # [b, T, k]
            divergence = forward_kl(student_top, teacher_top, floor=teacher.log_prob_min_clamp)
            # Probability mass of the teacher's k likeliest tokens.
            metrics["actor/student_top_mass"] = _token_mean(student_top.exp().sum(-1), mask)
            metrics["actor/teacher_top_mass"] = _token_mean(teacher_top.exp().sum(-1), mask)
        else:
            divergence = kl_penalty(log_prob, teacher_log_prob, teacher.loss_mode)
        if teacher.loss_max_clamp is not None:
            divergence = divergence.clamp(-teacher.loss_max_clamp, teacher.loss_max_clamp)
        return divergence, metrics


def _token_mean(values: Tensor, mask: Tensor) -> Metric:
    """Mean of values [b, T] under a mask [b, T], weighted by the number of tokens."""
    num_tokens = mask.sum()
    return Metric((values.detach() * mask).sum() / num_tokens, "mean", num_tokens)


class ValueObjective(Objective):
    """Clipped squared error of values against returns."""

    name = "critic"
    columns = ("response_mask", "values", "returns")

    def __init__(self, config: CriticConfig) -> None:
        self.config = config

    def __call__(
        self, rows: DataProto, outputs: Mapping[str, Tensor], counts: LossCounts
    ) -> LossAndMetrics:
        """Compute a micro-batch's share of the value loss; see `Objective.__call__`."""
        mask = rows.batch["response_mask"]
        predicted = outputs["values"]
        losses, diagnostics = clipped_value_loss(
            predicted,
            rows.batch["returns"],
            rows.batch["values"],
            mask,
            cliprange_value=self.config.cliprange_value,
        )
        loss = aggregation_of(self.config, rows, counts)(losses)
        return loss, {
            "critic/vf_loss": Metric(loss.detach(), "sum"),
            "critic/vf_clipfrac": _token_mean(diagnostics["vf_clipfrac"], mask),
            "critic/vpred_mean": _token_mean(predicted, mask),
        }


class LikelihoodObjective(Objective):
    """Negative log-likelihood of the tokens under the mask."""

    name = "train"

    def __init__(self, config: ActorConfig) -> None:
        self.config = config

    def __call__(
        self, rows: DataProto, outputs: Mapping[str, Tensor], counts: LossCounts
    ) -> LossAndMetrics:
        """Compute a micro-batch's share of the loss; see `Objective.__call__`."""
        mask = rows.batch["response_mask"]
        loss = aggregation_of(self.config, rows, counts)(-outputs["log_probs"])
        return loss, {
            "train/loss": Metric(loss.detach(), "sum"),
            "train/entropy": _token_mean(outputs["entropy"], mask),
        }


class ScoreObjective(Objective):
    """A loss on scores, given by its derivative with respect to the score of each row.

    The derivatives (slopes) are computed before the step. The gradient of slope x score equals the
    gradient of the loss, so responses that the loss compares may be in different micro-batches and
    on different ranks.
    """

    name = "train"
    columns = ("response_mask", SCORE_SLOPE)

    def rows_with_gradient(self, data: DataProto) -> Tensor:
        """[B] bool: rows whose score affects the loss."""
        return super().rows_with_gradient(data) & (data.batch[SCORE_SLOPE] != 0)

    def __call__(
        self, rows: DataProto, outputs: Mapping[str, Tensor], counts: LossCounts
    ) -> LossAndMetrics:
        """Sum slope x score over the rows. There are no metrics."""
        # Only the gradient of the result has a meaning, not its value. The mask selects the token
        # at which a row is scored.
        scores = (outputs["scores"] * rows.batch["response_mask"]).sum(-1)
        return (rows.batch[SCORE_SLOPE] * scores).sum(), {}
