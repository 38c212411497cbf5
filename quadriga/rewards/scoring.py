# SPDX-License-Identifier: Apache-2.0
"""The score function of a run: the built-in graders, one for each data source, or a user's function from a file.

A grader's module, and the library behind it, is loaded when its first sample arrives: a run that grades with GSM8K's
rule does not need math-verify. A `ScoreFunction` only says which function it is. It is loaded in each grading process,
never on the driver, so it does not have to be picklable, and whatever its file imports stays out of the trainer.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from quadriga.errors import ConfigError, RewardError
from quadriga.user_file import FILE, PACKAGE, import_file, member_of

GRADERS: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    **dict.fromkeys(
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "math"
    ),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), "math_dapo"),
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code"),
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
    "numina_": "math",
}
"""Beginning of a data source's name -> module."""

WITHOUT_TRUTH = frozenset(
    {"reasoning_gym"}
)  # modules that grade by other columns than the ground truth
_PACKAGES = {"math_verify": "math-verify", "sympy": "math-verify", "reasoning_gym": "reasoning-gym"}


def grader_name(data_source: str, where: str = "data_source") -> str:
    """Name of the grader module for a data source; RewardError, which names `where`, where no grader knows it."""
    if data_source in GRADERS:
        return GRADERS[data_source]
    for prefix, name in GRADERS_BY_PREFIX.items():
        if str(data_source).startswith(prefix):
            return name
    known = ", ".join([*GRADERS, *(f"{prefix}..." for prefix in GRADERS_BY_PREFIX)])
    fix = "Set custom_reward_function.path to a file with a compute_score function for this data."
    raise RewardError(
        where,
        got=repr(data_source),
        expected=f"one that a built-in grader knows ({known})",
        fix=fix,
    )


@cache
def load_grader(name: str) -> Callable[..., Any]:
    """The `compute_score` function of a grader module; RewardError where the library behind it is missing."""
    try:
        return import_module(f"quadriga.rewards.graders.{name}").compute_score
    except ModuleNotFoundError as error:
        package = _PACKAGES.get(error.name or "")
        if package is None:
            raise
        got, fix = f"no module named {error.name}", f"Install it: pip install {package}."
        raise RewardError(
            f"grader {name}", got=got, expected=f"the package {package}", fix=fix
        ) from error


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Grade one response by the rule that belongs to its data source.
    Returns "score", the reward, and "pred", the answer that was read from the response.
    `data_source`: the data set's name, a key of `GRADERS`.
    `solution_str`: the response, decoded.
    `ground_truth`: the right answer, in the form the grader expects.
    `extra_info`: what else the row says.
    `options`: the grader's own options (`method="flexible"` for GSM8K). One that has a grader's name holds a dict of
    options for that grader alone (`code={"total_s": 5}`): so one run may grade several kinds of data."""
    name = grader_name(data_source)
    own = options.get(name, {})
    if not isinstance(own, Mapping):
        where = f"custom_reward_function.reward_kwargs.{name}"
        raise RewardError(where, got=repr(own), expected=f"the options of the grader {name}")
    names = {*GRADERS.values(), *GRADERS_BY_PREFIX.values()}
    options = {**{key: value for key, value in options.items() if key not in names}, **own}
    if name == "reasoning_gym":
        options = {"task": data_source.removeprefix("reasoning_gym/"), **options}
    return load_grader(name)(solution_str, ground_truth, extra_info, **options)


ITEM_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
PLURALS = {
    "solution_with_special_tokens": "solutions_with_special_tokens",
    "solution_messages": "solutions_messages",
}
"""Further arguments, and their names in batches: passed to functions that name them."""
POLICY_TEXT = "policy_str"  # entry of a sample's row: what the policy itself wrote, its turns joined by line ends
_SECTION = "custom_reward_function"


@dataclass(frozen=True)
class ScoreFunction:
    """Which function grades, and with which fixed arguments."""

    # File that holds it, or "pkg://package.module"; None for the built-in `default_compute_score`.
    path: str | None = None
    name: str = "compute_score"
    reward_kwargs: dict[str, Any] = field(
        default_factory=dict
    )  # further keyword arguments of every call
    # Whether one call grades a list of samples (`BATCH_ARGUMENTS`) or one sample (`ITEM_ARGUMENTS`).
    is_batch: bool = False

    def __post_init__(self) -> None:
        if taken := [name for name in self.reward_kwargs if name in self.arguments]:
            expected = "names that a sample's own columns do not have"
            raise ConfigError(f"{_SECTION}.reward_kwargs", got=", ".join(taken), expected=expected)
        if self.path is None or self.path.startswith(PACKAGE):
            return
        file = Path(self.path.removeprefix(FILE)).expanduser().absolute()
        if not file.is_file():
            fix = f"Nothing is there, seen from {Path.cwd()}." if not file.exists() else ""
            raise ConfigError(f"{_SECTION}.path", got=self.path, expected="a Python file", fix=fix)
        # The grading processes may see another working directory.
        object.__setattr__(self, "path", str(file))

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments that each call passes, `reward_kwargs` aside."""
        return BATCH_ARGUMENTS if self.is_batch else ITEM_ARGUMENTS

    def facts_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments for one sample, from its row: a built-in grader reads only what the policy itself wrote."""
        text = row["solution_str"]
        facts = {name: row[name] for name in ITEM_ARGUMENTS}
        if self.path is None:
            return {**facts, "solution_str": row.get(POLICY_TEXT, text)}
        messages = row.get("solution_messages") or [{"role": "assistant", "content": text}]
        return {
            **facts,
            "solution_with_special_tokens": row.get("solution_with_special_tokens", text),
            "solution_messages": messages,
        }

    def batch_of(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        """The arguments of one call for samples with such arguments."""
        return {PLURALS.get(name, f"{name}s"): [row[name] for row in rows] for name in rows[0]}

    def accepted_by(self, function: Callable[..., Any]) -> frozenset[str]:
        """Names of the arguments that a loaded function is called with."""
        further = PLURALS.values() if self.is_batch else PLURALS.keys()
        try:
            named = inspect.signature(function).parameters.keys()
        except (TypeError, ValueError):
            named = frozenset[str]()
        return frozenset(self.arguments) | (set(further) & set(named))

    def load(self) -> Callable[..., Any]:
        """The function itself; ConfigError where its file fails, lacks it, or it takes other arguments."""
        function: Callable[..., Any] = default_compute_score
        if self.path is not None:
            function = member_of(
                import_file(self.path, f"{_SECTION}.path"), self.name, f"{_SECTION}.name"
            )
        # A partial has no frame of its own: a traceback shows the user's function and nothing of ours.
        loaded = partial(function, **self.reward_kwargs)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            # Some callables written in C have no signature; then the first call has to show it.
            return loaded
        try:
            signature.bind(**{**dict.fromkeys(self.accepted_by(function)), **self.reward_kwargs})
        except TypeError as error:
            names = tuple(signature.parameters)
            if (names[:1], names[2:]) == (
                ("data_source",),
                ("ground_truth",),
            ) and not self.is_batch:
                # As verl's main_eval calls it: by place, whatever the response is called.
                return lambda data_source, solution_str, ground_truth, **_: loaded(
                    data_source, solution_str, ground_truth
                )
            fix = "Change the function's parameters, add **kwargs to them, or give what it wants in reward_kwargs."
            if not self.is_batch and signature.parameters.keys() & set(BATCH_ARGUMENTS):
                fix = "A function that takes lists, of a whole batch, needs reward_model.reward_manager=batch."
            fixed = (
                f" and reward_kwargs ({', '.join(self.reward_kwargs)})"
                if self.reward_kwargs
                else ""
            )
            where = f"{_SECTION}.name={self.name}"
            expected = (
                f"a function that takes the keyword arguments {', '.join(self.arguments)}{fixed}"
            )
            raise ConfigError(
                where, got=f"{self.name}{signature}: {error}", expected=expected, fix=fix
            ) from error
        return loaded
