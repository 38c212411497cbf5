# SPDX-License-Identifier: Apache-2.0
"""`algorithm`: the advantage estimator, the KL penalty in the reward, dynamic sampling, off-policy correction."""

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    field_validator,
    model_validator,
)

from quadriga.config.base import Section, fill_preset, refuse
from quadriga.config.types import Count, KLKind, Name, Share

_TWO_BOUNDS = "a number above 0, or two as LOWER_UPPER"
_LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
_RULES = tuple(f"{level}_{kind}" for level in _LEVELS for kind in ("k1", "k2", "k3"))
# Parts that the presets of the off-policy correction are put together from.
_POLICY_GRADIENT = {"bypass_mode": True, "loss_type": "reinforce"}
_TOKEN = {"rollout_is": "token"}
_SEQUENCE = {"rollout_is": "sequence"}
_GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.01"}
_CORRECTIONS: dict[str, dict[str, Any]] = {
    "token_is": _TOKEN,
    "seq_is": _SEQUENCE,
    "seq_is_rs": _SEQUENCE | {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "geo_rs": _GEO,
    "geo_rs_seq_tis": _SEQUENCE | _GEO,
    "geo_rs_token_tis": _TOKEN | _GEO,
    "k3_rs": _K3,
    "k3_rs_seq_tis": _SEQUENCE | _K3,
    "k3_rs_token_tis": _TOKEN | _K3,
    "token_icepop": _TOKEN | {"rollout_is_threshold": "0.5_5.0"},
}
_IN_POLICY_GRADIENT = ("geo_rs", "geo_rs_seq_tis", "geo_rs_token_tis", "token_icepop")
_PRESETS: dict[str, dict[str, Any]] = {
    **{f"decoupled_{name}": keys for name, keys in _CORRECTIONS.items()},
    "bypass_ppo_clip": {"bypass_mode": True},
    **{
        f"bypass_ppo_clip_{name}": {"bypass_mode": True} | _CORRECTIONS[name]
        for name in ("geo_rs", "k3_rs")
    },
    "bypass_pg_is": _POLICY_GRADIENT | _SEQUENCE,
    **{f"bypass_pg_{name}": _POLICY_GRADIENT | _CORRECTIONS[name] for name in _IN_POLICY_GRADIENT},
    "disabled": {},
}
"""Presets with the names and numbers that the field uses.

`disabled` makes no pass for old log-probabilities, so it logs no `rollout_corr/` metrics; the
`rollout/` metrics show the mismatch in every step.
"""

if TYPE_CHECKING:
    Preset = str
else:
    Preset = Literal[tuple(_PRESETS)]

_PRESET_BY_FORMER_NAME = {
    "token_tis": "decoupled_token_is",
    "seq_mis": "decoupled_seq_is_rs",
    "geo_mis": "decoupled_geo_rs",
    "ppo_is_bypass": "bypass_ppo_clip",
    "pure_is": "bypass_pg_is",
    "pg_is": "bypass_pg_is",
    "pg_rs": "bypass_pg_geo_rs",
    "pg_geo_rs_seq_tis": "bypass_pg_geo_rs_seq_tis",
}
"""Former name of a preset -> the nearest present one. Former names are refused, because some of them
also had a veto on single tokens."""


def _split_at_commas(text: float | str | None) -> list[str]:
    """Split a text at commas; None has no entries."""
    if text is None:
        return []
    return [part.strip() for part in str(text).split(",") if part.strip()]


def _parse_bounds(value: float | str, expected: str = _TWO_BOUNDS) -> tuple[float | None, float]:
    """Parse `UPPER` or `LOWER_UPPER`.

    Args:
        value: the value of a key, or a part of it.
        expected: the accepted values, for the error.

    Returns:
        The lower bound, or None, and the upper bound.

    Raises:
        PydanticCustomError: the value has another form, or the bounds are not positive and sorted.
    """
    try:
        numbers = [float(part) for part in str(value).split("_")]
    except ValueError:
        raise refuse(expected) from None
    # NaN is refused too: comparisons with it are false.
    are_positive = all(0 < number < float("inf") for number in numbers)
    if len(numbers) > 2 or not are_positive or numbers != sorted(numbers):
        raise refuse(expected)
    if len(numbers) == 1:
        return None, numbers[0]
    return numbers[0], numbers[1]


class RolloutCorrectionConfig(Section):
    """Off-policy correction: importance sampling weights and rejection of samples, for staleness or engine mismatch."""

    preset: Preset | None = None
    """Named choice of the keys below, of which any may be set as well. `disabled`: no off-policy correction."""
    bypass_mode: bool = False
    """Whether the rollout's policy is the old policy: no pass for old log-probabilities, and a separate loss."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """Bypass: `ppo_clip` clips the ratio over the rollout; `reinforce` weighs policy gradient by `rollout_is`."""
    rollout_is: Literal["token", "sequence"] | None = None
    """Importance sampling weights of tokens, or of whole responses. null: none."""
    rollout_is_threshold: float | str = 2.0
    """Upper bound to which weights are truncated; or `LOWER_UPPER`, as in 0.5_5.0: others become 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Whether weights are divided by their mean over the batch; with bypass_mode this costs the pass it saves."""
    rollout_rs: str | None = None
    """Rejection sampling by `token`, `seq_sum`, `seq_mean`, `seq_max` and `_k1`, `_k2`, `_k3`; several with commas."""
    rollout_rs_threshold: float | str | None = None
    """Largest divergence to accept, one for all rules or a list with commas; k1: ratios `LOWER_UPPER`, or the upper."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, values: Any) -> Any:
        """Set the keys of the preset that are not set themselves."""
        return fill_preset(values, _PRESETS)

    @field_validator("preset", mode="before")
    @classmethod
    def _refuse_former_preset(cls, value: Any) -> Any:
        """Refuse former names of presets, and suggest the present name.

        A present name, and a text that never was one, are returned unchanged.
        """
        # Presets called `k1_rs` bounded k1 by 0.001, which bounds the geometric mean of the ratios
        # to 0.999_1.001. They are now called `geo_rs`.
        name = str(value).replace("k1_rs", "geo_rs")
        if name in _PRESET_BY_FORMER_NAME:
            name = _PRESET_BY_FORMER_NAME[name]
        elif name in _CORRECTIONS:
            # Some names had no prefix.
            name = f"decoupled_{name}"
        if name == value or name not in _PRESETS:
            return value
        fix = f"Set algorithm.rollout_correction.preset={name}."
        if "geo_rs" in name:
            fix += " It has no veto on single tokens, unlike the former preset."
        raise refuse(f"the name that it has now, {name}", fix)

    @field_validator("rollout_is_threshold")
    @classmethod
    def _check_bounds(cls, value: float | str) -> float | str:
        """Refuse bounds that cannot be parsed."""
        _parse_bounds(value)
        return value

    @field_validator("rollout_rs")
    @classmethod
    def _check_rules(cls, value: str | None) -> str | None:
        """Refuse unknown rules of rejection."""
        names = _split_at_commas(value)
        if value is not None and (not names or set(names) - set(_RULES)):
            raise refuse(
                f"one or more of {', '.join(_RULES)}, with commas between",
                "Or null, to reject nothing.",
            )
        return value

    @model_validator(mode="after")
    def _check_thresholds(self) -> Self:
        """Refuse thresholds that do not fit the rules of rejection."""
        # Reading the property raises the error.
        _ = self.rejections
        return self

    @property
    def weight_bounds(self) -> tuple[float | None, float]:
        """Lower bound of importance weights, or None, and upper bound."""
        return _parse_bounds(self.rollout_is_threshold)

    @property
    def rejections(self) -> tuple[tuple[str, str, float, float], ...]:
        """Rules of rejection, from `rollout_rs` and `rollout_rs_threshold`.

        Returns:
            The values of a `Rejection` (`algorithms.rollout_correction`) for each rule: its level,
            its kind, and its lower and upper bound. For k1 these bound the ratio. For other kinds
            they bound the divergence, and the lower one is 0.

        Raises:
            PydanticCustomError: the thresholds do not fit the rules. `_check_thresholds` reads this
                property for its error, so that later readers meet none.
        """
        names = list(dict.fromkeys(_split_at_commas(self.rollout_rs)))
        if not names:
            return ()
        thresholds = _split_at_commas(self.rollout_rs_threshold)
        # One threshold is for all rules.
        if len(thresholds) == 1:
            thresholds *= len(names)
        if len(thresholds) != len(names):
            raise refuse(
                f"one threshold, or {len(names)}: one for each of {', '.join(names)}",
                "Set algorithm.rollout_correction.rollout_rs_threshold.",
            )
        rules = []
        for name, threshold in zip(names, thresholds, strict=True):
            level, _, kind = name.rpartition("_")
            if kind == "k1":
                ratios = f"two ratios above 0 as LOWER_UPPER for {name}, or"
                lower, upper = _parse_bounds(threshold, f"{ratios} the upper one alone")
                # A single bound U stands for 1/U to U. A U below 1 would be the lower bound.
                lower = lower or 1 / upper
                if lower > upper:
                    raise refuse(f"{ratios} an upper one of at least 1")
            else:
                lower, upper = _parse_bounds(threshold, f"a number above 0 for {name}")
                if lower is not None:
                    raise refuse(f"one number for {name}: only k1 has a lower bound")
            rules.append((level, kind, lower or 0.0, upper))
        return tuple(rules)

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the correction needs old log-probabilities of the whole batch before the update."""
        has_weights = self.rollout_is is not None
        if self.bypass_mode:
            # Weights are computed in the update itself, unless they are divided by their mean over
            # the whole batch. Only `reinforce` has weights.
            is_normalized = has_weights and self.rollout_is_batch_normalize
            return is_normalized and self.loss_type == "reinforce"
        return has_weights or self.rollout_rs is not None


class KLControlConfig(Section):
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed: a constant coefficient; adaptive: it follows `target_kl`."""
    kl_coef: NonNegativeFloat = 0.001
    """The coefficient (adaptive: its first value), reward per nat."""
    horizon: Count = 10000
    """Adaptive: sequences over which the coefficient adapts."""
    target_kl: PositiveFloat = 0.1
    """Adaptive: KL divergence to hold, in nats."""


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO, arXiv:2503.14476): groups without differences in reward have no gradient."""

    enable: bool = False
    """Whether groups of equal responses are left out, and more prompts are generated until the batch is full."""
    metric: Name = "score"
    """Number to compare: `score`, `seq_final_reward` or `seq_reward` (all the score), or one that graders add."""
    max_num_gen_batches: NonNegativeInt = 10
    """Batches of prompts that a step may generate for until its batch is full; then the run stops. 0: no limit."""


class PFPPOConfig(Section):
    """Probability of drawing each response for the update (PF-PPO, arXiv:2409.06957)."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """`pow`: by the size of the score; `max_min`: the best and the worst; `max_random`: the best, and less the rest."""
    weight_pow: NonNegativeFloat = 2.0
    """Exponent of `pow`."""


class AlgorithmConfig(Section):
    """Computation of advantages from rewards."""

    adv_estimator: Name = "grpo"
    """Name of a registered advantage estimator, or `path/to/file.py:function`."""
    adv_options: dict[str, Any] = {}
    """Open dictionary: options of that estimator, under its own names."""
    gamma: Share = 1.0
    """Discount of a later reward, per token, in [0, 1]."""
    lam: Share = 1.0
    """Lambda of generalised advantage estimation (GAE), in [0, 1]."""
    norm_adv_by_std_in_grpo: bool = True
    """Whether GRPO divides by the standard deviation of the group (false: Dr. GRPO)."""
    use_kl_in_reward: bool = False
    """Whether the KL divergence from the reference model is subtracted from the reward of each token."""
    kl_penalty: KLKind = "kl"
    """Estimator of that divergence."""
    kl_ctrl: KLControlConfig = KLControlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    use_pf_ppo: bool = False
    """Whether the batch of an update is drawn from the responses with replacement, by their scores."""
    pf_ppo: PFPPOConfig = PFPPOConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
