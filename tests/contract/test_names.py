# SPDX-License-Identifier: Apache-2.0
"""The configuration imports no torch, so it writes down names that tables elsewhere hold: both must say the same."""

from typing import Any, get_args

import pytest

from quadriga.algorithms.aggregate import LOSS_AGG_MODES
from quadriga.algorithms.kl import KL_PENALTIES
from quadriga.config.trainer import Tracker, TrainerConfig
from quadriga.config.types import KLKind, LossAggMode
from quadriga.observe.tracking import BACKENDS
from quadriga.trainer.build import TEAMS

PAIRS = {
    "loss_agg_mode": (LossAggMode, LOSS_AGG_MODES),
    "kl_loss_type and kl_penalty": (KLKind, KL_PENALTIES),
    "trainer.logger": (Tracker, BACKENDS),
    "trainer.backend": (TrainerConfig.model_fields["backend"].annotation, TEAMS),
}


@pytest.mark.parametrize("key", list(PAIRS))
def test_the_configuration_takes_exactly_the_names_there_are(key: str) -> None:
    """A name that only one side knows would be refused, or accepted and then not found."""
    accepted: tuple[Any, ...] = get_args(PAIRS[key][0])
    there = list(PAIRS[key][1])
    assert len(set(accepted)) == len(accepted)
    assert sorted(accepted) == sorted(there)
