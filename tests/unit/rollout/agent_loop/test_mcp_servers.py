# SPDX-License-Identifier: Apache-2.0
"""Tools of a real server over standard input and output, started by the agent loop."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from quadriga.config.rollout import RolloutConfig
from quadriga.errors import RolloutError
from quadriga.rollout.agent_loop import AgentLoopManager

needs_mcp = pytest.mark.skipif(
    find_spec("mcp") is None, reason="the package mcp is not installed: no server was tried"
)
SERVER = '''
import os, sys, time
from mcp.server import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail(reason: str) -> str:
    """Fails."""
    raise ValueError(reason)


@server.tool()
def die() -> str:
    """Ends the server."""
    print("the end is near", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def hang() -> str:
    """Never answers in time."""
    time.sleep(60)
    return "late"


server.run("stdio")
'''


@pytest.fixture
def tools_yaml(tmp_path: Path):
    """`tools_yaml(more="")`: a file with the server above."""

    def write(more: str = "", program: str = SERVER) -> str:
        (tmp_path / "serve.py").write_text(program)
        path = tmp_path / "tools.yaml"
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        path.write_text(
            f"mcp_servers:\n  sums:\n    command: python\n    args: [serve.py]\n    env: {environment}\n{more}"
        )
        return str(path)

    return write


def _call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@needs_mcp
def test_tools_of_a_server(converse, make_prompts, recorder, tools_yaml, tokenizer) -> None:
    """They are listed in the prompt and answer; what a tool calls an error is told the model; a hanging one ends."""
    engine = recorder(
        {
            "tool\n": "done",
            "do sum": _call("add", '{"a": 40, "b": 2}'),
            "do odd": _call("add", '{"a": "x"}'),
            "do fail": _call("fail", '{"reason": "no luck"}'),
            "do hang": _call("hang"),
        }
    )
    prompts = make_prompts(["do sum", "do odd", "do fail", "do hang"])
    config = {"tool_config_path": tools_yaml(), "tool_timeout_s": 8.0, "max_user_turns": 1}
    output = converse(engine, prompts, config, prompt_length=2000, T=1000)
    texts = [tokenizer.decode(row) for row in output.batch["responses"]]
    assert '"Add two numbers."' in tokenizer.decode(engine.seen[0][0])
    assert "tool\n42<" in texts[0]
    assert "b: Field required" in texts[1]
    assert "Error: fail: " in texts[2] and "no luck" in texts[2]
    assert output.non_tensor_batch["finish_reason"][3].startswith(
        "tool_error: hang({}): got no response within 8 s"
    )


@needs_mcp
def test_a_server_that_dies(converse, make_prompts, recorder, tools_yaml) -> None:
    """The conversation that it served ends with the reason; those without it go on."""
    engine = recorder({"do die": _call("die"), "do say": "42"})
    config = {"tool_config_path": tools_yaml("    tools: [die]\n"), "tool_timeout_s": 8.0}
    output = converse(engine, make_prompts(["do die", "do say"]), config, prompt_length=2000)
    died, said = output.non_tensor_batch["finish_reason"]
    assert "the end is near" in died
    assert died.startswith("tool_error: die({}): got ") and said == "stop"
    assert "tool_timeout_s" not in died


@needs_mcp
@pytest.mark.parametrize(
    ("more", "program", "expected"),
    [
        (
            "    tools: [sub]\n",
            SERVER,
            "MCP server sums, tools: got sub, expected some of add, fail, die, hang",
        ),
        (
            "",
            "raise OSError('no disk')",
            r"MCP server sums: .*expected a server of tools. Try it alone: python serve",
        ),
        (
            "",
            "raise OSError('no disk')",
            r"(?s)standard error \(.*\.log\) ends with:.*OSError: no disk",
        ),
    ],
)
def test_servers_that_cannot_be_used(
    converse, make_prompts, recorder, tools_yaml, more: str, program: str, expected: str
) -> None:
    """The error names the server and how to try it."""
    with pytest.raises(RolloutError, match=expected):
        converse(
            recorder(["x"]), make_prompts(["?"]), {"tool_config_path": tools_yaml(more, program)}
        )


@needs_mcp
def test_a_proxy_that_cannot_be_used_is_named(
    converse, make_prompts, recorder, monkeypatch, tmp_path
) -> None:
    """Before the server is asked; the proxy's password is not shown."""
    monkeypatch.setenv("HTTPS_PROXY", "gopher://me:secret@proxy.example:70")
    path = tmp_path / "tools.yaml"
    path.write_text("mcp_servers:\n  sums:\n    url: https://tools.example/mcp\n")
    with pytest.raises(RolloutError, match=r"HTTPS_PROXY \(proxy.example:70\)") as caught:
        converse(recorder(["x"]), make_prompts(["?"]), {"tool_config_path": str(path)})
    assert "secret" not in str(caught.value)


@pytest.mark.skipif(find_spec("mcp") is not None, reason="the package mcp is installed")
def test_without_the_package(converse, make_prompts, recorder, tools_yaml) -> None:
    """The error says what to install."""
    with pytest.raises(
        RolloutError, match=r"expected the package mcp\. Install it: pip install -e"
    ):
        converse(recorder(["x"]), make_prompts(["?"]), {"tool_config_path": tools_yaml()})


@needs_mcp
def test_standard_error_goes_to_a_file(tools_yaml, tokenizer, tmp_path: Path, capfd) -> None:
    """Nothing reaches the terminal; the manager's description names the file."""
    program = SERVER.replace(
        'server = MCPServer("sums")', 'server = MCPServer("sums")\nprint("loud", file=sys.stderr)'
    )
    turns = {"enable": True, "tool_config_path": tools_yaml("", program)}
    config = RolloutConfig.model_validate({"mode": "async", "multi_turn": turns})
    lengths = {"prompt_length": 2000, "response_length": 400}
    manager = AgentLoopManager(config, tokenizer, log_dir=tmp_path / "logs", **lengths)
    (log,) = (tmp_path / "logs").iterdir()
    assert manager.description == f"MCP servers sums; standard error in {tmp_path}/logs/mcp-*.log"
    manager.close()
    assert "loud" in log.read_text() and "loud" not in capfd.readouterr().err
