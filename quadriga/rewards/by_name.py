# SPDX-License-Identifier: Apache-2.0
"""Reward functions that are called by the names of their arguments.

A function whose arguments have these names grades one response, and returns a number or a dict:

    solution_str, ground_truth, data_source, extra_info     this package's names
    completion, prompt                                      TRL's names
    response                                                same as solution_str
    any other name                                          column of the data row
    a single argument of an unknown name                    text of the response

With plural names (`solution_strs`, `completions`, ...) it grades a batch: its arguments, columns
too, are lists, and it returns a list. As in TRL, a completion is a list of messages if the prompt
of the row is one, else text.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quadriga.background import run_coroutine
from quadriga.errors import ConfigError
from quadriga.rewards.components import weighted

OPTIONAL_ARGUMENTS = {
    "solution_with_special_tokens": "solutions_with_special_tokens",
    "solution_messages": "solutions_messages",
}
"""Arguments that are passed only to functions that name them -> their names for a batch."""
# Entry of `extra_info` with the columns of the row; present if a function reads one of them.
ROW = "row"
# Arguments that every sample has, and arguments that are made from columns of the sample's row.
SAMPLE_ARGUMENTS = (
    "solution_str",
    "response",
    "ground_truth",
    "data_source",
    "extra_info",
    *OPTIONAL_ARGUMENTS,
)
ROW_ARGUMENTS = ("completion", "prompt")
# Name of an argument -> its name in functions that grade a batch.
BATCH_NAMES = {
    name: OPTIONAL_ARGUMENTS.get(name, f"{name}s") for name in (*SAMPLE_ARGUMENTS, *ROW_ARGUMENTS)
}
PLURAL_NAMES = tuple(BATCH_NAMES.values())
# A function with one of these names is called by the names of its arguments. All other names above
# may also be those of an ordinary `compute_score` (`quadriga.rewards.scoring`).
_SINGULAR = ("response", *ROW_ARGUMENTS)
BY_NAME_ONLY = frozenset([*_SINGULAR, *(BATCH_NAMES[name] for name in _SINGULAR)])


class NamedReward:
    """A user's function that is called by the names of its arguments, with its weight.

    Attributes:
        function: the function.
        name: name under which its score is logged.
        weight: weight of its score in the sum.
        takes_all: whether it takes any keyword argument (`**kwargs`).
        names: names of its arguments.
        required: names of its arguments without a default.
        is_batch: whether one call grades all samples of a batch.
        is_positional: whether it is called with the text of the response as its only argument.
        reads_row: whether it may read columns of the row.
    """

    def __init__(self, function: Callable[..., Any], name: str, weight: float = 1.0) -> None:
        self.function = function
        self.name = name
        self.weight = weight
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            # Some callables written in C have no signature. They get the text of the response.
            parameters = [inspect.Parameter("text", inspect.Parameter.POSITIONAL_ONLY)]

        self.takes_all = False
        self.names: list[str] = []
        self.required: list[str] = []
        for parameter in parameters:
            if parameter.kind is parameter.VAR_KEYWORD:
                self.takes_all = True
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                self.names.append(parameter.name)
                if parameter.default is parameter.empty:
                    self.required.append(parameter.name)

        names = set(self.names)
        # One plural name is enough: a function takes either one sample or a batch.
        self.is_batch = not names.isdisjoint(PLURAL_NAMES)
        has_known_name = self.is_batch or not names.isdisjoint(BATCH_NAMES)
        self.is_positional = len(self.required) == 1 and not has_known_name
        # All other arguments are columns of the row, or are made from columns.
        sample_names = {*SAMPLE_ARGUMENTS, *(BATCH_NAMES[name] for name in SAMPLE_ARGUMENTS)}
        has_other_name = self.takes_all or not names <= sample_names
        self.reads_row = has_other_name and not self.is_positional

    def check(self, columns: Iterable[str]) -> None:
        """Raise a ConfigError for a required argument that will get no value.

        Args:
            columns: names of the columns of the rows.

        Raises:
            ConfigError: an argument has neither a known name nor the name of a column.
        """
        if self.is_positional:
            return
        known = {*SAMPLE_ARGUMENTS, *ROW_ARGUMENTS, *columns}
        if self.is_batch:
            known.update(PLURAL_NAMES)
        for name in self.required:
            if name not in known:
                names = ", ".join(sorted(known))
                raise ConfigError(
                    f"reward {self.name}",
                    got=f"the argument {name!r}",
                    expected=f"one of {names}; or a single argument, the text of the response",
                )

    def __call__(self, samples: Sequence[dict[str, Any]]) -> list[Any]:
        """Call the function for samples.

        Args:
            samples: all arguments of each sample, by name (`collect_arguments`).

        Returns:
            What the function returned for each sample.

        Raises:
            ValueError: a function that grades a batch returned another number of scores.
        """
        if self.is_positional:
            return [_wait_for_result(self.function(sample["solution_str"])) for sample in samples]
        if not self.is_batch:
            return [_wait_for_result(self.function(**self._select(sample))) for sample in samples]

        # Turn one dict per sample into one dict of lists. Columns keep their names, and all other
        # arguments can also be named in the plural.
        names = dict.fromkeys(name for sample in samples for name in sample)
        lists = {name: [sample.get(name) for sample in samples] for name in names}
        for name, batch_name in BATCH_NAMES.items():
            lists[batch_name] = lists[name]
        returned = list(_wait_for_result(self.function(**self._select(lists))))
        if len(returned) != len(samples):
            raise ValueError(
                f"{self.name} returned {len(returned)} scores, expected {len(samples)}"
            )
        return returned

    def _select(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Select the arguments that the function takes."""
        if self.takes_all:
            return arguments
        return {name: arguments[name] for name in self.names if name in arguments}


class ItemReward:
    """Score function of a run that calls one or several functions of the user for each sample.

    The score is the weighted sum of the functions' scores. Each of these is logged under the name
    of its function. A single function of weight 1 keeps whatever else it returns.

    Args:
        parts: the functions.
    """

    def __init__(self, parts: Sequence[NamedReward]) -> None:
        self.parts = parts

    @property
    def reads_row(self) -> bool:
        """Whether one of the functions may read columns of the row."""
        return any(part.reads_row for part in self.parts)

    def __call__(
        self,
        data_source: Any,
        solution_str: str,
        ground_truth: Any,
        extra_info: Any = None,
        solution_with_special_tokens: str | None = None,
        solution_messages: list[dict[str, Any]] | None = None,
    ) -> Any:
        sample = collect_arguments(
            data_source,
            solution_str,
            ground_truth,
            extra_info,
            solution_with_special_tokens,
            solution_messages,
        )
        return self.score([sample])[0]

    def score(self, samples: Sequence[dict[str, Any]]) -> list[Any]:
        """Score samples by the weighted sum over all functions.

        A function that returns None for a sample does not take part in the sample's score. If all
        of them return None, the sample has no score.

        Args:
            samples: all arguments of each sample, by name (`collect_arguments`).

        Returns:
            For each sample a number or a dict with "score". The score None means that the sample
            has no score on purpose.
        """
        results = [part(samples) for part in self.parts]
        scores = results[0]
        # A single function of weight 1 may return a dict with entries of its own.
        if len(self.parts) > 1 or self.parts[0].weight != 1:
            scores = [self._combine(values) for values in zip(*results, strict=True)]
        return [{"score": None} if score is None else score for score in scores]

    def _combine(self, values: Sequence[Any]) -> dict[str, float] | None:
        """Combine what each function returned for one sample; None if no function gave a score."""
        components = {}
        weights = {}
        for part, value in zip(self.parts, values, strict=True):
            score = value["score"] if isinstance(value, dict) else value
            if score is not None:
                components[part.name] = float(score)
                weights[part.name] = part.weight
        return weighted(components, weights) if components else None


class BatchReward(ItemReward):
    """Score function of a run in which at least one function of the user grades batches."""

    def __call__(
        self,
        data_sources: Any,
        solution_strs: Any,
        ground_truths: Any,
        extra_infos: Any,
        solutions_with_special_tokens: Any,
        solutions_messages: Any,
    ) -> list[Any]:
        samples = map(
            collect_arguments,
            data_sources,
            solution_strs,
            ground_truths,
            extra_infos,
            solutions_with_special_tokens,
            solutions_messages,
        )
        return self.score(list(samples))


def collect_arguments(
    data_source: Any,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any,
    solution_with_special_tokens: str | None = None,
    solution_messages: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Collect all arguments that a function may name, for one sample.

    Args:
        data_source: name of the data set.
        solution_str: the response, decoded without special tokens.
        ground_truth: the right answer.
        extra_info: further facts of the row. The entry `ROW` holds the columns of the row.
        solution_with_special_tokens: the response with special tokens. None: `solution_str`.
        solution_messages: messages after the prompt. None: one message with the response.

    Returns:
        All arguments by name, including the columns of the row. A column that has the name of
        another argument is left out.
    """
    messages = solution_messages or [{"role": "assistant", "content": solution_str}]
    extra_info = dict(extra_info or {})
    # The function sees `extra_info` as it is in the data, without the entry that was added.
    row = dict(extra_info.pop(ROW, None) or {})
    prompt = row.get("prompt")
    return row | {
        "prompt": prompt,
        "completion": messages if isinstance(prompt, list) else solution_str,
        "solution_messages": messages,
        "solution_with_special_tokens": solution_with_special_tokens or solution_str,
        "solution_str": solution_str,
        "response": solution_str,
        "ground_truth": ground_truth,
        "data_source": data_source,
        "extra_info": extra_info,
    }


def reward_of(functions: Any) -> ItemReward:
    """Make one score function of one or several functions of the user.

    Args:
        functions: a function, or a list of functions and pairs `(function, weight)`.

    Returns:
        One score function that calls all of them.

    Raises:
        ConfigError: something in the list is neither a function nor a pair, or the list is empty.
    """
    entries = functions if isinstance(functions, list | tuple) else [functions]
    parts = []
    for number, entry in enumerate(entries, start=1):
        function = entry
        weight = 1.0
        if isinstance(entry, tuple) and len(entry) == 2:
            function, weight = entry
        if not callable(function) or not isinstance(weight, int | float):
            raise ConfigError(
                f"reward {number}", got=repr(entry), expected="a function, or (function, weight)"
            )
        # Scores are logged by name, so names must differ from each other. A lambda has none.
        name = getattr(function, "__name__", type(function).__name__)
        taken_names = [part.name for part in parts]
        if len(entries) > 1 or weight != 1:
            # The weighted sum is called "score", so no function can be logged by that name.
            taken_names.append("score")
        if not name.isidentifier() or name in taken_names:
            name = f"reward_{number}"
        parts.append(NamedReward(function, name, weight))
    if not parts:
        raise ConfigError("reward", got="an empty list", expected="at least one function")
    cls = BatchReward if any(part.is_batch for part in parts) else ItemReward
    return cls(parts)


def _wait_for_result(returned: Any) -> Any:
    """Run the coroutine that an `async def` function returned. Return anything else as it is."""
    return run_coroutine(returned) if inspect.iscoroutine(returned) else returned
