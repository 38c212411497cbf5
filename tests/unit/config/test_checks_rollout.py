# SPDX-License-Identifier: Apache-2.0
"""Checks of the rollout's keys: engines, processes of their own, conversations with tools."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from quadriga.config import Config, load_config, training_findings
from quadriga.config.checks import check_multi_turn
from quadriga.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
READ = (
    "temperature", "top_p", "min_p", "val_kwargs", "stop_token_ids", "max_model_len", "tensor_model_parallel_size",
    "data_parallel_size", "gpu_memory_utilization", "enforce_eager", "cache_gigabytes",
)  # fmt: skip


def found(*changes: str) -> tuple[list[ConfigError], list[str]]:
    """What training with these settings of the engine is told about it."""
    problems, notices = training_findings(
        load_config([f"{ROLLOUT}.{change}" for change in changes]).config
    )
    mine = (f"{ROLLOUT}.name", *(f"{ROLLOUT}.{one}" for one in READ))
    notices = [
        one for one in notices if one.startswith(mine) and "generation leaves out" not in one
    ]
    return [one for one in problems if one.where.startswith(mine)], notices


def findings(*changes: str) -> tuple[set[str], str]:
    """The keys that are refused, and the notices."""
    problems, notices = found(*changes)
    keys = {one.where.removeprefix(f"{ROLLOUT}.") for one in problems}
    # Whether vLLM or SGLang is installed is not what these tests are about.
    missing = [
        one for one in ("vllm", "sglang") if f"name={one}" in changes and find_spec(one) is None
    ]
    return keys - {"name"} if missing else keys, "\n".join(notices)


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [
            "name=vllm",
            "tensor_model_parallel_size=2",
            "gpu_memory_utilization=0.6",
            "enforce_eager=True",
        ],
        ["name=vllm", "temperature=0.7"],
        ["name=vllm", "top_p=0.9"],
        ["name=sglang", "temperature=0.7", "top_p=0.9", "cache_gigabytes=2"],
        ["max_model_len=4096"],
        ["name=vllm", "mode=async", "data_parallel_size=2"],
        ["name=sglang", "data_parallel_size=2"],
    ],
)
def test_nothing_to_say(changes: list[str]) -> None:
    """Settings that the engine reads."""
    assert findings(*changes) == (set(), "")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["name=http"], "name"),
        (["tensor_model_parallel_size=2"], "tensor_model_parallel_size"),
        (["name=vllm", "temperature=0.7", "top_k=20"], "temperature"),
        (["name=vllm", "temperature=1.2", "min_p=0.1"], "temperature"),
        (["name=sglang", "min_p=0.1"], "min_p"),
        (["name=sglang", "val_kwargs.min_p=0.1"], "val_kwargs.min_p"),
        (["name=sglang", "ignore_eos=true", "stop_token_ids=[3]"], "stop_token_ids"),
        (["max_model_len=7"], "max_model_len"),
        (["data_parallel_size=2"], "data_parallel_size"),
        (["name=vllm", "data_parallel_size=2"], "data_parallel_size"),
    ],
)
def test_refused(changes: list[str], key: str) -> None:
    """What the engine cannot do."""
    assert findings(*changes)[0] == {key}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["gpu_memory_utilization=0.6"], "gpu_memory_utilization: not used because"),
        (["enforce_eager=True", "name=hf"], "rollout.name is 'hf'"),
        (["name=http", "cache_gigabytes=2"], "cache_gigabytes: not used"),
        (
            [
                "name=vllm",
                "val_kwargs.do_sample=True",
                "val_kwargs.temperature=1",
                "val_kwargs.top_p=0.7",
            ],
            "is nan",
        ),
        (
            ["name=vllm", "top_p=0.9", "val_kwargs.do_sample=True", "val_kwargs.temperature=0.6"],
            "is nan",
        ),
    ],
)
def test_told(changes: list[str], words: str) -> None:
    """What is not read, and what is not known."""
    assert words in findings(*changes)[1]


def test_filters_at_temperature_1_in_training_and_validation() -> None:
    """vLLM reports the model's own log-probabilities, which are those of validation."""
    sampling = ["val_kwargs.do_sample=True", "val_kwargs.temperature=1", "val_kwargs.top_p=0.7"]
    assert "is nan" not in findings("name=vllm", "top_p=0.9", *sampling)[1]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_environment_without_the_engine(engine: str) -> None:
    """It is told before anything starts."""
    if find_spec(engine) is not None:
        pytest.skip(f"{engine} is here")
    assert f"scripts/install-{engine}" in str(found(f"name={engine}")[0][0])


def test_a_server_of_sglang_needs_no_sglang_here() -> None:
    """Weights and requests go over HTTP."""
    assert found("name=sglang", "engine_kwargs.sglang.url=http://host:30000")[0] == []


_ROLLOUT = "actor_rollout_ref.rollout"


def _check(
    rollout: dict[str, Any], *, return_raw_chat: bool = True
) -> tuple[list[ConfigError], list[str]]:
    """Problems and notices."""
    tree = {"data": {"return_raw_chat": return_raw_chat}, "actor_rollout_ref": {"rollout": rollout}}
    found = list(check_multi_turn(Config.model_validate(tree)))
    return [one for one in found if isinstance(one, ConfigError)], [
        one for one in found if isinstance(one, str)
    ]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Files that are there: `tools.py`, `good` and `bad` YAML of tools, and YAML of user simulators."""
    texts = {
        "tools.py": "",
        "good.yaml": "mcp_servers: {a: {url: 'http://127.0.0.1:1/mcp'}}",
        "bad.yaml": "tools: [{class_nam: x.py:X}]",
        "users.yaml": "interaction: [{name: a, class_name: x.py:X}]",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in texts}


def test_a_run_without_conversations() -> None:
    """Nothing to say of the defaults, nor of samples as tasks of their own."""
    for mode in ("sync", "async"):
        assert _check({"mode": mode}, return_raw_chat=False) == ([], [])


def test_tools_that_are_all_there(files: dict[str, str]) -> None:
    """A whole configuration passes without a word."""
    turns = {
        "enable": True,
        "function_tool_path": files["tools.py"],
        "tool_config_path": files["good.yaml"],
        "interaction_config_path": files["users.yaml"],
        "format": "glm",
    }
    rollout = {"mode": "async", "multi_turn": turns, "agent": {"default_agent_loop": "tool_agent"}}
    assert _check(rollout) == ([], [])


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        ({"multi_turn": {"enable": True}}, f"Set {_ROLLOUT}.mode=async."),
        (
            {"mode": "async", "agent": {"default_agent_loop": "tool_agent"}},
            f"Set {_ROLLOUT}.multi_turn.enable=True.",
        ),
        (
            {"mode": "async", "agent": {"default_agent_loop": "tol_agent"}},
            "Did you mean tool_agent?",
        ),
        (
            {"mode": "async", "multi_turn": {"enable": True, "format": "qwen3"}},
            "Did you mean qwen3_coder?",
        ),
        ({"mode": "async", "agent": {"default_agent_loop": "zzz"}}, "agent.agent_loop_path"),
        ({"mode": "async", "agent": {"agent_loop_path": "no.py"}}, "There is no such file"),
        (
            {"mode": "async", "multi_turn": {"enable": True, "function_tool_path": "no.py"}},
            "There is no such file",
        ),
        (
            {
                "mode": "async",
                "multi_turn": {"enable": True},
                "agent": {"default_agent_loop": "tool_agent"},
            },
            "got neither tools nor user simulators",
        ),
    ],
)
def test_what_is_refused(rollout: dict[str, Any], expected: str) -> None:
    """One problem each, which says what to set."""
    (problem,) = _check(rollout)[0]
    assert expected in str(problem)


def test_an_environment_has_a_loop_of_its_own() -> None:
    rollout = {"agent": {"default_agent_loop": "single_turn_agent"}}
    config = Config(env={"name": "gem:x"}, actor_rollout_ref={"rollout": rollout})
    problems = [text for text in map(str, check_multi_turn(config)) if "env sets it" in text]
    assert len(problems) == 1
    assert "got single_turn_agent, with env=gem:x" in problems[0]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"agents": ["policy", "random"], "trained_agents": [1]}, "env.trained_agents: got [1]"),
        (
            {"agents": ["policy", "random"], "train_together": True},
            "several agents that are trained",
        ),
        ({"roles": ["white", "black"]}, "a role for each of 1 agents"),
        ({"name": None, "roles": ["white"]}, "got null, with env.roles"),
    ],
)
def test_agents_that_do_not_fit(env: dict[str, Any], expected: str) -> None:
    config = Config(env={"name": "gem:x", **env})
    problems = [str(problem) for problem in config.env.findings("env")]
    assert len(problems) == 1
    assert expected in problems[0]


def test_the_messages_of_prompts_are_needed() -> None:
    """Tools are rendered out of them."""
    (problem,) = _check({"mode": "async", "multi_turn": {"enable": True}}, return_raw_chat=False)[0]
    assert str(problem).startswith("data.return_raw_chat: got false")


def test_a_yaml_file_with_a_mistake(files: dict[str, str]) -> None:
    """Its file, line and key are named, with everything else."""
    (problem,) = _check(
        {"mode": "async", "multi_turn": {"enable": True, "tool_config_path": files["bad.yaml"]}}
    )[0]
    assert "bad.yaml, line 1" in str(problem) and "class_name: got nothing" in str(problem)


def test_keys_without_effect() -> None:
    """Named in a notice, for what they are not used."""
    (turns, agent, trace) = _check(
        {
            "multi_turn": {"format": "glm"},
            "agent": {"default_agent_loop": "tool_agent"},
            "trace_dir": "x",
        }
    )[1]
    assert turns == f"{_ROLLOUT}.multi_turn.format: not used because {_ROLLOUT}.mode is sync."
    assert agent.startswith(f"{_ROLLOUT}.agent.default_agent_loop: not used")
    assert trace.startswith(f"{_ROLLOUT}.trace_dir: not used")
    (unused,) = _check({"mode": "async", "multi_turn": {"max_user_turns": 3}})[1]
    assert (
        unused
        == f"{_ROLLOUT}.multi_turn.max_user_turns: not used because {_ROLLOUT}.multi_turn.enable is false."
    )
    (single,) = _check({"mode": "async", "multi_turn": {"enable": True}})[1]
    assert "agent_name" in single
