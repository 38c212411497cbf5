# SPDX-License-Identifier: Apache-2.0
"""Seconds that a model's layers take on this CPU, measured with layers of its shape.

Models with one layer and with three, with random weights, make an update, a pass without gradients,
and decode steps, by the code of a run. The difference is the time of two layers; the rest is that
of embedding, head and sampling.

Legend: R sequences that are decoded together.
"""

import time
from collections.abc import Callable
from dataclasses import fields

import torch
from torch import nn

from quadriga.config import Config
from quadriga.config.explain import BatchPlan
from quadriga.config.placement import ACTOR, CRITIC
from quadriga.engines.fsdp.engine import FSDPEngine, Memory, Training
from quadriga.engines.packing import Outputs
from quadriga.models.architecture import packed_rows
from quadriga.models.attention import PackedBatch
from quadriga.models.load import skeleton_causal_lm
from quadriga.models.lora import add_adapter
from quadriga.models.scorers import PolicyScorer, ScoreQuestion, Scorer, ValueScorer
from quadriga.observe.machine import release_free_memory
from quadriga.planning.devices import LayerTimes, PassTimes
from quadriga.planning.phases import Lengths, micro_batch_tokens
from quadriga.planning.sizes import ModelSizes
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.native.engine import NativeEngine

_NUM_LAYERS = (1, 3)
_PASS_S = 0.4  # seconds of an update by the rate of products, which limits its tokens
_REPEATED_S = 0.8  # a measurement is repeated for so long, and at least twice after the first
_DECODE_STEPS = 32
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
        for num_layers in _NUM_LAYERS:
            few_layers = _FewLayers(config, role, num_layers, getattr(torch, dtype))
            measured.append(few_layers.times(sizes, lengths, flops, num_ranks))
            del few_layers
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
    return LayerTimes(PassTimes(**of_layer), PassTimes(**of_ends), _DECODE_STEPS / 2)


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
        policy = config.actor_rollout_ref.model
        section = config.critic if role == CRITIC else config.actor_rollout_ref.actor
        path = policy.path
        override = policy.override_config
        if role == CRITIC and config.critic.model.path:
            path = config.critic.model.path
            override = {}
        # The types of its layers, if the file lists them, are those of all its layers.
        override = {**override, "num_hidden_layers": num_layers, "layer_types": None}
        assert path is not None, "the sizes were read from its config.json"
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

    def times(self, sizes: ModelSizes, lengths: Lengths, flops: float, num_ranks: int) -> PassTimes:
        """Measure an update, a pass without gradients and, of a policy, decode steps.

        Args:
            sizes: the model.
            lengths: assumed mean lengths.
            flops: operations per second of products.
            num_ranks: number of ranks that share the work of a step.
        """
        batch = self._batch(sizes, lengths, flops, num_ranks)
        question = ScoreQuestion()
        forward_s = _seconds(lambda: self.engine.forward([batch], question))
        update_s = _seconds(
            lambda: self.engine.backward([batch], [_sum_of_outputs]),
            afterwards=self.engine.parameters.clear_gradients,
        )
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

    def _batch(
        self, sizes: ModelSizes, lengths: Lengths, flops: float, num_ranks: int
    ) -> PackedBatch:
        """Pack rows of mean lengths: a micro-batch, or as many rows as are quick to compute."""
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
        return packed_rows(rows, torch.device("cpu"))

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
        return _seconds(lambda: engine.generate_batch(prompts, sampling), afterwards=engine.sleep)


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
