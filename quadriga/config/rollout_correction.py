# SPDX-License-Identifier: Apache-2.0
"""`algorithm.rollout_correction`: off-policy correction for the mismatch of rollout and trainer: weights, rejection."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import field_validator, model_validator

from quadriga.config.base import Section, filled, refuse

_LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
_KINDS = ("k1", "k2", "k3")
_RULES = tuple(f"{level}_{kind}" for level in _LEVELS for kind in _KINDS)

_BYPASS = {"bypass_mode": True}
_POLICY_GRADIENT = {"bypass_mode": True, "loss_type": "reinforce"}
_WEIGHTS = {
    "token_is": {"rollout_is": "token"},
    "seq_is": {"rollout_is": "sequence"},
    "token_icepop": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
}
_REJECTION = {
    "geo_rs": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"},
    "k3_rs": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.01"},
    "sum_rs": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
}

_PRESETS: dict[str, dict[str, Any]] = {
    "decoupled_token_is": _WEIGHTS["token_is"],
    "decoupled_seq_is": _WEIGHTS["seq_is"],
    "decoupled_seq_is_rs": _WEIGHTS["seq_is"] | _REJECTION["sum_rs"],
    "decoupled_geo_rs": _REJECTION["geo_rs"],
    "decoupled_geo_rs_seq_tis": _WEIGHTS["seq_is"] | _REJECTION["geo_rs"],
    "decoupled_geo_rs_token_tis": _WEIGHTS["token_is"] | _REJECTION["geo_rs"],
    "decoupled_k3_rs": _REJECTION["k3_rs"],
    "decoupled_k3_rs_seq_tis": _WEIGHTS["seq_is"] | _REJECTION["k3_rs"],
    "decoupled_k3_rs_token_tis": _WEIGHTS["token_is"] | _REJECTION["k3_rs"],
    "decoupled_token_icepop": _WEIGHTS["token_icepop"],
    "bypass_ppo_clip": _BYPASS,
    "bypass_ppo_clip_geo_rs": _BYPASS | _REJECTION["geo_rs"],
    "bypass_ppo_clip_k3_rs": _BYPASS | _REJECTION["k3_rs"],
    "bypass_pg_is": _POLICY_GRADIENT | _WEIGHTS["seq_is"],
    "bypass_pg_geo_rs": _POLICY_GRADIENT | _REJECTION["geo_rs"],
    "bypass_pg_geo_rs_seq_tis": _POLICY_GRADIENT | _WEIGHTS["seq_is"] | _REJECTION["geo_rs"],
    "bypass_pg_geo_rs_token_tis": _POLICY_GRADIENT | _WEIGHTS["token_is"] | _REJECTION["geo_rs"],
    "bypass_pg_token_icepop": _POLICY_GRADIENT | _WEIGHTS["token_icepop"],
    "disabled": {},
}
"""Names and numbers are verl's. There `disabled` still tells `rollout_corr/` metrics, from a pass that is made for old
log-probabilities; here it makes none, and `rollout/` metrics tell of the difference in every step."""

if TYPE_CHECKING:
    Preset = str
else:
    Preset = Literal[tuple(_PRESETS)]

_EARLIER = {
    "token_is": "decoupled_token_is",
    "token_tis": "decoupled_token_is",
    "seq_is": "decoupled_seq_is",
    "seq_is_rs": "decoupled_seq_is_rs",
    "seq_mis": "decoupled_seq_is_rs",
    "geo_rs": "decoupled_geo_rs",
    "geo_mis": "decoupled_geo_rs",
    "geo_rs_seq_tis": "decoupled_geo_rs_seq_tis",
    "ppo_is_bypass": "bypass_ppo_clip",
    "pure_is": "bypass_pg_is",
    "pg_is": "bypass_pg_is",
    "pg_rs": "bypass_pg_geo_rs",
    "pg_geo_rs_seq_tis": "bypass_pg_geo_rs_seq_tis",
}
"""Names that verl had before, and what is nearest: refused, for some of them had a veto on single tokens as well."""


class RolloutCorrectionConfig(Section):
    """Off-policy correction: importance sampling weights and rejection of samples whose policy differs from the trained
    one (staleness, numerics of the rollout engine). Off until one is set."""

    preset: Preset | None = None
    """A named off-policy correction: a choice of the keys below; those that are given as well hold. `disabled`:
    none."""
    bypass_mode: bool = False
    """Whether the rollout's policy is taken as the old one: no pass for old log-probabilities, a loss of its own."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """Bypass: `ppo_clip` clips the ratio over the rollout; `reinforce` weighs policy gradient by `rollout_is`."""
    rollout_is: Literal["token", "sequence"] | None = None
    """Importance sampling weights of tokens, or of whole responses. null: none."""
    rollout_is_threshold: float | str = 2.0
    """Largest importance weight; larger ones are truncated to it. `LOWER_UPPER`, such as 0.5_5.0: weights outside
    become 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Whether weights are divided by their mean over the batch; with bypass_mode this costs the pass it saves."""
    rollout_rs: str | None = None
    """Rejection sampling by `token`, `seq_sum`, `seq_mean` or `seq_max` and `_k1`, `_k2` or `_k3`; several with
    commas."""
    rollout_rs_threshold: float | str | None = None
    """Largest divergence that is kept, for all rules or for each with commas; for k1 ratios as `LOWER_UPPER`, one
    number alone being the upper."""

    @model_validator(mode="before")
    @classmethod
    def _preset_fills_in(cls, given: Any) -> Any:
        known = isinstance(given, dict) and isinstance(given.get("preset"), str)
        return filled(given, _PRESETS.get(given["preset"], {})) if known else given

    @field_validator("preset", mode="before")
    @classmethod
    def _present_name(cls, value: Any) -> Any:
        """k1 within 0.001 is the geometric mean of ratios within 0.999_1.001: such presets have its name."""
        name = _EARLIER.get(value) or value.replace("k1_rs", "geo_rs") if isinstance(value, str) else value
        if name != value and name in _PRESETS:
            veto = " The veto on single tokens that was part of it is not." if "geo_rs" in name else ""
            raise refuse(f"the name that it has now, {name}", f"Set algorithm.rollout_correction.preset={name}.{veto}")
        return value

    @field_validator("rollout_is_threshold")
    @classmethod
    def _readable_bounds(cls, value: float | str) -> float | str:
        _bounds(value, "a number above 0, or two as LOWER_UPPER")
        return value

    @field_validator("rollout_rs")
    @classmethod
    def _known_rules(cls, value: str | None) -> str | None:
        unknown = [name for name in _names(value) if name not in _RULES]
        if unknown or (value is not None and not _names(value)):
            raise refuse(f"one or more of {', '.join(_RULES)}, with commas between", "Or null, to reject nothing.")
        return value

    @model_validator(mode="after")
    def _whole(self) -> "RolloutCorrectionConfig":
        _ = self.rejections
        return self

    @property
    def weight_bounds(self) -> tuple[float | None, float]:
        """The lower bound, if there is one, and the upper one."""
        return _bounds(self.rollout_is_threshold, "a number above 0, or two as LOWER_UPPER")

    @property
    def rejections(self) -> tuple[tuple[str, str, float, float], ...]:
        """Each rule: level, kind, lower and upper bound (ratios for k1; otherwise the lower one is 0)."""
        names = tuple(dict.fromkeys(_names(self.rollout_rs)))
        if not names:
            return ()
        fix = "Set algorithm.rollout_correction.rollout_rs_threshold."
        given = _names(self.rollout_rs_threshold)
        if len(given) not in (1, len(names)):
            raise refuse(f"one threshold, or {len(names)}: one for each of {', '.join(names)}", fix)
        thresholds = given * len(names) if len(given) == 1 else given
        return tuple(_rule(name, text) for name, text in zip(names, thresholds, strict=True))

    @property
    def is_active(self) -> bool:
        """Whether anything is corrected."""
        return self.bypass_mode or self.rollout_is is not None or self.rollout_rs is not None

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the correction needs old log-probabilities of the whole batch before the update."""
        if self.bypass_mode:
            return self.is_normalized_in_bypass
        return self.is_active

    @property
    def is_normalized_in_bypass(self) -> bool:
        """Whether a bypass loss is divided by a mean over the whole batch."""
        is_weighted = self.loss_type == "reinforce" and self.rollout_is is not None
        return self.bypass_mode and is_weighted and self.rollout_is_batch_normalize


def _names(text: float | str | None) -> list[str]:
    return [] if text is None else [part.strip() for part in str(text).split(",") if part.strip()]


def _bounds(value: float | str, expected: str) -> tuple[float | None, float]:
    parts = [part.strip() for part in str(value).split("_")]
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        raise refuse(expected) from None
    if len(numbers) > 2 or not all(0 < number < float("inf") for number in numbers) or numbers != sorted(numbers):
        raise refuse(expected)
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _rule(name: str, threshold: str) -> tuple[str, str, float, float]:
    level, _, kind = name.rpartition("_")
    if kind == "k1":
        lower, upper = _bounds(threshold, f"two ratios above 0 as LOWER_UPPER for {name}, or the upper one alone")
        lower = 1 / upper if lower is None else lower
        if lower > upper:
            raise refuse(f"two ratios above 0 as LOWER_UPPER for {name}, or an upper one of at least 1")
        return level, kind, lower, upper
    lower, upper = _bounds(threshold, f"a number above 0 for {name}")
    if lower is not None:
        raise refuse(f"one number for {name}: only k1 has a lower bound")
    return level, kind, 0.0, upper
