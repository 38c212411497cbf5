# SPDX-License-Identifier: Apache-2.0
"""Tools out of files, the registry of loops, and a manager that keeps what it has loaded."""

import asyncio
from pathlib import Path

import pytest
import torch

from quadriga.config.rollout import RolloutConfig
from quadriga.errors import ConfigError, RolloutError
from quadriga.rollout.agent_loop import AgentLoop, AgentLoopManager, Interaction, Tool
from quadriga.rollout.agent_loop.loops import AgentLoopRegistry, SingleTurnAgent, ToolAgent

ADD = '''
@function_tool
def add(a: int, b: int, *, bonus: int = 0) -> int:
    """Add two numbers."""
    return a + b + bonus
'''
CALL = 'to: <tool_call>{"name": "add", "arguments": {"a": 40, "b": 2}}</tool_call>'


STATEFUL = '''
class Account(Tool):
    """A bank account."""

    def __init__(self, log: str) -> None:
        self.log = log

    def create(self, balance: int = 0) -> None:
        self.balance = balance

    async def execute(self, amount: int) -> str:
        """Pay in.

        Args:
            amount: how much.
        """
        self.balance += amount
        return f"balance {self.balance}"

    def calc_reward(self) -> float:
        return self.balance / 10

    def release(self) -> None:
        with open(self.log, "a") as file:
            file.write(f"{self.balance}\\n")
'''


def test_a_tool_with_state(
    converse, make_prompts, recorder, tool_file, tokenizer, tmp_path
) -> None:
    """Each conversation has its own object; its reward travels, and it is released however the conversation ends."""
    tool_file(STATEFUL, "bank.py")
    (tmp_path / "tools.yaml").write_text(
        f"tools:\n  - class_name: bank.py:Account\n    config: {{log: {tmp_path / 'log'}}}\n"
    )
    pay = '<tool_call>{"name": "account", "arguments": {"amount": %s}}</tool_call>'
    engine = recorder(
        {"balance 1": "done", "pay 1": pay % 1, "pay 2": pay % 2, "balance 52": pay % '"x"'}
    )
    kwargs = [
        {"account": {"create_kwargs": {"balance": 10}}},
        {"account": {"create_kwargs": {"balance": 50}}},
    ]
    config = {"tool_config_path": str(tmp_path / "tools.yaml"), "max_assistant_turns": 3}
    output = converse(engine, make_prompts(["pay 1", "pay 2"], tools_kwargs=kwargs), config, T=900)
    assert list(output.non_tensor_batch["tool_rewards"]) == [{"account": 1.1}, {"account": 5.2}]
    assert list(output.non_tensor_batch["finish_reason"]) == ["stop", "max_assistant_turns"]
    assert sorted((tmp_path / "log").read_text().split()) == ["11", "52"]


def test_registry() -> None:
    """A name is given once."""
    registry = AgentLoopRegistry()
    registry.register("one")(SingleTurnAgent)
    registry.register("one")(SingleTurnAgent)
    with pytest.raises(RolloutError, match="expected a free name"):
        registry.register("one")(ToolAgent)


class Silent(AgentLoop):
    """Lacks `run`."""


def test_a_loop_that_lacks_a_method() -> None:
    """Neither registered nor made."""
    registry = AgentLoopRegistry()
    with pytest.raises(
        RolloutError,
        match=r"register\('silent'\): got Silent, a class without run, .*Write Silent.run",
    ):
        registry.register("silent")(Silent)
    with pytest.raises(RolloutError, match="agent_name: got 'silent'"):
        registry["silent"]
    with pytest.raises(TypeError, match=r"Silent.*\brun\b"):
        Silent(None)


@pytest.mark.parametrize(("base", "lacks"), [(Tool, "execute"), (Interaction, "generate_response")])
def test_hooks_are_optional_and_the_rest_is_not(base: type, lacks: str) -> None:
    """One method is enough; without it no object is made."""
    assert isinstance(type("Whole", (base,), {lacks: lambda self: None})(), base)
    with pytest.raises(TypeError, match=lacks):
        type("Idle", (base,), {})()


def test_a_manager_keeps_its_tools(make_prompts, recorder, tool_file, tokenizer) -> None:
    """Batch after batch over the same manager, within an event loop of the caller's too."""
    turns = {"enable": True, "function_tool_path": tool_file(ADD)}
    config = RolloutConfig.model_validate(
        {"mode": "async", "multi_turn": turns, "agent": {"default_agent_loop": "tool_agent"}}
    )
    manager = AgentLoopManager(config, tokenizer, prompt_length=1000, response_length=400)
    engine = recorder({"tool\n": "42", "Tools": CALL})
    counts: list[int] = []
    first = manager.generate(engine, make_prompts(["?"]), seed=1, count_ended=counts.append)
    # A rollout of several turns counts once.
    assert counts == [1]
    second = asyncio.run(manager.lead(engine, make_prompts(["?"]), seed=1))
    assert torch.equal(first.batch["input_ids"], second.batch["input_ids"])
    manager.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1", "no function is a tool"),
        ("raise OSError('gone')", "(?s)which raised OSError while it was loaded:.*OSError: gone"),
        ("@function_tool\ndef f(a): 'F.'", "a without a type hint"),
        (
            "@function_tool(name='g')\ndef f(): 'F.'\n@function_tool\ndef g(): 'G.'",
            "two with the name 'g'",
        ),
    ],
)
def test_files_that_are_not_of_tools(
    converse, make_prompts, recorder, tool_file, text: str, expected: str
) -> None:
    """The error says what the file lacks, before anything is generated."""
    with pytest.raises((ConfigError, RolloutError), match=expected):
        converse(recorder(["x"]), make_prompts(["?"]), {"function_tool_path": tool_file(text)})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "tools: [{class_name: bank.py:Accout}]",
            "no class 'Accout', expected a subclass of .*Did you mean 'Account'",
        ),
        ("tools: [{class_name: nobody.knows.Tool}]", "nobody.knows"),
        (
            "tools: [{class_name: bank.py:Plain}]",
            "Plain, a subclass of object, expected a subclass of .*Tool",
        ),
        (
            "tools: [{class_name: bank.py:Idle}]",
            "bank.py:Idle: got Idle, a class without execute, .*Write Idle.execute",
        ),
        ("tools: [{class: bank.py:Account}]", "class_name: got nothing"),
        ("mcp_servers: {files: {}}", "either command or url"),
        ("tols: []", "tools.yaml, line 1, tols: got"),
    ],
)
def test_yaml_files_that_are_wrong(
    converse, make_prompts, recorder, tool_file, tmp_path: Path, text: str, expected: str
) -> None:
    """The error names the key and what it may be."""
    tool_file(STATEFUL + "\n\nclass Plain:\n    pass\n\n\nclass Idle(Tool):\n    pass\n", "bank.py")
    (tmp_path / "tools.yaml").write_text(text)
    with pytest.raises(ConfigError, match=expected):
        converse(
            recorder(["x"]), make_prompts(["?"]), {"tool_config_path": str(tmp_path / "tools.yaml")}
        )


def test_a_user_simulator_that_cannot_reply(
    converse, make_prompts, recorder, tool_file, tmp_path: Path
) -> None:
    """Said before anything is generated."""
    tool_file("class Mute(Interaction):\n    pass\n", "mute.py")
    (tmp_path / "users.yaml").write_text("interaction: [{name: mute, class_name: mute.py:Mute}]")
    with pytest.raises(ConfigError, match="got Mute, a class without generate_response"):
        converse(
            recorder(["x"]),
            make_prompts(["?"]),
            {"interaction_config_path": str(tmp_path / "users.yaml")},
        )
