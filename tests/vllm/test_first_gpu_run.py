# SPDX-License-Identifier: Apache-2.0
"""The first command lines of docs/first_gpu_run.md, shrunk, up to new weights after an update.

What it does not prove: anything of kernels, graphs, NCCL, vLLM's allocator, memory and time.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from small_models import save
from small_runs import REWARD
from tests.first_gpu_run import command_lines, shrunk
from tests.limits import PROGRAM_S
from tests.vllm.gpu_line_worker import EVENT, FINDINGS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SIZES = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256, "max_position_embeddings": 512,
    "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}

# Megatron-core wraps an asynchronous copy in an array, and waits for it before it reads the array.
VIEW_BY_MEGATRON = (
    "numpy of an asynchronous copy that nothing waited for, at engines/megatron/engine.py"
)


def tiny_model(folder: Path, family: str) -> str:
    """A random model in a folder."""
    torch.manual_seed(0)
    more = MIXTURE if family == "qwen3_moe" else {}
    config = AutoConfig.for_model(family, **SIZES, **more)
    return save(AutoModelForCausalLM.from_config(config), folder)


def small(folder: Path, num_gpus: int, family: str = "qwen2") -> dict[str, str]:
    """Values of a run that takes seconds, for any of the lines.

    Args:
        folder: for the run and what it reads.
        num_gpus: number of GPUs of the machine.
        family: type of the model that the line trains.
    """
    rows = []
    for row in range(4):
        rows.append(
            {
                "data_source": "letters",
                "prompt": [{"role": "user", "content": chr(0x110 + row) * 3}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": row},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    (folder / "reward.py").write_text(REWARD)
    return {
        "data.train_files": f"{folder}/data.parquet",
        "data.val_files": f"{folder}/data.parquet",
        "data.train_batch_size": "4",
        "data.max_prompt_length": "16",
        "data.max_response_length": "8",
        "custom_reward_function.path": f"{folder}/reward.py",
        "actor_rollout_ref.model.path": tiny_model(folder / "model", family),
        "actor_rollout_ref.actor.ppo_mini_batch_size": "2",
        "actor_rollout_ref.rollout.n": "4",
        "actor_rollout_ref.model.external_lib": str(Path(__file__).with_name("gpu_line_worker.py")),
        "ray_kwargs.ray_init.num_gpus": str(num_gpus),
        "ray_kwargs.ray_init.num_cpus": str(2 * num_gpus),
        "trainer.total_training_steps": "2",
        "trainer.save_freq": "-1",
        "trainer.default_local_dir": f"{folder}/run",
        "trainer.logger": "[console,jsonl]",
    }


@dataclass
class Rehearsed:
    """A run of a line.

    Attributes:
        metrics: of each step.
        gpus: those that each process saw.
        arguments: of each of vLLM's engines, as a GPU would get them.
        events: further events of the processes, in their order.
        mistakes: what the stand-in found.
        printed: what the run printed.
    """

    metrics: list[dict[str, float]]
    gpus: list[str]
    arguments: list[dict[str, Any]]
    events: list[str]
    mistakes: list[str]
    printed: str


def rehearse(program: list[str], words: list[str], folder: Path, **variables: str) -> Rehearsed:
    """Run a line that must succeed."""
    paths = [ROOT, ROOT / "packages", ROOT / "recipes", Path(__file__).parent]
    variables |= {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        FINDINGS: str(folder / "findings"),
        "OMP_NUM_THREADS": "1",
    }
    environment = {name: text for name, text in os.environ.items() if not name.startswith("CUDA_")}
    done = subprocess.run(
        [sys.executable, "-m", "quadriga.cli.main", *program, *words],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    (folder / "printed").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    gpus = []
    arguments = []
    events = []
    mistakes = []
    for line in (folder / "findings").read_text().splitlines():
        kind, _, text = line.removeprefix(EVENT).partition(" ")
        if not line.startswith(EVENT):
            mistakes.append(line)
        elif kind == "gpu":
            gpus.append(text)
        elif kind == "engine":
            arguments.append(json.loads(text))
        else:
            events.append(f"{kind} {text}")
    metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").open()]
    # Without the validation before them.
    metrics = [line for line in metrics if line["step"] > 0]
    return Rehearsed(metrics, gpus, arguments, events, mistakes, done.stdout)


def require_update(found: Rehearsed, num_gpus: int) -> None:
    """Two steps that learn, with vLLM's log-probs those of the trainer, on as many GPUs."""
    assert len(found.metrics) == 2
    for step in found.metrics:
        assert step["actor/grad_norm"] > 0
        # Of responses that older weights have drawn it is not measured.
        if step.get("async/lag_0_share", 1) > 0:
            assert step["rollout/log_prob_diff_mean"] < 0.05
    assert sorted(found.gpus) == [str(number) for number in range(num_gpus)]
    assert [text for text in found.mistakes if not text.startswith(VIEW_BY_MEGATRON)] == []


def test_native_and_an_adapter(tmp_path: Path) -> None:
    words = shrunk(command_lines("quadriga train")[0], small(tmp_path, 1))
    words = [word for word in words if not word.startswith("ray_kwargs")]
    found = rehearse(["train"], words, tmp_path, CUDA_VISIBLE_DEVICES="0")
    require_update(found, 1)


def test_vllm_beside_training(tmp_path: Path) -> None:
    """Its ranks see one GPU each, and it sleeps with dropped weights while they train."""
    overrides = small(tmp_path, 2) | {"trainer.n_gpus_per_node": "2"}
    words = shrunk(command_lines("quadriga train")[1], overrides)
    found = rehearse(["train"], words, tmp_path)
    require_update(found, 2)
    require_group(found, 2)


def require_group(found: Rehearsed, num_ranks: int) -> None:
    """vLLM in groups of two ranks, which sleep and wake up for weights, then for the cache."""
    assert len(found.arguments) == num_ranks
    for arguments in found.arguments:
        assert arguments["tensor_parallel_size"] == 2
        assert arguments["disable_custom_all_reduce"]
        assert arguments["enable_sleep_mode"] and not arguments["enforce_eager"]
    assert "sleep {'level': 2}" in found.events
    assert "wake_up {'tags': ['weights']}" in found.events
    assert "wake_up {'tags': ['kv_cache']}" in found.events


def test_verls_script(tmp_path: Path) -> None:
    overrides = small(tmp_path, 2) | {"trainer.n_gpus_per_node": "2"}
    [line] = command_lines("quadriga verl main_ppo")
    found = rehearse(["verl", "main_ppo"], shrunk(line, overrides), tmp_path)
    require_update(found, 2)
    require_group(found, 2)


def test_asynchronous(tmp_path: Path) -> None:
    """Two ranks train while a third GPU generates, where vLLM has a process of its own."""
    overrides = small(tmp_path, 3) | {
        "trainer.resource_pools": "{training: [2], generation: [1]}",
    }
    words = shrunk(command_lines("quadriga train")[2], overrides)
    found = rehearse(["train"], words, tmp_path)
    require_update(found, 3)
    # The weights of the start, and those of the first step, from which the second one's were drawn.
    assert found.events.count("handle 0") >= 2
    assert [step["async/staleness_max"] for step in found.metrics] == [0, 1]
    assert abs(found.metrics[1]["rollout_corr/kl"]) < 0.05
    assert found.events.count("asynchronous True") == 2
    # One engine generates, and one validates.
    shares = [arguments["gpu_memory_utilization"] for arguments in found.arguments]
    assert shares == [0.45] * 2


@pytest.mark.skipif(
    find_spec("megatron") is None, reason="no megatron-core beside vLLM: pip install '.[megatron]'"
)
def test_megatron_and_experts(tmp_path: Path) -> None:
    """Tensor, pipeline and expert parallel on four ranks, which hold two engines of vLLM."""
    overrides = small(tmp_path, 4, "qwen3_moe") | {"trainer.n_gpus_per_node": "4"}
    words = shrunk(command_lines("quadriga train")[3], overrides)
    found = rehearse(["train"], words, tmp_path)
    require_update(found, 4)
    require_group(found, 4)
