# SPDX-License-Identifier: Apache-2.0
"""The naive manager with DAPO's soft punishment of over-long responses (arXiv:2503.14476, eq. 13).

Up to `max_resp_len - len` tokens nothing happens; from there the reward falls linearly, by `penalty_factor` at
`max_resp_len`:

    reward = score + min(0, (max_resp_len - len - length) / len * penalty_factor)

Options (`reward_model.reward_kwargs`): `max_resp_len`, in tokens, and `overlong_buffer_cfg` with `enable`, `len`
(tokens), `penalty_factor`, and `log` (the punishment goes to the extras, as "overlong_reward" and "overlong").
"""

from typing import Any

from quadriga.config import Config
from quadriga.errors import ConfigError
from quadriga.rewards.managers.naive import NaiveRewardManager
from quadriga.rewards.outcome import Outcome
from quadriga.rewards.registry import register
from quadriga.rewards.samples import Samples

_WHERE = "reward_model.reward_kwargs"
_BUFFER_DEFAULTS = {"enable": False, "len": 0, "penalty_factor": 1.0, "log": False}


@register("dapo")
class DapoRewardManager(NaiveRewardManager):
    """Grades each sample on its own and makes long responses cheaper not to write."""

    options = ("overlong_buffer_cfg", "max_resp_len")

    def __init__(self, config: Config, tokenizer: Any) -> None:
        kwargs = config.reward_model.reward_kwargs
        given, self._max_length = kwargs.get("overlong_buffer_cfg") or {}, kwargs.get("max_resp_len")
        unknown = ", ".join(key for key in given if key not in _BUFFER_DEFAULTS)
        if unknown:
            expected = f"only {', '.join(_BUFFER_DEFAULTS)}"
            raise ConfigError(f"{_WHERE}.overlong_buffer_cfg", got=unknown, expected=expected)
        self._buffer = {**_BUFFER_DEFAULTS, **given}
        length = self._buffer["len"]
        if self._buffer["enable"]:
            if not isinstance(self._max_length, int) or self._max_length < 1:
                expected = "a number of tokens, usually data.max_response_length"
                raise ConfigError(f"{_WHERE}.max_resp_len", got=repr(self._max_length), expected=expected)
            if not isinstance(length, int) or not 0 < length <= self._max_length:
                expected = f"a number of tokens from 1 to max_resp_len={self._max_length}"
                raise ConfigError(f"{_WHERE}.overlong_buffer_cfg.len", got=repr(length), expected=expected)
        super().__init__(config, tokenizer)

    def shaped(self, outcomes: list[Outcome], samples: Samples) -> list[Outcome]:
        """The outcomes with the punishment; "acc" keeps the score from before it, if there was one."""
        shaped = []
        for outcome, length in zip(outcomes, samples.lengths.tolist(), strict=True):
            if not outcome.error:
                extra = {**outcome.extra, "acc": outcome.extra.get("acc", outcome.score)} if self.has_grades else {}
                outcome = outcome._replace(extra=extra)
            if self._buffer["enable"] and not outcome.error:
                excess = length - (self._max_length - self._buffer["len"])
                punishment = min(0.0, -excess / self._buffer["len"] * self._buffer["penalty_factor"])
                told = {"overlong_reward": punishment, "overlong": punishment < 0} if self._buffer["log"] else {}
                outcome = outcome._replace(score=outcome.score + punishment, extra={**outcome.extra, **told})
            shaped.append(outcome)
        return shaped
