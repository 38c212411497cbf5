# SPDX-License-Identifier: Apache-2.0
"""The tools of `examples/tools` work as they stand."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from quadriga.errors import RolloutError
from quadriga_recipes.tasks import prepare_data

EXAMPLES = Path(__file__).resolve().parents[4] / "examples" / "tools"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("(3 + 4) * 12", "tool\n84<"),
        ("-1 / 4", "tool\n-0.25<"),
        ("1 / 0", "Error: calculator: float division by zero."),
        ("3 +", "Error: calculator: invalid syntax"),
        ("open('x')", "Error: calculator: open('x') is not arithmetic."),
    ],
)
def test_calculator(
    converse, make_prompts, recorder, tokenizer, expression: str, expected: str
) -> None:
    """It computes, and tells the model what it did wrong."""
    call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'
    engine = recorder({"tool\n": "done", "Tools": call})
    output = converse(
        engine, make_prompts(["?"]), {"function_tool_path": str(EXAMPLES / "calculator.py")}
    )
    assert expected in tokenizer.decode(output.batch["responses"][0])
    assert list(output.non_tensor_batch["finish_reason"]) == ["stop"]


def test_account_and_teacher(converse, make_prompts, recorder) -> None:
    """A class of tools and a user simulator out of their YAML files, together."""
    call = '<tool_call>{"name": "account", "arguments": {"amount": %d}}</tool_call>'
    engine = recorder([call % -30, call % 5, "There are 4.", "There are 75."])
    prompts = make_prompts(
        ["?"],
        tools_kwargs=[{"account": {"create_kwargs": {"balance": 100}}}],
        interaction_kwargs=[{"name": "teacher", "answer": "75"}],
    )
    files = {"tool_config_path": "tools.yaml", "interaction_config_path": "interactions.yaml"}
    config = {key: str(EXAMPLES / name) for key, name in files.items()}
    output = converse(engine, prompts, config, T=900)
    row = {name: column[0] for name, column in output.non_tensor_batch.items()}
    roles = [message["role"] for message in row.pop("solution_messages")]
    assert roles == ["assistant", "tool", "assistant", "tool", "assistant", "user", "assistant"]
    spans = row.pop("turn_spans")
    mask = output.batch["response_mask"][0]
    assert len(spans) == 4 and all(mask[start:end].all() for start, end in spans)
    assert sum(end - start for start, end in spans) == int(mask.sum())
    states = row.pop("turn_states")
    assert states[:2] == ["", "There are 70 EUR."]
    assert row == {
        "num_turns": 7,
        "finish_reason": "interaction",
        "tool_rewards": {"account": 75.0},
        "turn_scores": [0.0, 1.0],
        "turn_rewards": [],
        "agent": "",
    }


def test_an_account_refuses(converse, make_prompts, recorder) -> None:
    """What the tool refuses is told the model."""
    call = '<tool_call>{"name": "account", "arguments": {"amount": -1}}</tool_call>'
    config = {"tool_config_path": str(EXAMPLES / "tools.yaml")}
    output = converse(recorder([call, "ok"]), make_prompts(["?"]), config)
    assert output.non_tensor_batch["finish_reason"][0] == "stop"
    assert output.meta_info["metrics"]["rollout/num_refused_calls"].value == 1
    with pytest.raises(RolloutError, match=r"tools_kwargs\.account: got create=1"):
        converse(
            recorder(["ok"]), make_prompts(["?"], tools_kwargs=[{"account": {"create": 1}}]), config
        )


def test_what_checks_answers_takes_rows_as_they_are_prepared(
    converse, make_prompts, recorder, tmp_path
) -> None:
    """The answer of a row is in its `tools_kwargs`, under the tool's name."""
    source = tmp_path / "rows.jsonl"
    source.write_text('{"question": "q", "answer": "#### 1,000"}\n' * 2)
    path = prepare_data("gsm8k_tools", tmp_path, source=str(source))["train"]
    [row] = pq.read_table(path).to_pylist()
    call = '<tool_call>{"name": "check_answer", "arguments": {"answer": "%s"}}</tool_call>'
    engine = recorder([call % 999, call % 1000, "#### 1000"])
    prompts = make_prompts(
        ["?"], tools_kwargs=[row["extra_info"]["tools_kwargs"]], agent_name=[row["agent_name"]]
    )
    output = converse(
        engine, prompts, {"tool_config_path": str(EXAMPLES / "check_answer.yaml")}, T=900
    )
    assert output.non_tensor_batch["tool_rewards"][0] == {"check_answer": 1.0}
    assert output.non_tensor_batch["num_turns"][0] == 5
