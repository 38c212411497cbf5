# SPDX-License-Identifier: Apache-2.0
"""Seconds that a model's layers take on this CPU, measured with layers of its shape.

Models with one layer and with three, with random weights, make an update, a pass without gradients,
and decode steps, by the code of a run. The difference is the time of two layers; the rest is that
of embedding, head and sampling.

Legend: R sequences that are decoded together.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import cycle, islice

import torch
from torch import nn

from quadriga.config import Config
from quadriga.config.explain import BatchPlan
from quadriga.config.placement import ACTOR, CRITIC
from quadriga.engines.fsdp.engine import FSDPEngine, Memory, Training
from quadriga.engines.packing import Outputs
from quadriga.models.architecture import pack_rows
from quadriga.models.attention import PackedBatch
from quadriga.models.load import load_config, skeleton_causal_lm
from quadriga.models.lora import add_adapter
from quadriga.models.scorers import PolicyScorer, ScoreQuestion, Scorer, ValueScorer
from quadriga.observe.machine import forget_peak, release_free_memory, resident_bytes
from quadriga.planning.devices import LayerTimes, PassTimes
from quadriga.planning.memory import UpdateShape, update_memory
from quadriga.planning.phases import Lengths, adapter_rank, micro_batch_tokens
from quadriga.planning.sizes import ModelSizes
from quadriga.planning.time import update_passes
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.native.engine import NativeEngine

_NUM_LAYERS = (1, 3)
_PASS_S = 0.3  # seconds of an update by the rate of products, which limits its tokens
_REPEATED_S = 0.3  # a measurement is repeated for so long, and at least twice after the first
_DECODE_STEPS = 16
_NUM_UPDATES = 2  # updates whose memory is measured
_WEIGHT = 0.05  # largest random weight


def layer_times(
    config: Config,
    role: str,
    sizes: ModelSizes,
    lengths: Lengths,
    *,
    dtype: str,
    flops: float,
    num_ranks: int,
) -> LayerTimes:
    """Measure the layers of a trained role with the threads of one rank.

    Args:
        config: the configuration.
        role: key of the role's section.
        sizes: the model.
        lengths: assumed mean lengths.
        dtype: dtype that computes.
        flops: operations per second of products, with the threads of one rank.
        num_ranks: number of ranks that share the work of a step.

    Returns:
        The times. Those of decode steps are 0 for a critic and for an engine that does not compute
        in the trainer's process.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(max(1, num_threads // num_ranks))
    try:
        measured = []
        resident_factor = 1.0
        for num_layers in _NUM_LAYERS:
            few_layers = _FewLayers(config, role, num_layers, getattr(torch, dtype))
            batch = few_layers.batch(sizes, lengths, flops, num_ranks)
            measured.append(few_layers.times(batch, lengths, num_ranks))
            if num_layers == _NUM_LAYERS[-1]:
                resident_factor = few_layers.resident_factor(batch, sizes)
            # Modules with a fused forward refer to themselves.
            del few_layers
            gc.collect()
            release_free_memory()
    finally:
        torch.set_num_threads(num_threads)
    fewer, more = measured
    added_layers = _NUM_LAYERS[1] - _NUM_LAYERS[0]
    of_layer = {}
    of_ends = {}
    for field in fields(PassTimes):
        fewer_s = getattr(fewer, field.name)
        # A layer takes some time, whatever another program has added to the first measurement.
        layer_s = max(0.0, getattr(more, field.name) - fewer_s) / added_layers
        of_layer[field.name] = layer_s
        of_ends[field.name] = max(0.0, fewer_s - _NUM_LAYERS[0] * layer_s)
    model_section = config.critic.model if role == CRITIC else config.actor_rollout_ref.model
    recomputes = model_section.enable_gradient_checkpointing is True
    return LayerTimes(
        PassTimes(**of_layer),
        PassTimes(**of_ends),
        num_new_tokens=_DECODE_STEPS / 2,
        num_passes=update_passes(config, role, recomputes=recomputes),
        resident_factor=resident_factor,
    )


class _FewLayers:
    """A model of a role with few layers, in the engines of a run.

    Args:
        config: the configuration.
        role: key of the role's section.
        num_layers: number of layers.
        dtype: dtype that computes.
    """

    def __init__(self, config: Config, role: str, num_layers: int, dtype: torch.dtype) -> None:
        self.config = config
        self.is_actor = role == ACTOR
        self.num_layers = num_layers
        policy = config.actor_rollout_ref.model
        section = config.critic if role == CRITIC else config.actor_rollout_ref.actor
        path = policy.path
        override = policy.override_config
        if role == CRITIC and config.critic.model.path:
            path = config.critic.model.path
            override = {}
        assert path is not None, "the sizes were read from its config.json"
        override = {**override, "num_hidden_layers": num_layers}
        layer_types = load_config(path).get_text_config().to_dict().get("layer_types")
        if layer_types:
            # The model may have fewer layers than are measured.
            override["layer_types"] = list(islice(cycle(layer_types), num_layers))
        model = skeleton_causal_lm(path, override_config=override)
        for name, parameter in list(model.named_parameters()):
            parent, _, attribute = name.rpartition(".")
            value = torch.empty(parameter.shape).uniform_(-_WEIGHT, _WEIGHT)
            setattr(model.get_submodule(parent), attribute, nn.Parameter(value))
        model.tie_weights()
        if self.is_actor and policy.has_adapter:
            add_adapter(model, policy, seed=0)
        scorer: Scorer = PolicyScorer(model) if self.is_actor else ValueScorer(model)
        memory_section = policy if self.is_actor else config.critic.model
        self.engine = FSDPEngine(
            scorer,
            dtype=dtype,
            device=torch.device("cpu"),
            training=Training(section.optim, section.grad_clip, section.max_nonfinite_steps),
            memory=Memory(
                gradient_checkpointing=memory_section.enable_gradient_checkpointing is True
            ),
        )
        self.section = section

    def times(self, batch: PackedBatch, lengths: Lengths, num_ranks: int) -> PassTimes:
        """Measure an update, a pass without gradients and, of a policy, decode steps.

        Args:
            batch: tokens of the update and of the pass.
            lengths: assumed mean lengths.
            num_ranks: number of ranks that share the work of a step.
        """
        question = ScoreQuestion()
        forward_s = _seconds(lambda: self.engine.forward([batch], question))
        update_s = _seconds(lambda: self._backward(batch), afterwards=self._clear)
        start_s = 0.0
        step_s = 0.0
        traits = self.config.actor_rollout_ref.rollout.traits
        if self.is_actor and traits.packs_weights:
            start_s = self._generation_s(lengths, num_ranks, 1)
            more_s = self._generation_s(lengths, num_ranks, 1 + _DECODE_STEPS)
            step_s = max(0.0, more_s - start_s) / _DECODE_STEPS
        return PassTimes(
            forward_s=forward_s / batch.num_tokens,
            update_s=update_s / batch.num_tokens,
            generation_start_s=start_s,
            decode_step_s=step_s,
        )

    def resident_factor(self, batch: PackedBatch, sizes: ModelSizes) -> float:
        """Measure the growth of this process in updates, relative to the predicted tensors.

        Args:
            batch: tokens of the updates.
            sizes: the model, with all of its layers.

        Returns:
            At least 1, and 1 if the system does not tell the peak.
        """
        num_left_out = sizes.num_layers - self.num_layers
        sizes = replace(
            sizes,
            num_layers=self.num_layers,
            num_parameters=sizes.num_parameters - num_left_out * sizes.layer_parameters,
        )
        shape = UpdateShape(
            num_tokens=batch.num_tokens,
            num_predicted=len(batch.targets),
            itemsize=self.engine.dtype.itemsize,
            recomputes=self.engine.memory.gradient_checkpointing,
            adapter_rank=adapter_rank(self.config, ACTOR if self.is_actor else CRITIC),
            has_head=self.is_actor,
            is_on_cpu=True,
        )
        predicted = update_memory(sizes, shape)
        release_free_memory()
        if not forget_peak():
            return 1.0
        resident, _ = resident_bytes()
        for _ in range(_NUM_UPDATES):
            self._backward(batch)
            self._clear()
        _, peak = resident_bytes()
        growth = float(peak - resident)
        if shape.itemsize == 4:
            # Narrower parameters keep their sums of gradients between updates.
            growth -= predicted.gradients
        return max(1.0, growth / (predicted.activations + predicted.working))

    def _backward(self, batch: PackedBatch) -> None:
        """Compute the gradients of a micro-batch."""
        self.engine.backward([batch], [_sum_of_outputs])

    def _clear(self) -> None:
        """Drop the gradients."""
        self.engine.parameters.clear_gradients()

    def batch(
        self, sizes: ModelSizes, lengths: Lengths, flops: float, num_ranks: int
    ) -> PackedBatch:
        """Pack rows of mean lengths: a micro-batch, or as many rows as are quick to compute.

        Args:
            sizes: the model.
            lengths: assumed mean lengths.
            flops: operations per second of products.
            num_ranks: number of ranks that share the work of a step.
        """
        batch = BatchPlan(self.config)
        response = list(range(max(2, round(lengths.response))))
        prompt = list(range(max(1, round(lengths.prompt))))
        num_parameters = _NUM_LAYERS[1] * sizes.matrix_parameters / sizes.num_layers
        num_parameters += sizes.table_parameters
        most_tokens = micro_batch_tokens(self.config, self.section, num_ranks, lengths)
        num_tokens = min(most_tokens, _PASS_S * flops / (6 * num_parameters))
        num_rows = min(num_tokens / len(response), batch.num_sequences / num_ranks)
        rows = []
        num_samples = max(1, round(batch.num_sequences / batch.num_prompts))
        for row in range(max(1, int(num_rows))):
            # Each prompt begins with its number, and has several responses.
            first = row // num_samples
            tokens = [token % sizes.vocabulary for token in [first, *prompt[1:]]]
            rows.append((tokens, [token % sizes.vocabulary for token in response]))
        return pack_rows(rows, torch.device("cpu"))

    def _generation_s(self, lengths: Lengths, num_ranks: int, num_new_tokens: int) -> float:
        """Seconds of a generation with all sequences of a rank, from the packing of weights on."""
        rollout = self.config.actor_rollout_ref.rollout
        batch = BatchPlan(self.config)
        num_sequences = max(1, min(rollout.max_num_seqs, batch.num_sequences // num_ranks))
        num_samples = max(1, round(batch.num_sequences / batch.num_prompts))
        engine = NativeEngine(self.engine.model, max_num_seqs=num_sequences)
        prompts = []
        sampling = []
        for row in range(num_sequences):
            first = row // num_samples % self.engine.model.config.vocab_size
            prompts.append([first] * max(1, round(lengths.prompt)))
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
            """Free the packed weights, as an update makes the engine pack the new ones."""
            engine.sleep()
            engine.wake()

        return _seconds(lambda: engine.generate_batch(prompts, sampling), afterwards=forget_weights)


def _sum_of_outputs(outputs: Outputs) -> torch.Tensor:
    """A loss with a gradient for each token: the sum of log-probs or values."""
    return next(iter(outputs.values())).sum()


def _seconds(
    compute: Callable[[], object], *, afterwards: Callable[[], object] = lambda: None
) -> float:
    """Shortest time of a computation, since other programs only make it slower.

    Args:
        compute: the computation. The first time is not counted.
        afterwards: called after each, outside of the measurement.
    """
    compute()
    afterwards()
    shortest_s = float("inf")
    num_times = 0
    end = time.perf_counter() + _REPEATED_S
    while num_times < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        compute()
        shortest_s = min(shortest_s, time.perf_counter() - start)
        num_times += 1
        afterwards()
    return shortest_s
