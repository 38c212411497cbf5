# SPDX-License-Identifier: Apache-2.0
"""Rewards of several parts."""

import pytest

from quadriga.rewards.components import weighted


def test_the_sum_and_its_parts():
    assert weighted({"a": 1.0, "b": 0.5}, {"a": 2.0, "b": -1.0}) == {
        "score": 1.5,
        "a": 1.0,
        "b": 0.5,
    }


def test_names_that_do_not_fit():
    with pytest.raises(ValueError, match=r"got \['a'\] with weights for \['b'\]"):
        weighted({"a": 1.0}, {"b": 1.0})
    with pytest.raises(ValueError, match="another name"):
        weighted({"score": 1.0}, {"score": 1.0})
