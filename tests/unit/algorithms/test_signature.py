# SPDX-License-Identifier: Apache-2.0
"""What a signature says of an algorithm, and which signatures say too little."""

import pytest

from quadriga.algorithms.registry import Registry, bind_options, options, required_fields
from quadriga.errors import ConfigError


def example(rewards, mask, /, uid, *, scale, shift=1):
    """Two ways to be positional, two options."""
    return rewards, mask, uid, scale, shift


def test_fields_and_options() -> None:
    """Positional parameters are fields, keyword-only ones options, and binding changes neither."""
    assert required_fields(example) == ("rewards", "mask", "uid")
    assert options(example) == ("scale", "shift")
    assert required_fields(bind_options(example, {"scale": 2})) == ("rewards", "mask", "uid")


def test_bound_values() -> None:
    """What is given goes before what is shared; what is shared and unknown is left alone."""
    bound = bind_options(example, {"scale": 2}, shared={"scale": 3, "shift": 4, "other": 5})
    assert bound("r", "m", "u") == ("r", "m", "u", 2, 4)


def test_unknown_option() -> None:
    """The nearest names are offered."""
    with pytest.raises(ConfigError, match=r"algorithm: got the option 'sclae'.* Did you mean 'scale'\?"):
        bind_options(example, {"sclae": 2})
    with pytest.raises(ConfigError, match="this algorithm has none"):
        bind_options(lambda rewards: rewards, {"sclae": 2})


def test_option_without_a_value() -> None:
    """An option without a default must come from somewhere."""
    with pytest.raises(ConfigError, match="no value for the option 'scale'"):
        bind_options(example, {"shift": 2})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rewards, *rest: rewards, r"a function with \*rest"),
        (lambda rewards, **settings: rewards, r"a function with \*\*settings"),
        (lambda rewards, scale=1: rewards, r"'scale' with a default.*Put a `\*` before 'scale'"),
    ],
)
def test_open_signatures_are_refused(function, message: str) -> None:
    """What cannot be asked of the signature cannot be provided."""
    with pytest.raises(ConfigError, match=message):
        Registry("here").register("x")(function)
