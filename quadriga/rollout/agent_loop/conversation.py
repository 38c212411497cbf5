# SPDX-License-Identifier: Apache-2.0
"""One conversation: tokens in, tokens out. What the engine is given is exactly what training will see.

    prompt | model | tools | model | user  | model |        token_ids
             1 1 1   0 0 0   1 1 1   0 0 0   1 1 1          response_mask

What the model wrote is never rendered again: a template may drop its thoughts, and a tokenizer may split its text
another way. The tokens that a turn of a tool or user adds are found by rendering a stand-in for the model's turn and
the new messages:

    <user>x<end>\\n<assistant>STAND-IN<end>\\n<tool>42<end>\\n<assistant>
                                     └───────────── added ─────────────┘

If the model has written the closing token itself, as it mostly does, that one is left out of what is added. An image of
a later turn has as many tokens as the model has embeddings of it, and positions along three axes, like one of the
prompt. Tokens that no turn of the model follows are left out at the end: they have no loss, and the score of a response
stands at its last token.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from quadriga.errors import DataError, RolloutError
from quadriga.protocol.chats import CONTINUING, ends_with_assistant
from quadriga.protocol.memory import images_key
from quadriga.rewards.outcome import Outcome
from quadriga.rollout.agent_loop.tool_calls import ToolFailedError, ToolResponse
from quadriga.rollout.interface import Completion, Images, RolloutEngine, SamplingParams

_STAND_IN, _PROBE = "quadrigastandin", "quadrigaprobe"
_FIX_TEMPLATE = "Set actor_rollout_ref.model.custom_chat_template to one that has"


class ConversationOver(Exception):  # noqa: N818 - not an error: the way in which a conversation ends
    """A limit is reached, or the user simulator has ended it. Loops let it pass."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Sample:
    """A row of the batch, as a loop sees it."""

    row: int  # its number in the batch
    uid: str  # of its prompt
    prompt_ids: list[int]  # token ids of the prompt as the data set rendered it
    messages: list[dict[str, Any]] | None  # of the prompt; None where the data did not bring them
    # Every non-tensor of the row, `tools_kwargs`, `interaction_kwargs` and `extra_info` among them.
    columns: Mapping[str, Any]
    agent: str  # name of the loop that leads it
    images: Images | None = None  # of the prompt
    num_axes: int = 1  # of positions: 1, or 3 of a vision-language model


@dataclass(frozen=True)
class Turn:
    """A turn of the model, of tools or of the user."""

    role: str  # "assistant", "tool" or "user"
    token_ids: list[int]  # as they stand in the conversation
    text: str  # special tokens included, for parsers
    seconds: float  # that it took
    finish_reason: str = ""  # of the engine; "" where the model did not write it
    tool_responses: tuple[ToolResponse, ...] = ()  # one for each call of the turn before
    messages: Sequence[
        dict[str, Any]
    ] = ()  # that the turn consists of; empty: one, with the role and the text


@dataclass(frozen=True)
class Limits:
    """How long a conversation may be."""

    prompt_tokens: int  # P, tokens of the prompt
    response_tokens: int  # T, tokens of everything behind it
    total_tokens: int  # both together, as the engine takes them
    assistant_turns: int | None = None  # of the model. None: as many as fit
    user_turns: int | None = None  # of tools or the user. None: as many as fit


@dataclass
class Conversation:
    """A prompt and its response of one or many turns. Loops call `begin`, `generate` and `append`."""

    engine: RolloutEngine  # generates the model's turns
    encoder: "TurnEncoder"  # renders the other turns
    sample: Sample  # the row of the batch
    sampling: SamplingParams  # its `seed` is the conversation's
    limits: Limits  # on tokens and turns
    prompt_ids: list[int] = field(init=False)  # that the engine is given before everything else
    # token_ids, mask, log_probs, versions: of the response, one each; the mask is 1 on tokens of the model; versions
    # are of the weights that drew them, -1 on other tokens
    token_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)  # of the response
    # Turns that the model did not come to follow; their tokens are not in the response.
    unread: list[Turn] = field(default_factory=list)
    # All turns as text, for a user simulator; they are never rendered.
    messages: list[dict[str, Any]] = field(init=False)
    finish_reason: str = ""  # why it ended; "" while it goes on
    failure: str = ""  # what ended it if it failed; "" if nothing did
    activity: str = "not begun"  # what it is at, for a report on a long wait
    # By the name of a tool, what its use earned; of a loop of verl's, what each call did.
    tool_rewards: dict[str, float] | list[float] = field(default_factory=dict)
    turn_scores: list[float] = field(default_factory=list)  # that a user simulator gave, in order
    # [tokens, L, k] of the prompt and the response, as far as the model has read them; None: unknown.
    routes: np.ndarray | None = None
    # What a loop says of it, for `extra_info` of the score function.
    extra_fields: dict[str, Any] = field(default_factory=dict)
    outcome: Outcome | None = (
        None  # the grade that a loop gave itself; None: it is graded like others
    )
    # Of a vision-language model, `quadriga.data.VisionProcessor`; None: later turns have no images.
    processor: Any = None

    def __post_init__(self) -> None:
        given = self.sample.images
        # Tokens from the prompt on, and the images that stand in them.
        self._shown: list[tuple[list[int], Images]] = (
            [] if given is None else [(self.sample.prompt_ids, given)]
        )
        self._own_time: asyncio.Timeout | None = None
        self._own_limit_s = 0.0
        self._num_completions = 0
        self.prompt_ids = list(self.sample.prompt_ids)
        self.messages = list(self.sample.messages or [])

    @asynccontextmanager
    async def limited(self, limit_s: float) -> AsyncIterator[None]:
        """Around a loop: it may take so long before, between and after responses of the engine; then a TimeoutError."""
        self._own_limit_s, self.activity = limit_s, "in the loop"
        try:
            async with asyncio.timeout(limit_s) as self._own_time:
                yield
        except TimeoutError as error:
            if self._own_time is None or not self._own_time.expired():
                raise
            limit = f"{limit_s:g} s by itself after turn {len(self.turns)} (actor_rollout_ref.rollout.agent.timeout_s)"
            raise TimeoutError(f"the loop took over {limit}") from error
        finally:
            self._own_time = None

    def begin(
        self,
        messages: Sequence[Mapping[str, Any]] | None,
        schemas: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Replaces the prompt that the data set rendered, to offer tools or to say something else.
        Raises ConversationOver: it does not fit into `data.max_prompt_length`.
        Raises RolloutError: there are no messages, or the template leaves the tools out."""
        assert not self.turns, "a conversation begins before its first turn"
        where = f"conversation of row {self.sample.row}"
        if messages is None:
            got = "a prompt without its messages"
            raise RolloutError(
                where,
                got=got,
                expected="the column raw_prompt",
                fix="Set data.return_raw_chat=True.",
            )
        prompt_ids = self.encoder.prompt(messages, schemas)
        if (given := self.sample.images) is not None:
            prompt_ids = self.show((), prompt_ids, given.pictures)
        self.messages = [dict(message) for message in messages]
        if len(prompt_ids) > self.limits.prompt_tokens:
            names = f" with {len(schemas)} tools" if schemas else ""
            limit = f"data.max_prompt_length={self.limits.prompt_tokens}"
            self.failure = f"prompt_length: {len(prompt_ids)} tokens{names}, over {limit}"
            raise ConversationOver(self.failure)
        self.prompt_ids = prompt_ids

    @property
    def images(self) -> Images | None:
        """All that the conversation shows, with positions of all its tokens; None: it has been text so far."""
        return self.images_in([*self.prompt_ids, *self.token_ids])

    def images_in(self, tokens: Sequence[int]) -> Images | None:
        """What stands in tokens that begin as the conversation does; None: text."""
        for known, one in reversed(self._shown):
            if known == list(tokens[: len(known)]):
                return one.followed_by(tokens[len(known) :])
        return None

    @property
    def num_assistant_turns(self) -> int:
        return sum(turn.role == "assistant" for turn in self.turns)

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        total = self.limits.total_tokens - len(self.prompt_ids)
        return min(self.limits.response_tokens, total) - len(self.token_ids)

    @property
    def solution_messages(self) -> list[dict[str, Any]]:
        """The turns behind the prompt as messages: role, content, and where there are some name and tool_calls."""
        keys = ("role", "content", "name", "tool_calls")
        messages = [
            one
            for turn in self.turns
            for one in turn.messages or [{"role": turn.role, "content": turn.text}]
        ]
        return [{key: message[key] for key in keys if key in message} for message in messages]

    async def generate(self, **changes: Any) -> Turn:
        """The model's next turn; `changes` replace fields of `SamplingParams` for this turn alone.
        Raises ConversationOver: no token fits any more, or the model's turn was cut or given up.
        Raises RolloutError: the engine failed."""
        if self.room < 1:
            raise ConversationOver("length")
        changes["max_tokens"] = min(changes.pop("max_tokens", self.room), self.room)
        started = time.perf_counter()
        completion = await self.complete(
            [*self.prompt_ids, *self.token_ids], self.images, **changes
        )
        token_ids, self.routes = list(completion.token_ids), completion.routes
        text = self.encoder.text(token_ids, with_special=True)
        message = {"role": "assistant", "content": self.encoder.text(token_ids, with_special=False)}
        seconds = time.perf_counter() - started
        turn = Turn(
            "assistant",
            token_ids,
            text,
            seconds,
            completion.finish_reason,
            messages=[dict(message)],
        )
        self.extend(
            turn,
            1,
            completion.log_probs,
            completion.versions or [completion.weight_version] * len(token_ids),
        )
        self.messages.append(message)
        # A turn that a caller has made shorter was not cut by the conversation's own limit.
        is_cut = completion.finish_reason == "length" and self.room < 1
        if is_cut or completion.finish_reason == "abort":
            raise ConversationOver(completion.finish_reason)
        return turn

    async def complete(
        self, token_ids: Sequence[int], images: Images | None = None, **changes: Any
    ) -> Completion:
        """The engine's completion of any tokens, with a seed of its own; the conversation itself does not grow.

        Arguments and errors as for `generate`.
        """
        seed, number = self.sampling.seed, self._num_completions
        self._num_completions += 1
        if number > 0:  # the first one has the seed that a response of one turn has
            seed = int.from_bytes(
                hashlib.blake2b(repr((seed, number)).encode(), digest_size=8).digest(), "big"
            )
        sampling = replace(self.sampling, **{"seed": seed, **changes})
        limit, self.activity = self._own_time, "in the engine"
        if limit is not None:
            limit.reschedule(None)
        completion = await self.engine.generate(list(token_ids), sampling, images)
        self.activity = f"in the loop after turn {number + 1}"
        if limit is not None:
            limit.reschedule(asyncio.get_running_loop().time() + self._own_limit_s)
        where = f"engine, conversation of row {self.sample.row}, completion {number}"
        completion.require_fit(sampling.max_tokens, where)
        return completion

    def require_another(self) -> None:
        """To be called before work is done for a turn of tools or the user: it, and a turn after it, must be allowed.
        Raises ConversationOver: a limit on turns is reached."""
        limits, num_assistant_turns = self.limits, self.num_assistant_turns
        if limits.assistant_turns is not None and num_assistant_turns >= limits.assistant_turns:
            raise ConversationOver("max_assistant_turns")
        if (
            limits.user_turns is not None
            and len(self.turns) - num_assistant_turns >= limits.user_turns
        ):
            raise ConversationOver("max_user_turns")

    def append(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tool_responses: Sequence[ToolResponse] = (),
        seconds: float = 0,
    ) -> None:
        """A turn that the model did not write: messages of the role "tool", or of "user".
        Their content is text, or parts of text and `{"type": "image", "image": ...}`, as a row may have them.
        Raises ConversationOver: it does not fit, or a limit on turns is reached; or it shows an image after the model
        has written the token of one itself.
        Raises RolloutError: the template does not take the messages, or there is an image, for a text-only model."""
        self.require_another()
        plain, pictures = self.encoder.plain_messages(messages)
        token_ids = self.encoder.following(plain, self.turns[-1].token_ids if self.turns else ())
        if pictures:
            written = [
                token for token, is_own in zip(self.token_ids, self.mask, strict=True) if is_own
            ]
            token_ids = self.show([*self.prompt_ids, *self.token_ids], token_ids, pictures, written)
        parts = (
            [one["content"]] if isinstance(one["content"], str) else one["content"] for one in plain
        )
        texts = [
            "".join(one if isinstance(one, str) else one.get("text", "") for one in some)
            for some in parts
        ]
        added = [{**message, "content": text} for message, text in zip(plain, texts, strict=True)]
        self.messages += added
        text = "\n".join(texts)
        role = plain[0]["role"]
        turn = Turn(
            role, token_ids, text, seconds, tool_responses=tuple(tool_responses), messages=added
        )
        # A turn that leaves no room for the model to go on is of no use, and neither is a part of one.
        if len(token_ids) >= self.room:
            self.unread.append(turn)
            raise ConversationOver("length")
        self.extend(turn, 0, [0.0] * len(token_ids))

    def show(
        self,
        before: Sequence[int],
        token_ids: Sequence[int],
        pictures: Sequence[Any],
        written: Sequence[int] = (),
    ) -> list[int]:
        """Tokens of a prompt, or of a turn behind the tokens `before`, with as many for each of its images as the model
        has embeddings of it; `token_ids` have one each. `written` are tokens of the model. Videos are the prompt's.
        Raises ConversationOver: the model has written the token of images itself."""
        where = f"conversation of row {self.sample.row}"
        if self.processor is None:
            got, expected = (
                "images in a later turn, or beside tools",
                "text, or a vision-language model",
            )
            fix = "Leave them out; rollout.multi_turn.enable or agent.agent_loop_path must be set with such a model."
            raise RolloutError(where, got=got, expected=expected, fix=fix)
        if not set(written).isdisjoint(self.processor.media_ids):
            self.failure = (
                "image_token: the model wrote the token of images itself, and is shown one"
            )
            raise ConversationOver(self.failure)
        known, given = self.images_in(before), self.sample.images
        short, shown = (before, ()) if known is None else (known.short_prompt, known.pictures)
        short, pictures, videos = (
            [*short, *token_ids],
            [*shown, *pictures],
            given.videos if given else (),
        )
        try:
            seen = self.processor.conversation(short, pictures, videos, self.encoder.encode, where)
        except DataError as error:
            raise ToolFailedError(
                error.where, got=error.got, expected=error.expected, fix=error.fix
            ) from error
        key = images_key(seen.inputs)
        self._shown.append(
            (
                seen.ids,
                Images(seen.pictures, seen.inputs, seen.positions, tuple(short), key, videos),
            )
        )
        return seen.ids[len(before) :]

    def finish(self, reason: str, *, failure: str = "") -> None:
        """Ends it; what stands behind the model's last turn is left out."""
        self.finish_reason, self.failure = reason, failure or self.failure
        while self.turns and not (self.turns[-1].role == "assistant" and self.turns[-1].token_ids):
            last = self.turns.pop()
            self.unread.insert(0, last)
            keep = len(self.token_ids) - len(last.token_ids)
            del self.token_ids[keep:], self.mask[keep:], self.log_probs[keep:], self.versions[keep:]

    def extend(
        self, turn: Turn, written: int, log_probs: Sequence[float], versions: Sequence[int] = ()
    ) -> None:
        """A turn as it is, `written` by the model (1) or not (0), with log-probabilities and versions of its tokens."""
        self.versions += versions or [-1] * len(turn.token_ids)
        self.turns.append(turn)
        self.token_ids += turn.token_ids
        self.mask += [written] * len(turn.token_ids)
        self.log_probs += log_probs


class TurnEncoder:
    """Renders and tokenizes prompts and turns with the tokenizer's chat template.

    `vocabulary_size`: rows of the model's embedding. None: enough for each token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any],
        vocabulary_size: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = {
            key: value for key, value in template_kwargs.items() if key != "add_generation_prompt"
        }
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        texts = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        if vocabulary_size is not None:
            texts |= {
                token
                for token, token_id in tokenizer.get_added_vocab().items()
                if token_id >= vocabulary_size
            }
        self._special = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
        self._closing = frozenset(tokenizer.all_special_ids)
        self._known_roles: set[str] = set()
        self._where = f"chat template of {tokenizer.name_or_path or 'the tokenizer'}"

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Token ids of a prompt that offers tools; a RolloutError where it does not name each of them."""
        text = self._render(messages, schemas)
        if missing := [name for one in schemas if (name := one["function"]["name"]) not in text]:
            got = f"a prompt that does not name the tools {', '.join(missing)}"
            fix = f"{_FIX_TEMPLATE} them, or describe the tools in a system message of the data."
            raise RolloutError(
                self._where, got=got, expected="one that writes `tools` into the prompt", fix=fix
            )
        return self.encode([text])[0]

    def following(self, messages: Sequence[Mapping[str, Any]], written: Sequence[int]) -> list[int]:
        """Token ids that stand between what the model wrote and what it writes next.
        Raises RolloutError: the template leaves messages of this role out, or refuses them."""
        for role in dict.fromkeys(message["role"] for message in messages):
            # A template that knows the role writes what a message of it says.
            of_tool = {"name": "probe", "tool_call_id": "call00000"} if role == "tool" else {}
            probe = {"role": role, "content": _PROBE, **of_tool}
            if role not in self._known_roles and _PROBE not in self._added([probe])[0]:
                got, expected = (
                    f"messages of the role {role}, which it leaves out",
                    "a template that writes them",
                )
                raise RolloutError(
                    self._where, got=got, expected=expected, fix=f"{_FIX_TEMPLATE} this role."
                )
            self._known_roles.add(role)
        text, is_closed_apart = self._added(messages)
        [ids] = self.encode([text])
        if (
            ids
            and written
            and (
                written[-1] == ids[0]
                or (is_closed_apart and {written[-1], ids[0]} <= self._closing)
            )
        ):
            return ids[1:]
        return ids

    def plain_messages(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[Any]]:
        """Messages with `plain` texts, and the images that their parts bring."""
        plain, pictures = list[dict[str, Any]](), list[Any]()
        for message in messages:
            content = message["content"]
            if not isinstance(content, str):
                pictures += [part.get("image") for part in content if part["type"] == "image"]
                texts = [self.plain(part.get("text", "")) for part in content]
                kinds = [{"type": part["type"]} for part in content]
                content = [
                    one | {"text": text} if text else one
                    for one, text in zip(kinds, texts, strict=True)
                ]
            plain.append(
                {**message, "content": self.plain(content) if isinstance(content, str) else content}
            )
        return plain, pictures

    def plain(self, text: str) -> str:
        """The text with every special token broken in two, so that no tool can forge a turn.

        So are added tokens that the model's embedding does not have.
        """
        for token in self._special:
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def text(self, token_ids: Sequence[int], *, with_special: bool) -> str:
        """What tokens say."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not with_special))

    def _added(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
        """The text after the stand-in, and whether the model's turn is closed by a token that belongs to it."""
        # Tools are not given here: some templates write them beside the last message, and the prompt has them.
        user = {"role": "user", "content": "x"}
        start: list[dict[str, Any]] = [user, {"role": "assistant", "content": _STAND_IN}]
        try:
            rendered = self._render([*start, *messages])
        except RolloutError:
            # Some templates take a tool's response only after an assistant's call, whose name they repeat.
            if messages[0]["role"] != "tool":
                raise
            called = [
                (one["tool_call_id"], {"name": one["name"], "arguments": {_STAND_IN: _STAND_IN}})
                for one in messages
            ]
            calls = [
                {"id": name, "type": "function", "function": function} for name, function in called
            ]
            rendered = self._render(
                [user, {"role": "assistant", "content": "", "tool_calls": calls}, *messages]
            )
            after = rendered.rpartition(_STAND_IN)[2]
            # Behind the stand-in stands the rest of the call; what follows it begins with a special token.
            places = [place for token in self._special if (place := after.find(token)) >= 0]
            return after[min(places, default=0) :], False
        closed = self._render(start, is_open=False).rpartition(_STAND_IN)[2]
        return rendered.rpartition(_STAND_IN)[2], bool(closed.strip())

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        schemas: Sequence[Mapping[str, Any]] = (),
        is_open: bool = True,
    ) -> str:
        options = {
            "tools": list(schemas) or None,
            "add_generation_prompt": is_open,
            **self.template_kwargs,
        }
        if schemas and ends_with_assistant(messages):
            options |= CONTINUING
        try:
            return str(
                self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
            )
        except Exception as error:
            # A template is a program of the model's author: it may raise what it likes about messages that it dislikes.
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            got, expected = (
                f"{type(error).__name__}: {error}",
                f"a template that takes messages of {roles}",
            )
            raise RolloutError(
                self._where, got=got, expected=expected, fix=f"{_FIX_TEMPLATE} these roles."
            ) from error

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, in which a template has written the special tokens."""
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)[
            "input_ids"
        ]
