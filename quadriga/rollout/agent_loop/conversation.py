# SPDX-License-Identifier: Apache-2.0
"""A conversation as tokens: the engine receives exactly the tokens that training sees.

    prompt | model | tools | model | user  | model |        token_ids
             1 1 1   0 0 0   1 1 1   0 0 0   1 1 1          response_mask

A turn of the model is never rendered again: a template may drop its thoughts, and a tokenizer may split its text
another way. To find the tokens that a turn of a tool or user adds, the template renders a stand-in for the model's turn
together with the new messages. The text after the stand-in is added:

    <user>x<end>\\n<assistant>STAND-IN<end>\\n<tool>42<end>\\n<assistant>
                                     └───────────── added ─────────────┘

The model mostly writes the closing token itself; then the added tokens begin after it. An image in a later turn has one
token for each of its embeddings, and positions along three axes, like an image of the prompt. When the conversation
ends, tokens after the model's last turn are removed: they have no loss, and the score of a response belongs to its last
token.

Legend: P prompt tokens, T response tokens, L layers with experts, k experts of a token.
"""

import asyncio
import itertools
import math
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from transformers import PreTrainedTokenizerBase

from quadriga.errors import DataError, RolloutError
from quadriga.protocol.chats import CONTINUING, ends_with_assistant
from quadriga.protocol.memory import images_key
from quadriga.rewards.outcome import Outcome
from quadriga.rollout.agent_loop.tool_calls import ConversationOver, ToolFailedError, ToolResult
from quadriga.rollout.interface import Completion, Images, RolloutEngine, SamplingParams
from quadriga.rollout.sequences import derive_seed

# Texts that occur in no conversation. They are rendered to find out what a template writes around
# the model's turn (the stand-in), and around the content of a message (the probe).
_STAND_IN = "quadrigastandin"
_PROBE = "quadrigaprobe"
Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages of a chat, each with `role` and `content`."""
_FIX_TEMPLATE = "Set actor_rollout_ref.model.custom_chat_template to one that has"


@dataclass(frozen=True)
class Sample:
    """A row of the batch, as a loop sees it."""

    row: int  # number of the row in the batch
    uid: str  # id of the prompt, which all responses to it share
    prompt_ids: list[int]  # token ids of the prompt as the data set rendered it
    messages: list[dict[str, Any]] | None  # of the prompt; None if the data does not have them
    # Every non-tensor of the row, including `tools_kwargs`, `interaction_kwargs` and `extra_info`.
    columns: Mapping[str, Any]
    agent: str  # name of the loop that leads the conversation
    images: Images | None = None  # of the prompt
    num_axes: int = 1  # axes of positions: 1, or 3 of a vision-language model


@dataclass(frozen=True)
class Turn:
    """A turn of the model, of tools or of the user."""

    role: str  # "assistant", "tool" or "user"
    token_ids: list[int]  # the tokens of the turn in the conversation
    text: str  # special tokens included, for parsers
    seconds: float  # time that the turn took
    finish_reason: str = ""  # of the engine; "" if the model did not write the turn
    tool_responses: tuple[ToolResult, ...] = ()  # one for each call in the model's turn before it
    # Messages of the turn. Empty: the turn is one message, with `role` and `text`.
    messages: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True)
class LengthLimits:
    """Limits on the length of a conversation."""

    prompt_tokens: int  # P, tokens of the prompt
    response_tokens: int  # T, tokens of everything behind the prompt
    total_tokens: int  # tokens of prompt and response together, the engine's own limit
    assistant_turns: float = math.inf  # number of turns of the model
    user_turns: float = math.inf  # number of turns of tools or the user


@dataclass
class LoopTimer:
    """Time limit of a loop, shared by the conversations of its rollout."""

    limit_s: float = 0.0  # time that the loop may take between two completions, in seconds
    timeout: asyncio.Timeout | None = None  # None: the loop has no limit
    num_in_engine: int = 0  # completions for which the loop is waiting; the clock then stands still

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager around a completion, during which the clock stands still.

        Afterwards the loop may take `limit_s` seconds again.
        """
        timeout = self.timeout
        self.num_in_engine += 1
        if timeout is not None:
            timeout.reschedule(None)  # no deadline
        try:
            yield
        finally:
            self.num_in_engine -= 1
            # The last completion to end starts the clock, as conversations of a rollout share it.
            if timeout is not None and not self.num_in_engine:
                timeout.reschedule(asyncio.get_running_loop().time() + self.limit_s)


@dataclass
class Conversation:
    """A prompt, and a response of one or more turns.

    An agent loop calls `begin`, `generate` and `append`. It may begin further conversations with
    `another`; each becomes a row of the batch.
    """

    engine: RolloutEngine  # generates the model's turns
    encoder: "TurnEncoder"  # renders the other turns
    sample: Sample  # the row of the batch
    sampling: SamplingParams  # `complete` derives the seeds of later completions from its `seed`
    limits: LengthLimits  # on tokens and turns
    prompt_ids: list[int] = field(init=False)  # the prompt that the engine receives
    # Five lists with a value for each token of the response.
    token_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)  # 1 on tokens of the model
    log_probs: list[float] = field(default_factory=list)  # 0.0 on tokens of tools and users
    versions: list[int] = field(default_factory=list)  # of the weights; -1 for tools and users
    # 1 on tokens of tools and users that have a loss of their own (`TurnEncoder.echo_roles`).
    echo_mask: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)  # of the response
    # Turns after the model's last one; their tokens are not in the response.
    unread: list[Turn] = field(default_factory=list)
    # Prompt and turns as messages of text, for a user simulator; they are never rendered.
    messages: list[dict[str, Any]] = field(init=False)
    finish_reason: str = ""  # why the conversation ended; "" while it goes on
    failure: str = ""  # the error that ended it; "" without an error
    activity: str = "not begun"  # current activity, for reports on long waits; "" after the end
    # Rewards of tools by name. A loop that an `AgentLoop` wraps may give those of the calls in a list.
    tool_rewards: dict[str, float] | list[float] = field(default_factory=dict)
    turn_scores: list[float] = field(default_factory=list)  # scores of a user simulator, in order
    # Experts of the tokens that the model has read, [tokens, L, k] from the prompt on. None: unknown.
    routes: np.ndarray | None = None
    # Further entries of `extra_info` for the score function.
    extra_fields: dict[str, Any] = field(default_factory=dict)
    # Reward of each turn of the model; the score includes them. Empty: there is only the score.
    turn_rewards: list[float] = field(default_factory=list)
    # State of the environment before each turn of the model, by number of the turn, from 0.
    states: dict[int, str] = field(default_factory=dict)
    # Grade that the loop has given. None: a score function or a reward model grades.
    outcome: Outcome | None = None
    # `quadriga.data.VisionProcessor` of a vision-language model. None: later turns have no images.
    processor: Any = None
    agent: str = ""  # name of the agent whose turns the model writes
    # All conversations of the rollout, which share this list.
    rollout: "list[Conversation]" = field(default_factory=list)
    timer: LoopTimer = field(default_factory=LoopTimer)

    def __post_init__(self) -> None:
        self.prompt_ids = list(self.sample.prompt_ids)
        self.messages = list(self.sample.messages or [])
        # Prefixes of the conversation's tokens, each with the images in it; the longest is last.
        self._image_prefixes: list[tuple[list[int], Images]] = []
        if self.sample.images is not None:
            self._image_prefixes.append((self.sample.prompt_ids, self.sample.images))
        self._num_completions = 0
        self.rollout.append(self)

    def another(self, agent: str = "") -> "Conversation":
        """Begin a further conversation of the same rollout, which becomes a row of its own.

        The new conversation has the same limits, its own seeds, and the data's prompt of this row
        until `begin` replaces the prompt. Unless the loop sets the `outcome` of the new
        conversation, its grade is that of the rollout's first conversation.

        Args:
            agent: name of the agent whose turns the model writes.

        Returns:
            The conversation.
        """
        seed = derive_seed(self.rollout[0].sampling.seed, "conversation", len(self.rollout))
        return Conversation(
            engine=self.engine,
            encoder=self.encoder,
            sample=self.sample,
            sampling=replace(self.sampling, seed=seed),
            limits=self.limits,
            processor=self.processor,
            agent=agent,
            rollout=self.rollout,
            timer=self.timer,
        )

    @property
    def rows(self) -> "list[Conversation]":
        """Conversations of the rollout that become rows: those in which the model has written.

        If there are none, the first one is still a row, since each prompt needs a response.
        """
        return [chat for chat in self.rollout if chat.token_ids] or self.rollout[:1]

    @asynccontextmanager
    async def time_limit(self, limit_s: float) -> AsyncIterator[None]:
        """Context manager around a loop, which limits the time of the loop itself.

        The limit applies anew before the first completion, between two completions, and after the
        last one. Time in the engine does not count.

        Args:
            limit_s: the limit, in seconds.

        Raises:
            TimeoutError: the loop took longer, or raised this error itself.
        """
        timer = self.timer
        timer.limit_s = limit_s
        self.activity = "in the loop"
        try:
            # `LoopTimer.pause` stops this timeout during completions.
            async with asyncio.timeout(limit_s) as timer.timeout:
                yield
        except TimeoutError as error:
            # The loop may also raise a TimeoutError of its own.
            if timer.timeout is None or not timer.timeout.expired():
                raise
            raise TimeoutError(
                f"the loop took over {limit_s:g} s by itself after turn {len(self.turns)}"
                " (actor_rollout_ref.rollout.agent.timeout_s)"
            ) from error
        finally:
            timer.timeout = None

    def begin(
        self,
        messages: Messages | None,
        schemas: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Replace the prompt that the data set rendered, to offer tools or to change its text.

        Args:
            messages: messages of the new prompt.
            schemas: schemas of the tools that it offers.

        Raises:
            ConversationOver: the prompt does not fit into `data.max_prompt_length`.
            RolloutError: there are no messages, the template leaves the tools out, or a text-only
                model is shown an image.
        """
        assert not self.turns, "a conversation begins before its first turn"
        # A prompt of the data is rendered already, but cannot be rendered again without messages.
        if messages is None:
            raise RolloutError(
                f"conversation of row {self.sample.row}",
                got="a prompt without its messages",
                expected="the column raw_prompt",
                fix="Set data.return_raw_chat=True.",
            )
        prompt_ids = self.encoder.encode_prompt(messages, schemas)
        if self.sample.images is not None:
            prompt_ids = self.expand_images((), prompt_ids, self.sample.images.pictures)
        self.messages = [dict(message) for message in messages]
        if len(prompt_ids) > self.limits.prompt_tokens:
            tools_text = f" with {len(schemas)} tools" if schemas else ""
            limit = f"data.max_prompt_length={self.limits.prompt_tokens}"
            self.failure = f"prompt_length: {len(prompt_ids)} tokens{tools_text}, over {limit}"
            raise ConversationOver(self.failure)
        self.prompt_ids = prompt_ids

    @property
    def all_tokens(self) -> list[int]:
        """Token ids of the prompt and the response so far."""
        return [*self.prompt_ids, *self.token_ids]

    @property
    def images(self) -> Images | None:
        """All images so far, with the positions of all tokens; None if there is only text."""
        return self.images_in(self.all_tokens)

    def images_in(self, tokens: Sequence[int]) -> Images | None:
        """Images in a sequence of tokens, with the positions of all its tokens.

        Args:
            tokens: the beginning of the conversation, perhaps with other text behind it.

        Returns:
            The images. None: there is only text.
        """
        # The longest prefix that matches has all images of `tokens`; what follows it is text.
        for prefix, images in reversed(self._image_prefixes):
            if prefix == list(tokens[: len(prefix)]):
                return images.followed_by(tokens[len(prefix) :])
        return None

    @property
    def num_assistant_turns(self) -> int:
        """Number of turns that the model has written."""
        return sum(turn.role == "assistant" for turn in self.turns)

    @property
    def room(self) -> int:
        """Number of tokens that still fit into the response, by both limits on its length."""
        total = self.limits.total_tokens - len(self.prompt_ids)
        return min(self.limits.response_tokens, total) - len(self.token_ids)

    @property
    def turn_spans(self) -> list[tuple[int, int]]:
        """Start and end of each turn of the model, as token numbers in the response.

        The end is exclusive.
        """
        spans = []
        start = 0
        for turn in self.turns:
            end = start + len(turn.token_ids)
            if turn.role == "assistant":
                spans.append((start, end))
            start = end
        return spans

    @property
    def turn_states(self) -> list[str]:
        """State in which each turn of the model began.

        This is the environment's state if the loop has set one in `states`, else the text of the
        turn before, or "" for the first turn of the response.
        """
        states = []
        for number, turn in enumerate(self.turns):
            if turn.role == "assistant":
                observation = self.turns[number - 1].text if number else ""
                # `self.states` counts only turns of the model, of which this is the next one.
                states.append(self.states.get(len(states), observation))
        return states

    @property
    def solution_messages(self) -> list[dict[str, Any]]:
        """The response as messages with role and content, and if present name and tool_calls."""
        messages = []
        for turn in self.turns:
            messages += turn.messages or [{"role": turn.role, "content": turn.text}]
        keys = ("role", "content", "name", "tool_calls")
        return [{key: message[key] for key in keys if key in message} for message in messages]

    async def generate(self, **changes: Any) -> Turn:
        """Generate the model's next turn.

        Args:
            changes: fields of `SamplingParams` to replace for this turn.

        Returns:
            The turn, which has been appended to the conversation.

        Raises:
            ConversationOver: no token fits any more, or the engine cut or aborted the turn.
            RolloutError: the engine failed.
        """
        room = self.room
        if room < 1:
            raise ConversationOver("length")
        changes["max_tokens"] = min(changes.get("max_tokens", room), room)
        started = time.perf_counter()
        completion = await self.complete(self.all_tokens, self.images, **changes)
        token_ids = list(completion.token_ids)
        # A completion has the routes of all tokens so far, so they replace the earlier ones.
        self.routes = completion.routes
        text = self.encoder.decode(token_ids, with_special=True)
        message = {
            "role": "assistant",
            "content": self.encoder.decode(token_ids, with_special=False),
        }
        turn = Turn(
            role="assistant",
            token_ids=token_ids,
            text=text,
            seconds=time.perf_counter() - started,
            finish_reason=completion.finish_reason,
            # A copy, because loops add calls of tools to the message of the turn.
            messages=[dict(message)],
        )
        self.append_turn(turn, 1, completion.log_probs, completion.token_versions)
        self.messages.append(message)
        # A turn that reached only the caller's smaller `max_tokens` does not end the conversation.
        is_cut = completion.finish_reason == "length" and self.room < 1
        if is_cut or completion.finish_reason == "abort":
            raise ConversationOver(completion.finish_reason)
        return turn

    async def complete(
        self, token_ids: Sequence[int], images: Images | None = None, **changes: Any
    ) -> Completion:
        """Complete tokens with the engine, without appending anything to the conversation.

        Each call has a different seed.

        Args:
            token_ids: the tokens to complete.
            images: the images in them. None: text.
            changes: fields of `SamplingParams` to replace for this completion.

        Returns:
            The engine's completion.

        Raises:
            RolloutError: the engine failed, or its completion does not fit into `max_tokens`.
        """
        number = self._num_completions
        self._num_completions += 1
        seed = self.sampling.seed
        # The first completion keeps the row's seed: a response of one turn is then the same as
        # without an agent loop.
        if number > 0:
            seed = derive_seed(seed, number)
        sampling = replace(self.sampling, **{"seed": seed, **changes})

        self.activity = "in the engine"
        with self.timer.pause():
            completion = await self.engine.generate(list(token_ids), sampling, images)
        self.activity = f"in the loop after turn {number + 1}"
        where = f"engine, conversation of row {self.sample.row}, completion {number}"
        completion.require_fit(sampling.max_tokens, where)
        return completion

    def require_turns_left(self) -> None:
        """Check that the limits allow a turn of tools or the user, and a model's turn after it.

        Call it before tools are called for such a turn, because calls may have effects.

        Raises:
            ConversationOver: a limit on turns is reached.
        """
        num_user_turns = len(self.turns) - self.num_assistant_turns
        if self.num_assistant_turns >= self.limits.assistant_turns:
            raise ConversationOver("max_assistant_turns")
        if num_user_turns >= self.limits.user_turns:
            raise ConversationOver("max_user_turns")

    def append(
        self,
        messages: Messages,
        *,
        tool_responses: Sequence[ToolResult] = (),
        seconds: float = 0,
    ) -> None:
        """Append a turn that the model did not write.

        Args:
            messages: messages of the role "tool", or of "user". Their content is text, or parts:
                text and `{"type": "image", "image": ...}`, as in a row of the data.
            tool_responses: the responses of which the messages are made; for metrics and traces.
            seconds: time that the turn took.

        Raises:
            ConversationOver: the turn does not fit, a limit on turns is reached, or the turn shows
                an image after the model itself has written the token of images.
            RolloutError: the template does not take the messages, or a text-only model is shown an
                image.
            ToolFailedError: an image cannot be read.
        """
        self.require_turns_left()
        escaped, pictures = self.encoder.escape_messages(messages)
        model_turn = self.turns[-1].token_ids if self.turns else ()
        token_ids = self.encoder.encode_turn(escaped, model_turn)
        if pictures:
            model_tokens = itertools.compress(self.token_ids, self.mask)
            token_ids = self.expand_images(self.all_tokens, token_ids, pictures, model_tokens)

        # For parsers, user simulators and traces: the messages without their images.
        text_messages = []
        for message in escaped:
            content = message["content"]
            if not isinstance(content, str):
                content = "".join(part.get("text", "") for part in content)
            text_messages.append(message | {"content": content})
        self.messages += text_messages
        turn = Turn(
            role=escaped[0]["role"],
            token_ids=token_ids,
            text="\n".join(message["content"] for message in text_messages),
            seconds=seconds,
            tool_responses=tuple(tool_responses),
            messages=text_messages,
        )
        # The turn must fit as a whole, and leave room for at least one token of the model.
        if len(token_ids) >= self.room:
            self.unread.append(turn)
            raise ConversationOver("length")
        echo_mask = []
        # A turn before the model's first one is like a part of the prompt, and has no loss. Nor has
        # a turn with images, because `content_mask` does not know their tokens.
        if self.encoder.echo_roles and self.num_assistant_turns and not pictures:
            echo_mask = self.encoder.content_mask(escaped, len(token_ids))
        self.append_turn(turn, 0, [0.0] * len(token_ids), echo_mask=echo_mask)

    def expand_images(
        self,
        before: Sequence[int],
        token_ids: Sequence[int],
        pictures: Sequence[Any],
        model_tokens: Iterable[int] = (),
    ) -> list[int]:
        """Expand the token of each image in a turn to one token for each of its embeddings.

        The images are stored, and passed to the engine with the later completions. New videos
        cannot be added; those of the prompt stay.

        Args:
            before: the tokens before the turn; empty for a prompt.
            token_ids: tokens of the turn, with one token for each image.
            pictures: images of the turn.
            model_tokens: all tokens of the conversation that the model has written.

        Returns:
            The tokens that replace `token_ids`.

        Raises:
            ConversationOver: the model itself has written the token of images.
            RolloutError: the model is not a vision-language model.
            ToolFailedError: an image cannot be read.
        """
        where = f"conversation of row {self.sample.row}"
        if self.processor is None:
            keys = "rollout.multi_turn.enable or agent.agent_loop_path"
            raise RolloutError(
                where,
                got="images in a later turn, or beside tools",
                expected="text, or a vision-language model",
                fix=f"Leave the images out, or take a vision-language model and set {keys}.",
            )
        # The processor would take a token of images that the model has written for an image.
        if not set(model_tokens).isdisjoint(self.processor.media_ids):
            reason = "the model wrote the token of images itself, and is shown one"
            self.failure = f"image_token: {reason}"
            raise ConversationOver(self.failure)

        # The processor needs all images of the conversation at once, and the conversation with one
        # token for each of them (the short prompt).
        earlier = self.images_in(before)
        if earlier is None:
            short_prompt = [*before, *token_ids]
            all_pictures = list(pictures)
        else:
            short_prompt = [*earlier.short_prompt, *token_ids]
            all_pictures = [*earlier.pictures, *pictures]
        videos = self.sample.images.videos if self.sample.images else ()
        try:
            rendered = self.processor.conversation(
                short_prompt, all_pictures, videos, self.encoder.encode, where
            )
        except DataError as error:
            # An image that cannot be read ends this conversation, not the run.
            raise ToolFailedError(
                error.where, got=error.got, expected=error.expected, fix=error.fix
            ) from error
        images = Images(
            pictures=rendered.pictures,
            inputs=rendered.inputs,
            position_ids=rendered.positions,
            short_prompt=tuple(short_prompt),
            key=images_key(rendered.inputs),
            videos=videos,
        )
        self._image_prefixes.append((rendered.ids, images))
        return rendered.ids[len(before) :]

    def finish(self, reason: str, *, failure: str = "") -> None:
        """End the conversation, and move turns after the model's last one to `unread`.

        Args:
            reason: why it ended.
            failure: the error that ended it. "": keep the `failure` recorded so far, if any.
        """
        self.finish_reason = reason
        self.failure = failure or self.failure
        while self.turns:
            last = self.turns[-1]
            # The engine may have aborted a turn before its first token; this turn is removed, too.
            if last.role == "assistant" and last.token_ids:
                break
            self.turns.pop()
            self.unread.insert(0, last)
            # The five lists have a value for each token of the response.
            end = len(self.token_ids) - len(last.token_ids)
            del self.token_ids[end:]
            del self.mask[end:]
            del self.log_probs[end:]
            del self.versions[end:]
            del self.echo_mask[end:]

    def append_turn(
        self,
        turn: Turn,
        mask_value: int,
        log_probs: Sequence[float],
        versions: Sequence[int] = (),
        echo_mask: Sequence[int] = (),
    ) -> None:
        """Append a turn and its tokens to the response, without any check.

        Args:
            turn: the turn.
            mask_value: the mask of all tokens of the turn: 1 if the model wrote them, else 0.
            log_probs: log-probability of each token.
            versions: version of the weights that drew each token. Empty: -1 for each.
            echo_mask: 1 on tokens with a loss of their own. Empty: 0 for each.
        """
        self.echo_mask += echo_mask or [0] * len(turn.token_ids)
        self.versions += versions or [-1] * len(turn.token_ids)
        self.turns.append(turn)
        self.token_ids += turn.token_ids
        self.mask += [mask_value] * len(turn.token_ids)
        self.log_probs += log_probs


class TurnEncoder:
    """Renders and tokenizes prompts and turns with the tokenizer's chat template.

    Args:
        tokenizer: the model's tokenizer.
        template_kwargs: `data.apply_chat_template_kwargs`.
        vocabulary_size: rows of the model's embedding. None: every token has a row.
        echo_roles: roles whose tokens `content_mask` marks.

    Raises:
        RolloutError: there are `echo_roles`, but the tokenizer cannot map tokens to the text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any],
        vocabulary_size: int | None = None,
        echo_roles: Sequence[str] = (),
    ) -> None:
        if echo_roles and not tokenizer.is_fast:
            raise RolloutError(
                "actor_rollout_ref.actor.echo_coeff",
                got=f"{type(tokenizer).__name__}, which does not say where tokens stand in a text",
                expected="a fast tokenizer (tokenizer.json)",
                fix="Set echo_coeff to 0, or take a model with a tokenizer.json.",
            )
        self.echo_roles = frozenset(echo_roles)
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs)
        # `_render` decides for each text whether it ends with the beginning of the model's turn.
        self.template_kwargs.pop("add_generation_prompt", None)
        added_tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special_texts = {str(token) for token in added_tokens if token.special}
        special_texts.update(tokenizer.all_special_tokens)
        # The embedding has no row for some added tokens, which the model therefore must not read.
        if vocabulary_size is not None:
            for text, token_id in tokenizer.get_added_vocab().items():
                if token_id >= vocabulary_size:
                    special_texts.add(text)
        # `escape_text` breaks a token by a space after its first character, so a token of one
        # character stays. Longer tokens come first, since they may contain shorter ones.
        breakable_texts = [text for text in special_texts if len(text) > 1]
        self._special_texts = sorted(breakable_texts, key=len, reverse=True)
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._checked_roles: set[str] = set()
        self._where = f"chat template of {tokenizer.name_or_path or 'the tokenizer'}"

    def encode_prompt(self, messages: Messages, schemas: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a prompt, which may offer tools.

        Args:
            messages: messages of the prompt.
            schemas: schemas of the tools; empty if it offers none.

        Returns:
            Token ids, including those that begin the model's turn.

        Raises:
            RolloutError: the rendered prompt does not name each of the tools.
        """
        text = self._render(messages, schemas)
        names = [schema["function"]["name"] for schema in schemas]
        missing = [name for name in names if name not in text]
        if missing:
            raise RolloutError(
                self._where,
                got=f"a prompt that does not name the tools {', '.join(missing)}",
                expected="a template that writes `tools` into the prompt",
                fix=f"{_FIX_TEMPLATE} them, or describe the tools in a system message of the data.",
            )
        return self.encode([text])[0]

    def encode_turn(self, messages: Messages, model_turn: Sequence[int]) -> list[int]:
        """Render and tokenize a turn of tools or the user, between two turns of the model.

        Args:
            messages: messages of tools or the user.
            model_turn: tokens of the model's turn before the messages; empty if there is none.

        Returns:
            Token ids of the messages, and of the beginning of the model's next turn.

        Raises:
            RolloutError: the template leaves messages of this role out, or refuses them.
        """
        for role in dict.fromkeys(message["role"] for message in messages):
            if role not in self._checked_roles:
                self._require_role(role)
                self._checked_roles.add(role)
        text, has_closing_token = self._render_turn(messages)
        [token_ids] = self.encode([text])
        if not token_ids or not model_turn:
            return token_ids

        # The text begins with the token that closes the model's turn. It is left out if the model
        # has written it, or has closed its turn with another special token.
        last_written = model_turn[-1]
        is_closed = last_written == token_ids[0]
        if has_closing_token and {last_written, token_ids[0]} <= self._special_ids:
            is_closed = True
        return token_ids[1:] if is_closed else token_ids

    def content_mask(self, messages: Messages, num_tokens: int) -> list[int]:
        """Mark the tokens of the contents of messages of `echo_roles`.

        Tokens that the template writes around a content are not marked.

        Args:
            messages: messages of tools or the user.
            num_tokens: number of token ids that `encode_turn` returned for these messages.

        Returns:
            1 on tokens of contents and 0 on others, [num_tokens]. All are 0 if the template changes
            contents, so that they cannot be found in its text.
        """
        text, _ = self._render_turn(messages)
        spans = self._content_spans(messages, text)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        # A token [first, last) counts if it lies in the span of a content as a whole, and stands
        # for at least one character.
        mask = [
            int(any(start <= first < last <= end for start, end in spans))
            for first, last in encoded["offset_mapping"]
        ]
        # `encode_turn` leaves out the first token if the model has written it, so the last
        # `num_tokens` of the mask are those of the turn.
        return mask[len(mask) - num_tokens :]

    def _content_spans(self, messages: Messages, text: str) -> list[tuple[int, int]]:
        """Find the contents of `echo_roles` in the text of a turn.

        Args:
            messages: messages of tools or the user.
            text: the text of the turn, from `_render_turn`.

        Returns:
            Start and end of each content, in characters. Empty if the contents cannot be found,
            because what the template writes around them depends on them.
        """
        # The same messages with probes as contents show what the template writes around contents.
        probes = []
        for message in messages:
            is_text = isinstance(message["content"], str)
            probe = _PROBE if is_text else [{"type": "text", "text": _PROBE}]
            probes.append({**message, "content": probe})
        probe_text, _ = self._render_turn(probes)
        before, *behind = map(re.escape, probe_text.split(_PROBE))
        if len(behind) != len(messages):
            return []

        # A pattern with one group for each content, followed by what is written behind the content,
        # such as "(42.*?|.*?)<end>" for the content 42.
        parts = []
        for message, separator in zip(messages, behind, strict=True):
            # The content itself is tried first, because it may contain the separator. A template
            # may also change it, as by stripping it: then the text up to the separator is taken.
            content = message["content"]
            exact = re.escape(content) if isinstance(content, str) else ""
            parts.append(f"({exact}.*?|.*?){separator}")
        # Earlier parts are atomic groups, so that matching takes linear time.
        *earlier, last = parts
        pattern = "".join((before, *(f"(?>{part})" for part in earlier), last))
        match = re.fullmatch(pattern, text, re.DOTALL)
        if match is None:
            return []
        # The first message has group 1: group 0 is the whole match.
        roles = enumerate((message["role"] for message in messages), start=1)
        return [match.span(group) for group, role in roles if role in self.echo_roles]

    def escape_messages(self, messages: Messages) -> tuple[list[dict[str, Any]], list[Any]]:
        """Escape the texts of messages by `escape_text`, and collect their images.

        Args:
            messages: messages whose content is a text, or parts of type "text" and "image".

        Returns:
            The messages with escaped texts, in which the part of an image is {"type": "image"}; and
            the images, in order.
        """
        escaped = []
        pictures = []
        for message in messages:
            content = message["content"]
            if isinstance(content, str):
                escaped.append({**message, "content": self.escape_text(content)})
                continue
            # The pixels of an image are no text for the template, so its part is left empty.
            parts = []
            for part in content:
                escaped_part = {"type": part["type"]}
                if part.get("text"):
                    escaped_part["text"] = self.escape_text(part["text"])
                if part["type"] == "image":
                    pictures.append(part.get("image"))
                parts.append(escaped_part)
            escaped.append({**message, "content": parts})
        return escaped, pictures

    def escape_text(self, text: str) -> str:
        """Write a space into every special token in a text, so that no tool can forge a turn.

        The tokenizer then encodes the token as ordinary text. Added tokens for which the model's
        embedding has no row are broken as well.
        """
        for token in self._special_texts:
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def decode(self, token_ids: Sequence[int], *, with_special: bool) -> str:
        """Decode tokens.

        Args:
            token_ids: the tokens.
            with_special: whether special tokens are part of the text.

        Returns:
            The decoded text.
        """
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not with_special))

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Tokenize texts that a template has rendered, which have their special tokens already."""
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        return encoded["input_ids"]

    def _require_role(self, role: str) -> None:
        """Raise a RolloutError if the template leaves out messages of a role."""
        probe = {"role": role, "content": _PROBE}
        if role == "tool":
            probe |= {"name": "probe", "tool_call_id": "call00000"}
        if _PROBE not in self._render_turn([probe])[0]:
            raise RolloutError(
                self._where,
                got=f"messages of the role {role}, which it leaves out",
                expected="a template that writes them",
                fix=f"{_FIX_TEMPLATE} this role.",
            )

    def _render_turn(self, messages: Messages) -> tuple[str, bool]:
        """Render the text that a turn of tools or the user adds after a turn of the model.

        Args:
            messages: messages of tools or the user.

        Returns:
            The text, including the beginning of the model's next turn, and whether the text begins
            with what closes the model's turn before.
        """
        # Schemas are left out: some templates write them beside the last message, but the prompt
        # has them already.
        user = {"role": "user", "content": "x"}
        start: list[dict[str, Any]] = [user, {"role": "assistant", "content": _STAND_IN}]
        try:
            rendered = self._render([*start, *messages])
        except RolloutError:
            if messages[0]["role"] != "tool":
                raise
            # The template may refuse responses of tools after a turn that calls no tool.
            return self._render_after_calls(user, messages), False
        added_text = rendered.rpartition(_STAND_IN)[2]
        # What follows the stand-in if nothing comes after it is what closes the model's turn.
        closed_turn = self._render(start, add_generation_prompt=False)
        closing_text = closed_turn.rpartition(_STAND_IN)[2]
        return added_text, bool(closing_text.strip())

    def _render_after_calls(self, user: Mapping[str, Any], messages: Messages) -> str:
        """Render the text that responses of tools add after a turn with their calls.

        Some templates take a tool's response only after the model's call, whose name they repeat.

        Args:
            user: a message of the user, to begin with.
            messages: the responses.

        Returns:
            The text, beginning with the special token that ends the last call, or else with the one
            that begins the first response.
        """
        calls = []
        for message in messages:
            function = {"name": message["name"], "arguments": {_STAND_IN: _STAND_IN}}
            calls.append({"id": message["tool_call_id"], "type": "function", "function": function})
        calling_turn = {"role": "assistant", "content": "", "tool_calls": calls}
        after = self._render([user, calling_turn, *messages]).rpartition(_STAND_IN)[2]
        # The stand-in is the last argument of the last call. Whatever closes the arguments is left
        # out up to the first special token, because the model has written it.
        places = [after.find(token) for token in self._special_texts]
        start = min((place for place in places if place >= 0), default=0)
        return after[start:]

    def _render(
        self,
        messages: Messages,
        schemas: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Render messages with the chat template.

        Args:
            messages: the messages.
            schemas: schemas of tools to offer.
            add_generation_prompt: whether the text ends with the beginning of the model's turn. If
                the last message is the model's own, the text ends within this message instead.

        Raises:
            RolloutError: the template raised an error.
        """
        options = {
            "tools": list(schemas) or None,
            "add_generation_prompt": add_generation_prompt,
            **self.template_kwargs,
        }
        # The model continues a prompt that ends within its own turn.
        if add_generation_prompt and ends_with_assistant(messages):
            options |= CONTINUING
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        except Exception as error:  # a template is a program, which may raise any error
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise RolloutError(
                self._where,
                got=f"{type(error).__name__}: {error}",
                expected=f"a template that takes messages of {roles}",
                fix=f"{_FIX_TEMPLATE} these roles.",
            ) from error
        return str(text)
