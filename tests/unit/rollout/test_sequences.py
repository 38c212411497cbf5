# SPDX-License-Identifier: Apache-2.0
"""`generate_sequences` puts answers where training looks for them, and gives every sequence a seed of its own."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quadriga.config.rollout import RolloutConfig
from quadriga.errors import RolloutError, WeightSyncError
from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto
from quadriga.protocol.times import TIMES
from quadriga.rollout import Completion, SamplingParams, ScriptedEngine, generate_sequences
from quadriga.rollout.sequences import sequence_seeds


class Recorder(ScriptedEngine):
    """A scripted engine that remembers what it was asked."""

    def generate_batch(
        self, prompts, sampling: list[SamplingParams], images=None
    ) -> list[Completion]:
        self.prompts, self.sampling = prompts, sampling
        return super().generate_batch(prompts, sampling)


def _prompts(**meta_info) -> DataProto:
    """Two prompts, [5, 6] and [7, 8, 9], padded to four tokens; the second one twice."""
    input_ids = torch.tensor([[0, 0, 5, 6], [0, 7, 8, 9], [0, 7, 8, 9]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]])
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    return DataProto.from_dict(
        tensors={"input_ids": input_ids, "attention_mask": mask, "position_ids": position_ids},
        non_tensors={"uid": np.array(["x", "y", "y"], dtype=object)},
        meta_info=meta_info,
    )


def _generate(
    engine: ScriptedEngine, prompts: DataProto, config: RolloutConfig | None = None, **more
) -> DataProto:
    options = {
        "config": config or RolloutConfig(),
        "response_length": 3,
        "pad_token_id": 99,
        "seed": 1,
        **more,
    }
    return generate_sequences(engine, prompts, **options)


def test_answers_stand_where_training_looks() -> None:
    """Prompts stay, answers are padded on the right, positions continue and the mask covers the tokens generated."""
    engine = Recorder([[1, 2], [3], [4, 4, 4, 4]])
    output = _generate(engine, _prompts())
    assert engine.prompts == [[5, 6], [7, 8, 9], [7, 8, 9]]
    batch = output.batch
    assert batch["responses"].tolist() == [[1, 2, 99], [3, 99, 99], [4, 4, 4]]
    assert batch["response_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    assert batch["prompts"].tolist() == _prompts().batch["input_ids"].tolist()
    assert batch["input_ids"].tolist()[0] == [0, 0, 5, 6, 1, 2, 99]
    assert batch["attention_mask"].tolist()[0] == [0, 0, 1, 1, 1, 1, 0]
    assert batch["position_ids"].tolist() == [
        [0, 0, 0, 1, 2, 3, 4],
        [0, 0, 1, 2, 3, 4, 5],
        [0, 0, 1, 2, 3, 4, 5],
    ]
    assert not batch["rollout_log_probs"].any()


def test_metrics() -> None:
    """Tokens are counted, and answers that were cut."""
    metrics = _generate(Recorder([[1, 2], [3], [4, 4, 4, 4]]), _prompts()).meta_info["metrics"]
    assert metrics["rollout/num_prompt_tokens"] == Metric(8, "sum")
    assert metrics["rollout/num_response_tokens"] == Metric(6, "sum")
    assert metrics["rollout/length_share"] == Metric(1 / 3, "mean", 3)
    assert metrics["timing_s/generate_sequences"].value > 0


def test_several_axes_of_position_continue_together() -> None:
    """Position ids of [B, 3, P] keep their axes."""
    prompts = _prompts()
    prompts.batch["position_ids"] = torch.tensor([[[0, 0, 0, 1], [0, 0, 2, 3], [0, 0, 4, 5]]] * 3)
    output = _generate(Recorder([[1]]), prompts)
    assert output.batch["position_ids"][2, :, 4:].tolist() == [[2, 3, 4], [4, 5, 6], [6, 7, 8]]


def test_settings_of_training_and_validation() -> None:
    """Validation has its own settings; `do_sample` in the call wins; stop tokens hold for both."""
    config = RolloutConfig(temperature=0.8, top_k=7, stop_token_ids=[11])
    engine = Recorder([[1]])
    _generate(engine, _prompts(), config)
    assert engine.sampling[0].temperature == 0.8
    assert (engine.sampling[0].top_k, engine.sampling[0].is_greedy) == (7, False)
    _generate(engine, _prompts(do_sample=False), config)
    assert engine.sampling[0].is_greedy
    _generate(engine, _prompts(validate=True), config)
    assert engine.sampling[0].is_greedy
    assert (engine.sampling[0].top_k, engine.sampling[0].stop_token_ids) == (-1, (11,))


def test_every_sequence_has_its_own_seed() -> None:
    """Seeds differ by sample, uid, step, run and purpose, and do not depend on the rows around."""
    seeds = sequence_seeds(_prompts(global_steps=3), seed=1)
    assert len(set(seeds)) == 3
    assert sequence_seeds(_prompts(global_steps=3), seed=1) == seeds
    for other in (
        sequence_seeds(_prompts(global_steps=4), seed=1),
        sequence_seeds(_prompts(global_steps=3), seed=2),
        sequence_seeds(_prompts(global_steps=3, validate=True), seed=1),
    ):
        assert not set(other) & set(seeds)
    assert sequence_seeds(_prompts(global_steps=3)[[1, 0]], seed=1) == [seeds[1], seeds[0]]


def test_samples_of_one_prompt_in_several_calls() -> None:
    """`sample_index` numbers them where a call sees only some."""
    prompts = _prompts()
    whole = sequence_seeds(prompts, seed=1)
    part = prompts[[2]]
    part.non_tensor_batch["sample_index"] = np.array([1], dtype=object)
    assert sequence_seeds(part, seed=1) == whole[2:]


def test_rows_without_uid() -> None:
    """They are told apart by their place."""
    prompts = _prompts()
    prompts.non_tensor_batch.clear()
    assert len(set(sequence_seeds(prompts, seed=1))) == 3


def test_stale_weights_are_an_error() -> None:
    """The version that the caller expects must be the engine's."""
    engine = Recorder([[1]])
    engine.load_weights((), version=4)
    assert _generate(engine, _prompts(weight_version=4)).meta_info["weight_version"] == 4
    with pytest.raises(WeightSyncError, match=r"version 4, expected version 5, .*Publish"):
        _generate(engine, _prompts(weight_version=5))


def test_an_engine_that_answers_too_much() -> None:
    """Answers longer than the room for them do not pass."""

    class Chatty(ScriptedEngine):
        def generate_batch(
            self, prompts, sampling: list[SamplingParams], images=None
        ) -> list[Completion]:
            return [Completion([1] * 9, [0.0] * 9, "stop", 0) for _ in prompts]

    with pytest.raises(RolloutError, match="response 0: got 9 tokens"):
        _generate(Chatty([[1]]), _prompts())


def test_times_of_responses() -> None:
    """A row has the times that its engine reports, else NaN."""

    class Timed(ScriptedEngine):
        def generate_batch(
            self, prompts, sampling: list[SamplingParams], images=None
        ) -> list[Completion]:
            completions = super().generate_batch(prompts, sampling)
            return [replace(completions[0], times=(1.0, 2.0, 3.0)), *completions[1:]]

    rows = _generate(Timed([[1]]), _prompts())
    assert rows.batch[TIMES][0].tolist() == [1.0, 2.0, 3.0]
    assert rows.batch[TIMES][1:].isnan().all()
