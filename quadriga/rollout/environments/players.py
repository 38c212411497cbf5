# SPDX-License-Identifier: Apache-2.0
"""Players, which act for the agents of an episode: the policy, a fixed model, or a script."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from quadriga.errors import RolloutError
from quadriga.http_client import HTTPClient, ServerLostError
from quadriga.rollout.agent_loop.conversation import Conversation, ConversationOver, Turn
from quadriga.rollout.environments.pool import Episode
from quadriga.rollout.sequences import derive_seed

_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True)
class PolicyPlayer:
    """Player that is the policy."""

    chat: Conversation  # conversation of this player alone
    # Makes the first messages of the conversation, which include the first observation.
    prompt: Callable[[Conversation, str], list[dict[str, Any]]]
    generate: Callable[[], Awaitable[Turn]]  # generates the next turn in the conversation
    name: str  # name of the agent, for the reason why an episode was cut off

    async def act(self, observation: str) -> str:
        """Generate a turn. The action is its text after the thoughts.

        Raises:
            ConversationOver: the conversation reached a limit.
        """
        try:
            if self.chat.turns:
                self.chat.append([{"role": "user", "content": observation}])
            else:
                self.chat.begin(self.prompt(self.chat, observation))
            turn = await self.generate()
        except ConversationOver as over:
            # The limit ends the whole episode. The conversation of this agent gets the reason as it
            # is, and those of other agents get it with the name of this agent.
            self.chat.finish_reason = over.reason
            raise ConversationOver(f"{self.name}: {over.reason}") from over
        text = str(turn.messages[0]["content"])
        return text.rpartition(_END_OF_THOUGHT)[2].strip()


@dataclass
class ScriptedPlayer:
    """Player that is a user's function, or random. It runs in the process of the environment."""

    episode: Episode
    reference: str  # "random", or `file.py:function`
    seed: int  # seed of the player, from which the seeds of its actions are derived
    num_actions: int = 0  # actions so far

    async def act(self, observation: str) -> str:
        """Choose an action. Each action has a different seed."""
        seed = player_seed(self.seed, self.num_actions)
        self.num_actions += 1
        return await self.episode.sample(observation, seed, self.reference)


class ServerPlayer:
    """Player that is a fixed model behind a server, such as `quadriga serve` or vLLM.

    Args:
        url: address of the server, which has `/v1/chat/completions`.
        chat: conversation of a trained agent, whose sampling parameters the fixed model gets, too.
        system_prompt: system message of the fixed model. None: there is none.
        name: name of the agent, for errors.
    """

    def __init__(self, url: str, chat: Conversation, system_prompt: str | None, name: str) -> None:
        self._client = HTTPClient(
            url, RolloutError, setting="env.agents", where=f"the fixed model of {name}"
        )
        self._chat = chat
        self._model = ""  # name of the model on the server; "" until the first action
        self._messages: list[dict[str, str]] = []
        if system_prompt is not None:
            self._messages.append({"role": "system", "content": system_prompt})

    async def act(self, observation: str) -> str:
        """Ask the server for a reply. The action is its text after the thoughts.

        Raises:
            RolloutError: the server does not answer, or refuses the request.
        """
        self._messages.append({"role": "user", "content": observation})
        sampling = self._chat.sampling
        try:
            # A request must name the model, and the server reports which one it serves.
            if not self._model:
                models = await self._client.call_async("v1/models", method="GET")
                self._model = models["data"][0]["id"]
            body = {
                "model": self._model,
                "messages": self._messages,
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "seed": player_seed(sampling.seed, len(self._messages)) % 2**31,
            }
            reply = await self._client.call_async("v1/chat/completions", body)
            text = str(reply["choices"][0]["message"]["content"] or "")
        except (ServerLostError, LookupError, TypeError) as error:
            got = f"{type(error).__name__}: {error}"
            expected = "a server with /v1/models and /v1/chat/completions"
            raise RolloutError(self._client.where, got, expected) from error
        self._messages.append({"role": "assistant", "content": text})
        return text.rpartition(_END_OF_THOUGHT)[2].strip()


def player_seed(seed: int, number: int) -> int:
    """Derive a seed below 2**56 for a player, or for one of its actions.

    Args:
        seed: the seed to derive from.
        number: number of the player or of the action.
    """
    return derive_seed(seed, number, num_bytes=7)


# What a player may be: each has `act`, which responds to an observation with an action.
Player: TypeAlias = PolicyPlayer | ScriptedPlayer | ServerPlayer
