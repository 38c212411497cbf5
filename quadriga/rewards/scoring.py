# SPDX-License-Identifier: Apache-2.0
"""From a data source's name to the grader that knows it.

A grader's module, and the library behind it, is loaded when its first sample arrives: a run that grades with
GSM8K's rule does not need math-verify.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from quadriga.errors import RewardError

GRADERS: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math": "math",
    "math_dapo": "math_dapo",
    "numina_aops_forum": "math",
    "numina_synthetic_math": "math",
    "numina_amc_aime": "math",
    "numina_synthetic_amc": "math",
    "numina_cn_k12": "math",
    "numina_olympiads": "math",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "hiyouga/geometry3k": "geometry3k",
    "exact_match": "exact_match",
    "quadriga/largest": "largest_number",
}
"""Data source -> module in `quadriga.rewards.graders`."""

GRADERS_BY_PREFIX: dict[str, str] = {
    "reasoning_gym/": "reasoning_gym",
    "exact_match/": "exact_match",
    "searchR1_": "question_answering",
    "aime": "math_dapo",
}
"""Beginning of a data source's name -> module."""

_PACKAGES = {"math_verify": "math-verify", "sympy": "math-verify", "reasoning_gym": "reasoning-gym"}


def grader_name(data_source: str) -> str:
    """Name of the grader module for a data source.

    Raises:
        RewardError: if no grader knows this data source.
    """
    if data_source in GRADERS:
        return GRADERS[data_source]
    for prefix, name in GRADERS_BY_PREFIX.items():
        if str(data_source).startswith(prefix):
            return name
    known = ", ".join([*GRADERS, *(f"{prefix}..." for prefix in GRADERS_BY_PREFIX)])
    raise RewardError(
        "data_source",
        got=repr(data_source),
        expected=f"one that a built-in grader knows ({known})",
        fix="Set custom_reward_function.path to a file with a compute_score function for this data.",
    )


@cache
def load_grader(name: str) -> Callable[..., Any]:
    """The `compute_score` function of a grader module.

    Raises:
        RewardError: if the library that it grades with is not installed.
    """
    try:
        return import_module(f"quadriga.rewards.graders.{name}").compute_score
    except ModuleNotFoundError as error:
        package = _PACKAGES.get(error.name or "")
        if package is None:
            raise
        raise RewardError(
            f"grader {name}",
            got=f"no module named {error.name}",
            expected=f"the package {package}",
            fix=f"Install it: pip install {package}.",
        ) from error


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Grade one response by the rule that belongs to its data source.

    Args:
        data_source: the data set's name, see `GRADERS`.
        solution_str: the response, decoded.
        ground_truth: the right answer, in the form the grader expects.
        extra_info: what else the row says.
        options: the grader's own options (`method="flexible"` for GSM8K). One that has a grader's name holds a dict of
            options for that grader alone (`code={"total_s": 5}`): so one run may grade several kinds of data.

    Returns:
        "score", the reward, and "pred", the answer that was read from the response.
    """
    name = grader_name(data_source)
    options = _options_of(name, options)
    if name == "reasoning_gym":
        options = {"task": data_source.removeprefix("reasoning_gym/"), **options}
    return load_grader(name)(solution_str, ground_truth, extra_info, **options)


def _options_of(name: str, options: dict[str, Any]) -> dict[str, Any]:
    names = {*GRADERS.values(), *GRADERS_BY_PREFIX.values()}
    own = options.get(name, {})
    if not isinstance(own, Mapping):
        raise RewardError(
            f"custom_reward_function.reward_kwargs.{name}", got=repr(own), expected=f"the options of the grader {name}"
        )
    return {**{key: value for key, value in options.items() if key not in names}, **own}
