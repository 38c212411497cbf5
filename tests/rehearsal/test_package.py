# SPDX-License-Identifier: Apache-2.0
"""The package on the stand-in for CUDA: whole runs, and each place that treats an accelerator in a way of its own.

What none of it proves: anything about kernels, time or memory of a GPU; tests/gpu is for that.
"""

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quadriga.cli.doctor import _machine_lines
from quadriga.config import load_config, training_findings
from quadriga.config_draft import ConfigDraft
from quadriga.engines import process_group
from quadriga.engines.checkpoint import StateCopier
from quadriga.engines.fsdp import offload
from quadriga.engines.fsdp.engine import ALL_KINDS
from quadriga.errors import ConfigError
from quadriga.models.flops import peak_flops
from quadriga.observe.machine import choose_dtype, describe_gpus, describe_machine
from quadriga.observe.profiler import Recording, check_tool
from quadriga.observe.timing import PhaseTimer
from quadriga.protocol import DataProto
from quadriga.rollout import NativeEngine, SamplingParams
from quadriga.rollout.manifest import Manifest
from quadriga.rollout.native.kernels import Kernels
from quadriga.rollout.native.scheduler import Scheduler
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.sglang.engine import SGLangEngine, sglang_arguments
from quadriga.rollout.vllm.library import (
    drop_packed_experts,
    engine_environment,
    executor,
    repack_tied,
)
from quadriga.single_controller import WorkerPlace
from quadriga.single_controller.ray.transport import stamp_of
from quadriga.trainer.saving import random_states, restore_random_states
from quadriga.weight_sync import CopiedWeights, WeightReceiver, WeightSender, fingerprint
from quadriga.weight_sync.fingerprint import PendingFingerprints
from quadriga.workers import base
from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker
from quadriga.workers.base import COPIED, Learner, choose_device
from quadriga.workers.models import sizes_of_models
from quadriga_verl.commands.meaning import set_run_key
from tests.gpu.test_cuda import make_engine, make_model
from tests.limits import SOON_S
from tests.rehearsal.in_worker import FINDINGS, STARTED
from tests.rehearsal.stand_in import StandIn
from tests.unit.rollout.sglang.test_engine import Direct, Model
from tests.unit.rollout.vllm.stand_in import StandIn as OnStandIn
from tests.unit.rollout.vllm.stand_in import stand_in_for_vllm

CUDA = torch.device("cuda", 0)
Train = Callable[..., Path]
Lines = Callable[[Path], list[dict[str, Any]]]
IN_HALF = (
    "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16",
    "critic.fsdp_config.model_dtype=bfloat16",
)


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]], bound: float) -> None:
    """Metrics of all steps agree; those of the device alone are left out."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for name in ours.keys() & theirs.keys():
            if isinstance(ours[name], float):
                assert ours[name] == pytest.approx(theirs[name], abs=bound, rel=bound), name


def test_a_run_on_the_device_is_the_one_on_the_host(
    train: Train, metric_lines: Lines, stand_in: StandIn
) -> None:
    """GRPO in float32 with validation, a checkpoint, KL against a reference; the same numbers, and no finding."""
    options = (
        "trainer.test_freq=1",
        "trainer.save_freq=1",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "actor_rollout_ref.model.enable_activation_offload=True",
    )
    there = metric_lines(train("trainer.device=cuda", *options, run="there"))
    assert stand_in.findings == [] and stand_in.counts["operators"] > 1000
    same(there, metric_lines(train("trainer.device=cpu", *options, run="here")), 1e-4)
    goes_on = train("trainer.device=cuda", *options, "trainer.total_training_steps=3", run="there")
    assert (
        json.loads((goes_on / "metrics.jsonl").read_text().splitlines()[-1])["training/global_step"]
        == 3
    )


def test_ppo_in_bfloat16_with_a_critic_and_a_reward_model(
    train: Train, judges: Path, stand_in: StandIn
) -> None:
    """Conversations (`mode=async`), a reward model, and an adapter."""
    train(
        "trainer.device=cuda",
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.rollout.mode=async",
        "reward_model.enable=True",
        f"reward_model.model.path={judges / 'same'}",
        "actor_rollout_ref.model.lora_rank=2",
        *IN_HALF,
    )
    assert stand_in.findings == [] and stand_in.counts["set_device"] > 0


def test_a_snapshot_of_memory(train: Train, stand_in: StandIn) -> None:
    steps = ("trainer.total_training_steps=1", "global_profiler.steps=[1]")
    train("trainer.device=cuda", "global_profiler.tool=torch_memory", *steps)
    assert stand_in.counts["_record_memory_history"] == 2 and stand_in.counts["_dump_snapshot"] == 1


@pytest.mark.parametrize("tool", ["torch", "nsys"])
def test_a_recording(stand_in: StandIn, tool: str) -> None:
    """As workers make it, of a few operators: torch's profiler takes minutes for a step on the stand-in, and the
    command `nsys` is not there."""
    check_tool(tool, CUDA)
    recording = Recording(tool, "actor", 0, 0)
    with PhaseTimer.mark("a phase"):
        torch.ones(2, device=CUDA) + 1
    events = recording.finish()
    if tool == "torch":
        assert b"a phase" in zlib.decompress(events)
    else:
        assert [
            stand_in.counts[name] for name in ("profiler.start", "nvtx.range", "profiler.stop")
        ] == [1, 1, 1]


def test_another_device_than_the_first(train: Train, stand_in: StandIn) -> None:
    """`trainer.device=cuda:1`: all that is computed, in every thread, is on the current device."""
    train("trainer.device=cuda:1", "actor_rollout_ref.rollout.mode=async", *IN_HALF)
    assert stand_in.findings == []


def test_what_is_chosen_for_the_device(stand_in: StandIn) -> None:
    assert choose_device("auto", 1) == choose_device("cuda", 1) == torch.device("cuda", 1)
    assert choose_device("cuda") == CUDA and stand_in.counts["set_device"] == 3
    with pytest.raises(ConfigError, match=r"'cuda:9' \(CUDA error: invalid device ordinal"):
        choose_device("cuda:9")
    assert choose_dtype("float16", "cuda").reason == "float16: asked for"
    assert (
        choose_dtype("auto", CUDA).reason
        == "bfloat16: stand-in for a GPU multiplies it in hardware"
    )
    assert "2 x stand-in with 80 GiB" in describe_machine()
    assert any("dtype on cuda" in line for line in _machine_lines())


def test_a_driver_that_torch_cannot_use(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch says that there is no GPU then; a run must not go on with the CPU."""
    driver = tmp_path / "version"
    monkeypatch.setattr(base, "DRIVER", driver)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54\n")
    with pytest.raises(ConfigError, match=r"Module  535\.54\), which torch .* for CUDA 13\.0"):
        choose_device("auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto") == torch.device("cpu")


def test_ranks_with_different_gpus(stand_in: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    """One warning, from the first rank."""
    kinds = ["stand-in with 80 GiB", "other with 40 GiB", "stand-in with 80 GiB"]
    world: Any = SimpleNamespace(gather=lambda kind: kinds, is_first=True)
    base.warn_about_unequal_devices(world, CUDA)
    expected = "different GPUs (2 x stand-in with 80 GiB, 1 x other with 40 GiB)"
    assert expected in capsys.readouterr().out
    world.gather = lambda kind: [kind] * 3
    base.warn_about_unequal_devices(world, CUDA)
    assert capsys.readouterr().out == ""
    assert peak_flops(CUDA, torch.float32) > 0


def test_a_gpu_that_is_half_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    base.warn_about_other_programs.cache_clear()
    base.warn_about_other_programs(CUDA)
    expected = "other programs hold 40.0 of 80.0 GiB of cuda:0 (CUDA_VISIBLE_DEVICES=3)"
    assert expected in capsys.readouterr().out


def test_gpus_that_cannot_read_each_others_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any("peer access" in line for line in _machine_lines())
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda first, second: False)
    assert (
        "no peer access between GPUs 0 and 1: NCCL copies through the host" in _machine_lines()[-1]
    )


def test_what_other_parts_decide_by_the_device(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="a process on cpu"):
        check_tool("nsys", torch.device("cpu"))
    on_ray = load_config(["trainer.backend=ray", "trainer.device=cuda:1"]).config
    assert any("a device of its own" in str(problem) for problem in training_findings(on_ray)[0])
    for way in ("actor_rollout_ref.rollout.mode=async", "async_training.enable=True"):
        beside = load_config(
            ["actor_rollout_ref.rollout.name=vllm", way, "trainer.device=cuda:1"]
        ).config
        assert any("use the first GPUs" in str(problem) for problem in training_findings(beside)[0])
    keys = (
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    )
    several = load_config(
        ["trainer.backend=ray", "trainer.device=cuda", "trainer.n_gpus_per_node=2", *keys]
    ).config
    assert any("Ray gives no devices" in str(problem) for problem in training_findings(several)[0])
    assert ConfigDraft._choose_batch_size(SimpleNamespace(config=several), 8, 1) == 8  # pyrefly: ignore[bad-argument-type]
    config = load_config(
        ["actor_rollout_ref.rollout.name=sglang", "data.max_prompt_length=10"]
    ).config
    setup = EngineSetup(config, None, {}, CUDA, torch.bfloat16)
    assert (
        sglang_arguments(setup, None)["device"] == "cuda"
        and not sglang_arguments(setup, None)["disable_cuda_graph"]
    )
    with engine_environment(1):
        assert "TORCH_COMPILE_DISABLE" not in os.environ
    layer: Any = torch.nn.Linear(2, 2, device=CUDA)
    layer.quant_method = SimpleNamespace(moe_kernel="vLLM's own")
    repack_tied(layer)  # nothing is packed there
    drop_packed_experts(layer, "qwen3_moe")
    assert layer.quant_method.moe_kernel == "vLLM's own"
    assert stamp_of(torch.ones(2, device=CUDA)) is not None
    rows = DataProto.from_dict(tensors={"rows": torch.ones(2, device=CUDA)})
    assert DataProto.concat([rows, rows]).batch["rows"].tolist() == [1.0] * 4
    alone = process_group.join(WorkerPlace(0, 1, 0, 1), CUDA, also_alone=True)
    assert stand_in.counts["nccl groups"] == 1
    process_group.leave(alone)
    assert not Kernels.can_multiply(torch.ones(64, 64, dtype=torch.bfloat16, device=CUDA))
    base = type("UniProcExecutor", (), {"_distributed_args": lambda self: ("meeting place", 0, 0)})
    monkeypatch.setitem(
        sys.modules, "vllm.v1.executor.uniproc_executor", SimpleNamespace(UniProcExecutor=base)
    )
    assert executor(torch.device("cuda", 1))()._distributed_args() == ("meeting place", 0, 1)
    note = partial(stand_in.counts.update, ["a note"])
    line = SimpleNamespace(set=lambda key, value: None, note=note)
    set_run_key(line, "trainer.device", "npu")
    assert stand_in.counts["a note"] == 1


def test_experts_of_megatron_are_made_on_the_device(stand_in: StandIn) -> None:
    megatron = pytest.importorskip("quadriga.engines.megatron.model")
    sizes = SimpleNamespace(moe_ffn_hidden_size=8, hidden_size=8, params_dtype=torch.bfloat16)
    experts = megatron.Experts(2, sizes)
    assert all(weight.is_cuda and weight.dtype == torch.bfloat16 for weight in experts.parameters())
    assert (
        experts.use_grouped_products
        and "Transformer Engine is not installed" in megatron.linear_modules(CUDA)[2]
    )


def test_random_states_of_more_devices_than_there_are(stand_in: StandIn) -> None:
    restore_random_states(random_states())


def test_generation_gives_way_where_the_memory_is_full(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cache_gigabytes` is null: preempted requests end with the same tokens."""
    prompts = [[1, 2, 3, 4, 5], [6, 7]] * 3
    sampling = [SamplingParams(max_tokens=90, temperature=1.0, seed=seed) for seed in range(6)]
    model, preempted = make_model().to("cuda"), []
    preempt = Scheduler.preempt
    monkeypatch.setattr(Scheduler, "preempt", lambda self: preempted.append(1) or preempt(self))
    found = []
    for num_tokens in (10**6, 450):
        free = num_tokens * NativeEngine(model).cache_memory.token_bytes / 0.7 + 1
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device=None, free=free: (int(free), 0)
        )
        engine = NativeEngine(model, eos_token_ids=())
        found.append([one.token_ids for one in engine.generate_batch(prompts, sampling)])
        assert len(preempted) == 0 or num_tokens < 10**6
    assert found[0] == found[1] and preempted


def test_a_step_of_generation_reads_once(stand_in: StandIn) -> None:
    """However many rows: the host waits for the sampled tokens, and for nothing else of the device."""
    counts = []
    for num_tokens in (4, 14):
        stand_in.host_reads.clear()
        engine = NativeEngine(make_model().to("cuda"), eos_token_ids=())
        engine.generate_batch(
            [[1, 2], [3]], [SamplingParams(max_tokens=num_tokens, seed=seed) for seed in (0, 1)]
        )
        counts.append(sum("tolist" in read for read in stand_in.host_reads))
    assert counts == [4, 14]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_steps_as_graphs(stand_in: StandIn, dtype: torch.dtype) -> None:
    """Tokens and log-probs are those without graphs: rows that end, that join, groups of several sizes, a cache that
    grows; a replayed graph waits for nothing, and copies once to the device."""
    model = make_model().to("cuda", dtype)
    prompts = [[1, 2, 3, 4, 5]] * 4 + [[6, 7]] * 2 + [[8, 9, 10]]
    sampling = [
        SamplingParams(max_tokens=6 + 19 * number, temperature=1.0, seed=number)
        for number in range(len(prompts))
    ]
    found = []
    for uses_graphs in (True, False):
        engine = NativeEngine(model, eos_token_ids=(), uses_graphs=uses_graphs, max_num_seqs=5)
        found.append(engine.generate_batch(prompts, sampling))
        if uses_graphs:
            assert (
                stand_in.counts["graphs captured"] >= 3 and stand_in.counts["graphs replayed"] > 60
            )
            assert stand_in.counts["graphs captured"] < 20
            stand_in.counts.clear()
    assert stand_in.counts["graphs captured"] == 0
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(
            one.log_probs, other.log_probs, atol=1e-5 if dtype == torch.float32 else 2e-2
        )


def test_memory_that_moves(
    train: Train, metric_lines: Lines, stand_in: StandIn, tmp_path: Path
) -> None:
    """Weights, moments, masters and the reference rest in pinned memory between phases: the same numbers."""
    options = ("trainer.device=cuda", "actor_rollout_ref.actor.use_kl_loss=True", *IN_HALF)
    keys = ("param_offload", "optimizer_offload", "grad_offload")
    moved = [f"actor_rollout_ref.actor.fsdp_config.{key}=True" for key in keys]
    lines = metric_lines(train(*options, *moved, run="moved"))
    assert stand_in.counts["asynchronous copies"] > 0 and stand_in.counts["streams"] > 0
    same(lines, metric_lines(train(*options, run="kept")), 1e-6)
    on_host = metric_lines(
        train(*options, "actor_rollout_ref.actor.fsdp_config.offload_policy=True", run="on_host")
    )
    same(on_host, lines, 1e-3)


def test_pinned_memory_is_not_rounded_up(stand_in: StandIn) -> None:
    """Exactly what is offloaded is pinned."""
    tensors = [torch.ones(size, device=CUDA) for size in (33, 700)]
    others = dict(stand_in.pinned)
    pinned = offload.PinnedCopy(tensors, torch.cuda.Stream(), "moments")
    padded_bytes = 192 + 2816  # each to a multiple of 64
    new_sizes = [size for address, size in stand_in.pinned.items() if address not in others]
    assert new_sizes == [padded_bytes]
    pinned.sleep(is_changed=True)
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0]
    pinned.wake()
    assert all(torch.equal(tensor.cpu(), torch.ones(len(tensor))) for tensor in tensors)
    del pinned
    assert stand_in.pinned.keys() <= others.keys()


def test_a_copy_of_the_state_beside_computation(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a stream of its own; what is offloaded is read from the host, and stays there."""
    engine = make_engine("cuda")
    copier = StateCopier(engine.state(COPIED), engine.world)
    [slot_bytes] = copier.plan.slot_bytes
    file = tmp_path / "copies"
    file.write_bytes(bytes(2 * slot_bytes))
    copier.open(str(file))
    worker: Any = SimpleNamespace(engine=engine, copier=copier)
    streams = []
    copy = torch._foreach_copy_

    def copy_and_note(targets: Any, sources: Any) -> None:
        streams.append(torch.cuda.current_stream())
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", copy_and_note)
    Learner.copy_state(worker, 1)
    engine.offloaded.await_copy()
    assert streams[-1] is not torch.cuda.default_stream()

    engine.offload_between_phases(ALL_KINDS, tmp_path)
    stand_in.counts.clear()
    Learner.copy_state(worker, 2)
    engine.offloaded.await_copy()
    assert stand_in.counts["copies to the device"] == 0
    first_bytes, second_bytes = np.fromfile(file, np.uint8).reshape(2, slot_bytes)
    # The slots begin with the number of the step, and the content with the sum of its bytes.
    assert np.array_equal(first_bytes[8:], second_bytes[8:])


def test_weights_are_summed_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they go to the host, from where they reach engines in other processes."""
    devices = []
    add = PendingFingerprints.add

    def add_and_note(marks: PendingFingerprints, name: str, tensor: torch.Tensor) -> None:
        devices.append(tensor.device.type)
        add(marks, name, tensor)

    monkeypatch.setattr(PendingFingerprints, "add", add_and_note)
    worker: Any = SimpleNamespace(
        engine=make_engine("cuda"), rank=0, world_size=1, has_rollout=False
    )
    copied = ActorRolloutRefWorker.copy_weights(worker)
    assert set(devices) == {"cuda"}
    assert all(weight.device.type == "cpu" for weight in copied.weights.values())
    assert copied.fingerprints == fingerprint(copied.weights.items()).tensors


def test_memory_that_cannot_be_pinned(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a small limit of locked memory."""
    runtime: Any = SimpleNamespace(cudaHostRegister=lambda address, size, flags: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(ConfigError, match=r"error 2 of the CUDA driver .*ulimit -l unlimited"):
        offload.pinned_memory(64, "moments")


def test_a_driver_makes_no_context(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not compute asks the driver's program, or only counts."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)

    def refuse(device: Any) -> Any:
        raise AssertionError("makes a context")

    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    answer = SimpleNamespace(stdout="NVIDIA H100 80GB HBM3, 81559\nNVIDIA H100 80GB HBM3, 81559\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: answer)
    assert describe_gpus() == "2 x NVIDIA H100 80GB HBM3 with 80 GiB"

    def fail(*args: Any, **options: Any) -> Any:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", fail)
    assert describe_gpus() == "2 GPUs"


def test_a_step_on_ray(
    train: Train,
    metric_lines: Lines,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    stand_in: StandIn,
) -> None:
    """The worker has a GPU of Ray's, which is the stand-in, and computes what the run on the host does."""
    monkeypatch.setenv(FINDINGS, str(tmp_path / "findings"))
    worker = f"actor_rollout_ref.model.external_lib={Path(__file__).with_name('in_worker.py')}"
    ray = (
        "trainer.backend=ray",
        "ray_kwargs.ray_init.num_gpus=1",
        "ray_kwargs.ray_init.num_cpus=2",
    )
    there = metric_lines(train("trainer.device=cuda", worker, *ray, run="there"))
    assert (tmp_path / "findings").read_text() == f"{STARTED}\n"
    same(there, metric_lines(train("trainer.device=cpu", run="here")), 1e-4)


def test_weights_to_vllm_beside(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They go as handles of the device's memory, after what fills it; vLLM keeps its own graphs and its sleep. Here a
    library stands where vLLM does."""
    stand_in_for_vllm(monkeypatch)
    make_model().save_pretrained(tmp_path)
    keys = (f"model.path={tmp_path}", "rollout.name=vllm", "rollout.max_model_len=20")
    limits = ("data.max_prompt_length=10", "data.max_response_length=10")
    config = load_config([*(f"actor_rollout_ref.{key}" for key in keys), *limits]).config
    tokenizer: Any = SimpleNamespace(eos_token_id=1)
    engine = OnStandIn.from_config(EngineSetup(config, tokenizer, {}, CUDA, torch.bfloat16))
    assert (
        engine.can_sleep
        and engine.arguments["enable_chunked_prefill"]
        and not engine.arguments["enforce_eager"]
    )
    assert list(sizes_of_models(config, has_critic=False))[1].endswith("bfloat16)")
    engine.core.is_in_process = False
    (process,) = engine.core.processes
    process.device = CUDA
    # Asynchronous training on Ray publishes copies on the host.
    for version, place in enumerate(("cuda", "cpu"), start=1):
        weights = dict(make_model().to(place).named_parameters())
        process.weights.clear()
        CopiedWeights().publish(weights.items(), engine, version)
        assert process.weights.keys() == weights.keys()
        assert all(
            process.weights[name].is_cuda and torch.equal(process.weights[name].cpu(), weight.cpu())
            for name, weight in weights.items()
        )
    assert any("a wait for a stream" in read for read in stand_in.host_reads)

    # A rank with another GPU keeps nothing on the sender's.
    process.device = torch.device("cuda", 1)
    process.weights.clear()
    CopiedWeights().publish(make_model().to(CUDA).named_parameters(), engine, 3)
    assert {weight.device for weight in process.weights.values()} == {process.device}
    # Here both sides are one process, with one current device.
    stand_in.findings.clear()


def test_weights_to_sglang_beside(stand_in: StandIn) -> None:
    """They go as handles of the device's memory; its sleep drops them. Here a model stands where SGLang does."""
    direct = Direct({}, has_seeds=True)
    direct.takes_handles, direct.model = True, direct.model.to(CUDA)
    engine = SGLangEngine(
        direct, Manifest.of(Model()), 20, (1,), bucket_bytes=4 * 64, can_sleep=True
    )
    for version in (1, 2):
        sent = Model().to(CUDA)
        engine.sleep()
        assert engine.has_dropped_weights
        CopiedWeights().publish(sent.named_parameters(), engine, version)
        engine.wake()
        assert not engine.has_dropped_weights
        assert all(
            torch.equal(one, own)
            for one, own in zip(sent.parameters(), direct.model.parameters(), strict=True)
        )
    payloads = [
        one["serialized_named_tensors"][0]
        for name, one in direct.asked
        if name == "update_weights_from_tensor"
    ]
    assert len(payloads) == 4 and all(b"rebuild_cuda_tensor" in one for one in payloads)
    assert stand_in.counts["ipc_collect"] == 2


class Held:
    """A rollout on the device."""

    def __init__(self) -> None:
        self.weights = {name: torch.zeros(30, 4, device=CUDA) for name in ("embed", "head")}
        self.weight_version = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        for name, tensor in weights:
            self.weights[name].copy_(tensor)
        self.weight_version = version

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.weights.items()

    def fingerprint(self) -> Any:
        return fingerprint(self.weights.items())


def test_weights_to_other_processes(stand_in: StandIn) -> None:
    """By "NCCL", sender and receiver being threads."""
    sender = WeightSender("localhost", [0], CUDA, 300)
    receiver, target = WeightReceiver(sender.address, 0, CUDA), Held()
    weights = {name: torch.randn(30, 4, device=CUDA) for name in ("embed", "head")}
    with ThreadPoolExecutor(2) as threads:
        sent = threads.submit(sender.publish, weights.items(), 1)
        received = threads.submit(receiver.receive, target, 1)
        assert sent.exception(timeout=SOON_S) is None and received.exception(timeout=SOON_S) is None
    assert all(torch.equal(target.weights[name], weights[name]) for name in weights)
    assert target.weight_version == 1 and stand_in.counts["nccl groups"] == 2
