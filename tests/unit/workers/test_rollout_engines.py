# SPDX-License-Identifier: Apache-2.0
"""Several engines behind one rollout, out of the configuration: who is made, with what, and that all are reached.

The engines repeat the prompt: vLLM and SGLang themselves are in tests/vllm and tests/sglang.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from quadriga.config import Config, RolloutConfig, load_config, problem_of_several_engines
from quadriga.config.checks import check_replay
from quadriga.engine_traits import ENGINES
from quadriga.errors import ConfigError
from quadriga.models.load import load_causal_lm
from quadriga.rollout import Balancer, Completion, SamplingParams, ScriptedEngine
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.sglang import engine as sglang
from quadriga.rollout.sglang.engine import SGLangEngine
from quadriga.rollout.vllm.engine import VLLMEngine
from quadriga.weight_sync import CopiedWeights
from quadriga.workers import rollout_engines
from quadriga.workers.rollout_engines import make_rollout_engine, rollout_engine_class

MIB = 1 << 20
EXAMPLE = f"{Path(__file__).parents[3] / 'examples/custom/engine.py'}:BruteForceEngine"


class Echo(ScriptedEngine):
    """Repeats the prompt; keeps what it was made with. An engine of the number that `dies` names does not start."""

    made: ClassVar[list["Echo"]] = []
    dies = -1

    def __init__(self, bucket_bytes: int, given: Any) -> None:
        super().__init__(lambda prompt: prompt)
        if len(Echo.made) == Echo.dies:
            raise ConfigError("engine", got="too little memory")
        Echo.made.append(self)
        self.weight_version = -1
        self.bucket_bytes, self.given = bucket_bytes, given
        self.num_threads = os.environ.get("OMP_NUM_THREADS")
        self.events: list[str] = []
        self.asked: list[int] = []

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        images: Any = None,
    ) -> list[Completion]:
        self.asked += [prompt[0] for prompt in prompts]
        return super().generate_batch(prompts, sampling)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        super().load_weights(weights, version)
        self.events.append(f"weights {version}")

    def sleep(self) -> None:
        super().sleep()
        self.events.append("sleep")

    def wake(self) -> None:
        super().wake()
        self.events.append("wake")

    def close(self) -> None:
        super().close()
        self.events.append("close")


class EchoOfVLLM(Echo):
    """Made as vLLM's engine is."""

    name = "vllm"
    from_config = classmethod(VLLMEngine.from_config.__func__)  # pyrefly: ignore[missing-attribute]

    def __init__(self, setup: EngineSetup, *args: Any, **more: Any) -> None:
        super().__init__(setup.bucket_bytes, setup)
        self.description = "vllm"


class EchoOfSGLang(Echo):
    """Made as SGLang's engine is."""

    name = "sglang"
    from_config = classmethod(SGLangEngine.from_config.__func__)  # pyrefly: ignore[missing-attribute]

    def __init__(
        self, connection: Any, *, bucket_bytes: int, description: str, **more: Any
    ) -> None:
        super().__init__(bucket_bytes, connection)
        self.connection, self.description = connection, description


class Connection:
    """Keeps what it was made with."""

    version, has_seeds = "0", True

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args, self.options = args, options


@pytest.fixture
def make(config: Config, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`make(**rollout)`: the engine of a configuration, with these in the place of vLLM's and SGLang's."""
    monkeypatch.setattr(Echo, "made", [])
    monkeypatch.setitem(rollout_engines.ENGINES, "vllm", EchoOfVLLM)
    monkeypatch.setitem(rollout_engines.ENGINES, "sglang", EchoOfSGLang)
    monkeypatch.setattr(sglang, "SGLangProcess", Connection)
    monkeypatch.setattr(sglang, "SGLangServer", Connection)

    def build(**changes: Any) -> Any:
        policy = config.actor_rollout_ref.model_copy(
            update={"rollout": RolloutConfig(n=2, **changes)}
        )
        own = config.model_copy(update={"actor_rollout_ref": policy})
        return make_rollout_engine(own, tokenizer, device=torch.device("cpu"), dtype=torch.float32)

    return build


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_two_engines_share_what_the_process_has(
    name: str, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads, the accelerator's memory and the bucket for weights are divided; the KV cache is each one's own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    rollout = make(
        name=name,
        mode="async",
        data_parallel_size=2,
        gpu_memory_utilization=0.5,
        update_weights_bucket_megabytes=8,
    )
    assert isinstance(rollout, Balancer) and rollout.engines == Echo.made
    assert [engine.num_threads for engine in Echo.made] == ["3", "3"] and os.environ[
        "OMP_NUM_THREADS"
    ] == "6"
    assert [engine.bucket_bytes for engine in Echo.made] == [4 * MIB] * 2
    if name == "sglang":
        assert all(
            engine.connection.args[0]["mem_fraction_static"] == 0.9 for engine in Echo.made
        )  # of a CPU's
    assert "balanced over 2 engines, each: " + name in rollout.description


def test_one_engine_is_itself(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    rollout = make(name="vllm", mode="async")
    assert [rollout] == Echo.made and Echo.made[0].num_threads == "6"
    assert "balanced" not in rollout.description


def test_a_process_without_the_variable_divides_its_own_threads(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    make(name="vllm", mode="async", data_parallel_size=2)
    assert [engine.num_threads for engine in Echo.made] == [
        "2",
        "2",
    ] and "OMP_NUM_THREADS" not in os.environ
    make(name="vllm", mode="async", data_parallel_size=9)
    assert Echo.made[-1].num_threads == "1"


def test_requests_weights_and_sleep_reach_all(make: Callable[..., Any], config: Config) -> None:
    rollout, weights = make(name="vllm", mode="async", data_parallel_size=2), CopiedWeights()
    model = load_causal_lm(
        config.actor_rollout_ref.model.path, dtype=torch.float32, attention="sdpa"
    )
    for version in (1, 2):
        weights.publish(model.named_parameters(), rollout, version)
    weights.verify(rollout, 2)
    assert rollout.weight_version == 2 and not rollout.shares_weights
    prompts = [[number, 3] for number in range(3, 11)]
    answers = rollout.generate_batch(prompts, [SamplingParams(max_tokens=2)] * 8)
    assert [answer.token_ids for answer in answers] == prompts
    assert [len(engine.asked) for engine in Echo.made] == [4, 4]
    rollout.sleep()
    rollout.wake()
    rollout.close()
    for engine in Echo.made:
        assert engine.events == ["weights 1", "weights 2", "sleep", "wake", "close"]


def test_where_one_does_not_start_the_others_are_closed(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Echo, "dies", 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    with pytest.raises(ConfigError, match="too little memory"):
        make(name="vllm", mode="async", data_parallel_size=3)
    assert [engine.events for engine in Echo.made] == [["close"], ["close"]]
    assert os.environ["OMP_NUM_THREADS"] == "6"


def test_servers_of_sglang(make: Callable[..., Any]) -> None:
    """One, or a list; each has a part of the bucket, and the options of the configuration."""
    one = make(name="sglang", engine_kwargs={"sglang": {"url": "http://a:1"}})
    assert one is Echo.made[0] and "at http://a:1, which gets the weights" in one.description
    urls = ["http://a:1", "http://b:1"]
    options = {"urls": urls, "timeout_s": 5.0}
    several = make(
        name="sglang", engine_kwargs=options, update_weights_bucket_megabytes=8, max_num_seqs=7
    )
    assert several.engines == Echo.made[1:]
    assert [engine.connection.args for engine in Echo.made[1:]] == [(url,) for url in urls]
    for engine in Echo.made[1:]:
        assert (
            engine.connection.options["max_num_seqs"] == 7
            and engine.connection.options["timeout_s"] == 5.0
        )
        assert engine.bucket_bytes == 4 * MIB
    assert "at http://a:1, http://b:1, balanced, which get the weights" in several.description


@pytest.mark.parametrize(
    "options",
    [
        {"urls": []},
        {"urls": "http://a:1"},
        {"urls": ["http://a:1", 3]},
        {"urls": ["http://a:1", "http://a:1"]},
        {"url": 3},
        {"url": "http://a:1", "urls": ["http://b:1"]},
        {"urls": ["http://a:1"], "tp_size": 2},
    ],
)
def test_addresses_that_are_none(make: Callable[..., Any], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected url, or urls"):
        make(name="sglang", engine_kwargs=options)
    assert Echo.made == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "native"}, "For more engines, use more processes that generate"),
        ({"name": "hf"}, "computes in the calling process"),
        ({"name": "scripted"}, "computes in the calling process"),
        ({"name": "vllm"}, "1, or actor_rollout_ref.rollout.mode=async"),
        ({"name": "http"}, "Name all servers in actor_rollout_ref.rollout.engine_kwargs.urls"),
        ({"name": "sglang", "engine_kwargs": {"sglang": {"url": "http://a:1"}}}, "all servers in"),
        ({"name": "sglang", "engine_kwargs": {"urls": ["http://a:1"]}}, "all servers in"),
    ],
)
def test_one_only(make: Callable[..., Any], changes: dict[str, Any], words: str) -> None:
    """The factory refuses it, for generate and eval, and the checks before a training run starts."""
    with pytest.raises(
        ConfigError, match=r"data_parallel_size: got 2, with .*rollout.name="
    ) as caught:
        make(**changes, data_parallel_size=2)
    assert words in str(caught.value)
    problem = problem_of_several_engines(RolloutConfig(**changes, data_parallel_size=2))
    assert str(problem) == str(caught.value)
    assert problem_of_several_engines(RolloutConfig(**changes)) is None


def test_the_key_is_verl_s() -> None:
    config = load_config(["actor_rollout_ref.rollout.data_parallel_size=2"]).config
    assert config.actor_rollout_ref.rollout.data_parallel_size == 2


@pytest.mark.parametrize("name", ["hf", "vllm", "sglang", "http"])
def test_engines_that_report_no_routes(name: str) -> None:
    """Refused by the configuration alone."""
    for replay in ("rollout", "old_log_prob"):
        section = {"rollout": {"name": name}, "actor": {"router_replay": replay}}
        found = [str(one) for one in check_replay(Config(actor_rollout_ref=section))]
        assert ["an engine that reports its choices: native" in one for one in found] == [True] * (
            replay == "rollout"
        )


def test_each_name_has_a_class_with_its_traits() -> None:
    """What the configuration checks is what the classes declare, and the other way round."""
    declared = {name: engine.traits for name, engine in rollout_engines.ENGINES.items()}
    assert declared == ENGINES


def test_an_engine_from_a_users_file(config: Config, tokenizer: Any) -> None:
    """The example draws the tokens that the reference draws with the same seeds."""
    place = {"device": torch.device("cpu"), "dtype": torch.float32}
    sampling = [SamplingParams(max_tokens=4, seed=7)] * 2
    responses = []
    for name in (EXAMPLE, "hf"):
        policy = config.actor_rollout_ref.model_copy(update={"rollout": RolloutConfig(name=name)})
        changed = config.model_copy(update={"actor_rollout_ref": policy})
        engine = make_rollout_engine(changed, tokenizer, **place)
        responses.append(engine.generate_batch([[3, 4], [5]], sampling))
        assert engine.traits == policy.rollout.traits
    assert [one.token_ids for one in responses[0]] == [one.token_ids for one in responses[1]]


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("object", "got Mine, a subclass of object, expected a subclass of quadriga.rollout"),
        ("RolloutEngine", "without generate_batch and load_weights and from_config"),
        ("ScriptedEngine", ""),
    ],
)
def test_a_class_that_is_no_engine(base: str, words: str, config: Config, tmp_path: Path) -> None:
    """Such a class is refused where it is loaded, before processes start."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from quadriga.engine_traits import EngineTraits\n"
        "from quadriga.rollout import RolloutEngine, ScriptedEngine\n"
        f"class Mine({base}):\n    traits = EngineTraits()\n"
    )
    policy = {"rollout": RolloutConfig(name=f"{file}:Mine")}
    changed = config.model_copy(
        update={"actor_rollout_ref": config.actor_rollout_ref.model_copy(update=policy)}
    )
    if not words:
        assert rollout_engine_class(changed).__name__ == "Mine"
        return
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.name: ") as caught:
        rollout_engine_class(changed)
    assert words in str(caught.value) and str(file) in str(caught.value)
