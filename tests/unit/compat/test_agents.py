# SPDX-License-Identifier: Apache-2.0
"""verl's tools and user simulators as ours, without an engine: the loops run in tests/e2e."""

import asyncio
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from quadriga.errors import ConfigError, RolloutError
from quadriga.rollout.agent_loop.interactions import Reply, load_interactions
from quadriga.rollout.agent_loop.tools import class_tools
from tests.http_server import Handler, serving

pytestmark = pytest.mark.usefixtures("verl_names")

YAML = """
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: calc_gsm8k_reward
        description: Grades an answer.
        parameters:
          type: object
          properties: {answer: {type: string, description: the answer}}
          required: [answer]
"""
PLAIN = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema


class Plain(BaseTool):
    def get_openai_tool_schema(self):
        function = {"name": "plain", "description": "Says it.", "parameters": {
            "type": "object", "properties": {"what": {"type": "array", "items": {"type": "string"}}}, "required": []}}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def execute(self, instance_id, parameters, **kwargs):
        return {"text": f"{parameters} {kwargs} {self.config}"}, 0.25, {}


class Picture(Plain):
    async def execute(self, instance_id, parameters, **kwargs):
        return {"image": [1]}, None, {}
"""


def test_the_tool_of_gsm8k(tmp_path: Path) -> None:
    """An answer that is no better than the one before costs something; the last one is the reward."""
    (tmp_path / "tools.yaml").write_text(YAML)
    (spec,) = class_tools(str(tmp_path / "tools.yaml"))
    assert spec.name == "calc_gsm8k_reward" and spec.check({"answer": "3"}) == {"answer": "3"}

    async def use(*answers: str) -> tuple[Any, ...]:
        tool: Any = spec.make()
        await tool.create(ground_truth="72")
        said = [await tool.execute(answer=answer) for answer in answers]
        earned, reward = tool.call_rewards, await tool.calc_reward()
        await tool.release()
        assert not tool.tool._states
        return said[-1], earned, reward

    said, earned, reward = asyncio.run(use("71", "72", "72"))
    assert "1.0" in said and earned == [-0.05, 0.0, -0.05] and reward == 1.0


def test_a_tool_with_its_own_schema(tmp_path: Path) -> None:
    """Its schema is kept with what is nested in it; arguments that are no parameters of the model's arrive apart."""
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "tools.yaml").write_text(
        "tools:\n  - {class_name: plain.py:Plain, config: {key: 1}}\n  - {class_name: plain.py:Picture}\n"
    )
    plain, picture = class_tools(str(tmp_path / "tools.yaml"))
    properties = plain.schema["function"]["parameters"]["properties"]
    assert properties == {"what": {"type": "array", "items": {"type": "string"}}}

    async def use(tool: Any) -> tuple[Any, ...]:
        await tool.create()
        return await tool.execute(what=["x"], seed=3), await tool.calc_reward()

    assert asyncio.run(use(plain.make())) == ("{'what': ['x']} {'seed': 3} {'key': 1}", 0.25)
    shown, _ = asyncio.run(use(picture.make()))
    assert (shown.images, shown.text) == ([1], "")


def test_a_tool_that_is_a_server(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(YAML.replace("native", "mcp"))
    with pytest.raises(ConfigError, match=r"got config\.type='mcp'.*mcp_servers"):
        class_tools(str(tmp_path / "tools.yaml"))


def test_the_interaction_of_gsm8k(tmp_path: Path) -> None:
    """Without a name in the file it has that of its class."""
    text = "interaction:\n  - {class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction, config: {}}\n"
    (tmp_path / "interactions.yaml").write_text(text)
    makers = load_interactions(str(tmp_path / "interactions.yaml"))
    assert list(makers) == ["gsm8k"]

    async def talk() -> list[Reply]:
        teacher: Any = makers["gsm8k"]()
        await teacher.start_interaction(ground_truth="4")
        said = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "#### 5"}]
        replies = [await teacher.generate_response(said)]
        replies.append(
            await teacher.generate_response([*said, {"role": "assistant", "content": "#### 4"}])
        )
        await teacher.finalize_interaction()
        return replies

    wrong, right = asyncio.run(talk())
    assert (wrong.score, wrong.is_over) == (0.0, False) and "not right" in wrong.text
    assert (right.score, right.is_over) == (1.0, True)


SERVED = """
tools:
  - class_name: verl.tools.{}
    config: {{num_workers: 2, rate_limit: 2, default_timeout: 60, type: native, {}}}
    tool_schema:
      type: function
      function:
        name: served
        description: Goes to a server.
        parameters: {{type: object, properties: {{{}}}, required: []}}
"""


async def first_said(path: Path, **arguments: Any) -> tuple[str, Any]:
    """What the only tool of a file says to a call, and what it earned."""
    tool: Any = class_tools(str(path))[0].make()
    await tool.create()
    said = await tool.execute(**arguments)
    return said, await tool.calc_reward()


class Places(Handler):
    """A server of documents."""

    def answer(self, body: Any) -> None:
        self.server.bodies.append(body)
        documents = [
            {"document": {"contents": f"{query}\nis a place"}, "score": 1.0}
            for query in ("Nile", "Oslo")
        ]
        self.reply(200, {"result": [documents[: body["topk"]] for _ in body["queries"]]})


def test_the_search_tool(tmp_path: Path) -> None:
    """Queries go to the server; documents come back numbered, with their titles."""
    with serving(Places, bodies=[]) as server:
        config = f"retrieval_service_url: '{server.url}/retrieve', topk: 2"
        kind = "query_list: {type: array, items: {type: string}}"
        (tmp_path / "tools.yaml").write_text(SERVED.format("search_tool.SearchTool", config, kind))
        said, earned = asyncio.run(first_said(tmp_path / "tools.yaml", query_list=["a", "b"]))
        one = "Doc 1 (Title: Nile)\nis a place\n\nDoc 2 (Title: Oslo)\nis a place"
        assert json.loads(said) == {"result": f"{one}\n---\n{one}"} and earned == 0.0
        assert server.bodies == [{"queries": ["a", "b"], "topk": 2, "return_scores": True}]
        wrong, _ = asyncio.run(first_said(tmp_path / "tools.yaml", query_list="a"))
        assert "must be a list" in wrong and len(server.bodies) == 1
    with pytest.raises(RolloutError, match=r"tool served, config\.retrieval_service_url: got ''"):
        (tmp_path / "none.yaml").write_text(
            SERVED.format("search_tool.SearchTool", "topk: 2", kind)
        )
        class_tools(str(tmp_path / "none.yaml"))


class Fusion(Handler):
    """A sandbox that has run the program already."""

    def answer(self, body: Any) -> None:
        self.server.bodies.append(body)
        run = {
            "status": "Finished",
            "return_code": 1,
            "stdout": "4\n",
            "stderr": "late",
            "execution_time": 0.1,
        }
        self.reply(200, {"status": "Failed", "message": "", "run_result": run})


def test_the_sandbox_tool(tmp_path: Path) -> None:
    """Without a server programs run here, contained; errors are said, and so is what ended them."""
    code = "code: {type: string}, timeout: {type: number}"
    (tmp_path / "here.yaml").write_text(
        SERVED.format("sandbox_fusion_tools.SandboxFusionTool", "a: 1", code)
    )
    for program, expected in (("print(2 + 2)", "4\n"), ("print(1); 1 / 0", "ZeroDivisionError")):
        assert expected in asyncio.run(first_said(tmp_path / "here.yaml", code=program))[0]
    said, earned = asyncio.run(
        first_said(tmp_path / "here.yaml", code="while True: pass", timeout=1)
    )
    assert said in ("ended by its limit: time", "ended by its limit: wall") and earned is None
    with serving(Fusion, bodies=[]) as server:
        config = f"sandbox_fusion_url: '{server.url}/run_code', memory_limit_mb: 99"
        (tmp_path / "there.yaml").write_text(
            SERVED.format("sandbox_fusion_tools.SandboxFusionTool", config, code)
        )
        said, _ = asyncio.run(first_said(tmp_path / "there.yaml", code="print(2 + 2)"))
        (body,) = server.bodies
    assert said == "4\nlate"
    assert (body["code"], body["language"], body["memory_limit_MB"]) == (
        "print(2 + 2)",
        "python",
        99,
    )


def test_parsers_of_tool_calls() -> None:
    """Ours by verl's names: the text without its calls, and those of them that can be read."""
    tool_parser = import_module("verl.experimental.agent_loop.tool_parser")

    class Words:
        def decode(self, ids: list[int], **options: Any) -> str:
            return 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>no</tool_call>'

    parser = tool_parser.ToolParser.get_tool_parser("hermes", Words())
    text, (call,) = asyncio.run(parser.extract_tool_calls([1]))
    assert (text, call.name, json.loads(call.arguments)) == ("so ", "add", {"a": 1})
    _, (_, wrong) = asyncio.run(parser.extract_tool_calls([1], with_unreadable=True))
    assert "not JSON" in wrong.problem
    with pytest.raises(ValueError, match="got 'xml', expected one of hermes"):
        tool_parser.ToolParser.get_tool_parser("xml", Words())


def test_initialized_tools(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(YAML)
    registry = import_module("verl.tools.utils.tool_registry")
    (tool,) = registry.initialize_tools_from_config(str(tmp_path / "tools.yaml"))
    assert tool.name == "calc_gsm8k_reward" and type(tool).__name__ == "Gsm8kTool"
