# SPDX-License-Identifier: Apache-2.0
"""Rewards that consist of several named components."""

from collections.abc import Mapping


def weighted(components: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Combine the components of a reward into one score.

    A reward manager logs each number that a score function returns beside the score as
    reward/extra/NAME, and stores it with the sample. So each component can be followed on its own,
    and the advantage estimator `gdpo` can normalise each component separately.

    Args:
        components: value of each component, by name.
        weights: weight of each component, by the same names.

    Returns:
        The weighted sum as "score", and each component, unweighted, under its own name.

    Raises:
        ValueError: the names of components and weights differ, or one of them is "score".
    """
    if components.keys() != weights.keys():
        raise ValueError(
            f"components: got {sorted(components)} with weights for {sorted(weights)}, "
            "expected a weight for each component and no other"
        )
    if "score" in components:
        raise ValueError(
            "components: got one named 'score', expected another name; "
            "'score' is the name of the weighted sum"
        )
    score = sum(weights[name] * value for name, value in components.items())
    return {"score": score, **components}
