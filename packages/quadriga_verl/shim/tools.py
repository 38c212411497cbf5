# SPDX-License-Identifier: Apache-2.0
"""verl's tools and user simulators, and adapters for them.

In verl all conversations share one object of a tool, whose methods get the `instance_id` of the
conversation. In Quadriga each conversation has its own object: an adapter (`ConversationTool`,
`_ConversationSimulator`) that calls the shared object with its own `instance_id`.
"""

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from quadriga.errors import ConfigError, RolloutError
from quadriga.http_client import HTTPClient
from quadriga.rewards.code.containment import ResourceLimits
from quadriga.rewards.code.run import Case, run_cases, run_remotely
from quadriga.rollout.agent_loop.interactions import Interaction, Reply
from quadriga.rollout.agent_loop.tools import Tool, ToolSpec, WithImages, class_tools, validator_of
from quadriga.user_file import accepted_arguments
from quadriga_verl.shim import scores

JsonObject: TypeAlias = dict[str, Any]
"""An object of JSON: a message, the settings of a tool, or the arguments of a call."""
# ---- schemas ------------------------------------------------------------------------------------


class OpenModel(BaseModel):
    """Base class of pydantic models that accept further fields. pydantic copies mutable defaults."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(OpenModel):
    """Schema of an argument of a tool."""

    type: Any = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(OpenModel):
    """Schema of the arguments of a tool."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(OpenModel):
    """Description of a tool for the model."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()
    strict: bool = False


class OpenAIFunctionToolSchema(OpenModel):
    """A tool in the form that chat templates read."""

    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """Response of a tool to the model."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """Whether there is no text, image or video."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Whether there is text, and no image or video."""
        return bool(self.text) and not (self.image or self.video)


# ---- tools --------------------------------------------------------------------------------------


class BaseTool(Tool):
    """Base class of verl's tools. All conversations share one object.

    An instance, in verl's words, is the state that the object has for one conversation or call.

    Args:
        config: settings of the tool from the YAML file of tools.
        tool_schema: schema of the tool from that file. None: `get_openai_tool_schema` returns it.

    Raises:
        ConfigError: there is no schema.
    """

    def __init__(
        self, config: JsonObject, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        self.config = config
        schema = tool_schema if tool_schema is not None else self.get_openai_tool_schema()
        if schema is None:
            raise ConfigError(
                type(self).__name__,
                got="no schema",
                expected="a schema, from which the model learns the arguments of the tool",
                fix="Write tool_schema in the YAML file, or a method get_openai_tool_schema.",
            )
        self.tool_schema = schema
        self.name = schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """Return the schema that is used if the file of tools has none."""
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Create an instance, and return its id and a first response, which Quadriga does not use."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: JsonObject, **kwargs: Any) -> Any:
        """Execute a call, and return the response, the reward of the call and metrics."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        """Reward for the use of an instance."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Free an instance."""

    @classmethod
    def tool_spec(
        cls, config: Mapping[str, Any], schema: JsonObject | None, where: str
    ) -> ToolSpec:
        """Make the shared object of a tool, and describe it to Quadriga.

        Args:
            config: settings of the tool in the file of tools.
            schema: schema of the tool in that file. None: it has none.
            where: place in the file, for errors.

        Raises:
            ConfigError: the tool is one of an MCP server, or has no schema.
        """
        # `type` is a setting of verl's loader, not of the tool.
        settings = {name: value for name, value in config.items() if name != "type"}
        if config.get("type") == "mcp":
            raise ConfigError(
                where,
                got="config.type='mcp'",
                expected="native",
                fix="List MCP servers under `mcp_servers` of the file of tools.",
            )
        make_schema = OpenAIFunctionToolSchema.model_validate
        tool = cls(settings, None if schema is None else make_schema(schema))
        # The model reads only what the author of the tool has written, not the defaults of the schema
        # classes.
        described = tool.tool_schema.model_dump(exclude_none=True, exclude_unset=True)
        no_parameters = {"type": "object", "properties": {}, "required": []}
        parameters = described["function"].setdefault("parameters", no_parameters)
        return ToolSpec(partial(ConversationTool, tool), described, validator_of(parameters))


class ConversationTool(Tool):
    """Adapter of a shared tool for one conversation.

    The reward of the conversation is the result of the tool's own `calc_reward`, or, if its class does
    not define one, the sum of the rewards of the calls.

    Args:
        tool: the shared tool.

    Attributes:
        tool: as in the arguments.
        instance_id: id for the methods of `tool`; "" before `create`.
        call_rewards: rewards of the calls so far.
    """

    def __init__(self, tool: BaseTool) -> None:
        self.tool = tool
        self.instance_id = ""
        self.call_rewards: list[float] = []

    async def create(self, **kwargs: Any) -> None:
        # Tools of verl take the row's arguments by name, or all of them as `create_kwargs`.
        arguments = accepted_arguments(self.tool.create, {**kwargs, "create_kwargs": kwargs})
        result = await _await_result(self.tool.create(**arguments))
        self.instance_id = result[0] if isinstance(result, tuple) else result

    async def execute(self, **kwargs: Any) -> str | WithImages:
        """Execute a call of the model by the shared tool, and store the reward of the call.

        Returns:
            The response for the model.

        Raises:
            RolloutError: the response has a video.
        """
        # `kwargs` has arguments of the model, of the row, and `agent_data` of the loop. The model's are
        # those in the schema. A schema that lists none accepts any: all but `agent_data` are then the
        # model's.
        schema_names = self.tool.tool_schema.function.parameters.properties
        names = set(schema_names or kwargs.keys() - {"agent_data"})
        model_arguments = {name: kwargs.pop(name) for name in list(kwargs) if name in names}
        call = self.tool.execute(self.instance_id, model_arguments, **kwargs)
        result = await _await_result(call)

        # The result is the response, or a tuple of it, the reward of the call and metrics.
        response, *details = result if isinstance(result, tuple) else (result,)
        if details and details[0] is not None:
            self.call_rewards.append(float(details[0]))
        if isinstance(response, str):
            return response
        response = ToolResponse.model_validate(response)
        if response.video:
            where = f"tool {self.tool.name}"
            raise RolloutError(where, got="a response with a video", expected="text and images")
        text = response.text or ""
        return WithImages(response.image, text) if response.image else text

    async def calc_reward(self, **kwargs: Any) -> Any:
        """Reward of the conversation; None: no call had a reward, and the tool computes none."""
        if type(self.tool).calc_reward is BaseTool.calc_reward:
            return sum(self.call_rewards) if self.call_rewards else None
        return await _await_result(self.tool.calc_reward(self.instance_id, **kwargs))

    async def release(self, **kwargs: Any) -> None:
        await _await_result(self.tool.release(self.instance_id, **kwargs))


def tool_of(spec: ToolSpec) -> BaseTool | None:
    """Return the shared object of a tool whose class is a `BaseTool`. None: it has another class."""
    # `BaseTool.tool_spec` has made it as `partial(ConversationTool, tool)`.
    make = spec.make
    is_verls = isinstance(make, partial) and make.func is ConversationTool
    return make.args[0] if is_verls else None


def initialize_tools_from_config(tools_config_file: str) -> list[Any]:
    """Load tools from a YAML file. Those whose class is no `BaseTool` are left out."""
    tools = [tool_of(spec) for spec in class_tools(tools_config_file)]
    return [tool for tool in tools if tool is not None]


class Gsm8kTool(BaseTool):
    """Tool that grades answers to GSM8K. A call costs 0.05 unless its answer is better than the last one."""

    def __init__(
        self, config: JsonObject, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        # By instance: the last answer, the score of the last answer, and the ground truth.
        self._states: dict[str, JsonObject] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> Any:
        instance_id = instance_id or str(uuid4())
        truth = ground_truth or (kwargs.get("create_kwargs") or {}).get("ground_truth")
        self._states[instance_id] = {"answer": "", "score": 0.0, "ground_truth": truth}
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: JsonObject, **kwargs: Any) -> Any:
        state = self._states[instance_id]
        answer = str(parameters.get("answer", ""))
        state["answer"] = f"#### {answer.removeprefix('#### ')}"
        reward = await self.calc_reward(instance_id)
        call_reward = 0.0 if reward > state["score"] else -0.05
        state["score"] = reward
        return ToolResponse(text=f"The answer {answer!r} scores {reward}"), call_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        state = self._states[instance_id]
        return scores.gsm8k_compute_score(state["answer"], state["ground_truth"], method="flexible")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._states[instance_id]


class _ThreadPool:
    """Threads for the calls of a tool, used as `await pool.execute.remote(function, *arguments)`.

    Args:
        config: settings of the tool. There are as many threads as the lower of `num_workers` and
            `rate_limit`.
        default: default of both settings.
    """

    def __init__(self, config: Mapping[str, Any], default: int) -> None:
        num_threads = min(int(config.get(name, default)) for name in ("num_workers", "rate_limit"))
        self._threads = ThreadPoolExecutor(num_threads, "verl-tool")
        # In verl, the pool is a Ray actor with the method `execute`, called by `execute.remote(...)`.
        self.execute = self

    def remote(self, function: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        """Call a function in a thread, and return a future of its result."""
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *args)


class SandboxFusionTool(BaseTool):
    """Tool that runs the program `code`, and responds with its output.

    The program runs on the server `sandbox_fusion_url`, or else in a sandbox on this machine. The limits
    `num_workers` and `rate_limit` apply to each process that runs conversations.
    """

    def __init__(
        self, config: JsonObject, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self.default_timeout = config.get("default_timeout", 30)
        self.default_language = config.get("default_language", "python")
        self.sandbox_fusion_url = config.get("sandbox_fusion_url") or ""
        self.memory_limit_mb = config.get("memory_limit_mb", 1024)
        self.execution_pool = _ThreadPool(config, 10)

    async def execute(self, instance_id: str, parameters: JsonObject, **kwargs: Any) -> Any:
        text = await self.execution_pool.execute.remote(
            self.execute_code,
            instance_id,
            str(parameters.get("code", "")),
            parameters.get("timeout", self.default_timeout),
            parameters.get("language") or self.default_language,
        )
        return ToolResponse(text=text), None, None

    def execute_code(
        self, instance_id: str, code: str, timeout: float = 30, language: str = "python"
    ) -> str:
        """Run a program.

        Args:
            instance_id: ignored.
            code: the program.
            timeout: time limit, in seconds.
            language: its language.

        Returns:
            Standard output and standard error of the program. If a limit of time or memory has ended
            it, the last line says which.

        Raises:
            RolloutError: the language is not Python, and there is no server.
        """
        # The time limit is for CPU time, and for time by the clock.
        limits = ResourceLimits(timeout, timeout, self.memory_limit_mb)
        # The program is run on one test, without input. Its output is compared with nothing.
        cases = [Case({"input": ""}, "")]
        if self.sandbox_fusion_url:
            url = self.sandbox_fusion_url
            runs = list(run_remotely(code, cases, limits, url=url, language=language, parallel=1))
        elif language == "python":
            runs = list(run_cases(code, cases, limits, total_s=timeout + 1))
        else:
            raise RolloutError(
                f"tool {self.name}",
                got=f"language {language!r}",
                expected="python, or a server (sandbox_fusion_url)",
            )
        output = "".join(run.stdout + run.stderr for run in runs)
        # No run: the time limit of all cases has ended the program.
        status = runs[0].status if runs else "time"
        if status in ("ok", "error"):
            return output
        return f"{output}\nended by its limit: {status}".lstrip()


class SearchTool(BaseTool):
    """Tool that searches `topk` documents for each of `query_list` by a retrieval server."""

    def __init__(
        self, config: JsonObject, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self.retrieval_service_url = config.get("retrieval_service_url") or ""
        self.topk = config.get("topk", 3)
        self.default_timeout = config.get("default_timeout", 30)
        self.execution_pool = _ThreadPool(config, 120)
        setting = f"tool {self.name}, config.retrieval_service_url"
        self._server = HTTPClient(self.retrieval_service_url, RolloutError, setting=setting)

    async def execute(self, instance_id: str, parameters: JsonObject, **kwargs: Any) -> Any:
        queries = parameters.get("query_list")
        if not isinstance(queries, list) or not queries:
            error = {"result": "Error: query_list must be a list of queries."}
            return ToolResponse(text=json.dumps(error)), 0.0, {}
        text, metrics = await self.execution_pool.execute.remote(
            self.execute_search,
            instance_id,
            queries,
            self.retrieval_service_url,
            self.topk,
            self.default_timeout,
        )
        return ToolResponse(text=text), 0.0, metrics

    def execute_search(
        self,
        instance_id: str,
        query_list: list[str],
        retrieval_service_url: str,
        topk: int,
        timeout: float,
    ) -> tuple[str, JsonObject]:
        """Search documents.

        Args:
            instance_id: ignored.
            query_list: the queries.
            retrieval_service_url: ignored; the settings name the server.
            topk: number of documents for each query.
            timeout: time limit, in seconds.

        Returns:
            The documents as JSON text, {"result": ...}, and metrics.
        """
        body = {"queries": query_list, "topk": topk, "return_scores": True}
        results = self._server.call_until(body, timeout_s=timeout).get("result") or []
        parts = []
        for documents in results:
            part = ""
            for number, document in enumerate(documents, start=1):
                title, _, text = str(document["document"]["contents"]).partition("\n")
                part += f"Doc {number} (Title: {title})\n{text}\n\n"
            parts.append(part.strip())
        result = "\n---\n".join(parts) or "No search results found."
        metrics = {"query_count": len(query_list), "total_results": sum(map(len, results))}
        return json.dumps({"result": result}, ensure_ascii=False), metrics


# ---- user simulators ----------------------------------------------------------------------------


class BaseInteraction(Interaction):
    """Base class of verl's user simulators. All conversations share one object."""

    def __init__(self, config: JsonObject) -> None:
        self.config = config
        self.name = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Begin a conversation, and return its `instance_id`."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[JsonObject], **kwargs: Any
    ) -> Any:  # pyrefly: ignore
        """Reply to the model.

        Args:
            instance_id: the conversation.
            messages: messages of the conversation so far.
            kwargs: entries of the row's `interaction_kwargs`.

        Returns:
            Whether the conversation is over, the user's text, the score of the model's turn, and a
            dictionary that is ignored.
        """
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, *args: Any, **kwargs: Any) -> float:
        """Score a conversation. Quadriga does not call this."""
        return 0.0

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """End a conversation."""

    @classmethod
    def maker(cls, name: str, config: Mapping[str, Any]) -> Callable[[], Interaction]:
        """Make the shared object, and return a function that makes the adapter of a conversation."""
        return partial(_ConversationSimulator, cls({**config, "name": name}))


class _ConversationSimulator(Interaction):
    """Adapter of a shared user simulator for one conversation."""

    def __init__(self, shared: BaseInteraction) -> None:
        self.shared = shared
        self.instance_id = str(uuid4())
        self.kwargs: JsonObject = {}

    async def start_interaction(self, **kwargs: Any) -> None:
        self.kwargs = {"name": self.shared.name, **kwargs}
        instance_id = await self._call(self.shared.start_interaction, self.kwargs)
        self.instance_id = instance_id or self.instance_id

    async def generate_response(self, messages: list[JsonObject]) -> Reply:
        arguments = {"messages": messages, **self.kwargs}
        is_over, text, score, *_ = await self._call(self.shared.generate_response, arguments)
        return Reply(text or "", score, bool(is_over))

    async def finalize_interaction(self) -> None:
        await self._call(self.shared.finalize_interaction, {})

    async def _call(self, method: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Call a method of the shared object. Arguments without a parameter there are left out."""
        accepted = accepted_arguments(method, {"instance_id": self.instance_id, **arguments})
        return await _await_result(method(**accepted))


class Gsm8kInteraction(BaseInteraction):
    """User simulator that says whether the model's last answer to GSM8K is right, and ends if it is."""

    def __init__(self, config: JsonObject) -> None:
        super().__init__(config)
        self._truths: JsonObject = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        instance_id = instance_id or str(uuid4())
        self._truths[instance_id] = ground_truth
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[JsonObject], **kwargs: Any
    ) -> Any:  # pyrefly: ignore
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        answer = answers[-1] if answers else ""
        score = scores.gsm8k_compute_score(answer, self._truths[instance_id])
        if score == 1.0:
            return True, "That is right.", score, {}
        return False, "That is not right. Think about it and answer again.", score, {}

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        self._truths.pop(instance_id or "", None)


async def _await_result(result: Any) -> Any:
    """Return the result of a user's method. Await it first if it is a coroutine."""
    return await result if inspect.isawaitable(result) else result


# ---- tracing and timing -------------------------------------------------------------------------


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that returns the function unchanged: `rollout.trace_dir` writes traces without it."""
    return function


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Context manager: add the seconds of a block to `timing_raw[name]`."""
    start_s = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start_s


def marked_timer(
    name: str, timing_raw: dict[str, float], **marks: Any
) -> AbstractContextManager[None]:
    """Context manager: add the seconds of a block to `timing_raw[name]`.

    Args:
        name: name of the block.
        timing_raw: seconds by name.
        marks: `color`, `domain` and `category` of a range in a profile; ignored, because profiles
            have the names of workers' methods.
    """
    return simple_timer(name, timing_raw)
