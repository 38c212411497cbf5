# SPDX-License-Identifier: Apache-2.0
"""Rewards of several named parts."""

from collections.abc import Mapping


def weighted(components: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """The weighted sum as "score", and each component under its own name, unweighted.

    A reward manager logs every number that a score function returns in addition to the score as reward/extra/NAME, and
    stores it with the sample: so the parts of a reward can be read apart, and `gdpo` can normalise them apart. Raises
    ValueError: the names of components and weights differ, or one of them is "score"."""
    if components.keys() != weights.keys():
        raise ValueError(
            f"components: got {sorted(components)} with weights for {sorted(weights)}, expected the same"
        )
    if "score" in components:
        raise ValueError(
            "components: got one named 'score', expected another name: it is the sum's"
        )
    return {"score": sum(weights[name] * value for name, value in components.items()), **components}
