# SPDX-License-Identifier: Apache-2.0
"""verl's tools, user simulators and agent loops as ours.

    verl    one object for all conversations, which tells them apart by an `instance_id`
    ours    an object for each conversation: it calls the shared one with its own `instance_id`

A loop of verl's keeps the tokens itself: `run` returns them, and they become those of the `Conversation`.
"""

import asyncio
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any, TypeVar
from uuid import uuid4

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field

from quadriga.compat.verl import scores
from quadriga.compat.verl.algorithms import taken
from quadriga.compat.verl.data import RLHFDataset
from quadriga.errors import ConfigError, RolloutError
from quadriga.rewards.outcome import read_outcome
from quadriga.rollout.agent_loop.conversation import Conversation, ConversationOver, Turn
from quadriga.rollout.agent_loop.interactions import Interaction, Reply
from quadriga.rollout.agent_loop.loops import REGISTRY, AgentLoop, Services
from quadriga.rollout.agent_loop.tools import Tool, ToolSpec, validator_of

LoopClass = TypeVar("LoopClass", bound=type)


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Open):
    """An argument of a tool."""

    type: Any = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Open):
    """The arguments of a tool."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(_Open):
    """A tool as the model reads it."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(_Open):
    """A tool in the form that chat templates take."""

    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """What a tool says to the model."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """Whether it says nothing."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Whether it is text without pictures."""
        return bool(self.text) and not (self.image or self.video)


class BaseTool(Tool):
    """verl's tool: one object for all conversations."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        schema = tool_schema if tool_schema is not None else self.get_openai_tool_schema()
        if schema is None:
            fix = "Give it a tool_schema in the YAML file, or write get_openai_tool_schema."
            raise ConfigError(type(self).__name__, got="no schema", expected="what the model reads", fix=fix)
        self.tool_schema = schema
        self.name = schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """The schema, where the YAML file has none."""
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """The instance's id, and what it says at first."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """What the tool says, the reward of this call, and metrics."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        """What the use of the instance earned."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Frees the instance."""

    @classmethod
    def tool_spec(cls, config: Mapping[str, Any], schema: dict[str, Any] | None, where: str) -> ToolSpec:
        own = {name: value for name, value in config.items() if name != "type"}
        if config.get("type") == "mcp":
            fix = "List MCP servers under `mcp_servers` of the file of tools."
            raise ConfigError(where, got="config.type='mcp'", expected="native", fix=fix)
        tool = cls(own, None if schema is None else OpenAIFunctionToolSchema.model_validate(schema))
        described = tool.tool_schema.model_dump(exclude_none=True, exclude_unset=True)
        described["function"].setdefault("parameters", {"type": "object", "properties": {}, "required": []})
        return ToolSpec(partial(_Instance, tool), described, validator_of(described["function"]["parameters"]))


class _Instance(Tool):
    """A conversation's use of a shared tool; what single calls earn adds up where `calc_reward` is left as it is."""

    def __init__(self, tool: BaseTool) -> None:
        self.tool, self.instance_id, self.earned = tool, "", list[float]()

    async def create(self, **kwargs: Any) -> None:
        made = await _awaited(self.tool.create(**taken(self.tool.create, {**kwargs, "create_kwargs": kwargs})))
        self.instance_id = made[0] if isinstance(made, tuple) else made

    async def execute(self, **kwargs: Any) -> str:
        known = self.tool.tool_schema.function.parameters.properties
        own = {name: value for name, value in kwargs.items() if name not in known} if known else {}
        parameters = {name: value for name, value in kwargs.items() if name not in own}
        found = await _awaited(self.tool.execute(self.instance_id, parameters, **own))
        response, *rest = found if isinstance(found, tuple) else (found,)
        if rest and rest[0] is not None:
            self.earned.append(float(rest[0]))
        said = ToolResponse(text=response) if isinstance(response, str) else ToolResponse.model_validate(response)
        if said.image or said.video:
            raise RolloutError(f"tool {self.tool.name}", got="a response with pictures", expected="text")
        return said.text or ""

    async def calc_reward(self, **kwargs: Any) -> Any:
        if type(self.tool).calc_reward is BaseTool.calc_reward:
            return sum(self.earned) if self.earned else None
        return await _awaited(self.tool.calc_reward(self.instance_id, **kwargs))

    async def release(self, **kwargs: Any) -> None:
        await _awaited(self.tool.release(self.instance_id, **kwargs))


class Gsm8kTool(BaseTool):
    """Grades an answer by the rule of GSM8K while the conversation goes on; an answer that is no better costs 0.05."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._states: dict[str, dict[str, Any]] = {}

    async def create(self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any) -> Any:
        instance_id = instance_id or str(uuid4())
        truth = ground_truth or (kwargs.get("create_kwargs") or {}).get("ground_truth")
        self._states[instance_id] = {"answer": "", "ground_truth": truth, "best": 0.0}
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        state, answer = self._states[instance_id], str(parameters.get("answer", ""))
        state["answer"] = f"#### {answer.removeprefix('#### ')}"
        reward = await self.calc_reward(instance_id)
        earned, state["best"] = (0.0 if reward > state["best"] else -0.05), reward
        return ToolResponse(text=f"The answer {answer!r} scores {reward}"), earned, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        state = self._states[instance_id]
        return scores.gsm8k_compute_score(state["answer"], state["ground_truth"], method="flexible")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._states[instance_id]


class BaseInteraction(Interaction):
    """verl's user simulator: one object for all conversations."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.name = config, config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """The instance's id."""
        return instance_id or str(uuid4())

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:  # pyrefly: ignore
        """Whether the conversation is over, what the user says, the score of the model's turn, and more."""
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, *args: Any, **kwargs: Any) -> float:
        """The score of a turn."""
        return 0.0

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Frees the instance."""

    @classmethod
    def maker(cls, name: str, config: Mapping[str, Any]) -> Callable[[], Interaction]:
        return partial(_Talk, cls({**config, "name": name}))


class _Talk(Interaction):
    """A conversation with a shared user simulator."""

    def __init__(self, shared: BaseInteraction) -> None:
        self.shared, self.instance_id, self.kwargs = shared, str(uuid4()), dict[str, Any]()

    async def start_interaction(self, **kwargs: Any) -> None:
        self.kwargs = {"name": self.shared.name, **kwargs}
        given = taken(self.shared.start_interaction, {"instance_id": self.instance_id, **self.kwargs})
        self.instance_id = await _awaited(self.shared.start_interaction(**given)) or self.instance_id

    async def generate_response(self, messages: list[dict[str, Any]]) -> Reply:
        offered = {"instance_id": self.instance_id, "messages": messages, **self.kwargs}
        given = taken(self.shared.generate_response, offered)
        is_over, text, score, *_ = await _awaited(self.shared.generate_response(**given))
        return Reply(text or "", score, bool(is_over))

    async def finalize_interaction(self) -> None:
        given = taken(self.shared.finalize_interaction, {"instance_id": self.instance_id})
        await _awaited(self.shared.finalize_interaction(**given))


class Gsm8kInteraction(BaseInteraction):
    """A teacher who says whether the last answer is right by the rule of GSM8K, and ends the talk when it is."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._truths: dict[str, Any] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        instance_id = instance_id or str(uuid4())
        self._truths[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:  # pyrefly: ignore
        said = next((one["content"] for one in reversed(messages) if one["role"] == "assistant"), "")
        score = scores.gsm8k_compute_score(said, self._truths[instance_id])
        reply = "That is right." if score == 1.0 else "That is not right. Think about it and answer again."
        return score == 1.0, reply, score, {}

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        self._truths.pop(instance_id or "", None)


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


class TokenOutput(_Open):
    """What the engine generated."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = Field(default_factory=dict)


class AgentLoopMetrics(_Open):
    """Seconds of a conversation."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0


class AgentLoopOutput(_Open):
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


_IGNORED = {"logprobs", "n", "repetition_penalty", "max_tokens", "max_new_tokens"}
_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"}


class AsyncLLMServerManager:
    """The engine of one conversation, as verl's loops call it."""

    def __init__(self, chat: Conversation) -> None:
        self.chat, self.token_ids, self.log_probs = chat, list[int](), list[float]()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: Mapping[str, Any], **others: Any
    ) -> TokenOutput:
        """The engine's response to token ids; `sampling_params` are those of `run`, changed or not.

        Raises:
            ConversationOver: there is no room behind `prompt_ids`.
            RolloutError: pictures, or a sampling parameter that engines do not have.
        """
        where, given = "server_manager.generate", dict(sampling_params)
        if pictures := [name for name, value in others.items() if name.endswith("_data") and value]:
            raise RolloutError(where, got=", ".join(pictures), expected="token ids alone")
        unknown = given.keys() - _SAMPLING - _IGNORED
        if unknown or given.get("repetition_penalty", 1.0) != 1.0 or given.get("n", 1) != 1:
            expected = f"{', '.join(sorted(_SAMPLING))}, max_tokens; no repetition penalty, one response"
            raise RolloutError(where, got=str({**given})[:200], expected=expected)
        limits = self.chat.limits
        wanted = given.get("max_tokens") or given.get("max_new_tokens") or limits.response_tokens
        room = min(wanted, limits.total_tokens - len(prompt_ids))
        if room < 1:
            raise ConversationOver("length")
        changes = {name: given[name] for name in _SAMPLING & given.keys()}
        changes |= {name: tuple(changes[name]) for name in ("stop", "stop_token_ids") if name in changes}
        done = await self.chat.complete(prompt_ids, max_tokens=room, **changes)
        self.token_ids += done.token_ids
        self.log_probs += done.log_probs
        reason = "aborted" if done.finish_reason == "abort" else "completed"
        return TokenOutput(token_ids=list(done.token_ids), log_probs=list(done.log_probs), stop_reason=reason)

    def log_probs_of(self, response_ids: list[int], mask: list[int]) -> list[float]:
        """Log-probabilities of a response; RolloutError where its tokens are not the engine's, in their order."""
        own = [token for token, is_own in zip(response_ids, mask, strict=True) if is_own]
        if own != self.token_ids[: len(own)]:
            fix = "Return response_logprobs too, or give tokens of other origin the mask 0."
            raise RolloutError("AgentLoopOutput", got="tokens under the mask that were not generated", fix=fix)
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
        if messages is None or chat.sample.images is not None:
            got = "a prompt without its messages" if messages is None else "a prompt with images"
            fix = "Set data.return_raw_chat=True." if messages is None else "Leave images out."
            raise RolloutError(f"agent loop {chat.sample.agent}", got=got, expected="the column raw_prompt", fix=fix)
        server, config = AsyncLLMServerManager(chat), self._config(chat)
        names = {"trainer_config": DictConfigWrap(config), "data_config": DictConfigWrap(config.data)}
        names |= {"server_manager": server, "tokenizer": tokenizer, "processor": None, "dataset_cls": RLHFDataset}
        loop = self.loop_class(**taken(self.loop_class, names), **self.arguments)
        given = {"temperature": 0.0 if sampling.is_greedy else sampling.temperature, "top_p": sampling.top_p}
        given |= {"top_k": sampling.top_k, "repetition_penalty": 1.0, "logprobs": True}
        columns = {**chat.sample.columns, "raw_prompt": messages}
        output = await loop.run(given, **taken(loop.run, columns))
        if not isinstance(output, AgentLoopOutput):
            raise TypeError(f"{self.loop_class.__name__}.run: got {type(output).__name__}, expected an AgentLoopOutput")
        _write(output, server, chat)

    def _config(self, chat: Conversation) -> Any:
        limits, tokenizer = chat.limits, chat.encoder.tokenizer
        lengths = {"prompt_length": limits.prompt_tokens, "response_length": limits.response_tokens}
        data = {"max_prompt_length": limits.prompt_tokens, "max_response_length": limits.response_tokens}
        kwargs = {name: value for name, value in chat.encoder.template_kwargs.items() if name != "return_dict"}
        rollout = {**self.services.config.model_dump(mode="json"), **lengths}
        actor = {"rollout": rollout, "model": {"path": tokenizer.name_or_path}}
        return OmegaConf.create({"actor_rollout_ref": actor, "data": {**data, "apply_chat_template_kwargs": kwargs}})


class AgentLoopBase(ABC):
    """verl's agent loop: an object for each conversation."""

    _class_initialized = False
    quadriga_form: type[AgentLoop]
    """The class as an agent loop of ours."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        home = {"loop_class": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
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
        self.init_class(config=self.config, tokenizer=tokenizer, processor=processor, **kwargs)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any, **kwargs: Any) -> None:
        """Prepares what all conversations share; called with each, as in verl."""
        cls._class_initialized = True

    async def apply_chat_template(
        self, messages: list[dict[str, Any]], tools: Any = None, remove_system_prompt: bool = False, **others: Any
    ) -> list[int]:
        """Token ids of a chat, open for the model's turn."""
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        ids = self.tokenizer.apply_chat_template(messages, tools=tools, **options, **self.apply_chat_template_kwargs)
        return list(ids)

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Leads one conversation; `kwargs` are the columns of its row."""


class SingleTurnAgentLoop(AgentLoopBase):
    """One response to the prompt."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        found = await self.server_manager.generate(uuid4().hex, prompt_ids=ids, sampling_params=sampling_params)
        own = {"response_logprobs": found.log_probs, "num_turns": 2}
        mask = [1] * len(found.token_ids)
        return AgentLoopOutput(prompt_ids=ids, response_ids=found.token_ids, response_mask=mask, **own)


def _write(output: AgentLoopOutput, server: AsyncLLMServerManager, chat: Conversation) -> None:
    """The tokens that a loop returned as the conversation's, cut to its limits."""
    limits, num_tokens = chat.limits, len(output.response_ids)
    if len(output.prompt_ids) > limits.prompt_tokens:
        chat.failure = f"prompt_length: {len(output.prompt_ids)} tokens, over {limits.prompt_tokens}"
        raise ConversationOver(chat.failure)
    log_probs = output.response_logprobs
    if log_probs is None:
        log_probs = server.log_probs_of(output.response_ids, output.response_mask)
    if {len(output.response_mask), len(log_probs)} != {num_tokens}:
        got = f"{num_tokens} response_ids, {len(output.response_mask)} of response_mask, {len(log_probs)} log_probs"
        raise RolloutError(f"agent loop {chat.sample.agent}", got=got, expected="as many of each")
    chat.prompt_ids = list(output.prompt_ids)
    rows = list(zip(output.response_ids, output.response_mask, log_probs, strict=True))[: limits.response_tokens]
    for is_own, part in groupby(rows, key=lambda row: row[1]):
        ids, _, values = map(list, zip(*part, strict=True))
        turn = Turn("assistant" if is_own else "tool", ids, chat.encoder.text(ids, with_special=True), 0.0)
        chat.extend(turn, int(is_own), values)
    chat.finish_reason = "length" if num_tokens > limits.response_tokens else "stop"
    chat.extra_fields = dict(output.extra_fields)
    if output.reward_score is not None:
        chat.outcome = read_outcome(output.reward_score)


def register(agent_name: str) -> Callable[[LoopClass], LoopClass]:
    """verl's class decorator: a loop known by a name, in `actor_rollout_ref.rollout.agent.agent_loop_path`."""

    def decorate(cls: LoopClass) -> LoopClass:
        REGISTRY.register(agent_name)(cls.quadriga_form)
        return cls

    return decorate


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is: conversations are traced by `actor_rollout_ref.rollout.trace_dir`."""
    return function


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Adds the seconds of a block to `timing_raw[name]`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - started
