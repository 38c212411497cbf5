# SPDX-License-Identifier: Apache-2.0
"""The score function of a run: the built-in graders, one per data source, or a user's function.

A grader's module, and the library that the grader needs, is loaded when its first sample arrives: a
run that grades with GSM8K's rule does not need math-verify. A `ScoreFunction` only describes the
function. Grading processes load the function by this description, the driver does not. So the
function need not be picklable, and whatever its file imports stays out of the trainer.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from quadriga.errors import ConfigError, RewardError
from quadriga.rewards.by_name import (
    BY_NAME_ONLY,
    OPTIONAL_ARGUMENTS,
    PLURAL_NAMES,
    ROW,
    BatchReward,
    ItemReward,
    NamedReward,
)
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
"""Prefix of a data source's name -> module in `quadriga.rewards.graders`."""

# Modules whose graders need no ground truth: they grade by other columns.
WITHOUT_TRUTH = frozenset({"reasoning_gym"})
# Name of a module that a grader imports -> the package to install.
_PACKAGES = {"math_verify": "math-verify", "sympy": "math-verify", "reasoning_gym": "reasoning-gym"}


def grader_name(data_source: str, where: str = "data_source") -> str:
    """Look up the grader of a data source.

    Args:
        data_source: name of the data set.
        where: where the name comes from, for the error.

    Returns:
        Name of a module in `quadriga.rewards.graders`.

    Raises:
        RewardError: no built-in grader knows the data source.
    """
    if data_source in GRADERS:
        return GRADERS[data_source]
    for prefix, name in GRADERS_BY_PREFIX.items():
        if str(data_source).startswith(prefix):
            return name
    known = ", ".join([*GRADERS, *(f"{prefix}..." for prefix in GRADERS_BY_PREFIX)])
    raise RewardError(
        where,
        got=repr(data_source),
        expected=f"one that a built-in grader knows ({known})",
        fix="Set custom_reward_function.path to a file with a compute_score function for it.",
    )


@cache
def load_grader(name: str) -> Callable[..., Any]:
    """Load the `compute_score` function of a grader.

    Args:
        name: name of a module in `quadriga.rewards.graders`.

    Raises:
        RewardError: the library that the grader needs is not installed.
    """
    try:
        return import_module(f"quadriga.rewards.graders.{name}").compute_score
    except ModuleNotFoundError as error:
        package = _PACKAGES.get(error.name or "")
        # Not a library of a grader: the error is this package's own.
        if package is None:
            raise
        raise RewardError(
            f"grader {name}",
            got=f"no module named {error.name}",
            expected=f"the package {package}",
            fix=f"Install it: pip install {package}.",
        ) from error


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Grade one response by the rule of its data source.

    Args:
        data_source: name of the data set; chooses the grader (`grader_name`).
        solution_str: the response, decoded.
        ground_truth: the right answer, in the form that the grader expects.
        extra_info: further facts of the row.
        **options: options of the grader (`method="flexible"` for GSM8K). One run may grade several
            kinds of data, so an option with the name of a grader holds a dict of options for this
            grader alone (`code={"total_s": 5}`).

    Returns:
        At least "score", the reward, and "pred", the answer that was read from the response.

    Raises:
        RewardError: no grader knows the data source, its library is missing, or the options for
            one grader are not a dict.
    """
    name = grader_name(data_source)
    grader_options = options.get(name, {})
    if not isinstance(grader_options, Mapping):
        raise RewardError(
            f"custom_reward_function.reward_kwargs.{name}",
            got=repr(grader_options),
            expected=f"a dict with the options of the grader {name}",
        )
    # Options without the dicts for single graders; options for this grader alone take precedence.
    all_graders = {*GRADERS.values(), *GRADERS_BY_PREFIX.values()}
    common_options = {key: value for key, value in options.items() if key not in all_graders}
    options = {**common_options, **grader_options}
    if name == "reasoning_gym":
        options.setdefault("task", data_source.removeprefix("reasoning_gym/"))
    return load_grader(name)(solution_str, ground_truth, extra_info, **options)


ITEM_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
# Entry of `Samples.rows` with the text that the policy itself wrote, its turns joined by line ends.
POLICY_TEXT = "policy_str"
_SECTION = "custom_reward_function"


@dataclass(frozen=True)
class ScoreFunction:
    """Description of the function that grades, by which grading processes load the function.

    Attributes:
        path: file of the function, or "pkg://package.module". None: the built-in
            `default_compute_score`.
        name: name of the function in the file.
        reward_kwargs: further keyword arguments of every call.
        is_batch: whether a call grades a list of samples (`BATCH_ARGUMENTS`). Otherwise it grades
            one sample (`ITEM_ARGUMENTS`).

    Raises:
        ConfigError: there is no such file, or `reward_kwargs` has the name of another argument.
    """

    path: str | None = None
    name: str = "compute_score"
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    is_batch: bool = False

    def __post_init__(self) -> None:
        taken_names = [name for name in self.reward_kwargs if name in self.arguments]
        if taken_names:
            raise ConfigError(
                f"{_SECTION}.reward_kwargs",
                got=", ".join(taken_names),
                expected="names other than those of a sample's own columns",
            )
        if self.path is None or self.path.startswith(PACKAGE):
            return
        file = Path(self.path.removeprefix(FILE)).expanduser().absolute()
        if not file.is_file():
            fix = ""
            if not file.exists():
                fix = f"There is no such path; the working directory is {Path.cwd()}."
            raise ConfigError(f"{_SECTION}.path", got=self.path, expected="a Python file", fix=fix)
        # Make the path absolute: the grading processes may have another working directory. The
        # class is frozen, so the field is set by this detour.
        object.__setattr__(self, "path", str(file))

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments that every call passes, in addition to `reward_kwargs`."""
        return BATCH_ARGUMENTS if self.is_batch else ITEM_ARGUMENTS

    def arguments_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the call for one sample.

        For built-in graders, `solution_str` has only the text that the policy itself wrote. A
        user's function also sees what tools and users said in between.

        Args:
            row: entry of `Samples.rows`.

        Returns:
            The arguments by name. A user's function may not accept all of them
            (`accepted_names`).
        """
        arguments = {name: row[name] for name in ITEM_ARGUMENTS}
        text = row["solution_str"]
        if self.path is None:
            arguments["solution_str"] = row.get(POLICY_TEXT, text)
            return arguments
        messages = row.get("solution_messages") or [{"role": "assistant", "content": text}]
        arguments["solution_with_special_tokens"] = row.get("solution_with_special_tokens", text)
        arguments["solution_messages"] = messages
        return arguments

    def batch_arguments_of(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        """Arguments of one call for all samples: each one becomes a list, under its plural name.

        Args:
            rows: for each sample what `arguments_of` returned.
        """
        return {
            OPTIONAL_ARGUMENTS.get(name, f"{name}s"): [row[name] for row in rows]
            for name in rows[0]
        }

    def accepted_names(self, function: Callable[..., Any]) -> frozenset[str]:
        """Names of the arguments that each call of the loaded function gets.

        An optional argument (`OPTIONAL_ARGUMENTS`) is among them if the function has a parameter of
        this name. If the function reads columns of the row, `ROW` is among them, although it is an
        entry of `extra_info`: so the driver learns that this entry is needed.

        Args:
            function: the function that `load` returned.
        """
        optional = OPTIONAL_ARGUMENTS.values() if self.is_batch else OPTIONAL_ARGUMENTS.keys()
        row = [ROW] if isinstance(function, ItemReward) and function.reads_row else []
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):
            # Some callables written in C have no signature.
            return frozenset(self.arguments)
        optional_names = [name for name in optional if name in parameters]
        return frozenset([*self.arguments, *optional_names, *row])

    def load(self) -> Callable[..., Any]:
        """Load the function, with `reward_kwargs` bound.

        Returns:
            A function that takes `arguments` by keyword. It is an adapter if the user's function
            has TRL's argument names (`quadriga.rewards.by_name`) or takes three arguments by
            position.

        Raises:
            ConfigError: the file cannot be imported, the function is not in it, or the function
                takes other arguments.
        """
        function: Callable[..., Any] = default_compute_score
        if self.path is not None:
            module = import_file(self.path, f"{_SECTION}.path")
            function = member_of(module, self.name, f"{_SECTION}.name")
        # A partial has no frame of its own, so a traceback begins with the user's function.
        loaded = partial(function, **self.reward_kwargs)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            # Some callables written in C have no signature that could be checked.
            return loaded

        # Check that a call with all arguments is possible. `ROW` is an entry of `extra_info`.
        arguments = dict.fromkeys(self.accepted_names(function) - {ROW}) | self.reward_kwargs
        try:
            signature.bind(**arguments)
        except TypeError as error:
            # The function does not take this package's names. It may take TRL's names. Or it takes
            # data source, response and truth, and only the second has another name, as in
            # `f(data_source, answer, ground_truth)`.
            names = list(signature.parameters)
            takes_positions = names[:1] == ["data_source"] and names[2:] == ["ground_truth"]
            if not takes_positions and not BY_NAME_ONLY.isdisjoint(names):
                part = NamedReward(loaded, self.name)
                if self.is_batch:
                    return BatchReward([part])
                # A function that grades batches needs the manager `batch`: the error below says so.
                if not part.is_batch:
                    return ItemReward([part])
            if self.is_batch or not takes_positions:
                raise self._signature_error(signature, error) from error
            # Pass the three arguments by position, because the name of the second is not known.
            return lambda data_source, solution_str, ground_truth, **_: loaded(
                data_source, solution_str, ground_truth
            )
        return loaded

    def _signature_error(self, signature: inspect.Signature, error: TypeError) -> ConfigError:
        """Make the error for a function that takes other arguments.

        Args:
            signature: signature of the function.
            error: why a call with this package's arguments is impossible.
        """
        expected = f"a function that takes the keyword arguments {', '.join(self.arguments)}"
        if self.reward_kwargs:
            expected += f" and reward_kwargs ({', '.join(self.reward_kwargs)})"
        fix = (
            "Change the function's parameters, add **kwargs to them, "
            "or pass what else it needs in reward_kwargs."
        )
        if not self.is_batch and signature.parameters.keys() & set(PLURAL_NAMES):
            fix = (
                "A function that takes lists, of a whole batch, "
                "needs reward_model.reward_manager=batch."
            )
        return ConfigError(
            f"{_SECTION}.name={self.name}",
            got=f"{self.name}{signature}: {error}",
            expected=expected,
            fix=fix,
        )
