# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators. `quadriga/algorithms/advantages/` has a file for each paper.

Common to all, with B sequences and T response positions: `token_level_rewards` and `response_mask`
are [B, T]; `uid`, [B], is equal for responses to the same prompt; the score of a response is the
sum of its token-level rewards. An estimator returns advantages and returns, both [B, T] and 0
outside the mask. To add one, write such a file and import its function in `__init__.py`.
"""

from quadriga.algorithms.advantages.gae import gae
from quadriga.algorithms.advantages.gdpo import gdpo
from quadriga.algorithms.advantages.gigpo import gigpo
from quadriga.algorithms.advantages.gpg import gpg
from quadriga.algorithms.advantages.grpo import grpo
from quadriga.algorithms.advantages.grpo_passk import grpo_passk
from quadriga.algorithms.advantages.hierarchical_grpo import hierarchical_grpo
from quadriga.algorithms.advantages.maxrl import maxrl
from quadriga.algorithms.advantages.opo import opo
from quadriga.algorithms.advantages.optimal_token_baseline import (
    optimal_token_baseline,
    tir_optimal_token_baseline,
)
from quadriga.algorithms.advantages.rae import rae
from quadriga.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from quadriga.algorithms.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from quadriga.algorithms.advantages.remax import remax
from quadriga.algorithms.advantages.rloo import rloo
from quadriga.algorithms.registry import ADVANTAGES

ADVANTAGES.built_in = frozenset(ADVANTAGES)
