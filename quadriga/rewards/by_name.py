# SPDX-License-Identifier: Apache-2.0
"""Reward functions that are called by the names of their arguments: ours and verl's, TRL's, columns of the row.

    solution_str, ground_truth, data_source, extra_info                     one response: a number, or a dict
    response (the same as solution_str), completion, prompt, columns        likewise
    solution_strs ..., completions, prompts, and columns, all lists         all responses of a batch: a list
    one argument of another name                                            one response, its text

As in TRL a completion is a list of messages where the prompt of the row is one, else text.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quadriga.background import run_coroutine
from quadriga.errors import ConfigError
from quadriga.rewards.components import weighted
from quadriga.rewards.scoring import PLURALS

ROW = "row"  # entry of `extra_info` with the columns of the row, where a function names one
OF_SAMPLE = ("solution_str", "response", "ground_truth", "data_source", "extra_info", *PLURALS)
OF_ROW = ("completion", "prompt")
BATCH_NAMES = {name: PLURALS.get(name, f"{name}s") for name in (*OF_SAMPLE, *OF_ROW)}
OF_BATCH = tuple(BATCH_NAMES.values())


class NamedReward:
    """One function of the user's, and what it is called with."""

    def __init__(self, function: Callable[..., Any], name: str, weight: float = 1.0) -> None:
        self.function, self.name, self.weight = function, name, weight
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            # Some callables written in C have no signature.
            parameters = [inspect.Parameter("text", inspect.Parameter.POSITIONAL_ONLY)]
        named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        self.takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self.names = [one.name for one in named]
        self.required = [one.name for one in named if one.default is one.empty]
        self.is_batch = any(one in OF_BATCH for one in self.names)
        is_known = self.is_batch or any(one in (*OF_SAMPLE, *OF_ROW) for one in self.names)
        self.is_positional = len(self.required) == 1 and not is_known
        of_samples = {*OF_SAMPLE, *(BATCH_NAMES[one] for one in OF_SAMPLE)}
        self.reads_row = not self.is_positional and (
            self.takes_all or not of_samples.issuperset(self.names)
        )

    def check(self, columns: Iterable[str]) -> None:
        """Refuse (ConfigError) an argument that nothing has the name of; `columns` are those of the rows."""
        known = {*OF_SAMPLE, *OF_ROW, *columns, *(OF_BATCH if self.is_batch else ())}
        for name in () if self.is_positional else self.required:
            if name not in known:
                expected = f"one of {', '.join(sorted(known))}; or a single argument, the text of the response"
                raise ConfigError(
                    f"reward {self.name}", got=f"the argument {name!r}", expected=expected
                )

    def __call__(self, samples: Sequence[dict[str, Any]]) -> list[Any]:
        if self.is_positional:
            return [_awaited(self.function(one["solution_str"])) for one in samples]
        if not self.is_batch:
            return [_awaited(self.function(**self._chosen(one))) for one in samples]
        names = dict.fromkeys(name for one in samples for name in one)
        lists = {name: [one.get(name) for one in samples] for name in names}
        lists |= {plural: lists[name] for name, plural in BATCH_NAMES.items()}
        returned = list(_awaited(self.function(**self._chosen(lists))))
        if len(returned) != len(samples):
            raise ValueError(
                f"{self.name} returned {len(returned)} scores, expected {len(samples)}"
            )
        return returned

    def _chosen(self, known: dict[str, Any]) -> dict[str, Any]:
        return (
            known if self.takes_all else {name: known[name] for name in self.names if name in known}
        )


class ItemReward:
    """The score function of a run that calls those of the user; of several, their weighted sum and each by its name."""

    def __init__(self, parts: Sequence[NamedReward]) -> None:
        self.parts = parts

    def __call__(
        self,
        data_source: Any,
        solution_str: str,
        ground_truth: Any,
        extra_info: Any = None,
        solution_with_special_tokens: str | None = None,
        solution_messages: list[dict[str, Any]] | None = None,
    ) -> Any:
        further = (solution_with_special_tokens, solution_messages)
        return self.score([facts(data_source, solution_str, ground_truth, extra_info, *further)])[0]

    def score(self, samples: Sequence[dict[str, Any]]) -> list[Any]:
        """A number or a dict for each sample; None of one of several means that it has no say."""
        results = [part(samples) for part in self.parts]
        if len(self.parts) == 1 and self.parts[0].weight == 1:
            return results[0]
        weights, scores = {part.name: part.weight for part in self.parts}, []
        for values in zip(*results, strict=True):
            said = [
                (name, value)
                for name, value in zip(weights, values, strict=True)
                if value is not None
            ]
            numbers = {
                name: float(value["score"] if isinstance(value, dict) else value)
                for name, value in said
            }
            scores.append(
                weighted(numbers, {name: weights[name] for name in numbers}) if numbers else None
            )
        return scores


class BatchReward(ItemReward):
    """The same for all samples of a batch at a time, where one of the functions takes lists."""

    def __call__(
        self,
        data_sources: Any,
        solution_strs: Any,
        ground_truths: Any,
        extra_infos: Any,
        solutions_with_special_tokens: Any,
        solutions_messages: Any,
    ) -> list[Any]:
        further = (solutions_with_special_tokens, solutions_messages)
        return self.score(
            list(map(facts, data_sources, solution_strs, ground_truths, extra_infos, *further))
        )


def facts(
    data_source: Any,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any,
    solution_with_special_tokens: str | None = None,
    solution_messages: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """What a function may name of one sample."""
    messages = solution_messages or [{"role": "assistant", "content": solution_str}]
    row = dict((extra_info or {}).get(ROW) or {})
    is_chat = isinstance(row.get("prompt"), list)
    return row | {
        "prompt": row.get("prompt"),
        "completion": messages if is_chat else solution_str,
        "solution_messages": messages,
        "solution_with_special_tokens": solution_with_special_tokens or solution_str,
        "solution_str": solution_str,
        "response": solution_str,
        "ground_truth": ground_truth,
        "data_source": data_source,
        "extra_info": {name: value for name, value in (extra_info or {}).items() if name != ROW},
    }


def reward_of(given: Any) -> ItemReward:
    """The score function for a callable, or a list of them, each alone or with its weight: `(function, weight)`.
    Raises ConfigError: something in the list is none of these."""
    parts: list[NamedReward] = []
    for number, one in enumerate(given if isinstance(given, list | tuple) else [given], start=1):
        function, weight = one if isinstance(one, tuple) and len(one) == 2 else (one, 1.0)
        if not callable(function) or not isinstance(weight, int | float):
            raise ConfigError(
                f"reward {number}", got=repr(one), expected="a function, or (function, weight)"
            )
        name = getattr(function, "__name__", type(function).__name__)
        if not name.isidentifier() or name in [part.name for part in parts]:
            name = f"reward_{number}"
        parts.append(NamedReward(function, name, weight))
    if not parts:
        raise ConfigError("reward", got="an empty list", expected="at least one function")
    return (BatchReward if any(part.is_batch for part in parts) else ItemReward)(parts)


def _awaited(returned: Any) -> Any:
    """The result of an `async def` too."""
    return run_coroutine(returned) if inspect.iscoroutine(returned) else returned
