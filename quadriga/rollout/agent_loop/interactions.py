# SPDX-License-Identifier: Apache-2.0
"""User simulators, which reply when the model has called no tool, and may score its turn.

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
from quadriga.rollout.agent_loop.tool_calls import ToolFailedError, ToolThread, as_text, end_use
from quadriga.rollout.agent_loop.tools import load_class, without_none


@dataclass(frozen=True)
class Reply:
    """Reply of a user simulator to the model's turn."""

    text: str = ""  # text that the model reads; not used if the conversation is over
    score: float | None = None  # score of the model's turn; None: no score
    is_over: bool = False  # whether the conversation ends here


class Interaction(ABC):
    """Base class of user simulators. Each conversation has its own object.

    Every method may be `async`.
    """

    @classmethod
    def maker(cls, name: str, config: Mapping[str, Any]) -> "Callable[[], Interaction]":
        """Return a function that makes an object for each conversation.

        Args:
            name: name of the user simulator. It is not used here, but subclasses may need it.
            config: `config` of the file's entry: the arguments of `__init__`.

        Returns:
            A function without arguments.
        """
        return partial(cls, **config)

    def start_interaction(self, **kwargs: Any) -> Any:
        """Begin a conversation; `kwargs` are the sample's `interaction_kwargs` without the name."""
        return None

    @abstractmethod
    def generate_response(self, messages: list[dict[str, Any]]) -> Any:
        """Return a `Reply` to the last of the messages, which is the model's."""

    def finalize_interaction(self) -> Any:
        """End the conversation.

        Called once, however the conversation ends, unless `start_interaction` has failed.
        """
        return None


# Functions that make the object of a conversation, by the name of the user simulator.
Interactions: TypeAlias = dict[str, Callable[[], Interaction]]


class UserSimulator:
    """The user simulator of one conversation.

    It is an async context manager, inside which `reply` may be called.

    Args:
        interactions: the user simulators of the configuration.
        kwargs: the sample's `interaction_kwargs`: `name`, and arguments of `start_interaction`.
        thread: the thread in which user simulators run.
        timeout_s: time limit of each call, in seconds.

    Raises:
        RolloutError: there is no user simulator of that name.
    """

    def __init__(
        self,
        interactions: Interactions,
        kwargs: Mapping[str, Any],
        thread: ToolThread,
        timeout_s: float,
    ) -> None:
        self.name = kwargs["name"]
        if self.name not in interactions:
            expected = "no name, because no interaction is configured"
            if interactions:
                expected = f"one of {', '.join(interactions)}"
            key = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
            fix = f"Correct the row, or set {key} to a file that has it."
            raise RolloutError("interaction_kwargs.name", repr(self.name), expected, fix)
        self._make = interactions[self.name]
        self._thread = thread
        self._timeout_s = timeout_s
        self._kwargs = without_none(kwargs)
        del self._kwargs["name"]

    async def __aenter__(self) -> "UserSimulator":
        where = f"interaction {self.name}, constructor"
        # The constructor is users' code, too, and may take long.
        self._interaction = await self._thread.call(where, self._make, {}, self._timeout_s)
        await self._call("start_interaction", **self._kwargs)
        return self

    async def __aexit__(self, *error: Any) -> None:
        """End the conversation of the user's object. `end_use` says when a failure is raised."""
        await end_use(partial(self._call, "finalize_interaction"), *error)

    async def reply(self, messages: list[dict[str, Any]]) -> Reply:
        """Reply to the last of the messages.

        Raises:
            ToolFailedError: the user simulator raised, took too long, or did not return a `Reply`.
        """
        # Copies, because users' code may change its arguments.
        copies = [dict(message) for message in messages]
        reply = await self._call("generate_response", messages=copies)
        where = f"interaction {self.name}, generate_response"
        if not isinstance(reply, Reply):
            got = f"a response of type {type(reply).__name__}"
            raise ToolFailedError(where, got, expected="a Reply(text, score, is_over)")
        score = None if reply.score is None else float(reply.score)
        return Reply(as_text(reply.text, where), score, bool(reply.is_over))

    async def _call(self, method: str, /, **kwargs: Any) -> Any:
        """Call a method of the user's object in the tool thread."""
        where = f"interaction {self.name}, {method}"
        function = getattr(self._interaction, method)
        return await self._thread.call(where, function, kwargs, self._timeout_s)


def load_interactions(path: str) -> Interactions:
    """Load the user simulators of a YAML file.

    Raises:
        ConfigError: the file or a class is invalid, or two user simulators have the same name.
    """
    where = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
    folder = Path(path).expanduser().resolve().parent
    interactions: Interactions = {}
    for entry in read_tool_file(path, InteractionFile).interaction:
        if entry.name in interactions:
            got = f"two interactions with the name {entry.name!r}"
            raise ConfigError(where, got, expected="a different name for each interaction")
        user_class = load_class(entry.class_name, folder, Interaction, where)
        interactions[entry.name] = user_class.maker(entry.name, entry.config)
    return interactions
