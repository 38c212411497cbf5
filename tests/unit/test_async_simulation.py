# SPDX-License-Identifier: Apache-2.0
"""The simulator of asynchronous training against runs that are worked out by hand."""

import sys
from pathlib import Path

import numpy as np
import pytest

from quadriga.config import load_config
from quadriga.trainer.asynchronous.schedule import Rules
from quadriga.trainer.asynchronous.simulation import advice

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from async_simulation import (
    Costs,
    Simulation,
    SimulationResult,
    Workload,
    colocated,
    fit_recorded_run,
)

STEPS = 20
# A step generates 100 tokens in 10 s and learns from them in 10 s.
EVEN = Costs(
    decode_s=0.1, sequence_s=0.0, step_s=10.0, token_s=0.0, publish_s=0.0, load_s=0.0, switch_s=0.0
)


def simulated(
    costs: Costs = EVEN, lengths: float = 100.0, reward_s: float = 0.0, workers: int = 1, **ways
) -> SimulationResult:
    """A run of groups of one response, two to a step."""
    workload = Workload(np.full((STEPS, 2, 1), lengths), np.full((STEPS, 2), reward_s))
    return Simulation(
        Rules(num_groups=2, group_size=1, num_steps=STEPS, **ways), workload, costs, workers, 1
    ).run()


def test_lockstep_takes_the_sum() -> None:
    """Each side waits for the other; rewards, weights and the trip of both come on top."""
    alone = simulated()
    assert alone.seconds == pytest.approx(STEPS * 20)
    assert (alone.train_idle, alone.rollout_idle) == (pytest.approx(0.5), pytest.approx(0.5))
    assert dict(alone.ages) == {0: pytest.approx(STEPS * 200)}
    slow = Costs(**{**vars(EVEN), "publish_s": 2.0, "load_s": 1.0})
    more = simulated(slow, reward_s=3.0)
    # The last weights are not published.
    assert more.seconds == pytest.approx(STEPS * 23 + (STEPS - 1) * 3)


@pytest.mark.parametrize("in_flight", ["continue", "finish"])
def test_one_step_off_hides_the_shorter_half(in_flight: str) -> None:
    """From the first training step on both work at the same time, and all tokens but the first batch's are one old."""
    found = simulated(max_staleness=1, in_flight=in_flight)
    assert found.seconds == pytest.approx((STEPS + 1) * 10)
    assert found.train_idle == pytest.approx(1 / (STEPS + 1))
    total = STEPS * 200
    assert sum(found.ages.values()) == pytest.approx(total)
    assert found.ages[1] == pytest.approx(total - 200, rel=0.06) and set(found.ages) == {0, 1}


def test_tokens_after_an_update_in_flight_are_younger() -> None:
    """A response that takes two steps: half of it is drawn with newer weights. Decode steps of several cost more."""
    costs = Costs(**{**vars(EVEN), "decode_s": 0.1, "sequence_s": 0.05})
    assert simulated(costs).seconds == pytest.approx(STEPS * (10 + 20))
    found = simulated(EVEN, lengths=200.0, max_staleness=2)
    assert set(found.ages) == {0, 1, 2} and found.ages[1] > 0


@pytest.mark.parametrize(
    "ways", [{}, {"on_stale": "drop"}, {"deterministic": True}, {"sync_every": 2}]
)
def test_the_bound_holds_and_all_is_learned_from(ways: dict) -> None:
    """Long-tailed lengths on three workers: no token is too old, and more freedom is never slower."""
    dice = np.random.default_rng(0)
    workload = Workload(
        np.exp(dice.normal(4.0, 1.0, (STEPS, 6, 2))).round() + 1, np.zeros((STEPS, 6))
    )
    costs, seconds = Costs(**{**vars(EVEN), "step_s": 20.0, "load_s": 0.5}), []
    for bound in (0, 1, 4):
        rules = Rules(num_groups=6, group_size=2, num_steps=STEPS, max_staleness=bound, **ways)
        found = Simulation(rules, workload, costs, 3, 1).run()
        assert max(found.ages) <= bound and 0 < found.rollout_idle < 1
        seconds.append(found.seconds)
    assert seconds[0] > 1.2 * seconds[1] >= seconds[2]


def test_an_update_by_mini_batch_begins_before_the_batch_is_complete() -> None:
    """Lockstep of a response of 10 s and one of 20 s: the first is learned from, 5 s, while the second is generated."""
    workload = Workload(
        np.tile(np.array([[[100.0], [200.0]]]), (STEPS, 1, 1)), np.zeros((STEPS, 2))
    )
    for part_size, step_s in ((0, 30), (1, 25)):
        rules = Rules(num_groups=2, group_size=1, num_steps=STEPS, part_size=part_size)
        assert Simulation(rules, workload, EVEN, 1, 1).run().seconds == pytest.approx(
            STEPS * step_s
        )


def test_colocated_uses_all_for_both() -> None:
    workload = Workload(np.full((STEPS, 2, 1), 100.0), np.zeros((STEPS, 2)))
    rules = Rules(num_groups=2, group_size=1, num_steps=STEPS, max_staleness=1)
    costs = Costs(**{**vars(EVEN), "token_s": 0.1, "switch_s": 3.0, "publish_s": 9.0})
    # 10 s to generate, 10 s + 200 tokens x 0.1 s over two GPUs to learn, 3 s to change over.
    assert colocated(rules, workload, costs, 2, 2).seconds == pytest.approx(
        STEPS * (10 + 10 + 10 + 3)
    )


def test_a_recorded_run_gives_lengths_and_costs() -> None:
    """The seconds that the costs of a run lead to give back these costs."""
    dice, lines = np.random.default_rng(1), []
    for _ in range(6):
        lengths = dice.integers(10, 200, (4, 2))
        gen_s = 0.03 * lengths.max() + 0.002 * lengths.sum()
        lines.append(
            {
                "lengths": lengths.tolist(),
                "gen_s": gen_s,
                "train_s": 1.5 + 0.01 * int(lengths.sum()),
            }
        )
    workload, costs = fit_recorded_run(lines, 15, Costs(), 1, 1)
    assert (
        workload.lengths.shape == (15, 4, 2) and workload.lengths[7].tolist() == lines[1]["lengths"]
    )
    fitted = (costs.decode_s, costs.sequence_s, costs.step_s, costs.token_s)
    assert fitted == tuple(map(pytest.approx, (0.03, 0.002, 1.5, 0.01)))


def test_a_choice_is_recommended_for_a_configuration() -> None:
    """By the lengths of a recorded run: training takes twice as long as generation, so more ranks should train. Without
    a run the assumptions are said."""
    placed = "trainer.placement={actor: training, ref: training, rollout: generation}"
    on_ray = (
        "trainer.backend=ray",
        placed,
        "trainer.resource_pools={training: [4], generation: [4]}",
    )
    config = load_config(
        [*on_ray, "async_training.enable=True", "async_training.max_staleness=4"]
    ).config
    lengths = np.random.default_rng(1).integers(50, 150, (8, 2)).tolist()
    lines = [{"lengths": lengths, "gen_s": 10.0, "train_s": 80.0}] * 4
    source, mine, best = advice(config, (load_config(on_ray).config, lines))
    assert source.startswith("by lengths and seconds of 4 steps")
    assert mine.startswith("this: max_staleness=4, 4 training + 4 rollout ranks: ")
    assert best.startswith("recommended: max_staleness=1, 6 training + 2 rollout ranks: ")
    assumed = list(advice(config))
    assert assumed[0].startswith("assumed, not measured: ") and len(assumed) == 5
