# SPDX-License-Identifier: Apache-2.0
"""The naive manager with DAPO's soft punishment of over-long responses (arXiv:2503.14476, eq. 13).

Up to `max_resp_len - len` tokens nothing happens; from there the reward falls linearly, by `penalty_factor` at
`max_resp_len`:

    reward = score + min(0, (max_resp_len - len - length) / len * penalty_factor)

Options (`reward_model.reward_kwargs`): `max_resp_len`, in tokens, and `overlong_buffer_cfg` with `enable`, `len`
(tokens), `penalty_factor`, and `log` (the punishment goes to the extras, as "overlong_reward" and "overlong").
"""

from collections.abc import Mapping
from typing import Any

from quadriga.config import Config
from quadriga.errors import ConfigError
from quadriga.rewards.managers.naive import NaiveRewardManager
from quadriga.rewards.outcome import Outcome
from quadriga.rewards.registry import register
from quadriga.rewards.samples import Samples

_WHERE = "reward_model.reward_kwargs"
_BUFFER_DEFAULTS = {"enable": False, "len": 0, "penalty_factor": 1.0, "log": False}


def punishment_of(length: int, max_length: Any, given: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """What is added to the score of a response of `length` tokens, and what is told of it.

    Args:
        max_length: `max_resp_len`.
        given: `overlong_buffer_cfg`.

    Raises:
        ConfigError: one of them is not as it must be.
    """
    if unknown := ", ".join(key for key in given if key not in _BUFFER_DEFAULTS):
        expected = f"only {', '.join(_BUFFER_DEFAULTS)}"
        raise ConfigError(f"{_WHERE}.overlong_buffer_cfg", got=unknown, expected=expected)
    buffer = {**_BUFFER_DEFAULTS, **given}
    if not buffer["enable"]:
        return 0.0, {}
    if not isinstance(max_length, int) or max_length < 1:
        expected = "a number of tokens, usually data.max_response_length"
        raise ConfigError(f"{_WHERE}.max_resp_len", got=repr(max_length), expected=expected)
    if not isinstance(buffer["len"], int) or not 0 < buffer["len"] <= max_length:
        expected = f"a number of tokens from 1 to max_resp_len={max_length}"
        raise ConfigError(f"{_WHERE}.overlong_buffer_cfg.len", got=repr(buffer["len"]), expected=expected)
    excess = length - (max_length - buffer["len"])
    punishment = min(0.0, -excess / buffer["len"] * buffer["penalty_factor"])
    return punishment, {"overlong_reward": punishment, "overlong": punishment < 0} if buffer["log"] else {}


@register("dapo")
class DapoRewardManager(NaiveRewardManager):
    """Grades each sample on its own and makes long responses cheaper not to write."""

    options = ("overlong_buffer_cfg", "max_resp_len")

    def __init__(self, config: Config, tokenizer: Any) -> None:
        kwargs = config.reward_model.reward_kwargs
        self._max_length, self._buffer = kwargs.get("max_resp_len"), kwargs.get("overlong_buffer_cfg") or {}
        punishment_of(0, self._max_length, self._buffer)
        super().__init__(config, tokenizer)

    def shaped(self, outcomes: list[Outcome], samples: Samples) -> list[Outcome]:
        """The outcomes with the punishment; "acc" keeps the score from before it, if there was one."""
        shaped = []
        for outcome, length in zip(outcomes, samples.lengths.tolist(), strict=True):
            if not outcome.error:
                extra = {**outcome.extra, "acc": outcome.extra.get("acc", outcome.score)} if self.has_grades else {}
                punishment, told = punishment_of(length, self._max_length, self._buffer)
                outcome = outcome._replace(score=outcome.score + punishment, extra={**extra, **told})
            shaped.append(outcome)
        return shaped
