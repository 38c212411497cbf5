# SPDX-License-Identifier: Apache-2.0
"""verl's tools and user simulators as ours, without an engine: the loops run in tests/e2e."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quadriga.errors import ConfigError, RolloutError
from quadriga.rollout.agent_loop.interactions import Reply, load_interactions
from quadriga.rollout.agent_loop.tools import class_tools

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
        earned, reward = tool.earned, await tool.calc_reward()
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
    with pytest.raises(RolloutError, match="a response with pictures"):
        asyncio.run(use(picture.make()))


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
        replies.append(await teacher.generate_response([*said, {"role": "assistant", "content": "#### 4"}]))
        await teacher.finalize_interaction()
        return replies

    wrong, right = asyncio.run(talk())
    assert (wrong.score, wrong.is_over) == (0.0, False) and "not right" in wrong.text
    assert (right.score, right.is_over) == (1.0, True)
