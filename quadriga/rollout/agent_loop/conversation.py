# SPDX-License-Identifier: Apache-2.0
"""One conversation: tokens in, tokens out. What the engine is given is exactly what training will see.

    prompt | model | tools | model | partner | model |        token_ids
             1 1 1   0 0 0   1 1 1    0 0 0    1 1 1          response_mask

Tokens that no answer of the model follows are left out at the end: nothing would learn from them, and the score of a
response stands at its last token.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quadriga.errors import RolloutError
from quadriga.rollout.agent_loop.tool_calls import ToolAnswer
from quadriga.rollout.agent_loop.turns import TurnEncoder
from quadriga.rollout.base import Images, RolloutEngine, SamplingParams, with_images


class ConversationOver(Exception):  # noqa: N818 - not an error: the way in which a conversation ends
    """A limit is reached, or a partner has ended it. Loops let it pass."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Sample:
    """A row of the batch, as a loop sees it.

    Attributes:
        row: its number in the batch.
        uid: of its prompt.
        prompt_ids: token ids of the prompt as the data set rendered it.
        messages: of the prompt; None where the data did not bring them.
        columns: every non-tensor of the row, `tools_kwargs`, `interaction_kwargs` and `extra_info` among them.
        images: of the prompt.
        num_axes: of positions: 1, or 3 of a model that sees.
    """

    row: int
    uid: str
    prompt_ids: list[int]
    messages: list[dict[str, Any]] | None
    columns: Mapping[str, Any]
    images: Images | None = None
    num_axes: int = 1

    def require_messages(self) -> list[dict[str, Any]]:
        """The messages of the prompt.

        Raises:
            RolloutError: the data did not bring them.
        """
        if self.messages is None:
            raise RolloutError(
                f"conversation of row {self.row}",
                got="a prompt without its messages",
                expected="the column raw_prompt",
                fix="Set data.return_raw_chat=True.",
            )
        return self.messages


@dataclass(frozen=True)
class Turn:
    """What one side said.

    Attributes:
        role: "assistant", "tool" or "user".
        token_ids: as they stand in the conversation.
        text: special tokens included, for parsers.
        seconds: that it took.
        finish_reason: of the engine; "" on the other side.
        answers: of tools.
    """

    role: str
    token_ids: list[int]
    text: str
    seconds: float
    finish_reason: str = ""
    answers: tuple[ToolAnswer, ...] = ()


@dataclass(frozen=True)
class Limits:
    """How long a conversation may be.

    Attributes:
        prompt_tokens: P, tokens of the prompt.
        response_tokens: T, tokens of everything behind it.
        total_tokens: both together, as the engine takes them.
        assistant_turns: of the model. None: as many as fit.
        user_turns: of tools or the partner. None: as many as fit.
    """

    prompt_tokens: int
    response_tokens: int
    total_tokens: int
    assistant_turns: int | None = None
    user_turns: int | None = None


@dataclass
class Conversation:
    """See the module. Loops call `begin`, `generate` and `append`; the rest is for who collects it.

    Attributes:
        engine, encoder, sample, sampling, limits: given. `sampling` has the seed of the conversation.
        prompt_ids: that the engine is given before everything else.
        token_ids, mask, log_probs: of the response, one each.
        turns: of the response.
        unread: turns that the model did not come to answer; their tokens stand nowhere.
        messages: everything said, for a partner to read; it is never rendered.
        finish_reason: why it ended; "" while it goes on.
        failure: what ended it if it failed; "" if nothing did.
        tool_rewards: by the name of a tool, what its use earned.
        turn_scores: that a partner gave, in order.
    """

    engine: RolloutEngine
    encoder: TurnEncoder
    sample: Sample
    sampling: SamplingParams
    limits: Limits
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    unread: list[Turn] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = ""
    failure: str = ""
    tool_rewards: dict[str, float] = field(default_factory=dict)
    turn_scores: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_ids = list(self.sample.prompt_ids)
        self.messages = list(self.sample.messages or [])

    def begin(self, messages: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]] = ()) -> None:
        """Replaces the prompt that the data set rendered, to offer tools or to say something else.

        Raises:
            ConversationOver: it does not fit into `data.max_prompt_length`.
            RolloutError: the template leaves the tools out, or the prompt has images.
        """
        assert not self.turns, "a conversation begins before its first turn"
        if self.sample.images is not None:
            raise RolloutError(
                f"conversation of row {self.sample.row}",
                got="a prompt with images, to be rendered anew with tools",
                expected="text, or a conversation without tools",
                fix="Set actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent, or leave images out.",
            )
        prompt_ids = self.encoder.prompt(messages, schemas)
        self.messages = [dict(message) for message in messages]
        if len(prompt_ids) > self.limits.prompt_tokens:
            names = f" with {len(schemas)} tools" if schemas else ""
            self.failure = (
                f"prompt_length: {len(prompt_ids)} tokens{names}, over data.max_prompt_length="
                f"{self.limits.prompt_tokens}"
            )
            raise ConversationOver(self.failure)
        self.prompt_ids = prompt_ids

    @property
    def num_assistant_turns(self) -> int:
        """Turns that the model wrote."""
        return sum(turn.role == "assistant" for turn in self.turns)

    @property
    def num_user_turns(self) -> int:
        """Turns of tools or a partner."""
        return len(self.turns) - self.num_assistant_turns

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        total = self.limits.total_tokens - len(self.prompt_ids)
        return min(self.limits.response_tokens, total) - len(self.token_ids)

    async def generate(self, **changes: Any) -> Turn:
        """The model's next turn.

        Args:
            changes: of `SamplingParams`, for this turn.

        Raises:
            ConversationOver: no token fits any more, or the model's turn was cut or given up.
            RolloutError: the engine failed.
        """
        if self.room < 1:
            raise ConversationOver("length")
        number = self.num_assistant_turns
        params = {"max_tokens": self.room, "seed": turn_seed(self.sampling.seed, number), **changes}
        params["max_tokens"] = min(params["max_tokens"], self.room)
        sampling = replace(self.sampling, **params)
        started = time.perf_counter()
        images = None if self.sample.images is None else self.sample.images.followed_by(self.token_ids)
        option = {"images": images} if with_images(self.engine, [images]) else {}
        completion = await self.engine.generate([*self.prompt_ids, *self.token_ids], sampling, **option)
        where = f"engine, conversation of row {self.sample.row}, turn {len(self.turns)}"
        completion.require_fit(sampling.max_tokens, where)
        token_ids = list(completion.token_ids)
        self._extend(token_ids, 1, completion.log_probs)
        text = self.encoder.text(token_ids, with_special=True)
        turn = Turn("assistant", token_ids, text, time.perf_counter() - started, completion.finish_reason)
        self.turns.append(turn)
        self.messages.append({"role": "assistant", "content": self.encoder.text(token_ids, with_special=False)})
        # A turn that a caller has made shorter was not cut by the conversation's own limit.
        is_cut = completion.finish_reason == "length" and self.room < 1
        if is_cut or completion.finish_reason == "abort":
            raise ConversationOver(completion.finish_reason)
        return turn

    def require_another(self) -> None:
        """Before work is done for a turn of the other side: it, and an answer to it, must be allowed.

        Raises:
            ConversationOver: a limit on turns is reached.
        """
        limits = self.limits
        if limits.assistant_turns is not None and self.num_assistant_turns >= limits.assistant_turns:
            raise ConversationOver("max_assistant_turns")
        if limits.user_turns is not None and self.num_user_turns >= limits.user_turns:
            raise ConversationOver("max_user_turns")

    def append(
        self, messages: Sequence[Mapping[str, Any]], *, answers: Sequence[ToolAnswer] = (), seconds: float = 0.0
    ) -> None:
        """A turn of the other side: messages of the role "tool", or of "user". The model did not write it.

        Raises:
            ConversationOver: it does not fit, or a limit on turns is reached.
            RolloutError: the template does not take the messages.
        """
        self.require_another()
        plain = [{**message, "content": self.encoder.plain(message["content"])} for message in messages]
        written = self.turns[-1].token_ids if self.turns else ()
        token_ids = self.encoder.following(plain, written)
        text = "\n".join(message["content"] for message in plain)
        self.messages += plain
        turn = Turn(plain[0]["role"], token_ids, text, seconds, answers=tuple(answers))
        # An answer that leaves no room for the model to go on is of no use, and neither is a part of one.
        if len(token_ids) >= self.room:
            self.unread.append(turn)
            raise ConversationOver("length")
        self._extend(token_ids, 0, [0.0] * len(token_ids))
        self.turns.append(turn)

    def finish(self, reason: str, *, failure: str = "") -> None:
        """Ends it; what stands behind the model's last word is left out."""
        self.finish_reason, self.failure = reason, failure or self.failure
        while self.turns and not (self.turns[-1].role == "assistant" and self.turns[-1].token_ids):
            last = self.turns.pop()
            self.unread.insert(0, last)
            keep = len(self.token_ids) - len(last.token_ids)
            del self.token_ids[keep:], self.mask[keep:], self.log_probs[keep:]

    def _extend(self, token_ids: Sequence[int], written: int, log_probs: Sequence[float]) -> None:
        self.token_ids += token_ids
        self.mask += [written] * len(token_ids)
        self.log_probs += log_probs


def turn_seed(seed: int, number: int) -> int:
    """Of the model's turn `number`: the first one has the conversation's own, as an answer of one turn does."""
    if number == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(repr((seed, number)).encode(), digest_size=8).digest(), "big")
