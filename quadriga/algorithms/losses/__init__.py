# SPDX-License-Identifier: Apache-2.0
"""Losses per token, one per file; `aggregate.agg_loss` makes a number of them. A new one is a file and a line below."""

from quadriga.algorithms.losses.value import clipped_value_loss
from quadriga.algorithms.losses.vanilla import vanilla

__all__ = ["clipped_value_loss", "vanilla"]
