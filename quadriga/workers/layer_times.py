# SPDX-License-Identifier: Apache-2.0
"""Speed of this machine's CPU, and of a model's layers on it, measured by the code of a run.

Each rank of the plan is a process, as in a run. The ranks measure the same things at the same time,
so they share cores, caches and memory bandwidth, wait for each other, and gather weights and sum
gradients as in a run.

    products, copies    matrices of the dtype that computes; one large tensor, in old and new memory
    micro-batches       passes and updates of two sizes: seconds of each call and of each token
    steps               optimizer steps, weight sync, memory of whole updates
    generation          copies of weights, prefill, decode steps

The measured models have random weights and one layer or three. The difference of their times is the
time of two layers; the remaining time is that of embedding, head and sampling.
"""

import gc
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import torch
import torch.distributed as dist
from pyarrow import parquet
from torch import nn
from transformers import PreTrainedModel

from quadriga.config import Config
from quadriga.config.explain import BatchPlan
from quadriga.config.placement import ACTOR, CRITIC
from quadriga.engines.fsdp.engine import FSDPEngine, Memory, Training
from quadriga.engines.packing import Outputs
from quadriga.engines.parallel.processes import ONE_PROCESS, Processes
from quadriga.engines.process_group import ALONE, ProcessGroup
from quadriga.models.architecture import pack_rows
from quadriga.models.attention import PackedBatch
from quadriga.models.flops import peak_flops
from quadriga.models.load import load_config, skeleton_causal_lm
from quadriga.models.lora import add_adapter
from quadriga.models.scorers import PolicyScorer, ScoreQuestion, Scorer, ValueScorer
from quadriga.observe.machine import forget_peak, release_free_memory, resident_bytes
from quadriga.planning.devices import Devices, LayerTimes, PassTimes
from quadriga.planning.phases import (
    Lengths,
    RolePlan,
    adapter_rank,
    micro_batch_tokens,
    predict_update,
    trained_section,
)
from quadriga.planning.time import update_passes
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.native.engine import NativeEngine
from quadriga.weight_sync import CopiedWeights

_COPIED_NUMBERS = 1 << 25  # size of the copied tensor: 128 MiB in float32
_NUM_LAYERS = (1, 3)
_PASS_S = 0.3  # a pass has only so many tokens that it takes these seconds at the rate of products
_REPEATED_S = 0.3  # a measurement is repeated for so long, and at least twice after the first
_DECODE_STEPS = 16
_NUM_UPDATES = 3  # updates whose memory is measured
_WEIGHT = 0.05  # largest random weight
_TIMEOUT = timedelta(minutes=5)  # a rank waits no longer for another one
_CPU = torch.device("cpu")


def measure_cpu(
    config: Config,
    devices: Devices,
    roles: Mapping[str, RolePlan],
    lengths: Lengths,
    *,
    dtype: str,
    imported: str,
) -> Devices:
    """Measure this machine and the layers of the trained roles, with a process for each rank.

    Args:
        config: the configuration, with a rank for each device.
        devices: the devices, without measured figures.
        roles: the trained roles, by the keys of their sections.
        lengths: assumed mean lengths.
        dtype: dtype that computes.
        imported: module that a run's processes import. The measured processes import it, too, so
            that its libraries count in their memory.

    Returns:
        The devices, with the figures of one rank that measures beside all others.
    """
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(
            devices.count, get_context("spawn"), initializer=import_module, initargs=(imported,)
        ) as pool,
    ):
        measurement = Measurement(config, lengths, getattr(torch, dtype))
        meeting = Path(folder) / "ranks"
        calls = []
        for rank in range(devices.count):
            calls.append(pool.submit(_measure_rank, rank, meeting, measurement, devices, roles))
        # All ranks return the same figures, those of the slowest rank. If ranks fail, the first to
        # end has the reason, and the others only lost it.
        return next(call.result() for call in as_completed(calls))


def _measure_rank(
    rank: int,
    meeting: Path,
    measurement: "Measurement",
    devices: Devices,
    roles: Mapping[str, RolePlan],
) -> Devices:
    """Measure in the process of one rank.

    Args:
        rank: number of the rank.
        meeting: file by which the ranks find each other.
        measurement: settings of the measurements; gets the ranks and the rate of products.
        devices: the devices, without measured figures.
        roles: the trained roles, by the keys of their sections.

    Returns:
        The devices with the measured figures.
    """
    torch.set_num_threads(max(1, torch.get_num_threads() // devices.count))
    dtype = measurement.dtype
    world = measurement.world
    if devices.count > 1:
        address = f"file://{meeting}"
        dist.init_process_group(
            "gloo", init_method=address, rank=rank, world_size=devices.count, timeout=_TIMEOUT
        )
        world = ProcessGroup(rank, devices.count)
    try:
        measurement.world = world
        measurement.flops = min(world.gather(peak_flops(_CPU, dtype)))
        copied = torch.ones(_COPIED_NUMBERS)
        # A copy reads and writes each number.
        bytes_per_s = 2 * copied.nbytes / measurement.seconds(partial(copied.copy_, copied + 1))
        # Each call gets new memory: the C library maps so large a tensor separately, and returns
        # its memory to the system when it is freed.
        new_bytes_per_s = copied.nbytes / measurement.seconds(partial(torch.ones, copied.shape))
        del copied
        times = {}
        for role, plan in roles.items():
            times[role] = measurement.layer_times(role, plan)
        if devices.count == 1:
            # The process is also the driver, which reads rows and records rollouts. Do so once, so
            # that the memory of these libraries counts.
            rows = meeting.with_name("rows.parquet")
            parquet.write_table(pa.table({"row": [0]}), rows)
            parquet.read_table(rows)
        # Measured last, because kernels that have been compiled stay in memory in a run, too.
        process_bytes = max(world.gather(resident_bytes()[0]))
    finally:
        # Leave the group after an error, too, so that the other ranks do not wait for this one.
        if devices.count > 1:
            dist.destroy_process_group()
    num_threads = torch.get_num_threads()
    return replace(
        devices,
        flops=measurement.flops,
        bytes_per_s=bytes_per_s,
        new_bytes_per_s=new_bytes_per_s,
        source=f"measured: {str(dtype).removeprefix('torch.')} products and copies with "
        f"{num_threads} threads",
        process_bytes=process_bytes,
        layer_times=times,
    )


@dataclass
class Measurement:
    """Settings of the measurements in the process of a rank.

    Attributes:
        config: the configuration, with a rank for each device.
        lengths: assumed mean lengths.
        dtype: dtype that computes.
        world: the ranks.
        flops: operations per second of products on each rank.
    """

    config: Config
    lengths: Lengths
    dtype: torch.dtype
    world: ProcessGroup = ALONE
    flops: float = 0.0

    def layer_times(self, role: str, plan: RolePlan) -> LayerTimes:
        """Measure models with one layer and with three, and divide the times as in `LayerTimes`.

        Args:
            role: key of the role's section.
            plan: model and ranks of the role.
        """
        measured = []
        kept_share = 0.0
        for num_layers in _NUM_LAYERS:
            few_layers = _FewLayers(self, role, plan, num_layers)
            if num_layers == _NUM_LAYERS[1]:
                kept_share = few_layers.kept_share()
            measured.append(few_layers.update_times() | few_layers.generation_times())
            num_context_tokens = few_layers.num_context_tokens
            # Modules with a fused forward refer to themselves: only the collector frees them.
            del few_layers
            gc.collect()
            release_free_memory()
        fewer, more = measured
        of_layer = {}  # seconds of one layer, by name of the measurement
        of_ends = {}  # seconds of embedding, head and sampling
        for name, fewer_s in fewer.items():
            # A layer takes some time, whatever another program has added to the first measurement.
            of_layer[name] = max(0.0, more[name] - fewer_s) / (_NUM_LAYERS[1] - _NUM_LAYERS[0])
            of_ends[name] = max(0.0, fewer_s - _NUM_LAYERS[0] * of_layer[name])
        return LayerTimes(
            PassTimes(**of_layer),
            PassTimes(**of_ends),
            num_context_tokens=num_context_tokens,
            num_passes=update_passes(self.config, role, recomputes=plan.recomputes),
            kept_share=kept_share,
            kept_layers=_NUM_LAYERS[1],
        )

    def seconds(
        self, compute: Callable[[], object], afterwards: Callable[[], object] = lambda: None
    ) -> float:
        """Measure the seconds of a computation on the slowest rank.

        The shortest of several times counts, because other programs only make a time longer.

        Args:
            compute: the computation, which all ranks start together. The first time is not counted.
            afterwards: called after each computation, outside of the measured time.
        """
        times = []
        num_times = 3
        while len(times) < num_times:
            # The ranks wait for each other here.
            self.world.gather(None)
            start = time.perf_counter()
            compute()
            times.append(time.perf_counter() - start)
            afterwards()
            # Repeat quick computations more often, the same number of times on all ranks.
            if len(times) == 1:
                num_times += max(self.world.gather(int(_REPEATED_S / times[0])))
        return max(self.world.gather(min(times[1:])))


class _FewLayers:
    """A model of a role with few layers, in the engines of a rank.

    Args:
        measurement: settings of the measurements.
        role: key of the role's section.
        plan: model and ranks of the role.
        num_layers: number of layers.

    Attributes:
        num_sequences: sequences of a step that a rank generates and trains on.
        rows: prompt and response of each row in the measured micro-batch.
        num_context_tokens: tokens of each sequence in the measured decode steps; 0 before
            `generation_times`, and if no generation is measured.
    """

    def __init__(
        self, measurement: Measurement, role: str, plan: RolePlan, num_layers: int
    ) -> None:
        self.measurement = measurement
        self.config = measurement.config
        self.role = role
        self.plan = plan
        self.num_layers = num_layers
        self.num_sequences = BatchPlan(self.config).num_sequences // plan.layout.world_size
        self.num_context_tokens = 0
        section = trained_section(self.config, role)
        self.rows = self._micro_batch(micro_batch_tokens(self.config, role, plan))
        model = self._random_model(torch.float32)
        if adapter_rank(self.config, role):
            add_adapter(model, self.config.actor_rollout_ref.model, seed=0)
        scorer: Scorer = PolicyScorer(model) if role == ACTOR else ValueScorer(model)
        # If the role has another number of ranks, each process measures it alone.
        processes = ONE_PROCESS
        if plan.layout.world_size == measurement.world.size:
            processes = Processes.arrange(measurement.world, plan.layout)
        self.engine = FSDPEngine(
            scorer,
            dtype=measurement.dtype,
            device=_CPU,
            training=Training(section.optim, section.grad_clip, section.max_nonfinite_steps),
            memory=Memory(gradient_checkpointing=plan.recomputes),
            processes=processes,
        )

    def _micro_batch(self, most_tokens: int) -> list[tuple[list[int], list[int]]]:
        """Make rows of mean lengths: a full micro-batch, or fewer rows if that would take too long.

        Args:
            most_tokens: tokens of a full micro-batch.

        Returns:
            Token ids of prompt and response of each row, at least one row.
        """
        lengths = self.measurement.lengths
        sizes = self.plan.sizes
        num_parameters = _NUM_LAYERS[1] * sizes.layer_parameters + sizes.table_parameters
        # An update takes 6 operations per parameter and token: 2 forward, 4 backward.
        num_tokens = min(most_tokens, _PASS_S * self.measurement.flops / (6 * num_parameters))
        response = [token % sizes.vocabulary for token in range(max(2, round(lengths.response)))]
        prompt = [token % sizes.vocabulary for token in range(max(1, round(lengths.prompt)))]
        rows = []
        # Prompts are not counted, because responses share them.
        num_rows = max(1, min(int(num_tokens) // len(response), self.num_sequences))
        for row in range(num_rows):
            # Each prompt begins with its number, and has several responses.
            first = row // self.config.actor_rollout_ref.rollout.n % sizes.vocabulary
            rows.append(([first, *prompt[1:]], response))
        return rows

    def _random_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """Make the role's model with `num_layers` layers and random weights, equal on all ranks."""
        policy = self.config.actor_rollout_ref.model
        path = policy.path
        override = policy.override_config
        if self.role == CRITIC and self.config.critic.model.path:
            path = self.config.critic.model.path
            override = {}  # the configured one is for the policy's model
        assert path is not None, "the sizes were read from its config.json"
        override = {**override, "num_hidden_layers": self.num_layers}
        layer_types = load_config(path).get_text_config().to_dict().get("layer_types")
        if layer_types:
            # Repeat the types, because the model may have fewer layers than are measured.
            override["layer_types"] = list(islice(cycle(layer_types), self.num_layers))
        model = skeleton_causal_lm(path, override_config=override)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in list(model.named_parameters()):
            parent, _, attribute = name.rpartition(".")
            value = torch.empty(parameter.shape).uniform_(-_WEIGHT, _WEIGHT, generator=generator)
            setattr(model.get_submodule(parent), attribute, nn.Parameter(value.to(dtype)))
        model.tie_weights()
        return model

    def kept_share(self) -> float:
        """Measure how much memory of freed tensors this process keeps in updates.

        The updates are those of a run: several micro-batches, and an optimizer step that allocates
        moments the first time. What the C library keeps of freed tensors depends on this order.

        Returns:
            The kept memory, relative to the predicted tensors that exist at once; 0 if the system
            does not tell the peak.
        """
        batch = pack_rows(self.rows, _CPU)
        smaller_batch = pack_rows(self.rows[: len(self.rows) // 2 + 1], _CPU)
        plan = replace(self.plan, sizes=self.plan.sizes.with_layers(self.num_layers))
        predicted = predict_update(self.config, self.role, plan, batch.num_tokens)
        release_free_memory()
        if not forget_peak():
            return 0.0
        resident, _ = resident_bytes()
        for _ in range(_NUM_UPDATES):
            for micro_batch in (batch, batch, smaller_batch):
                self._backward(micro_batch)
            self.engine.optimizer_step(0.0)  # at a learning rate of 0
            release_free_memory()
        _, peak = resident_bytes()
        # Gradients and moments stay allocated. The rest of the growth is compared with the tensors
        # that an update frees again: if no freed memory is kept, both are equal.
        growth = peak - resident - predicted.optimizer - predicted.gradients
        kept_share = growth / (predicted.activations + predicted.working) - 1.0
        return max(0.0, *self.measurement.world.gather(kept_share))

    def update_times(self) -> dict[str, float]:
        """Measure passes without gradients, updates and optimizer steps, as in `PassTimes`."""
        question = ScoreQuestion()
        # Each is a pair: seconds of a call, and of each token.
        forward_s = self._micro_batch_times(lambda batch: self.engine.forward([batch], question))
        update_s = self._micro_batch_times(self._backward)
        # The optimizer step needs gradients, which the smallest batch gives it.
        batch = pack_rows(self.rows[:1], _CPU)
        self._backward(batch)
        optimizer_s = self.measurement.seconds(
            lambda: self.engine.optimizer_step(0.0), lambda: self._backward(batch)
        )
        self._clear()
        return {
            "forward_call_s": forward_s[0],
            "forward_token_s": forward_s[1],
            "update_call_s": update_s[0],
            "update_token_s": update_s[1],
            "optimizer_s": optimizer_s,
        }

    def _micro_batch_times(self, compute: Callable[[PackedBatch], object]) -> tuple[float, float]:
        """Divide the time of a pass over a micro-batch into a fixed part and a part per token.

        Args:
            compute: the pass.

        Returns:
            Seconds of each call, and of each token, from micro-batches of two sizes. With a single
            row, all time counts as time of tokens.
        """
        more = pack_rows(self.rows, _CPU)
        # A quarter of the rows, rounded up.
        fewer = pack_rows(self.rows[: -(-len(self.rows) // 4)], _CPU)
        seconds = self.measurement.seconds
        more_s = seconds(lambda: compute(more), self._clear)
        if len(self.rows) == 1:
            return 0.0, more_s / more.num_tokens
        fewer_s = seconds(lambda: compute(fewer), self._clear)
        token_s = max(0.0, more_s - fewer_s) / (more.num_tokens - fewer.num_tokens)
        return max(0.0, more_s - token_s * more.num_tokens), token_s

    def _backward(self, batch: PackedBatch) -> None:
        """Compute the gradients of a micro-batch."""
        self.engine.backward([batch], [_sum_of_outputs])

    def _clear(self) -> None:
        """Drop the gradients."""
        self.engine.parameters.clear_gradients()

    def generation_times(self) -> dict[str, float]:
        """Measure weight sync, the start of a generation and decode steps, as in `PassTimes`.

        Returns:
            The times; {} for a critic, and for a rollout engine other than `native`, whose code is
            measured here.
        """
        rollout = self.config.actor_rollout_ref.rollout
        if self.role != ACTOR or not rollout.traits.packs_weights:
            return {}
        lengths = self.measurement.lengths
        num_sequences = max(1, min(rollout.max_num_seqs, self.num_sequences))
        # A rank with all weights generates in the trained modules, without a weight sync. Otherwise
        # the rollout has its own copy.
        model = self.engine.model
        publish_s = 0.0
        if not self.plan.layout.is_whole:
            model = self._random_model(self.measurement.dtype)
        engine = NativeEngine(model, max_num_seqs=num_sequences)
        if not self.plan.layout.is_whole:
            sync = CopiedWeights()

            def publish() -> None:
                sync.publish(self.engine.weights(), engine, 0)
                sync.verify(engine, 0)

            publish_s = self.measurement.seconds(publish)

        num_tokens = round(lengths.prompt)
        start_s = self._generation_s(engine, num_sequences, num_tokens, 1, num_samples=rollout.n)
        # Measure decode steps as in the middle of a response: with prompts that are longer by half
        # a response, unless these take too long to compute: 2 operations per parameter and token.
        num_operations = 2 * _NUM_LAYERS[1] * self.plan.sizes.layer_parameters * num_sequences
        most_tokens = int(_PASS_S * self.measurement.flops / num_operations)
        middle = round(lengths.prompt + (lengths.response - _DECODE_STEPS) / 2)
        num_tokens = max(num_tokens, min(middle, most_tokens))
        self.num_context_tokens = num_tokens + _DECODE_STEPS // 2
        # The difference to a generation of one token is the time of the decode steps.
        fewer_s = self._generation_s(engine, num_sequences, num_tokens, 1)
        more_s = self._generation_s(engine, num_sequences, num_tokens, 1 + _DECODE_STEPS)
        return {
            "publish_s": publish_s,
            "generation_start_s": start_s,
            "decode_step_s": max(0.0, more_s - fewer_s) / _DECODE_STEPS,
        }

    def _generation_s(
        self,
        engine: NativeEngine,
        num_sequences: int,
        num_prompt_tokens: int,
        num_new_tokens: int,
        *,
        num_samples: int = 1,
    ) -> float:
        """Measure the seconds of a generation, including the packing of weights before it.

        Args:
            engine: the rollout engine.
            num_sequences: number of responses.
            num_prompt_tokens: tokens of each prompt.
            num_new_tokens: tokens of each response.
            num_samples: responses to each prompt.
        """
        rollout = self.config.actor_rollout_ref.rollout
        prompts = []
        sampling = []
        for row in range(num_sequences):
            # Responses to the same prompt share it in the engine, so other prompts must differ.
            first = row // num_samples % self.plan.sizes.vocabulary
            prompts.append([first] * max(1, num_prompt_tokens))
            sampling.append(
                SamplingParams(
                    num_new_tokens,
                    temperature=rollout.temperature,
                    top_p=rollout.top_p,
                    top_k=rollout.top_k,
                    seed=row,
                    ignore_eos=True,
                )
            )

        def forget_weights() -> None:
            """Free the packed weights, so that the next generation packs weights, as in a run."""
            engine.sleep()
            engine.wake()

        return self.measurement.seconds(
            lambda: engine.generate_batch(prompts, sampling), forget_weights
        )


def _sum_of_outputs(outputs: Outputs) -> torch.Tensor:
    """A loss with a gradient for each token: the sum of log-probs or values."""
    # The first output is what the role predicts.
    return next(iter(outputs.values())).sum()
