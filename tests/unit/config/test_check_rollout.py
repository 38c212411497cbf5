# SPDX-License-Identifier: Apache-2.0
"""What is refused or told of a generation engine's settings."""

from importlib.util import find_spec

import pytest

from quadriga.config import load_config, training_findings
from quadriga.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
READ = (
    "temperature", "top_p", "min_p", "val_kwargs", "stop_token_ids", "max_model_len", "tensor_model_parallel_size",
    "data_parallel_size", "gpu_memory_utilization", "enforce_eager", "cache_gigabytes",
)  # fmt: skip


def found(*changes: str) -> tuple[list[ConfigError], list[str]]:
    """What training with these settings of the engine is told about it."""
    problems, notices = training_findings(load_config([f"{ROLLOUT}.{change}" for change in changes]).config)
    mine = (f"{ROLLOUT}.name", *(f"{ROLLOUT}.{one}" for one in READ))
    notices = [one for one in notices if one.startswith(mine) and "generation leaves out" not in one]
    return [one for one in problems if one.where.startswith(mine)], notices


def findings(*changes: str) -> tuple[set[str], str]:
    """The keys that are refused, and the notices."""
    problems, notices = found(*changes)
    keys = {one.where.removeprefix(f"{ROLLOUT}.") for one in problems}
    # Whether vLLM or SGLang is installed is not what these tests are about.
    missing = [one for one in ("vllm", "sglang") if f"name={one}" in changes and find_spec(one) is None]
    return keys - {"name"} if missing else keys, "\n".join(notices)


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["name=vllm", "tensor_model_parallel_size=2", "gpu_memory_utilization=0.6", "enforce_eager=True"],
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
        (["gpu_memory_utilization=0.6"], "gpu_memory_utilization: not used, for"),
        (["enforce_eager=False", "name=hf"], "rollout.name is hf"),
        (["name=http", "cache_gigabytes=2"], "cache_gigabytes: not used"),
        (["name=vllm", "val_kwargs.do_sample=True", "val_kwargs.temperature=1", "val_kwargs.top_p=0.7"], "is nan"),
        (["name=vllm", "top_p=0.9", "val_kwargs.do_sample=True", "val_kwargs.temperature=0.6"], "is nan"),
    ],
)
def test_told(changes: list[str], words: str) -> None:
    """What is not read, and what is not known."""
    assert words in findings(*changes)[1]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_environment_without_the_engine(engine: str) -> None:
    """It is told before anything starts."""
    if find_spec(engine) is not None:
        pytest.skip(f"{engine} is here")
    assert f"scripts/install-{engine}" in str(found(f"name={engine}")[0][0])


def test_a_server_of_sglang_needs_no_sglang_here() -> None:
    """Weights and requests go over HTTP."""
    assert found("name=sglang", "engine_kwargs.sglang.url=http://host:30000")[0] == []
