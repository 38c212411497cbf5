# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators, one paper per file. A new one is a file here and an import below.

Shapes in all of them: B sequences, T response positions. `uid` [B] names the prompt of a response. The
score of a response is the sum of its token-level rewards.
"""

from quadriga.algorithms.advantages.gae import gae
from quadriga.algorithms.advantages.gdpo import gdpo
from quadriga.algorithms.advantages.gpg import gpg
from quadriga.algorithms.advantages.grpo import grpo
from quadriga.algorithms.advantages.grpo_passk import grpo_passk
from quadriga.algorithms.advantages.opo import opo
from quadriga.algorithms.advantages.optimal_token_baseline import optimal_token_baseline, tir_optimal_token_baseline
from quadriga.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from quadriga.algorithms.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from quadriga.algorithms.advantages.remax import remax
from quadriga.algorithms.advantages.rloo import rloo
