# SPDX-License-Identifier: Apache-2.0
"""User simulators: they reply where the model has called no tool, and may score its turn.

class Teacher(Interaction):
    def start_interaction(self, answer: str) -> None:      # interaction_kwargs: {"name": "teacher", "answer": "42"}
        self.answer = answer

    def generate_response(self, messages: list[dict]) -> Reply:
        if self.answer in messages[-1]["content"]:
            return Reply(score=1.0, is_over=True)
        return Reply("That is not right. Try again.", score=0.0)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from quadriga.config.multi_turn import InteractionFile, read_tool_file
from quadriga.errors import ConfigError, RolloutError
from quadriga.rollout.agent_loop.tool_calls import ToolFailedError, ToolThread, as_text
from quadriga.rollout.agent_loop.tools import class_named


@dataclass(frozen=True)
class Reply:
    """What a user simulator says to the model's turn."""

    text: str = ""  # that the model reads; not read where the conversation is over
    score: float | None = None  # of the model's turn; None: none
    is_over: bool = False  # whether the conversation ends here


class Interaction(ABC):
    """A user simulator. Each conversation has an object of its own; every method may be `async`."""

    @classmethod
    def maker(cls, name: str, config: Mapping[str, Any]) -> "Callable[[], Interaction]":
        """What makes the object of a conversation: `config` of the file has the arguments of `__init__`."""
        return partial(cls, **config)

    def start_interaction(self, **kwargs: Any) -> Any:
        """Begins a conversation; takes what a sample's `interaction_kwargs` say besides the name."""
        return None

    @abstractmethod
    def generate_response(self, messages: list[dict[str, Any]]) -> Any:
        """A `Reply` to the last of the messages, which is the model's."""

    def finalize_interaction(self) -> Any:
        """Called once, however the conversation ended."""
        return None


Interactions: TypeAlias = dict[
    str, Callable[[], Interaction]
]  # by name, what makes the object of a conversation


class UserSimulator:
    """An `Interaction` in one conversation: an async context, in which `reply` may be used.
    Raises RolloutError: there is no interaction of that name.
    `kwargs`: the sample's `interaction_kwargs`; `name` is one of `interactions`.
    `timeout_s`: the limit of one call, in seconds."""

    def __init__(
        self,
        interactions: Interactions,
        kwargs: Mapping[str, Any],
        thread: ToolThread,
        timeout_s: float,
    ) -> None:
        self.name = kwargs["name"]
        if self.name not in interactions:
            expected = (
                f"one of {', '.join(interactions)}"
                if interactions
                else "none: no interaction is configured"
            )
            fix = "Set actor_rollout_ref.rollout.multi_turn.interaction_config_path to a file that has it."
            raise RolloutError(
                "interaction_kwargs.name", got=repr(self.name), expected=expected, fix=fix
            )
        self._make, self._thread, self._timeout_s = interactions[self.name], thread, timeout_s
        self._kwargs = {
            key: value for key, value in kwargs.items() if key != "name" and value is not None
        }

    async def __aenter__(self) -> "UserSimulator":
        made = self._thread.call(f"interaction {self.name}, made", self._make, {}, self._timeout_s)
        self._interaction: Interaction = await made
        await self._call("start_interaction", **self._kwargs)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._call("finalize_interaction")

    async def reply(self, messages: list[dict[str, Any]]) -> Reply:
        """What it says to the last message.
        Raises ToolFailedError: it raised, took too long, or returned something else."""
        reply = await self._call(
            "generate_response", messages=[dict(message) for message in messages]
        )
        where = f"interaction {self.name}, generate_response"
        if not isinstance(reply, Reply):
            got = f"a response of type {type(reply).__name__}"
            raise ToolFailedError(where, got=got, expected="a Reply(text, score, is_over)")
        score = None if reply.score is None else float(reply.score)
        return Reply(as_text(reply.text, where), score, bool(reply.is_over))

    async def _call(self, method: str, /, **kwargs: Any) -> Any:
        where, function = f"interaction {self.name}, {method}", getattr(self._interaction, method)
        return await self._thread.call(where, function, kwargs, self._timeout_s)


def load_interactions(path: str) -> Interactions:
    """The interactions of a YAML file; else a ConfigError."""
    where = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
    folder = Path(path).expanduser().resolve().parent
    found: Interactions = {}
    for entry in read_tool_file(path, InteractionFile).interaction:
        if entry.name in found:
            raise ConfigError(
                where,
                got=f"two interactions with the name {entry.name!r}",
                expected="a name for each",
            )
        found[entry.name] = class_named(entry.class_name, folder, Interaction, where).maker(
            entry.name, entry.config
        )
    return found
