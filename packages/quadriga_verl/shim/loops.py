# SPDX-License-Identifier: Apache-2.0
"""verl's agent loops. Each conversation has a loop object, which holds the conversation's tokens.

    REGISTRY ──> _AdaptedLoop.run(conversation) ──> AgentLoopBase.run(...) ──> AgentLoopOutput
                     │                                  │ generates by AsyncLLMServerManager
                     └──> _write_tokens: the output's tokens become those of the conversation

`ToolAgentLoop` is a state machine. Each state has a method that returns the next state:

    PENDING ──> GENERATING ──> PROCESSING_TOOLS or INTERACTING ──> GENERATING ... ──> TERMINATED
"""

import asyncio
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar, TypeAlias
from uuid import uuid4

from omegaconf import OmegaConf
from pydantic import Field

from quadriga.errors import RolloutError
from quadriga.rewards.outcome import read_outcome
from quadriga.rollout.agent_loop.conversation import (
    Conversation,
    ConversationOver,
    Turn,
    TurnEncoder,
)
from quadriga.rollout.agent_loop.interactions import UserSimulator
from quadriga.rollout.agent_loop.loops import REGISTRY, AgentLoop, Services
from quadriga.rollout.agent_loop.parsers import PARSERS, ToolCall
from quadriga.rollout.agent_loop.tool_calls import ToolBox
from quadriga.user_file import accepted_arguments
from quadriga_verl.shim import is_before
from quadriga_verl.shim.data import RLHFDataset
from quadriga_verl.shim.tools import (
    ConversationTool,
    JsonObject,
    OpenModel,
    ToolResponse,
    simple_timer,
    tool_of,
)

TokenIds: TypeAlias = list[int]
_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"}
"""Sampling parameters that a loop may change."""
_OTHER_PARAMETERS = {"logprobs", "n", "repetition_penalty", "max_tokens", "max_new_tokens"}
"""Sampling parameters that are accepted, but not passed to the engine under these names."""
_CALLS = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)


# ---- results ------------------------------------------------------------------------------------


class TokenOutput(OpenModel):
    """A response of the engine."""

    token_ids: TokenIds
    log_probs: list[float] | None = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: JsonObject = Field(default_factory=dict)


class AgentLoopMetrics(OpenModel):
    """Seconds that a conversation spent."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0


class AgentLoopOutput(OpenModel):
    """A finished conversation. `response_mask` is 1 for response tokens that the model wrote, else 0."""

    prompt_ids: TokenIds
    response_ids: TokenIds
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    multi_modal_data: JsonObject | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = AgentLoopMetrics()
    extra_fields: JsonObject = Field(default_factory=dict)


@dataclass
class DictConfigWrap:
    """verl's wrapper of a configuration: an object with the attribute `config`."""

    config: Any


# ---- the engine of a conversation ---------------------------------------------------------------


class AsyncLLMServerManager:
    """Rollout engine with the interface that verl's loops call. Each conversation has its own object.

    Attributes:
        chat: the conversation.
        services: objects that agent loops share.
        token_ids: all tokens that the engine has generated, over all turns.
        log_probs: log-probabilities of `token_ids`.
        last_tokens: token ids of the prompt and the response of the last call.
    """

    def __init__(self, chat: Conversation, services: Services) -> None:
        self.chat = chat
        self.services = services
        self.token_ids: TokenIds = []
        self.log_probs: list[float] = []
        self.last_tokens: TokenIds = []

    async def generate(self, request_id: str, **arguments: Any) -> Any:
        """Call `complete`. Before verl 0.6, return only the token ids of the response."""
        output = await self.complete(request_id, **arguments)
        return output.token_ids if is_before(0, 6) else output

    async def complete(
        self,
        request_id: str,
        *,
        prompt_ids: TokenIds,
        sampling_params: Mapping[str, Any],
        **media: Any,
    ) -> TokenOutput:
        """Generate a response to token ids.

        Args:
            request_id: ignored.
            prompt_ids: the tokens.
            sampling_params: sampling parameters of `run`, which the loop may have changed.
                `max_tokens` is lowered to what the limits of the conversation leave.
            media: images and videos, ignored: those that `apply_chat_template` has rendered are used.

        Returns:
            The response. It is also added to the attributes `token_ids` and `log_probs`.

        Raises:
            ConversationOver: there is no room for a response.
            RolloutError: images were not rendered by `apply_chat_template`, or a sampling parameter
                is not supported.
        """
        images = self._rendered_images(prompt_ids, media)
        parameters = dict(sampling_params)
        unknown_names = parameters.keys() - _SAMPLING - _OTHER_PARAMETERS
        is_penalized = parameters.get("repetition_penalty", 1.0) != 1.0
        if unknown_names or is_penalized or parameters.get("n", 1) != 1:
            raise RolloutError(
                "server_manager.generate",
                got=str(parameters)[:200],
                expected=f"{', '.join(sorted(_SAMPLING))}, max_tokens; repetition_penalty=1, n=1",
            )
        limits = self.chat.limits
        max_tokens = parameters.get("max_tokens") or parameters.get("max_new_tokens")
        max_tokens = max_tokens or limits.response_tokens
        max_tokens = min(max_tokens, limits.total_tokens - len(prompt_ids))
        if max_tokens < 1:
            raise ConversationOver("length")

        changes = {name: parameters[name] for name in _SAMPLING & parameters.keys()}
        for name in ("stop", "stop_token_ids"):
            if name in changes:
                changes[name] = tuple(changes[name])
        completion = await self.chat.complete(prompt_ids, images, max_tokens=max_tokens, **changes)
        self.last_tokens = [*prompt_ids, *completion.token_ids]
        self.token_ids += completion.token_ids
        self.log_probs += completion.log_probs
        is_aborted = completion.finish_reason == "abort"
        return TokenOutput(
            token_ids=list(completion.token_ids),
            log_probs=list(completion.log_probs),
            stop_reason="aborted" if is_aborted else "completed",
        )

    def _rendered_images(self, prompt_ids: TokenIds, media: Mapping[str, Any]) -> Any:
        """Images in a prompt that `apply_chat_template` has rendered. None: the prompt has no images.

        Args:
            prompt_ids: the tokens of the prompt.
            media: further arguments of `generate`, such as `image_data`.

        Raises:
            RolloutError: there are images, but the prompt does not begin with tokens that
                `apply_chat_template` has returned for them.
        """
        # The conversation knows the tokens for which images were rendered.
        images = self.chat.images_in(prompt_ids)
        has_images = self.chat.sample.images is not None
        has_data = any(value for name, value in media.items() if name.endswith("_data"))
        if images is None and (has_images or has_data):
            raise RolloutError(
                "server_manager.generate",
                got="images, but not the tokens that were rendered for them",
                expected="the tokens of self.apply_chat_template(messages)",
                fix="Do not change these tokens; append further tokens at their end.",
            )
        return images

    def log_probs_of(self, response_ids: TokenIds, mask: list[int]) -> list[float]:
        """Log-probabilities for a response that a loop has returned without log-probabilities.

        Args:
            response_ids: tokens of the response.
            mask: 1 for tokens that were generated.

        Returns:
            A value for each token; 0 outside the mask.

        Raises:
            RolloutError: the tokens under the mask are not those that were generated.
        """
        pairs = zip(response_ids, mask, strict=True)
        generated = [token for token, is_generated in pairs if is_generated]
        if generated != self.token_ids[: len(generated)]:
            raise RolloutError(
                "AgentLoopOutput",
                got="tokens under the mask that were not generated",
                fix="Return response_logprobs too, or give tokens of other origin the mask 0.",
            )
        log_probs = iter(self.log_probs)
        return [next(log_probs) if is_generated else 0.0 for is_generated in mask]


# ---- the adapter --------------------------------------------------------------------------------


class _AdaptedLoop(AgentLoop):
    """Agent loop of Quadriga that runs a loop with verl's interface, a new object per conversation.

    Args:
        services: objects that agent loops share.
        arguments: arguments of the loop's class from the configuration.
    """

    loop_class: type[Any]  # set in subclasses, by `AgentLoopBase.__init_subclass__`

    def __init__(self, services: Services, **arguments: Any) -> None:
        super().__init__(services)
        self.arguments = arguments

    async def run(self, chat: Conversation) -> None:
        """Run a new object of `loop_class`, and store the tokens of its output in the conversation.

        Raises:
            RolloutError: the sample has no messages, or see `_write_tokens`.
            TypeError: the loop returns something else than an `AgentLoopOutput`.
        """
        messages = chat.sample.messages
        if messages is None:
            raise RolloutError(
                f"agent loop {chat.sample.agent}",
                got="a prompt without its messages",
                expected="the column raw_prompt",
                fix="Set data.return_raw_chat=True.",
            )
        server = AsyncLLMServerManager(chat, self.services)
        config = self._verl_config(chat)
        # A user's class may have only some of verl's parameters.
        loop_arguments = {
            "trainer_config": DictConfigWrap(config),
            "data_config": DictConfigWrap(config.data),
            "server_manager": server,
            "tokenizer": chat.encoder.tokenizer,
            "processor": None,
            "dataset_cls": RLHFDataset,
        }
        loop = self.loop_class(
            **accepted_arguments(self.loop_class, loop_arguments), **self.arguments
        )

        sampling = chat.sampling
        sampling_params = {
            "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "repetition_penalty": 1.0,
            "logprobs": True,
        }
        columns = {
            **chat.sample.columns,
            "raw_prompt": messages,
            "messages": messages,
            "sampling_params": sampling_params,
        }
        output = await loop.run(**accepted_arguments(loop.run, columns))
        if not isinstance(output, AgentLoopOutput):
            name = f"{self.loop_class.__name__}.run"
            got = type(output).__name__
            raise TypeError(f"{name}: got {got}, expected an AgentLoopOutput")
        _write_tokens(output, server, chat)

    def _verl_config(self, chat: Conversation) -> Any:
        """Make the parts of verl's configuration that loops read."""
        limits = chat.limits
        rollout = self.services.config.model_dump(mode="json")
        rollout["prompt_length"] = limits.prompt_tokens
        rollout["response_length"] = limits.response_tokens
        model = {"path": chat.encoder.tokenizer.name_or_path}
        data = {
            "max_prompt_length": limits.prompt_tokens,
            "max_response_length": limits.response_tokens,
            "apply_chat_template_kwargs": dict(chat.encoder.template_kwargs),
        }
        policy = {"rollout": rollout, "model": model}
        return OmegaConf.create({"actor_rollout_ref": policy, "data": data})


def _write_tokens(
    output: AgentLoopOutput, server: AsyncLLMServerManager, chat: Conversation
) -> None:
    """Store the output of a loop in the conversation: tokens, and rewards of turns and tools.

    The response is cut to its limit. The score of the output, if it has one, is stored too.

    Args:
        output: result of the loop.
        server: the engine, which has the log-probabilities if `output` does not.
        chat: the conversation, which has no turns yet.

    Raises:
        ConversationOver: the prompt is too long.
        RolloutError: the lists of `output` differ in length, or log-probabilities are not known.
    """
    limits = chat.limits
    num_tokens = len(output.response_ids)
    num_prompt_tokens = len(output.prompt_ids)
    if num_prompt_tokens > limits.prompt_tokens:
        chat.failure = f"prompt_length: {num_prompt_tokens} tokens, over {limits.prompt_tokens}"
        raise ConversationOver(chat.failure)
    mask = output.response_mask
    log_probs = output.response_logprobs
    if log_probs is None:
        log_probs = server.log_probs_of(output.response_ids, mask)
    if not len(mask) == len(log_probs) == num_tokens:
        raise RolloutError(
            f"agent loop {chat.sample.agent}",
            got=f"{num_tokens} response_ids, {len(mask)} of response_mask, {len(log_probs)} log_probs",
            expected="lists of one length",
        )

    chat.prompt_ids = list(output.prompt_ids)
    tokens = list(zip(output.response_ids, mask, log_probs, strict=True))
    # Neighbouring tokens with the same mask become a turn.
    turns = groupby(tokens[: limits.response_tokens], key=itemgetter(1))
    for is_generated, turn_tokens in turns:
        ids, _, turn_log_probs = map(list, zip(*turn_tokens, strict=True))
        text = chat.encoder.decode(ids, with_special=True)
        role = "assistant" if is_generated else "tool"
        chat.append_turn(Turn(role, ids, text, seconds=0.0), int(is_generated), turn_log_probs)
    chat.finish_reason = "length" if num_tokens > limits.response_tokens else "stop"
    chat.extra_fields = dict(output.extra_fields)
    chat.turn_scores = list(chat.extra_fields.get("turn_scores") or ())
    chat.tool_rewards = chat.extra_fields.get("tool_rewards") or {}
    if output.reward_score is not None:
        chat.outcome = read_outcome(output.reward_score)


def register(agent_name: str) -> Callable[[type[Any]], type[Any]]:
    """Class decorator that registers a loop, for use in the file `rollout.agent.agent_loop_path`."""

    def decorate(cls: type[Any]) -> type[Any]:
        REGISTRY.register(agent_name)(cls.quadriga_form)
        return cls

    return decorate


# ---- loops --------------------------------------------------------------------------------------


class AgentLoopBase(ABC):
    """Base class of verl's agent loops. Each conversation has an object.

    Args:
        trainer_config: object whose attribute `config` is the configuration.
        server_manager: the engine, an `AsyncLLMServerManager`.
        tokenizer: the tokenizer.
        processor: None; `apply_chat_template` processes images.
        dataset_cls: verl's data set.
        data_config: ignored; it is a section of `trainer_config`.
        kwargs: further arguments of `init_class`.
    """

    _class_initialized = False
    offers_tools = False  # whether prompts name the tools of the configuration
    quadriga_form: type[AgentLoop]  # agent loop of Quadriga that runs this class

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        members = {
            "loop_class": cls,
            "offers_tools": cls.offers_tools,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }
        cls.quadriga_form = type(cls.__name__, (_AdaptedLoop,), members)

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: type[Any] = RLHFDataset,
        data_config: Any = None,
        **kwargs: Any,
    ) -> None:
        # Attributes with verl's names, which subclasses read. The configuration is always whole
        # here, so `data_config`, which some versions of verl pass separately, is not needed.
        self.config = trainer_config.config
        self.server_manager = server_manager
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = self.config.data
        self.apply_chat_template_kwargs = self.config.data.apply_chat_template_kwargs
        self.loop = asyncio.get_running_loop()
        arguments = {
            "config": self.config,
            "tokenizer": tokenizer,
            "processor": processor,
            **kwargs,
        }
        # A subclass may declare only some of verl's parameters.
        self.init_class(**accepted_arguments(self.init_class, arguments))

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any, **kwargs: Any) -> None:
        """Prepare state that all conversations share. As in verl, each conversation calls it.

        Args:
            config: the configuration.
            tokenizer: the tokenizer.
            processor: None.
            kwargs: further arguments of the loop.
        """
        cls._class_initialized = True

    async def process_vision_info(self, messages: list[JsonObject]) -> JsonObject:
        """Return the images of the row's prompt, as arguments of `apply_chat_template`.

        Args:
            messages: ignored; the data set has read their images.
        """
        images = self.server_manager.chat.sample.images
        if images is None or not images.pictures:
            return {}
        return {"images": list(images.pictures)}

    async def apply_chat_template(
        self,
        messages: list[JsonObject],
        tools: Any = None,
        remove_system_prompt: bool = False,
        **media: Any,
    ) -> TokenIds:
        """Tokenize a chat, up to the start of the model's turn.

        Args:
            messages: a whole prompt, or messages that follow the model's last turn. Each image is a
                part `{"type": "image"}` of a message.
            tools: schemas of the tools that the prompt offers.
            remove_system_prompt: whether the messages follow the model's last turn. Then text in
                them that spells a special token is not encoded as this token.
            media: `images` of these messages. Without it, a prompt has the images of the row.

        Returns:
            Token ids; for messages that follow a turn, only of these messages.

        Raises:
            RolloutError: there are audios, or videos outside the prompt.
        """
        server = self.server_manager
        chat = server.chat
        prompt_images = chat.sample.images
        has_new_videos = media.get("videos") and (remove_system_prompt or prompt_images is None)
        if media.get("audios") or has_new_videos:
            raise RolloutError(
                "apply_chat_template", got="videos or audios", expected="text and images"
            )
        images = list(media.get("images") or ())
        encoder = chat.encoder
        # The loop may have changed the arguments of the template: the configured ones are in `config`.
        if self.apply_chat_template_kwargs != self.config.data.apply_chat_template_kwargs:
            encoder = TurnEncoder(self.tokenizer, dict(self.apply_chat_template_kwargs))

        # `expand_images` replaces the token of each image by one for each of its embeddings.
        if not remove_system_prompt:
            ids = encoder.encode_prompt(messages, tools or ())
            if not images and prompt_images:
                images = prompt_images.pictures
            return chat.expand_images((), ids, images) if prompt_images or images else ids

        complete_messages = []
        for message in messages:
            # Templates may require a name and an id in the response of a tool.
            is_response = message["role"] == "tool"
            defaults = {"name": "unknown", "tool_call_id": "call00000"} if is_response else {}
            complete_messages.append({**defaults, **message})
        escaped_messages, inline_images = encoder.escape_messages(complete_messages)
        ids = encoder.encode_turn(escaped_messages, server.token_ids)
        images = images or [image for image in inline_images if image is not None]
        if not images:
            return ids
        return chat.expand_images(server.last_tokens, ids, images, server.token_ids)

    @abstractmethod
    async def run(self, sampling_params: JsonObject, **kwargs: Any) -> AgentLoopOutput:
        """Lead a conversation.

        Args:
            sampling_params: parameters for the engine.
            kwargs: columns of the row.

        Returns:
            The tokens of the conversation.
        """


class SingleTurnAgentLoop(AgentLoopBase):
    """Agent loop with a single response to the prompt."""

    async def run(self, sampling_params: JsonObject, **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        ids = await self.apply_chat_template(messages, **await self.process_vision_info(messages))
        output = await self.server_manager.complete(
            uuid4().hex, prompt_ids=ids, sampling_params=sampling_params
        )
        return AgentLoopOutput(
            prompt_ids=ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            num_turns=2,
        )


# ---- tool calls ---------------------------------------------------------------------------------


class FunctionCall(OpenModel):
    """A tool call in a response.

    Attributes:
        name: the tool.
        arguments: the arguments as JSON text.
        problem: why the call cannot be read, or "".
    """

    name: str
    arguments: str
    problem: str = ""


class ToolParser:
    """Parser of the tool calls in responses. Subclasses are registered as a `multi_turn.format`."""

    _registry: ClassVar[dict[str, "type[ToolParser]"]] = {}
    format_name = "hermes"

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> "ToolParser":
        """Make the parser of a format.

        Args:
            name: a format that was registered here, or one of `PARSERS`.
            tokenizer: decodes responses.

        Raises:
            ValueError: the format is unknown.
        """
        if name not in cls._registry and name not in PARSERS:
            names = ", ".join((*PARSERS, *cls._registry))
            raise ValueError(f"tool parser: got {name!r}, expected one of {names}")
        parser = cls._registry.get(name, ToolParser)(tokenizer)
        parser.format_name = name
        return parser

    @classmethod
    def register(cls, name: str) -> Callable[[type[Any]], type[Any]]:
        """Class decorator that registers a parser.

        From then on, the loop `tool_agent` is verl's `ToolAgentLoop` in the whole process, because
        Quadriga's loop passes text to parsers, while verl's parsers take tokens.

        Args:
            name: name of the format.
        """

        def decorate(subclass: type[Any]) -> type[Any]:
            cls._registry[name] = subclass
            REGISTRY["tool_agent"] = ToolAgentLoop.quadriga_form
            return subclass

        return decorate

    async def extract_tool_calls(
        self, responses_ids: TokenIds, tools: Any = None, with_unreadable: bool = False
    ) -> tuple[str, list[FunctionCall]]:
        """Find the tool calls in a response.

        Args:
            responses_ids: tokens of the response.
            tools: schemas of the tools, by which arguments get their types.
            with_unreadable: whether to also return calls that cannot be read.

        Returns:
            The text without calls, and the calls.
        """
        text = str(self.tokenizer.decode(responses_ids, skip_special_tokens=False))
        parameters = {}
        for tool in tools or ():
            schema = tool if isinstance(tool, dict) else tool.model_dump()
            function = schema["function"]
            parameters[function["name"]] = function.get("parameters", {})
        calls = []
        for call in PARSERS[self.format_name](text, parameters):
            if with_unreadable or not call.problem:
                arguments = json.dumps(call.arguments, ensure_ascii=False)
                calls.append(
                    FunctionCall(name=call.name, arguments=arguments, problem=call.problem)
                )
        return _CALLS.sub("", text), calls


class AgentState(Enum):
    """State of a tool loop."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


class AgentData:
    """State of a conversation of `ToolAgentLoop`, with verl's names of attributes.

    `prompt_ids` has all tokens of the conversation, `response_ids` those of the last turn of the model.
    `response_mask` and `response_logprobs` are for all tokens after the prompt. Tools may store values
    in `extra_fields`.

    Args:
        messages: messages of the prompt.
        request_id: id of the conversation.
        tools_kwargs: keyword arguments by the name of the tool, from the row.
        attributes: values of further attributes.
    """

    def __init__(
        self,
        *,
        messages: list[JsonObject],
        request_id: str,
        tools_kwargs: Any = None,
        **attributes: Any,
    ):
        self.messages = messages
        self.request_id = request_id
        self.tools_kwargs = dict(tools_kwargs or {})
        self.interaction: Any = None
        self.interaction_kwargs: JsonObject = {}
        self.image_data = None
        self.video_data = None
        self.metrics: JsonObject = {}
        self.extra_fields: JsonObject = {}
        self.prompt_ids: TokenIds = []
        self.response_ids: TokenIds = []
        self.response_mask: list[int] = []
        self.response_logprobs: list[float] = []
        self.turn_scores: list[float] = []
        self.tool_rewards: list[float] = []
        self.tool_calls: list[FunctionCall] = []
        self.user_turns = 0
        self.assistant_turns = 0
        vars(self).update(attributes)


class ToolAgentLoop(AgentLoopBase):
    """Agent loop that calls the tools that the model names.

    If the model calls no tool, the row's user simulator replies. As in verl, each call creates an
    instance of the tool and releases it.
    """

    offers_tools = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        turns = self.rollout_config.multi_turn
        specs = self.server_manager.services.tools
        self.max_user_turns = turns.max_user_turns
        self.max_assistant_turns = turns.max_assistant_turns
        self.max_parallel_calls = turns.max_parallel_calls
        self.max_tool_response_length = turns.max_tool_response_length
        self.tool_response_truncate_side = turns.tool_response_truncate_side
        self.tools = {name: tool_of(spec) or spec for name, spec in specs.items()}
        self.tool_schemas = [spec.schema for spec in specs.values()]
        self.tool_parser_name = turns.format
        self.tool_parser = ToolParser.get_tool_parser(turns.format, self.tokenizer)
        self.prompt_length = self.rollout_config.prompt_length
        self.response_length = self.rollout_config.response_length

    async def run(self, sampling_params: JsonObject, **kwargs: Any) -> AgentLoopOutput:
        """Call the method of each state in turn, until the conversation is over.

        Args:
            sampling_params: parameters for the engine.
            kwargs: columns of the row: `raw_prompt`, and optionally `tools_kwargs` and
                `interaction_kwargs`, whose `name` selects a user simulator.
        """
        data = AgentData(
            messages=list(kwargs["raw_prompt"]),
            request_id=uuid4().hex,
            tools_kwargs=kwargs.get("tools_kwargs"),
            interaction_kwargs=kwargs.get("interaction_kwargs") or {},
        )
        if data.interaction_kwargs.get("name") is not None:
            services = self.server_manager.services
            limit_s = services.config.multi_turn.tool_timeout_s
            data.interaction = UserSimulator(
                services.interactions, data.interaction_kwargs, services.thread, limit_s
            )
        state = AgentState.PENDING
        async with data.interaction or nullcontext():
            while True:
                match state:
                    case AgentState.PENDING:
                        state = await self._handle_pending_state(data, sampling_params)
                    case AgentState.GENERATING:
                        state = await self._handle_generating_state(data, sampling_params)
                    case AgentState.PROCESSING_TOOLS:
                        state = await self._handle_processing_tools_state(data)
                    case AgentState.INTERACTING:
                        state = await self._handle_interacting_state(data)
                    case _:  # TERMINATED
                        break
        # `prompt_ids` has grown by the tokens of the response, for which there is a mask.
        num_prompt_tokens = len(data.prompt_ids) - len(data.response_mask)
        response_ids = data.prompt_ids[num_prompt_tokens:]
        return AgentLoopOutput(
            prompt_ids=data.prompt_ids[:num_prompt_tokens],
            response_ids=response_ids[: self.response_length],
            response_mask=data.response_mask[: self.response_length],
            response_logprobs=data.response_logprobs[: self.response_length] or None,
            num_turns=data.user_turns + data.assistant_turns + 1,  # the prompt is a turn, too
            metrics=data.metrics,
            extra_fields={
                **data.extra_fields,
                "turn_scores": data.turn_scores,
                "tool_rewards": data.tool_rewards,
            },
        )

    async def _handle_pending_state(
        self, agent_data: AgentData, sampling_params: JsonObject
    ) -> AgentState:
        """Render the prompt with the tools."""
        agent_data.prompt_ids = await self.apply_chat_template(
            agent_data.messages, tools=self.tool_schemas
        )
        return AgentState.GENERATING

    async def _handle_generating_state(
        self,
        agent_data: AgentData,
        sampling_params: JsonObject,
        ignore_termination: bool = False,
    ) -> AgentState:
        """Generate a turn of the model, and read its tool calls.

        Args:
            agent_data: the conversation.
            sampling_params: parameters for the engine.
            ignore_termination: whether to go on although the response has reached its longest length.

        Returns:
            The next state.
        """
        # Without room left, which only `ignore_termination` allows, the limits of the conversation apply.
        num_left = self.response_length - len(agent_data.response_mask)
        if num_left > 0:
            sampling_params = {"max_tokens": num_left, **sampling_params}
        with simple_timer("generate_sequences", agent_data.metrics):
            output = await self.server_manager.complete(
                agent_data.request_id,
                prompt_ids=agent_data.prompt_ids,
                sampling_params=sampling_params,
            )
        ids = output.token_ids
        agent_data.assistant_turns += 1
        agent_data.response_ids = ids
        agent_data.prompt_ids += ids
        agent_data.response_mask += [1] * len(ids)
        agent_data.response_logprobs += output.log_probs
        # A limit of None or 0 means that there is none.
        limits = (
            (self.max_assistant_turns, agent_data.assistant_turns),
            (self.max_user_turns, agent_data.user_turns),
        )
        has_reached_limit = any(limit and count >= limit for limit, count in limits)
        is_full = len(agent_data.response_mask) >= self.response_length
        is_over = output.stop_reason == "aborted" or has_reached_limit
        if is_over or (is_full and not ignore_termination):
            return AgentState.TERMINATED

        # A user's parser may take the tokens alone.
        extract = self.tool_parser.extract_tool_calls
        options = accepted_arguments(extract, {"tools": self.tool_schemas, "with_unreadable": True})
        _, agent_data.tool_calls = await extract(ids, **options)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        agent_data.messages.append({"role": "assistant", "content": text})
        if agent_data.tool_calls:
            return AgentState.PROCESSING_TOOLS
        return AgentState.TERMINATED if agent_data.interaction is None else AgentState.INTERACTING

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        """Call the tools, and append their responses. Calls beyond `max_parallel_calls` are ignored."""
        calls = agent_data.tool_calls[: self.max_parallel_calls]
        kwargs = agent_data.tools_kwargs
        with simple_timer("tool_calls", agent_data.metrics):
            results = await asyncio.gather(
                *(self._call_tool(call, kwargs, agent_data) for call in calls)
            )
        messages = []
        for number, (call, (response, reward, _)) in enumerate(zip(calls, results, strict=True)):
            if reward is not None:
                agent_data.tool_rewards.append(reward)
            content: Any = response.text or ""
            if response.image:
                images = [{"type": "image", "image": image} for image in response.image]
                content = [*images, {"type": "text", "text": content}]
            message = {
                "role": "tool",
                "name": call.name,
                "tool_call_id": f"call{number:05d}",
                "content": content,
            }
            messages.append(message)
        return await self._append_messages(agent_data, messages)

    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        """Append the reply of the user simulator."""
        reply = await agent_data.interaction.reply(agent_data.messages)
        if reply.score is not None:
            agent_data.turn_scores.append(reply.score)
        if reply.is_over:
            return AgentState.TERMINATED
        return await self._append_messages(agent_data, [{"role": "user", "content": reply.text}])

    async def _append_messages(
        self, agent_data: AgentData, messages: list[JsonObject]
    ) -> AgentState:
        """Append messages of tools or the user, unless they leave no room for a turn of the model.

        Returns:
            The next state.
        """
        agent_data.messages += messages
        ids = await self.apply_chat_template(messages, remove_system_prompt=True)
        total_tokens = self.server_manager.chat.limits.total_tokens
        num_left = min(
            self.response_length - len(agent_data.response_mask),
            total_tokens - len(agent_data.prompt_ids),
        )
        if len(ids) >= num_left:
            return AgentState.TERMINATED
        agent_data.prompt_ids += ids
        agent_data.response_mask += [0] * len(ids)
        agent_data.response_logprobs += [0.0] * len(ids)
        agent_data.user_turns += 1
        return AgentState.GENERATING

    async def _call_tool(
        self,
        tool_call: FunctionCall,
        tools_kwargs: Mapping[str, Any],
        agent_data: AgentData | None = None,
    ) -> tuple[ToolResponse, float | None, JsonObject]:
        """Call a tool.

        Args:
            tool_call: the call. If it is invalid, the response explains why.
            tools_kwargs: keyword arguments from the row, by tool.
            agent_data: the conversation, for tools that take it.

        Returns:
            The response; the reward of the call, None if there is none; and metrics, always empty. A sum
            of rewards of 0 counts as none.
        """
        services = self.server_manager.services
        name = tool_call.name
        spec = services.tools.get(name)
        # The box gets only this tool. If the tool is unknown, the box gets all tools, because its response
        # lists them.
        specs = {name: spec} if spec else dict(services.tools)
        kwargs_by_tool = {}
        instance = None
        if spec is not None:
            row_kwargs = tools_kwargs.get(name) or {}
            kwargs = {key: value for key, value in row_kwargs.items() if value is not None}
            tool = tool_of(spec)
            if tool is not None:
                # The object for this call is made here, because its rewards are read afterwards.
                instance = ConversationTool(tool)
                specs[name] = replace(spec, make=lambda: instance)
                loop_kwargs = accepted_arguments(tool.execute, {"agent_data": agent_data})
                kwargs["execute_kwargs"] = {**loop_kwargs, **(kwargs.get("execute_kwargs") or {})}
            kwargs_by_tool[name] = kwargs

        arguments = {}
        problem = tool_call.problem
        try:
            arguments = json.loads(tool_call.arguments)
        except ValueError as error:
            problem = f"the arguments are not JSON ({error}): {tool_call.arguments[:200]}"
        call = ToolCall(name, arguments, problem)
        box = ToolBox(specs, kwargs_by_tool, services.config.multi_turn, services.thread)
        # Entering the box creates the instance of the tool, leaving it releases the instance. A call
        # that cannot be executed has none.
        is_executed = spec is not None and not call.problem
        reward = None
        async with box if is_executed else nullcontext():
            (response,) = await box.call_all([call])
            if is_executed and instance is not None:
                reward = sum(instance.call_rewards) or None
            elif is_executed:
                reward = (await box.rewards()).get(name)
        return ToolResponse(text=response.text, image=list(response.images) or None), reward, {}
