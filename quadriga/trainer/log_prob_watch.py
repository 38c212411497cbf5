# SPDX-License-Identifier: Apache-2.0
"""Watches how far the rollout's log-probabilities are from the trainer's, and warns or stops where it is too far.

The differences come from the pass that computes old log-probabilities; where that is left out, from the forward pass
of the one update, which computes the same numbers at no cost.
"""

import logging
import math
from collections.abc import Mapping

from quadriga.config import RolloutConfig
from quadriga.errors import RolloutError

logger = logging.getLogger(__name__)

_KEY = "actor_rollout_ref.rollout"
_CAUSES = (
    "The rollout samples from another distribution than is trained: compare dtypes and attention kernels of both, look "
    "at rollout/log_prob_diff_max and at how the difference grows from step to step"
)
_LARGEST_EXPONENT = 709.0


class LogProbWatch:
    """The thresholds of a run.

    Args:
        config: of the rollout.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self.warn, self.stop = config.log_prob_diff_warn, config.log_prob_diff_stop

    def look(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Judge the metrics of a step; those of a step that has none pass.

        Returns:
            `rollout/ppl_ratio`: perplexity of the answers under the trainer over that under the rollout; 1 where both
            agree.

        Raises:
            RolloutError: the mean difference is above `log_prob_diff_stop`, or not a number.
        """
        mean = metrics.get("rollout/log_prob_diff_mean")
        if mean is None:
            return {}
        most = metrics["rollout/log_prob_diff_max"]
        found = f"a mean difference of {mean:.3g} nats (at most {most:.3g}) from the trainer's"
        if math.isnan(mean) or (self.stop is not None and mean > self.stop):
            limit = "a number" if self.stop is None else f"at most {self.stop:g} ({_KEY}.log_prob_diff_stop)"
            raise RolloutError(f"rollout log-probabilities, step {step}", got=found, expected=limit, fix=f"{_CAUSES}.")
        if mean > self.warn:
            text = "step %d: the rollout's log-probabilities have %s, above %s.log_prob_diff_warn=%g. %s."
            logger.warning(text, step, found, _KEY, self.warn, _CAUSES)
        # The mean of log(q / p) over tokens is the difference of the logarithms of the two perplexities.
        divergence = metrics["rollout/kl"]
        return {"rollout/ppl_ratio": math.exp(divergence) if divergence < _LARGEST_EXPONENT else math.inf}
