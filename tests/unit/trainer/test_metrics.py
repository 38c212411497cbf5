# SPDX-License-Identifier: Apache-2.0
"""The numbers about a batch, computed by hand; log-probabilities that differ: what passes, what is said, what stops."""

import logging
import math

import numpy as np
import pytest
import torch

from quadriga.config import RolloutConfig
from quadriga.config.multi_turn import MultiTurnConfig
from quadriga.config.trainer import TrainerConfig
from quadriga.errors import RolloutError
from quadriga.protocol import DataProto
from quadriga.rewards.outcome import UNSCORED
from quadriga.trainer.metrics import (
    check_log_probs,
    data_metrics,
    dead_signals,
    lost_gradients,
    performance_metrics,
    spread,
    unused_tools,
)


@pytest.fixture
def batch() -> DataProto:
    """Two prompts of 1 and 2 tokens; answers of 3 (the whole width) and 1."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    return DataProto.from_dict(
        tensors={
            "attention_mask": torch.cat([torch.tensor([[0, 1], [1, 1]]), mask], -1),
            "response_mask": mask,
            "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.0, 0.0]]),
            "token_level_rewards": torch.tensor([[0.0, -0.5, 1.0], [0.5, 0.0, 0.0]]),
            # Behind the mask stands what must not count.
            "advantages": torch.tensor([[1.0, 2.0, 3.0], [-2.0, 99.0, 99.0]]),
            "returns": torch.tensor([[1.0, 2.0, 3.0], [2.0, 99.0, 99.0]]),
            "values": torch.tensor([[1.0, 2.0, 2.0], [2.0, -99.0, 99.0]]),
        }
    )


def test_data_metrics(batch: DataProto) -> None:
    metrics = data_metrics(batch)
    expected = {
        "critic/score/mean": 0.75,
        "critic/score/max": 1.0,
        "critic/rewards/mean": 0.5,
        "critic/advantages/mean": 1.0,
        "critic/advantages/min": -2.0,
        "critic/advantages/max": 3.0,
        "critic/values/max": 2.0,
        "response_length/mean": 2.0,
        "response_length/clip_ratio": 0.5,
        "prompt_length/mean": 1.5,
        "prompt_length/max": 2.0,
        # returns 1 2 3 2 have variance 1/2, the errors 0 0 1 0 have 3/16
        "critic/vf_explained_var": 1 - (3 / 16) / (1 / 2),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def signals(
    scores: list[float], lengths: list[int], uid: str, unscored: tuple[int, ...] = ()
) -> dict[str, str]:
    mask = torch.arange(3) < torch.tensor(lengths)[:, None]
    tensors = {
        "responses": torch.zeros(len(scores), 3, dtype=torch.int64),
        "attention_mask": torch.cat([torch.ones(len(scores), 2), mask], -1).long(),
        "token_level_scores": torch.tensor(scores)[:, None],
    }
    extras = [{UNSCORED: "no verdict"} if row in unscored else {} for row in range(len(scores))]
    columns = {
        "uid": np.array(list(uid), dtype=object),
        "reward_extra": np.array(extras, dtype=object),
    }
    return dead_signals(DataProto.from_dict(tensors=tensors, non_tensors=columns), TrainerConfig())


def test_batches_without_a_signal_to_learn_from() -> None:
    alike = signals([1.0, 0.0, 1.0, 0.0], [1] * 4, "abab")
    assert alike["scores"].startswith("all responses of every group scored alike (mean 0.5)")
    assert signals([0.0, 0.0], [1, 1], "ab")["scores"].startswith(
        "all responses scored alike (mean 0)"
    )
    assert "quadriga show outputs/quadriga/run" in alike["scores"]
    # One of several groups differs; single responses differ; a batch of one has nothing to differ from.
    assert signals([1.0, 0.0, 1.0, 1.0], [1] * 4, "abab") == {}
    assert signals([1.0, 0.0], [1, 2], "ab") == {}
    assert signals([1.0], [1], "a") == {}
    # A row without a score is not part of the batch that single responses are compared in.
    assert signals([1.0, 0.0, 0.0], [1, 2, 1], "abc", unscored=(2,)) == {}
    alike = signals([1.0, 1.0, 0.0], [1, 2, 1], "abc", unscored=(2,))
    assert alike["scores"].startswith("all responses scored alike (mean 1)")
    assert signals([0.0, 0.0], [1, 2], "aa", unscored=(0, 1)) == {}
    # A single scored response of a group has nothing to differ from, whatever other groups score.
    lone = signals([0.0, 0, 0, 1.0, 0, 0], [1] * 6, "aaabbb", unscored=(1, 2, 4, 5))
    assert lone["scores"].startswith("all responses of every group scored alike")
    cut = signals([float(row) for row in range(16)], [3] * 15 + [1], "a" * 16)
    assert cut["length"].startswith("94% of responses hit the limit, data.max_response_length=3.")
    assert signals([float(row) for row in range(16)], [3] * 14 + [1, 2], "a" * 16) == {}


def test_scores_whose_square_float32_cannot_hold_are_named() -> None:
    large = signals([0.0, 1e30, -2e30], [1, 1, 1], "aaa")
    assert large["size"].startswith("the score -2e+30 of row 2 of the batch is too large")
    assert "size" not in signals([0.0, 1e18], [1, 1], "aa")


def test_gradients_that_are_not_finite_are_said_but_for_those_of_a_loss_scale() -> None:
    assert list(lost_gradients({"actor/nonfinite_steps": 2.0, "critic/nonfinite_steps": 0.0})) == [
        "actor/nonfinite_steps"
    ]
    assert lost_gradients({"actor/nonfinite_steps": 2.0, "actor/loss_scale": 1024.0}) == {}


def test_a_step_without_a_tool_call_is_said_where_tools_are_offered() -> None:
    turns = MultiTurnConfig(enable=True, function_tool_path="tools.py")
    name = "rollout/num_tool_calls"
    assert "no response of this step called a tool" in unused_tools({name: 0.0}, turns)[name]
    assert unused_tools({name: 1.0}, turns) == {}
    assert unused_tools({}, turns) == {}
    assert unused_tools({name: 0.0}, MultiTurnConfig()) == {}


def test_aborted_responses_are_counted_apart(batch: DataProto) -> None:
    batch.batch["attention_mask"][1, 2:] = 0
    metrics = data_metrics(batch)
    expected = {
        "critic/score/mean": 1.0,
        "critic/score/min": 1.0,
        "critic/rewards/mean": 0.5,
        "response/aborted_ratio": 0.5,
        "response_length/mean": 1.5,
        "response_length_non_aborted/mean": 3.0,
        "response_length_non_aborted/min": 3.0,
        "response_length_non_aborted/clip_ratio": 1.0,
        "prompt_length/clip_ratio": 0.5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    batch.batch["attention_mask"][0, 2:] = 0
    metrics = data_metrics(batch)
    assert metrics["response/aborted_ratio"] == 1 and metrics["critic/score/mean"] == 0.75
    assert not [name for name in metrics if name.startswith("response_length_non_aborted/")]


def test_batch_without_values_or_answers(batch: DataProto) -> None:
    batch.batch.pop("values")
    batch.batch["response_mask"] = torch.zeros(2, 3, dtype=torch.int64)
    metrics = data_metrics(batch)
    assert not [
        name for name in metrics if "values" in name or "advantages" in name or "explained" in name
    ]


def test_equal_returns_have_no_variance_to_explain(batch: DataProto) -> None:
    batch.batch["returns"] = torch.ones(2, 3)
    assert data_metrics(batch)["critic/vf_explained_var"] == 0.0


def test_spread() -> None:
    assert spread("x", torch.tensor([1, 2, 6])) == {"x/mean": 3.0, "x/max": 6.0, "x/min": 1.0}


def test_performance_metrics(batch: DataProto) -> None:
    generated = {"rollout/num_response_tokens": 4.0}
    metrics = performance_metrics(batch, {"step": 2.0, "gen": 0.5, "adv": 0.07}, generated)
    # Of 4 response tokens and of all 7.
    assert metrics["timing_per_token_ms/gen"] == 125 and metrics[
        "timing_per_token_ms/adv"
    ] == pytest.approx(10)
    assert "timing_per_token_ms/step" not in metrics
    assert metrics["perf/total_num_tokens"] == 7
    assert metrics["perf/throughput"] == 3.5
    assert metrics["perf/generated_tokens_per_s"] == 8.0
    assert (metrics["timing_s/step"], metrics["timing_s/gen"]) == (2.0, 0.5)
    assert 0 < metrics["perf/memory_resident_gib"] <= metrics["perf/memory_peak_gib"]


def test_speed_of_generation_counts_what_was_generated(batch: DataProto) -> None:
    """More than the batch, where groups were left out; nothing where answers come from a file."""
    seconds = {"step": 2.0, "gen": 0.5}
    more = performance_metrics(batch, seconds, {"rollout/num_response_tokens": 40.0})
    assert more["perf/generated_tokens_per_s"] == 80.0
    kept = {"rollout/num_response_tokens": 40.0, "rollout/replayed": 1.0}
    assert "perf/generated_tokens_per_s" not in performance_metrics(batch, seconds, kept)


def test_turns_of_conversations(batch: DataProto) -> None:
    assert "num_turns/mean" not in data_metrics(batch)
    batch.non_tensor_batch["num_turns"] = np.array([2, 5], dtype=object)
    assert data_metrics(batch)["num_turns/mean"] == 3.5


def check(metrics: dict[str, float], step: int, **limits: float) -> dict[str, float]:
    return check_log_probs(metrics, RolloutConfig(**limits), step, step)


def difference(mean: float, kl: float = 0.0) -> dict[str, float]:
    return {"rollout/log_prob_diff_mean": mean, "rollout/log_prob_diff_max": 9.0, "rollout/kl": kl}


def test_small_differences_pass_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    found = check(difference(0.1, kl=math.log(1.25)), 3)
    assert found == {"rollout/ppl_ratio": pytest.approx(1.25)}
    assert check({}, 3) == {}
    assert caplog.text == ""


def test_a_difference_above_the_first_limit_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check(difference(0.25), 3, log_prob_diff_warn=0.1, log_prob_diff_stop=0.5)
    assert (
        "step 3: the rollout's log-probabilities have a mean difference of 0.25 nats (at most 9)"
        in caplog.text
    )
    assert "log_prob_diff_warn=0.1" in caplog.text


def test_a_difference_above_the_second_limit_stops() -> None:
    with pytest.raises(
        RolloutError,
        match=r"step 3: got a mean difference of 0\.75 nats.*at most 0\.5 \(.*diff_stop",
    ):
        check(difference(0.75), 3, log_prob_diff_stop=0.5)


def test_another_model_stops_in_the_first_steps_of_a_process() -> None:
    """Of an engine that repacks weights; afterwards, and for others, there is no limit."""
    vllm = RolloutConfig(name="vllm")
    for num_steps in (1, 2):
        with pytest.raises(RolloutError, match=r"step 9: got a mean difference of 1\.5 nats"):
            check_log_probs(difference(1.5), vllm, 9, num_steps)
    check_log_probs(difference(1.5), vllm, 9, 3)
    check_log_probs(difference(1.5), RolloutConfig(name="native"), 1, 1)


def test_what_is_no_number_stops_without_a_limit() -> None:
    with pytest.raises(RolloutError, match=r"mean difference of nan nats .* expected a number"):
        check(difference(math.nan), 1)


def test_ratio_too_large_for_a_number() -> None:
    assert check(difference(0.0, kl=800.0), 1) == {"rollout/ppl_ratio": math.inf}
