# SPDX-License-Identifier: Apache-2.0
"""verl's agent loops as ours: an object for each conversation, which keeps the tokens itself.

AgentLoopBase    `run` returns the tokens, and they become those of the `Conversation`
ToolAgentLoop    PENDING -> GENERATING -> PROCESSING_TOOLS or INTERACTING -> GENERATING ... -> TERMINATED;
                 each state has a method, which says what the next one is
"""

import asyncio
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, TypeVar
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
from quadriga.user_file import taken
from quadriga_verl.shim import is_before
from quadriga_verl.shim.data import RLHFDataset
from quadriga_verl.shim.tools import Instance, Open, ToolResponse, simple_timer, tool_of

LoopClass = TypeVar("LoopClass", bound=type)
ParserClass = TypeVar("ParserClass", bound="type[ToolParser]")
_IGNORED = {"logprobs", "n", "repetition_penalty", "max_tokens", "max_new_tokens"}
_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"}
_CALLS = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)


class TokenOutput(Open):
    """What the engine generated."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = Field(default_factory=dict)


class AgentLoopMetrics(Open):
    """Seconds of a conversation."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0


class AgentLoopOutput(Open):
    """A conversation that has ended: tokens of prompt and response, and which of these the model wrote."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = Field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = Field(default_factory=dict)


class DictConfigWrap:
    """Holds a configuration as `config`."""

    def __init__(self, config: Any) -> None:
        self.config = config


class AsyncLLMServerManager:
    """The engine of one conversation, as verl's loops call it."""

    def __init__(self, chat: Conversation, services: Services) -> None:
        self.chat, self.services = chat, services
        # Of what the engine wrote; `last` is what it was given last, with what it wrote then.
        self.token_ids, self.log_probs, self.last = list[int](), list[float](), list[int]()

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        **others: Any,
    ) -> Any:
        """As `complete`; before 0.6 the token ids alone."""
        output = await self.complete(
            request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **others
        )
        return output.token_ids if is_before(0, 6) else output

    async def complete(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        **others: Any,
    ) -> TokenOutput:
        """The engine's response to token ids; `sampling_params` are those of `run`, changed or not.
        Raises ConversationOver: there is no room behind `prompt_ids`.
        Raises RolloutError: images that `apply_chat_template` did not render, or a parameter that engines do not have.
        """
        where, given = "server_manager.generate", dict(sampling_params)
        images, is_shown = self.chat.images_in(prompt_ids), self.chat.sample.images is not None
        if images is None and (
            is_shown or any(value for name, value in others.items() if name.endswith("_data"))
        ):
            got, expected = (
                "images, and other tokens for them",
                "those of self.apply_chat_template(messages)",
            )
            raise RolloutError(
                where,
                got=got,
                expected=expected,
                fix="Let what follows stand behind them, unchanged.",
            )
        unknown = given.keys() - _SAMPLING - _IGNORED
        if unknown or given.get("repetition_penalty", 1.0) != 1.0 or given.get("n", 1) != 1:
            expected = (
                f"{', '.join(sorted(_SAMPLING))}, max_tokens; no repetition penalty, one response"
            )
            raise RolloutError(where, got=str({**given})[:200], expected=expected)
        wanted = (
            given.get("max_tokens")
            or given.get("max_new_tokens")
            or self.chat.limits.response_tokens
        )
        room = min(wanted, self.chat.limits.total_tokens - len(prompt_ids))
        if room < 1:
            raise ConversationOver("length")
        changes = {name: given[name] for name in _SAMPLING & given.keys()}
        changes |= {
            name: tuple(changes[name]) for name in ("stop", "stop_token_ids") if name in changes
        }
        done = await self.chat.complete(prompt_ids, images, max_tokens=room, **changes)
        self.last = [*prompt_ids, *done.token_ids]
        self.token_ids += done.token_ids
        self.log_probs += done.log_probs
        reason = "aborted" if done.finish_reason == "abort" else "completed"
        return TokenOutput(
            token_ids=list(done.token_ids), log_probs=list(done.log_probs), stop_reason=reason
        )

    def log_probs_of(self, response_ids: list[int], mask: list[int]) -> list[float]:
        """Log-probabilities of a response; RolloutError where its tokens are not the engine's, in their order."""
        own = [token for token, is_own in zip(response_ids, mask, strict=True) if is_own]
        if own != self.token_ids[: len(own)]:
            fix = "Return response_logprobs too, or give tokens of other origin the mask 0."
            raise RolloutError(
                "AgentLoopOutput", got="tokens under the mask that were not generated", fix=fix
            )
        log_probs = iter(self.log_probs)
        return [next(log_probs) if is_own else 0.0 for is_own in mask]


class _Led(AgentLoop):
    """A loop of verl's class in ours."""

    loop_class: type[Any]

    def __init__(self, services: Services, **arguments: Any) -> None:
        super().__init__(services)
        self.arguments = arguments

    async def run(self, chat: Conversation) -> None:
        tokenizer, sampling = chat.encoder.tokenizer, chat.sampling
        messages = chat.sample.messages
        if messages is None:
            where, got = f"agent loop {chat.sample.agent}", "a prompt without its messages"
            raise RolloutError(
                where, got, "the column raw_prompt", "Set data.return_raw_chat=True."
            )
        server, config = AsyncLLMServerManager(chat, self.services), self._config(chat)
        names = {
            "trainer_config": DictConfigWrap(config),
            "data_config": DictConfigWrap(config.data),
        }
        names |= {
            "server_manager": server,
            "tokenizer": tokenizer,
            "processor": None,
            "dataset_cls": RLHFDataset,
        }
        loop = self.loop_class(**taken(self.loop_class, names), **self.arguments)
        given = {
            "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
            "top_p": sampling.top_p,
        }
        given |= {"top_k": sampling.top_k, "repetition_penalty": 1.0, "logprobs": True}
        columns = {
            **chat.sample.columns,
            "raw_prompt": messages,
            "messages": messages,
            "sampling_params": given,
        }
        output = await loop.run(**taken(loop.run, columns))
        if not isinstance(output, AgentLoopOutput):
            raise TypeError(
                f"{self.loop_class.__name__}.run: got {type(output).__name__}, expected an AgentLoopOutput"
            )
        _write(output, server, chat)

    def _config(self, chat: Conversation) -> Any:
        limits, tokenizer = chat.limits, chat.encoder.tokenizer
        lengths = {"prompt_length": limits.prompt_tokens, "response_length": limits.response_tokens}
        data = {
            "max_prompt_length": limits.prompt_tokens,
            "max_response_length": limits.response_tokens,
        }
        kwargs = {
            name: value
            for name, value in chat.encoder.template_kwargs.items()
            if name != "return_dict"
        }
        rollout = {**self.services.config.model_dump(mode="json"), **lengths}
        actor = {"rollout": rollout, "model": {"path": tokenizer.name_or_path}}
        return OmegaConf.create(
            {"actor_rollout_ref": actor, "data": {**data, "apply_chat_template_kwargs": kwargs}}
        )


class AgentLoopBase(ABC):
    """verl's agent loop: an object for each conversation."""

    _class_initialized = False
    offers_tools = False  # whether prompts name the tools of the configuration
    quadriga_form: type[AgentLoop]  # the class as an agent loop of ours

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        home = {"loop_class": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        home |= {"offers_tools": cls.offers_tools}
        cls.quadriga_form = type(cls.__name__, (_Led,), home)

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
        self.config, self.server_manager = trainer_config.config, server_manager
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.tokenizer, self.processor = tokenizer, processor
        self.dataset_cls, self.data_config = dataset_cls, self.config.data
        self.apply_chat_template_kwargs = self.config.data.apply_chat_template_kwargs
        self.loop = asyncio.get_running_loop()
        shared = {"config": self.config, "tokenizer": tokenizer, "processor": processor, **kwargs}
        self.init_class(**taken(self.init_class, shared))

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any, **kwargs: Any) -> None:
        """Prepares what all conversations share; called with each, as in verl."""
        cls._class_initialized = True

    async def process_vision_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Images of the prompt, whose messages they are. Its videos go with its tokens."""
        images = self.server_manager.chat.sample.images
        return {} if images is None or not images.pictures else {"images": list(images.pictures)}

    async def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        remove_system_prompt: bool = False,
        **others: Any,
    ) -> list[int]:
        """Token ids of a chat, open for the model's turn; with `remove_system_prompt` those of messages that follow
        what the model has written last, in which no text of a tool can close a turn. `images` are those of these
        messages, `{"type": "image"}` parts of which show where; a prompt's own need not be given."""
        server, images = self.server_manager, list(others.get("images") or ())
        chat, given = server.chat, server.chat.sample.images
        if others.get("audios") or (
            others.get("videos") and (remove_system_prompt or given is None)
        ):
            raise RolloutError(
                "apply_chat_template", got="videos or audios", expected="text and images"
            )
        kwargs, encoder = self.apply_chat_template_kwargs, chat.encoder
        if kwargs != self.config.data.apply_chat_template_kwargs:
            encoder = TurnEncoder(self.tokenizer, dict(kwargs))
        if not remove_system_prompt:
            ids, pictures = (
                encoder.prompt(messages, tools or ()),
                images or (given.pictures if given else ()),
            )
            return chat.show((), ids, pictures) if given or pictures else ids
        of_role = {"tool": {"name": "unknown", "tool_call_id": "call00000"}}
        plain, shown = encoder.plain_messages(
            [{**of_role.get(one["role"], {}), **one} for one in messages]
        )
        ids, images = (
            encoder.following(plain, server.token_ids),
            images or [one for one in shown if one is not None],
        )
        return chat.show(server.last, ids, images, server.token_ids) if images else ids

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Leads one conversation; `kwargs` are the columns of its row."""


class SingleTurnAgentLoop(AgentLoopBase):
    """One response to the prompt."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        ids = await self.apply_chat_template(messages, **await self.process_vision_info(messages))
        found = await self.server_manager.complete(
            uuid4().hex, prompt_ids=ids, sampling_params=sampling_params
        )
        own = {
            "response_mask": [1] * len(found.token_ids),
            "response_logprobs": found.log_probs,
            "num_turns": 2,
        }
        return AgentLoopOutput(prompt_ids=ids, response_ids=found.token_ids, **own)


class FunctionCall(Open):
    """A call as a parser found it; `arguments` are JSON text, `problem` says why a call cannot be read."""

    name: str
    arguments: str
    problem: str = ""


class ToolParser:
    """How a model writes tool calls; a subclass of one's own is known as `multi_turn.format` by `register`."""

    _registry: ClassVar[dict[str, "type[ToolParser]"]] = {}
    form = "hermes"

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> "ToolParser":
        """The parser of a form, a registered one or ours; ValueError where there is none."""
        if name not in cls._registry and name not in PARSERS:
            raise ValueError(
                f"tool parser: got {name!r}, expected one of {', '.join((*PARSERS, *cls._registry))}"
            )
        parser = cls._registry.get(name, ToolParser)(tokenizer)
        parser.form = name
        return parser

    @classmethod
    def register(cls, name: str) -> Callable[[ParserClass], ParserClass]:
        """verl's class decorator; the loop `tool_agent` is then verl's as well, for it gives parsers their tokens."""

        def decorate(subclass: ParserClass) -> ParserClass:
            cls._registry[name] = subclass
            REGISTRY["tool_agent"] = ToolAgentLoop.quadriga_form
            return subclass

        return decorate

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Any = None, with_unreadable: bool = False
    ) -> tuple[str, list[FunctionCall]]:
        """The text without its calls, and those of them that can be read, or all; `tools` are schemas."""
        text = str(self.tokenizer.decode(responses_ids, skip_special_tokens=False))
        functions = [
            one["function"] if isinstance(one, dict) else one.model_dump()["function"]
            for one in tools or ()
        ]
        calls = PARSERS[self.form](
            text, {one["name"]: one.get("parameters", {}) for one in functions}
        )
        found = [
            FunctionCall(
                name=one.name,
                arguments=json.dumps(one.arguments, ensure_ascii=False),
                problem=one.problem,
            )
            for one in calls
            if with_unreadable or not one.problem
        ]
        return _CALLS.sub("", text), found


class AgentState(Enum):
    """Where a tool loop is."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


class AgentData:
    """What a tool loop knows of its conversation; tools may keep things in `extra_fields`."""

    def __init__(
        self,
        *,
        messages: list[dict[str, Any]],
        request_id: str,
        tools_kwargs: Any = None,
        **given: Any,
    ):
        self.messages, self.request_id, self.tools_kwargs = (
            messages,
            request_id,
            dict(tools_kwargs or {}),
        )
        self.interaction: Any = None
        self.image_data = self.video_data = None
        self.interaction_kwargs, self.metrics, self.extra_fields = (
            dict[str, Any](),
            dict[str, Any](),
            dict[str, Any](),
        )
        self.prompt_ids, self.response_ids, self.response_mask = (
            list[int](),
            list[int](),
            list[int](),
        )
        self.response_logprobs, self.turn_scores, self.tool_rewards = (
            list[float](),
            list[float](),
            list[float](),
        )
        self.tool_calls = list[FunctionCall]()
        self.user_turns = self.assistant_turns = 0
        vars(self).update(given)


class ToolAgentLoop(AgentLoopBase):
    """Calls the tools that the model names; where it names none, the user simulator of the row replies. A tool's
    instance lasts as long as a call."""

    offers_tools = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        turns, specs = self.rollout_config.multi_turn, self.server_manager.services.tools
        self.max_user_turns, self.max_assistant_turns = (
            turns.max_user_turns,
            turns.max_assistant_turns,
        )
        self.max_parallel_calls = turns.max_parallel_calls
        self.max_tool_response_length = turns.max_tool_response_length
        self.tool_response_truncate_side = turns.tool_response_truncate_side
        self.tools = {name: tool_of(spec) or spec for name, spec in specs.items()}
        self.tool_schemas = [spec.schema for spec in specs.values()]
        self.tool_parser_name = turns.format
        self.tool_parser = ToolParser.get_tool_parser(turns.format, self.tokenizer)
        self.prompt_length = self.rollout_config.prompt_length
        self.response_length = self.rollout_config.response_length

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages, tools, talk = (
            kwargs["raw_prompt"],
            kwargs.get("tools_kwargs"),
            kwargs.get("interaction_kwargs"),
        )
        own = {"tools_kwargs": tools, "interaction_kwargs": talk or {}}
        data = AgentData(messages=list(messages), request_id=uuid4().hex, **own)
        handlers: dict[AgentState, Callable[[], Any]] = {
            AgentState.PENDING: partial(self._handle_pending_state, data, sampling_params),
            AgentState.GENERATING: partial(self._handle_generating_state, data, sampling_params),
            AgentState.PROCESSING_TOOLS: partial(self._handle_processing_tools_state, data),
            AgentState.INTERACTING: partial(self._handle_interacting_state, data),
        }
        if data.interaction_kwargs.get("name") is not None:
            services = self.server_manager.services
            limit_s = services.config.multi_turn.tool_timeout_s
            data.interaction = UserSimulator(
                services.interactions, data.interaction_kwargs, services.thread, limit_s
            )
        state = AgentState.PENDING
        async with data.interaction or nullcontext():
            while state in handlers:
                state = await handlers[state]()
        start, end = len(data.prompt_ids) - len(data.response_mask), self.response_length
        return AgentLoopOutput(
            prompt_ids=data.prompt_ids[:start],
            response_ids=data.prompt_ids[start:][:end],
            response_mask=data.response_mask[:end],
            response_logprobs=data.response_logprobs[:end] or None,
            num_turns=data.user_turns + data.assistant_turns + 1,
            metrics=data.metrics,
            extra_fields={
                **data.extra_fields,
                "turn_scores": data.turn_scores,
                "tool_rewards": data.tool_rewards,
            },
        )

    async def _handle_pending_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any]
    ) -> AgentState:
        """Renders the prompt, with the tools."""
        agent_data.prompt_ids = await self.apply_chat_template(
            agent_data.messages, tools=self.tool_schemas
        )
        return AgentState.GENERATING

    async def _handle_generating_state(
        self,
        agent_data: AgentData,
        sampling_params: dict[str, Any],
        ignore_termination: bool = False,
    ) -> AgentState:
        """The model's turn, and the calls in it."""
        room = self.response_length - len(agent_data.response_mask)
        given = {"max_tokens": room, **sampling_params} if room > 0 else sampling_params
        with simple_timer("generate_sequences", agent_data.metrics):
            output = await self.server_manager.complete(
                agent_data.request_id, prompt_ids=agent_data.prompt_ids, sampling_params=given
            )
        ids = agent_data.response_ids = output.token_ids
        agent_data.assistant_turns += 1
        agent_data.prompt_ids += ids
        agent_data.response_mask += [1] * len(ids)
        agent_data.response_logprobs += output.log_probs
        is_full = not ignore_termination and len(agent_data.response_mask) >= self.response_length
        counts = (
            (agent_data.assistant_turns, self.max_assistant_turns),
            (agent_data.user_turns, self.max_user_turns),
        )
        is_last = any(limit and count >= limit for count, limit in counts)
        if is_full or is_last or output.stop_reason == "aborted":
            return AgentState.TERMINATED
        extract = self.tool_parser.extract_tool_calls
        offered = {"tools": self.tool_schemas, "with_unreadable": True}
        _, agent_data.tool_calls = await extract(ids, **taken(extract, offered))
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        agent_data.messages.append({"role": "assistant", "content": text})
        if agent_data.tool_calls:
            return AgentState.PROCESSING_TOOLS
        return AgentState.TERMINATED if agent_data.interaction is None else AgentState.INTERACTING

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        calls = agent_data.tool_calls[: self.max_parallel_calls]
        with simple_timer("tool_calls", agent_data.metrics):
            found = await asyncio.gather(
                *(self._call_tool(one, agent_data.tools_kwargs, agent_data) for one in calls)
            )
        agent_data.tool_rewards += [reward for _, reward, _ in found if reward is not None]
        messages = list[dict[str, Any]]()
        for number, (call, (response, *_)) in enumerate(zip(calls, found, strict=True)):
            parts = [{"type": "image", "image": one} for one in response.image or ()]
            content = (
                [*parts, {"type": "text", "text": response.text or ""}]
                if parts
                else response.text or ""
            )
            messages += [
                {
                    "role": "tool",
                    "name": call.name,
                    "tool_call_id": f"call{number:05d}",
                    "content": content,
                }
            ]
        return await self._follow(agent_data, messages)

    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        reply = await agent_data.interaction.reply(agent_data.messages)
        agent_data.turn_scores += [] if reply.score is None else [reply.score]
        if reply.is_over:
            return AgentState.TERMINATED
        return await self._follow(agent_data, [{"role": "user", "content": reply.text}])

    async def _follow(self, agent_data: AgentData, messages: list[dict[str, Any]]) -> AgentState:
        """Messages that the model did not write; a turn that leaves it no room is of no use."""
        agent_data.messages += messages
        ids = await self.apply_chat_template(messages, remove_system_prompt=True)
        total = self.server_manager.chat.limits.total_tokens
        room = min(
            self.response_length - len(agent_data.response_mask), total - len(agent_data.prompt_ids)
        )
        if len(ids) >= room:
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
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """What the tool says, what the call earned, and metrics; what is wrong with a call is said to the model."""
        services, name, instance, earned = self.server_manager.services, tool_call.name, None, None
        specs = {name: services.tools[name]} if name in services.tools else dict(services.tools)
        given = {
            key: value
            for key, value in dict(tools_kwargs.get(name) or {}).items()
            if value is not None
        }
        if name in specs and (tool := tool_of(specs[name])) is not None:
            instance, own = Instance(tool), taken(tool.execute, {"agent_data": agent_data})
            specs[name] = replace(specs[name], make=lambda: instance)
            given["execute_kwargs"] = {**own, **(given.get("execute_kwargs") or {})}
        try:
            call = ToolCall(name, json.loads(tool_call.arguments), tool_call.problem)
        except ValueError as error:
            call = ToolCall(
                name, problem=f"the arguments are not JSON ({error}): {tool_call.arguments[:200]}"
            )
        box = ToolBox(
            specs,
            {name: given} if name in specs else {},
            services.config.multi_turn,
            services.thread,
        )
        # No tool is made for a call that cannot be made.
        can_be_made = name in services.tools and not call.problem
        async with box if can_be_made else nullcontext():
            (response,) = await box.call_all([call])
            if can_be_made:
                earned = (
                    (await box.rewards()).get(name)
                    if instance is None
                    else sum(instance.earned) or None
                )
        return ToolResponse(text=response.text, image=list(response.images) or None), earned, {}


def _write(output: AgentLoopOutput, server: AsyncLLMServerManager, chat: Conversation) -> None:
    """The tokens that a loop returned as the conversation's, cut to its limits."""
    limits, num_tokens = chat.limits, len(output.response_ids)
    if len(output.prompt_ids) > limits.prompt_tokens:
        chat.failure = (
            f"prompt_length: {len(output.prompt_ids)} tokens, over {limits.prompt_tokens}"
        )
        raise ConversationOver(chat.failure)
    if (log_probs := output.response_logprobs) is None:
        log_probs = server.log_probs_of(output.response_ids, output.response_mask)
    if {len(output.response_mask), len(log_probs)} != {num_tokens}:
        got = f"{num_tokens} response_ids, {len(output.response_mask)} of response_mask, {len(log_probs)} log_probs"
        raise RolloutError(f"agent loop {chat.sample.agent}", got=got, expected="as many of each")
    chat.prompt_ids = list(output.prompt_ids)
    rows = list(zip(output.response_ids, output.response_mask, log_probs, strict=True))[
        : limits.response_tokens
    ]
    for is_own, part in groupby(rows, key=lambda row: row[1]):
        ids, _, values = map(list, zip(*part, strict=True))
        turn = Turn(
            "assistant" if is_own else "tool", ids, chat.encoder.text(ids, with_special=True), 0.0
        )
        chat.extend(turn, int(is_own), values)
    chat.finish_reason = "length" if num_tokens > limits.response_tokens else "stop"
    chat.extra_fields = dict(output.extra_fields)
    chat.turn_scores = list(chat.extra_fields.get("turn_scores") or ())
    chat.tool_rewards = chat.extra_fields.get("tool_rewards") or {}
    if output.reward_score is not None:
        chat.outcome = read_outcome(output.reward_score)


def register(agent_name: str) -> Callable[[LoopClass], LoopClass]:
    """verl's class decorator: a loop known by a name, in `actor_rollout_ref.rollout.agent.agent_loop_path`."""

    def decorate(cls: LoopClass) -> LoopClass:
        REGISTRY.register(agent_name)(cls.quadriga_form)
        return cls

    return decorate
