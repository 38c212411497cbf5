# SPDX-License-Identifier: Apache-2.0
"""The score function of a run: the built-in one, or a user's, loaded from a file by path and name.

A `ScoreFunction` only says which function it is. It is loaded in each grading process, never on the driver, so it
does not have to be picklable, and whatever its file imports stays out of the trainer.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from quadriga.errors import ConfigError
from quadriga.rewards.scoring import default_compute_score
from quadriga.user_file import import_file, member_of

ITEM_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_SECTION = "custom_reward_function"


@dataclass(frozen=True)
class ScoreFunction:
    """Which function grades, and with which fixed arguments.

    Attributes:
        path: file that holds it; None for the built-in `default_compute_score`.
        name: its name in that file.
        reward_kwargs: further keyword arguments of every call.
        is_batch: whether one call grades a list of samples (`BATCH_ARGUMENTS`) or one sample (`ITEM_ARGUMENTS`).
    """

    path: str | None = None
    name: str = "compute_score"
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    is_batch: bool = False

    def __post_init__(self) -> None:
        taken = [name for name in self.reward_kwargs if name in self.arguments]
        if taken:
            expected = "names that a sample's own columns do not have"
            raise ConfigError(f"{_SECTION}.reward_kwargs", got=", ".join(taken), expected=expected)
        if self.path is None:
            return
        file = Path(self.path).expanduser().absolute()
        if not file.is_file():
            raise ConfigError(
                f"{_SECTION}.path",
                got=self.path,
                expected="a Python file",
                fix=f"Nothing is there, seen from {Path.cwd()}." if not file.exists() else "",
            )
        # The grading processes may see another working directory.
        object.__setattr__(self, "path", str(file))

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments that each call passes, `reward_kwargs` aside."""
        return BATCH_ARGUMENTS if self.is_batch else ITEM_ARGUMENTS

    def load(self) -> Callable[..., Any]:
        """The function itself, ready to be called with keyword arguments.

        Raises:
            ConfigError: if its file fails, has no such function, or the function does not take the arguments.
        """
        function: Callable[..., Any] = default_compute_score
        if self.path is not None:
            function = member_of(import_file(self.path, f"{_SECTION}.path"), self.name, f"{_SECTION}.name")
        self._check_signature(function)
        # A partial has no frame of its own: a traceback shows the user's function and nothing of ours.
        return partial(function, **self.reward_kwargs)

    def _check_signature(self, function: Callable[..., Any]) -> None:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            # Some callables written in C do not tell their arguments; then the first call has to show it.
            return
        try:
            signature.bind(**{**dict.fromkeys(self.arguments), **self.reward_kwargs})
        except TypeError as error:
            fixed = f" and reward_kwargs ({', '.join(self.reward_kwargs)})" if self.reward_kwargs else ""
            raise ConfigError(
                f"{_SECTION}.name={self.name}",
                got=f"{self.name}{signature}: {error}",
                expected=f"a function that takes the keyword arguments {', '.join(self.arguments)}{fixed}",
                fix="Change the function's parameters, or add **kwargs to them.",
            ) from error
