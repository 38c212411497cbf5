# SPDX-License-Identifier: Apache-2.0
"""verl's tools and user simulators as ours.

verl    one object for all conversations, which tells them apart by an `instance_id`
ours    an object for each conversation: it calls the shared one with its own `instance_id`
"""

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from quadriga.errors import ConfigError, RolloutError
from quadriga.http_client import HTTPClient
from quadriga.rewards.code.containment import Limits
from quadriga.rewards.code.run import Case, run_cases, run_remotely
from quadriga.rollout.agent_loop.interactions import Interaction, Reply
from quadriga.rollout.agent_loop.tools import Tool, ToolSpec, WithImages, class_tools, validator_of
from quadriga.user_file import taken
from quadriga_verl.shim import scores


class Open(BaseModel):
    """What may hold fields that are not named here."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(Open):
    """An argument of a tool."""

    type: Any = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(Open):
    """The arguments of a tool."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(Open):
    """A tool as the model reads it."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=OpenAIFunctionParametersSchema
    )
    strict: bool = False


class OpenAIFunctionToolSchema(Open):
    """A tool in the form that chat templates take."""

    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """What a tool says to the model."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not (self.image or self.video)


class BaseTool(Tool):
    """verl's tool: one object for all conversations."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        self.config = config
        schema = tool_schema if tool_schema is not None else self.get_openai_tool_schema()
        if schema is None:
            fix = "Give it a tool_schema in the YAML file, or write get_openai_tool_schema."
            raise ConfigError(
                type(self).__name__, got="no schema", expected="what the model reads", fix=fix
            )
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
    def tool_spec(
        cls, config: Mapping[str, Any], schema: dict[str, Any] | None, where: str
    ) -> ToolSpec:
        own = {name: value for name, value in config.items() if name != "type"}
        if config.get("type") == "mcp":
            fix = "List MCP servers under `mcp_servers` of the file of tools."
            raise ConfigError(where, got="config.type='mcp'", expected="native", fix=fix)
        tool = cls(own, None if schema is None else OpenAIFunctionToolSchema.model_validate(schema))
        described = tool.tool_schema.model_dump(exclude_none=True, exclude_unset=True)
        described["function"].setdefault(
            "parameters", {"type": "object", "properties": {}, "required": []}
        )
        return ToolSpec(
            partial(Instance, tool), described, validator_of(described["function"]["parameters"])
        )


class Instance(Tool):
    """A conversation's use of a shared tool; what single calls earn adds up where `calc_reward` is left as it is."""

    def __init__(self, tool: BaseTool) -> None:
        self.tool, self.instance_id, self.earned = tool, "", list[float]()

    async def create(self, **kwargs: Any) -> None:
        made = await _awaited(
            self.tool.create(**taken(self.tool.create, {**kwargs, "create_kwargs": kwargs}))
        )
        self.instance_id = made[0] if isinstance(made, tuple) else made

    async def execute(self, **kwargs: Any) -> str | WithImages:
        known = self.tool.tool_schema.function.parameters.properties
        # Beside the model's arguments: those of the row, and the loop's `agent_data`.
        own = {
            name: value
            for name, value in kwargs.items()
            if name not in known and (known or name == "agent_data")
        }
        parameters = {name: value for name, value in kwargs.items() if name not in own}
        found = await _awaited(self.tool.execute(self.instance_id, parameters, **own))
        response, *rest = found if isinstance(found, tuple) else (found,)
        if rest and rest[0] is not None:
            self.earned.append(float(rest[0]))
        said = (
            ToolResponse(text=response)
            if isinstance(response, str)
            else ToolResponse.model_validate(response)
        )
        if said.video:
            raise RolloutError(
                f"tool {self.tool.name}", got="a response with a video", expected="text and images"
            )
        return WithImages(said.image, said.text or "") if said.image else said.text or ""

    async def calc_reward(self, **kwargs: Any) -> Any:
        if type(self.tool).calc_reward is BaseTool.calc_reward:
            return sum(self.earned) if self.earned else None
        return await _awaited(self.tool.calc_reward(self.instance_id, **kwargs))

    async def release(self, **kwargs: Any) -> None:
        await _awaited(self.tool.release(self.instance_id, **kwargs))


def tool_of(spec: ToolSpec) -> BaseTool | None:
    """The shared object behind a tool of verl's class; None of a tool of ours."""
    made = spec.make
    return made.args[0] if isinstance(made, partial) and made.func is Instance else None


def initialize_tools_from_config(tools_config_file: str) -> list[Any]:
    """The tools of a YAML file, those of verl's classes."""
    return [tool for spec in class_tools(tools_config_file) if (tool := tool_of(spec)) is not None]


class Gsm8kTool(BaseTool):
    """Grades an answer by the rule of GSM8K while the conversation goes on; an answer that is no better costs 0.05."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self._states: dict[str, dict[str, Any]] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> Any:
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


class _Workers:
    """What stands behind a tool that waits: `await pool.execute.remote(function, *arguments)`, so many at a time."""

    def __init__(self, config: Mapping[str, Any], default: int) -> None:
        number = min(int(config.get(name, default)) for name in ("num_workers", "rate_limit"))
        self._threads, self.execute = ThreadPoolExecutor(number, "verl-tool"), self

    def remote(self, function: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        """The result of a plain function, in a thread."""
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *args)


class SandboxFusionTool(BaseTool):
    """Runs the program `code` and says what it prints: on the server `sandbox_fusion_url`, or without one on this
    machine, contained. `num_workers` and `rate_limit` are those of a process."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self.default_timeout = config.get("default_timeout", 30)
        self.default_language = config.get("default_language", "python")
        self.sandbox_fusion_url = config.get("sandbox_fusion_url") or ""
        self.memory_limit_mb = config.get("memory_limit_mb", 1024)
        self.execution_pool = _Workers(config, 10)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        limit_s, language = (
            parameters.get("timeout", self.default_timeout),
            parameters.get("language"),
        )
        arguments = (
            instance_id,
            str(parameters.get("code", "")),
            limit_s,
            language or self.default_language,
        )
        return (
            ToolResponse(
                text=await self.execution_pool.execute.remote(self.execute_code, *arguments)
            ),
            None,
            None,
        )

    def execute_code(
        self, instance_id: str, code: str, timeout: float = 30, language: str = "python"
    ) -> str:
        """What the program prints, errors behind; or what ended it."""
        limits, case = Limits(timeout, timeout, self.memory_limit_mb), [Case({"input": ""}, "")]
        if self.sandbox_fusion_url:
            runs = list(
                run_remotely(
                    code, case, limits, url=self.sandbox_fusion_url, language=language, parallel=1
                )
            )
        elif language == "python":
            runs = list(run_cases(code, case, limits, total_s=timeout + 1))
        else:
            raise RolloutError(
                f"tool {self.name}", got=f"language {language!r}", expected="python, or a server"
            )
        said = "".join(run.stdout + run.stderr for run in runs)
        status = runs[0].status if runs else "time"
        return (
            said if status in ("ok", "error") else f"{said}\nended by its limit: {status}".lstrip()
        )


class SearchTool(BaseTool):
    """Sends `query_list` to the server `retrieval_service_url`, and says the `topk` documents of each query."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self.retrieval_service_url, self.topk = (
            config.get("retrieval_service_url") or "",
            config.get("topk", 3),
        )
        self.default_timeout, self.execution_pool = (
            config.get("default_timeout", 30),
            _Workers(config, 120),
        )
        setting = f"tool {self.name}, config.retrieval_service_url"
        self._server = HTTPClient(self.retrieval_service_url, RolloutError, setting=setting)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        queries = parameters.get("query_list")
        if not isinstance(queries, list) or not queries:
            return (
                ToolResponse(
                    text=json.dumps({"result": "Error: query_list must be a list of queries."})
                ),
                0.0,
                {},
            )
        arguments = (
            instance_id,
            queries,
            self.retrieval_service_url,
            self.topk,
            self.default_timeout,
        )
        text, metrics = await self.execution_pool.execute.remote(self.execute_search, *arguments)
        return ToolResponse(text=text), 0.0, metrics

    def execute_search(
        self,
        instance_id: str,
        query_list: list[str],
        retrieval_service_url: str,
        topk: int,
        timeout: float,
    ) -> tuple[str, dict[str, Any]]:
        """The documents as JSON text, {"result": ...}, and metrics."""
        body = {"queries": query_list, "topk": topk, "return_scores": True}
        found = self._server.call_until(body, timeout_s=timeout).get("result") or []
        parts = []
        for documents in found:
            pairs = [str(one["document"]["contents"]).partition("\n") for one in documents]
            texts = [
                f"Doc {number} (Title: {title})\n{text}"
                for number, (title, _, text) in enumerate(pairs, start=1)
            ]
            parts.append("\n\n".join(texts).strip())
        result = "\n---\n".join(parts) or "No search results found."
        metrics = {"query_count": len(query_list), "total_results": sum(map(len, found))}
        return json.dumps({"result": result}, ensure_ascii=False), metrics


class BaseInteraction(Interaction):
    """verl's user simulator: one object for all conversations."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.name = config, config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """The instance's id."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> Any:  # pyrefly: ignore
        """Whether the conversation is over, what the user says, the score of the model's turn, and more."""
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, *args: Any, **kwargs: Any) -> float:
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
        given = taken(
            self.shared.start_interaction, {"instance_id": self.instance_id, **self.kwargs}
        )
        self.instance_id = (
            await _awaited(self.shared.start_interaction(**given)) or self.instance_id
        )

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

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> Any:  # pyrefly: ignore
        said = next(
            (one["content"] for one in reversed(messages) if one["role"] == "assistant"), ""
        )
        score = scores.gsm8k_compute_score(said, self._truths[instance_id])
        reply = (
            "That is right."
            if score == 1.0
            else "That is not right. Think about it and answer again."
        )
        return score == 1.0, reply, score, {}

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        self._truths.pop(instance_id or "", None)


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


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
