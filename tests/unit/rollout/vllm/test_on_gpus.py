# SPDX-License-Identifier: Apache-2.0
"""What the vLLM engine decides for GPUs, as far as no GPU is needed."""

import dataclasses
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quadriga.config import load_config
from quadriga.errors import ConfigError
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.vllm.arguments import arguments_of
from quadriga.rollout.vllm.cores import Response, restored_process_state
from quadriga.rollout.vllm.engine import row_parts
from quadriga.rollout.vllm.group import group_arguments
from quadriga.rollout.vllm.library import cache_folder, drawn_tokens, warn_about_version

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(("num_visible", "sees_all"), [(1, False), (2, True)])
def test_all_reduce_among_processes_that_see_one_gpu(
    monkeypatch: pytest.MonkeyPatch, num_visible: int, sees_all: bool
) -> None:
    """vLLM's own all-reduce would look up the other ranks' devices in CUDA_VISIBLE_DEVICES."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    group: Any = SimpleNamespace(size=2, device=CUDA)
    assert ("disable_custom_all_reduce" in group_arguments(group)) != sees_all


def test_tokens_drawn_by_either_model_runner() -> None:
    """Of the second runner: one that is being prefilled, one that drew two tokens, and a free slot."""
    first = SimpleNamespace(requests={"1-a": SimpleNamespace(output_token_ids=[5, 6])})
    assert drawn_tokens(first) == {"1-a": 2}
    states = SimpleNamespace(
        req_id_to_index={"1-a": 2, "2-b": 0},
        prompt_len=SimpleNamespace(np=np.array([7, 9, 3])),
        total_len=SimpleNamespace(gpu=torch.tensor([7, 50, 5])),
    )
    assert drawn_tokens(SimpleNamespace(req_states=states)) == {"1-a": 2, "2-b": 0}
    assert drawn_tokens(SimpleNamespace()) is None


def test_a_token_beyond_the_end_has_no_version() -> None:
    """An asynchronous scheduler draws it before it sees that the response has ended."""
    response = Response(versions=[(0, 1), (3, 2)], token_ids=[4, 5], log_probs=[-1.0, -1.0])
    completion = response.completion(SamplingParams(max_tokens=4), "processed_logprobs", 2)
    assert completion.versions == [1, 1]


def test_each_rank_compiles_into_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.delenv("RANK", raising=False)
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.setenv("RANK", "3")
    assert cache_folder() == tmp_path / "cache" / "rank3"
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(file))
    with pytest.raises(ConfigError, match=r"VLLM_CACHE_ROOT: got .*file/rank3 \(Not a directory"):
        cache_folder()


def test_a_start_of_vllm_leaves_the_trainers_random_states() -> None:
    def draws() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draws()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with restored_process_state(torch.device("cpu")):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
    assert draws() == expected


@pytest.mark.parametrize(("version", "warns"), [("0.33.1", False), ("0.34.0", True)])
def test_a_newer_vllm(version: str, warns: bool, capsys: pytest.CaptureFixture[str]) -> None:
    warn_about_version(version)
    assert ("newer than 0.33" in capsys.readouterr().out) == warns


SMALL = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.max_model_len=20")
APART = (
    "trainer.backend=ray",
    "async_training.enable=True",
    "trainer.placement={actor: train, ref: train, rollout: generate}",
)


@pytest.mark.parametrize(
    ("words", "max_num_seqs", "share"),
    [
        ((), 1024, 0.5),
        (("actor_rollout_ref.rollout.max_num_seqs=64",), 64, 0.5),
        (APART, 1024, 0.9),
        ((*APART, "data.val_files=prompts.parquet"), 1024, 0.45),
        ((*APART, "actor_rollout_ref.rollout.gpu_memory_utilization=0.6"), 1024, 0.6),
    ],
)
def test_defaults_on_a_gpu(words: tuple[str, ...], max_num_seqs: int, share: float) -> None:
    """Many sequences; more memory where nothing is trained, and half for each of two engines."""
    setup = EngineSetup(load_config([*SMALL, *words]).config, None, {}, CUDA, torch.bfloat16)
    arguments = arguments_of(setup, None, is_vision=False)
    assert arguments["max_num_seqs"] == max_num_seqs
    assert arguments["gpu_memory_utilization"] == share
    on_cpu = dataclasses.replace(setup, device=torch.device("cpu"))
    is_given = "max_num_seqs" in " ".join(words)
    cpu_arguments = arguments_of(on_cpu, None, is_vision=False)
    assert cpu_arguments["max_num_seqs"] == (max_num_seqs if is_given else 256)


def test_the_part_of_an_adapter_that_a_rank_holds() -> None:
    """Rank 3 of 4 holds the last quarter of the rows, the last half (of two heads), or all."""
    matrix = torch.arange(8).view(4, 2)
    parts = row_parts(matrix, 4, 3)
    assert [part.flatten().tolist() for part in parts] == [list(range(8)), [4, 5, 6, 7], [6, 7]]
    assert len(row_parts(matrix, 1, 0)) == 1
