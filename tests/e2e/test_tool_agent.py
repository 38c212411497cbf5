# SPDX-License-Identifier: Apache-2.0
"""A tiny model learns, through the command line, to ask a calculator instead of guessing."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quadriga.rollout.agent_loop.loops import REGISTRY
from tests.e2e.calculator import calculator_overrides, sum_row, write_calculator

Lines = Callable[[Path], list[dict[str, Any]]]
Train = Callable[..., Path]

TOOL_OF_VERL = """
from typing import Any, Optional
from uuid import uuid4

from verl.interactions.base import BaseInteraction
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class AddTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = kwargs["create_kwargs"]["bonus"]
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        return ToolResponse(text=str(parameters["a"] + parameters["b"])), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return self._instance_dict[instance_id] * self.config["scale"]

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]


class Doubter(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self._instance_dict = {}

    async def start_interaction(self, instance_id: Optional[str] = None, ground_truth: str = "", **kwargs) -> str:
        assert kwargs["name"] == self.name == "doubter"
        self._instance_dict[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs):
        is_right = messages[-1]["content"].replace(" ", "") == self._instance_dict[instance_id]
        return is_right, "+", float(is_right), {}
"""
TOOL_FILES_OF_VERL = {
    "tools.yaml": """
tools:
  - class_name: of_verl.py:AddTool
    config: {type: native, scale: 2.0}
    tool_schema:
      type: function
      function:
        name: add
        description: Add two numbers.
        parameters:
          type: object
          properties: {a: {type: integer, description: one}, b: {type: integer, description: other}}
          required: [a, b]
""",
    "interactions.yaml": """
interaction:
  - name: doubter
    class_name: of_verl.py:Doubter
    config: {}
""",
    "of_verl.py": TOOL_OF_VERL,
}


@pytest.fixture(scope="module")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that has a tool, sums to do, the tool and the reward."""
    folder = tmp_path_factory.mktemp("calculator")
    write_calculator(folder)
    return folder


@pytest.fixture
def train_calculator(train: Train, calculator: Path, tmp_path: Path) -> Train:
    """`train_calculator(*overrides)`: a run of the tool agent that must succeed; returns its directory."""

    def run_apart(*overrides: str, run: str = "run") -> Path:
        trace = f"actor_rollout_ref.rollout.trace_dir={tmp_path / 'trace'}"
        return train(*calculator_overrides(calculator), trace, *overrides, run=run)

    return run_apart


def _records(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(folder.iterdir())
        for line in path.read_text().splitlines()
    ]


def test_reward_rises_with_the_tool(
    train_calculator: Train, metric_lines: Lines, tmp_path: Path
) -> None:
    """Guessing a sum is right in one case of twenty: what is right in the end was asked of the calculator."""
    lines = metric_lines(train_calculator("trainer.total_training_steps=15"))
    rewards = [line["critic/score/mean"] for line in lines]
    before, after = sum(rewards[:2]) / 2, sum(rewards[-3:]) / 3
    assert before < 0.6
    assert after > 0.75
    assert lines[-1]["rollout/num_turns"] > lines[0]["rollout/num_turns"] + 0.5
    used = [record for record in _records(tmp_path / "trace") if len(record["turns"]) == 3]
    assert used and all(record["turns"][1]["role"] == "tool" for record in used)


def test_the_trainer_sees_what_the_engine_saw(train_calculator: Train, metric_lines: Lines) -> None:
    """Log-probabilities of the engine, turn by turn, are those of the trainer on the whole conversation."""
    lines = metric_lines(
        train_calculator("trainer.total_training_steps=2", "actor_rollout_ref.actor.ppo_epochs=2")
    )
    assert len(lines) == 2
    assert all(line["rollout/log_prob_diff_max"] < 1e-4 for line in lines)
    assert all(line["rollout/num_tool_tokens"] > 0 for line in lines)


def _files_of_verl(folder: Path) -> list[str]:
    """Rows with arguments for a tool and a user simulator of verl's, and the words that name them."""
    for name, text in TOOL_FILES_OF_VERL.items():
        (folder / name).write_text(text)
    rows = [sum_row(a, a + 1) for a in range(8)]
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        row["extra_info"]["tools_kwargs"] = {"add": {"create_kwargs": {"bonus": 1.5}}}
        row["extra_info"]["interaction_kwargs"] = {"name": "doubter", "ground_truth": truth}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    turns = "actor_rollout_ref.rollout.multi_turn"
    return [
        f"data.train_files={folder / 'rows.jsonl'}",
        f"{turns}.function_tool_path=null",
        f"{turns}.tool_config_path={folder / 'tools.yaml'}",
        f"{turns}.interaction_config_path={folder / 'interactions.yaml'}",
        f"{turns}.max_assistant_turns=3",
    ]


@pytest.mark.usefixtures("verl_names")
def test_a_tool_and_a_user_simulator_of_verls(
    train_calculator: Train, metric_lines: Lines, tmp_path: Path
) -> None:
    """Instances come and go with their conversations; rewards of the tool and scores of the turns arrive."""
    files = _files_of_verl(tmp_path)
    lines = metric_lines(train_calculator(*files, "trainer.total_training_steps=2"))
    assert all(
        line["rollout/num_failures"] == 0 and line["rollout/num_tool_calls"] > 0 for line in lines
    )
    records = _records(tmp_path / "trace")
    assert {record["tool_rewards"]["add"] for record in records} == {3.0}
    assert {"0.0", "1.0"} >= {str(score) for record in records for score in record["turn_scores"]}
    assert any(record["finish_reason"] == "interaction" for record in records)
    assert any(turn["role"] == "user" for record in records for turn in record["turns"])


LOOP_OF_VERL = """
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop


@register("counting_tool_agent")
class CountingLoop(ToolAgentLoop):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        assert set(self.tools) == {"add"} and self.tool_schemas[0]["function"]["name"] == "add"

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        output.extra_fields["num_turns_of_verl"] = output.num_turns
        return output

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        state = await super()._handle_generating_state(agent_data, sampling_params, ignore_termination)
        assert state != AgentState.PROCESSING_TOOLS or agent_data.tool_calls
        return state

    async def _call_tool(self, tool_call, tools_kwargs, agent_data):
        agent_data.extra_fields["last_call"] = tool_call.arguments
        return await super()._call_tool(tool_call, tools_kwargs, agent_data)
"""
PARSER_OF_VERL = """
import json
import re
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.base_tool import OpenAIFunctionToolSchema
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.utils.rollout_trace import rollout_trace_op


@ToolParser.register("sums")
class SumsParser(ToolParser):
    def __init__(self, tokenizer) -> None:
        super().__init__(tokenizer)
        self.number = re.compile("<arg_value>([0-9])</arg_value>")

    @rollout_trace_op
    async def extract_tool_calls(self, responses_ids: list[int]) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids)
        numbers = self.number.findall(text.replace(" ", ""))
        if len(numbers) != 2:
            return text, []
        return "", [FunctionCall(name="add", arguments=json.dumps(dict(zip("ab", map(int, numbers)))))]


class AddTool(SandboxFusionTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.numbers = config["numbers"]

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        code = f"print({parameters['a']} + {parameters['b']}, end='')"
        result = await self.execution_pool.execute.remote(
            self.execute_code, instance_id, code, self.default_timeout, self.default_language
        )
        return result, None, None
"""
TOOL_OF_SANDBOX = (
    TOOL_FILES_OF_VERL["tools.yaml"]
    .replace("scale: 2.0", "numbers: 2")
    .replace("of_verl", "parser")
)
ASKED = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    used, scores = "last_call" in extra_info, extra_info["turn_scores"]
    # The prompt is a turn in verl's count.
    assert extra_info["num_turns_of_verl"] == extra_info["num_turns"] + 1
    is_right = solution_str.replace(" ", "").rpartition("<assistant>")[2] == ground_truth
    return {"score": float(is_right), "used": float(used), "scored": float(len(scores))}
"""


@pytest.mark.usefixtures("verl_names")
def test_a_tool_loop_of_verls(train_calculator: Train, metric_lines: Lines, tmp_path: Path) -> None:
    """Over the same tools and users the numbers of the loop that is built in; what a subclass adds is graded."""
    (tmp_path / "loop.py").write_text(LOOP_OF_VERL)
    few = [
        *_files_of_verl(tmp_path),
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=2",
    ]
    built_in = metric_lines(train_calculator(*few, run="built_in"))
    loop = [
        f"actor_rollout_ref.rollout.agent.agent_loop_path={tmp_path / 'loop.py'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=counting_tool_agent",
    ]
    (tmp_path / "asked.py").write_text(ASKED)
    lines = metric_lines(
        train_calculator(*few, *loop, f"custom_reward_function.path={tmp_path / 'asked.py'}")
    )
    for one, other in zip(lines, built_in, strict=True):
        for name in (
            "actor/grad_norm",
            "response_length/mean",
            "rollout/num_turns",
            "rollout/log_prob",
        ):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name
        assert one["reward/extra/used"] > 0 and one["reward/extra/scored"] > 0


@pytest.mark.usefixtures("verl_names")
def test_a_tool_in_a_sandbox_and_a_parser_of_verls(
    train_calculator: Train, metric_lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs run contained where no server is named; the parser is given the tokens of the model's turn."""
    monkeypatch.setitem(REGISTRY, "tool_agent", REGISTRY["tool_agent"])
    (tmp_path / "parser.py").write_text(PARSER_OF_VERL)
    (tmp_path / "tools.yaml").write_text(TOOL_OF_SANDBOX)
    turns = "actor_rollout_ref.rollout.multi_turn"
    (line,) = metric_lines(
        train_calculator(
            f"actor_rollout_ref.rollout.agent.agent_loop_path={tmp_path / 'parser.py'}",
            f"{turns}.function_tool_path=null",
            f"{turns}.tool_config_path={tmp_path / 'tools.yaml'}",
            f"{turns}.format=sums",
            "data.train_batch_size=2",
            "actor_rollout_ref.rollout.n=4",
            "trainer.total_training_steps=1",
        )
    )
    assert line["rollout/num_failures"] == 0 and line["rollout/num_tool_tokens"] > 0
    used = [record for record in _records(tmp_path / "trace") if len(record["turns"]) == 3]
    assert used
    for record in used:
        written = re.findall(
            "<arg_value>([0-9])</arg_value>", record["turns"][0]["text"].replace(" ", "")
        )
        said = record["turns"][1]["text"].replace(" ", "").removeprefix("<eos>")
        assert said == f"<tool>{sum(map(int, written))}<assistant>"
