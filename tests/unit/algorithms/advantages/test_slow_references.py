# SPDX-License-Identifier: Apache-2.0
"""Every estimator against plain Python, answer by answer, on random groups, ragged answers with gaps, and empty ones.

The loops share no code with what they check. Whitening is over tokens, by the standard library's statistics.
"""

import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.algorithms import bind_options, estimate_advantages
from quadriga.algorithms.registry import ADVANTAGES

GAMMA, LAM, WIDTH = 0.9, 0.8, 5
SETTINGS = {
    "gamma": GAMMA,
    "lam": LAM,
    "gdpo_reward_keys": ["score", "style"],
    "gdpo_reward_weights": [1.0, 0.5],
    "episode_agents": ["solver"],
    "step_gamma": GAMMA,
}
Table = list[list[float]]


class Rows:
    """The batch as lists."""

    def __init__(self, fields: dict) -> None:
        self.rewards: Table = fields["token_level_rewards"].tolist()
        self.mask: list[list[int]] = fields["response_mask"].tolist()
        self.values: Table = fields["values"].tolist()
        self.baselines: list[float] = fields["reward_baselines"].tolist()
        self.log_probs: Table = fields["old_log_probs"].tolist()
        self.squares: Table = fields["sum_pi_squared"].tolist()
        self.is_weights: Table = fields["rollout_is_weights"].tolist()
        self.style = [row["style"] for row in fields["reward_extra"]]
        self.uid = list(fields["uid"])
        self.agent = list(fields["agent"])
        self.states = list(fields["turn_states"])
        self.spans = list(fields["turn_spans"])
        self.size = len(self.uid)
        self.scores = [math.fsum(row) for row in self.rewards]

    def group(self, row: int) -> list[int]:
        return [other for other in range(self.size) if self.uid[other] == self.uid[row]]

    def own(self, row: int) -> list[int]:
        return [t for t in range(WIDTH) if self.mask[row][t]]

    def spread(self, per_row: list[float]) -> Table:
        return [
            [per_row[row] * self.mask[row][t] for t in range(WIDTH)] for row in range(self.size)
        ]

    def whitened(self, table: Table) -> Table:
        tokens = [table[row][t] for row in range(self.size) for t in self.own(row)]
        if len(tokens) < 2:
            return [[0.0] * WIDTH for _ in range(self.size)]
        mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
        scale = 1 / math.sqrt(variance + 1e-8)
        return [
            [(table[r][t] - mean) * scale * self.mask[r][t] for t in range(WIDTH)]
            for r in range(self.size)
        ]

    def to_go(self, row: int, t: int) -> float:
        return math.fsum(self.rewards[row][t:])


def relative(rows: Rows, scores: list[float], *, use_std: bool = True) -> list[float]:
    results = []
    for row in range(rows.size):
        group = [scores[other] for other in rows.group(row)]
        if len(group) == 1:
            results.append(scores[row] / (1 + 1e-6 if use_std else 1))
            continue
        distance = scores[row] - statistics.fmean(group)
        results.append(distance / (statistics.stdev(group) + 1e-6) if use_std else distance)
    return results


def grpo(rows: Rows) -> Table:
    return rows.spread(relative(rows, rows.scores))


def grpo_passk(rows: Rows) -> Table:
    results = []
    for row in range(rows.size):
        group = sorted((rows.scores[other] for other in rows.group(row)), reverse=True)
        if len(group) == 1:
            results.append(rows.scores[row] / (1 + 1e-6))
        elif rows.scores[row] == group[0]:
            results.append((group[0] - group[1]) / (statistics.stdev(group) + 1e-6))
        else:
            results.append(0.0)
    return rows.spread(results)


def rloo(rows: Rows) -> Table:
    results = []
    for row in range(rows.size):
        others = [rows.scores[other] for other in rows.group(row) if other != row]
        results.append(rows.scores[row] - (statistics.fmean(others) if others else 0))
    return rows.spread(results)


def opo(rows: Rows) -> Table:
    results = []
    for row in range(rows.size):
        group = rows.group(row)
        lengths = [len(rows.own(other)) for other in group]
        if not sum(lengths):
            lengths = [1] * len(group)
        mean = sum(
            length * rows.scores[other] for length, other in zip(lengths, group, strict=True)
        ) / sum(lengths)
        results.append(rows.scores[row] - (mean if len(group) > 1 else 0))
    return rows.spread(results)


def gpg(rows: Rows) -> Table:
    differs = [
        len({rows.scores[other] for other in rows.group(row)}) > 1 for row in range(rows.size)
    ]
    count = sum(differs[row] or len(rows.group(row)) == 1 for row in range(rows.size))
    alpha = rows.size / max(count, 1)
    return rows.spread([alpha * value for value in relative(rows, rows.scores, use_std=False)])


def reinforce_plus_plus_baseline(rows: Rows) -> Table:
    return rows.whitened(rows.spread(relative(rows, rows.scores, use_std=False)))


def reinforce_plus_plus(rows: Rows) -> Table:
    table = []
    for row in range(rows.size):
        to_go, line = 0.0, [0.0] * WIDTH
        for t in reversed(range(WIDTH)):
            to_go = rows.rewards[row][t] + (GAMMA * to_go if rows.mask[row][t] else to_go)
            line[t] = to_go * rows.mask[row][t]
        table.append(line)
    return rows.whitened(table)


def remax(rows: Rows) -> Table:
    return [
        [(rows.to_go(row, t) - rows.baselines[row]) * rows.mask[row][t] for t in range(WIDTH)]
        for row in range(rows.size)
    ]


def gae(rows: Rows) -> Table:
    """The definition: a sum over later own tokens of (gamma lam)^k times their surprise."""
    table = []
    for row in range(rows.size):
        own, line = rows.own(row), [0.0] * WIDTH
        ends = [*own[1:], WIDTH][: len(own)]
        rewards = [
            math.fsum(rows.rewards[row][start:end]) for start, end in zip(own, ends, strict=True)
        ]
        values = [rows.values[row][t] for t in own] + [0.0]
        surprises = [reward + GAMMA * values[k + 1] - values[k] for k, reward in enumerate(rewards)]
        for k, t in enumerate(own):
            line[t] = sum((GAMMA * LAM) ** (j - k) * surprises[j] for j in range(k, len(own)))
        table.append(line)
    return rows.whitened(table)


def gdpo(rows: Rows) -> Table:
    parts = zip(relative(rows, rows.scores), relative(rows, rows.style), strict=True)
    total = [score + 0.5 * style for score, style in parts]
    known = [total[row] for row in range(rows.size) if rows.own(row)]
    if len(known) < 2:
        return rows.spread([0.0] * rows.size)
    mean, scale = statistics.fmean(known), 1 / math.sqrt(statistics.variance(known) + 1e-8)
    return rows.spread([(value - mean) * scale for value in total])


def energy(rows: Rows, row: int, t: int) -> float:
    return sum(
        max(0.0, 1 - 2 * math.exp(rows.log_probs[row][s]) + rows.squares[row][s])
        * rows.is_weights[row][s] ** 2
        for s in rows.own(row)
        if s <= t
    )


def against(rows: Rows, row: int, t: int, places: dict[int, int]) -> float:
    """`places`: for each answer of the group with a token there, where it is."""
    if len(places) == 1:
        return rows.to_go(row, t)
    weights = {other: energy(rows, other, place) for other, place in places.items()}
    if not sum(weights.values()):
        weights = dict.fromkeys(places, 1.0)
    total = sum(weight * rows.to_go(other, places[other]) for other, weight in weights.items())
    return rows.to_go(row, t) - total / sum(weights.values())


def optimal_token_baseline(rows: Rows) -> Table:
    return [
        [
            against(rows, row, t, {o: t for o in rows.group(row) if rows.mask[o][t]})
            if rows.mask[row][t]
            else 0.0
            for t in range(WIDTH)
        ]
        for row in range(rows.size)
    ]


def tir_optimal_token_baseline(rows: Rows) -> Table:
    table = []
    for row in range(rows.size):
        line = [0.0] * WIDTH
        for k, t in enumerate(rows.own(row)):
            places = {
                other: rows.own(other)[k] for other in rows.group(row) if len(rows.own(other)) > k
            }
            line[t] = against(rows, row, t, places)
        table.append(line)
    return table


def maxrl(rows: Rows) -> Table:
    results = []
    for row in range(rows.size):
        mean = statistics.fmean(rows.scores[other] for other in rows.group(row))
        is_alone = len(rows.group(row)) == 1
        results.append(0.0 if mean <= 0 or is_alone else (rows.scores[row] - mean) / mean)
    return rows.spread(results)


def hierarchical_grpo(rows: Rows) -> Table:
    """Every row is a rollout: a solver has no peers, a proposer those of the group."""
    results = []
    for row in range(rows.size):
        peers = [other for other in rows.group(row) if rows.agent[other] == rows.agent[row]]
        mean = statistics.fmean(rows.scores[other] for other in peers)
        results.append(0.0 if rows.agent[row] == "solver" else rows.scores[row] - mean)
    return rows.spread(results)


def rae(rows: Rows) -> Table:
    baselines: dict[str, float] = {}
    results = []
    for row in range(rows.size):
        baseline = baselines.get(rows.agent[row], 0.0)
        results.append(rows.scores[row] - baseline)
        baselines[rows.agent[row]] = 0.95 * baseline + 0.05 * rows.scores[row]
    return rows.spread(results)


def gigpo(rows: Rows) -> Table:
    """Equations 3, 6, 7 and 8, turn by turn."""
    turns = []
    for row in range(rows.size):
        starts = [start for start, _ in rows.spans[row]]
        ends = [*starts[1:], WIDTH]
        rewards = [math.fsum(rows.rewards[row][a:b]) for a, b in zip(starts, ends, strict=True)]
        for k, state in enumerate(rows.states[row]):
            to_go = sum(GAMMA ** (j - k) * rewards[j] for j in range(k, len(rewards)))
            turns.append((row, rows.spans[row][k], (rows.uid[row], state), to_go))
    table = rows.spread(relative(rows, rows.scores))
    for row, (start, end), anchor, to_go in turns:
        peers = [other_to_go for _, _, other, other_to_go in turns if other == anchor]
        if len(peers) == 1:
            continue
        step = (to_go - statistics.fmean(peers)) / (statistics.stdev(peers) + 1e-6)
        for t in range(start, end):
            table[row][t] += step * rows.mask[row][t]
    return table


REFERENCES: dict[str, Callable[[Rows], Table]] = {
    "gae": gae,
    "gdpo": gdpo,
    "gigpo": gigpo,
    "gpg": gpg,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "grpo_vectorized": grpo,
    "hierarchical_grpo": hierarchical_grpo,
    "maxrl": maxrl,
    "opo": opo,
    "optimal_token_baseline": optimal_token_baseline,
    "rae": rae,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "rloo": rloo,
    "rloo_vectorized": rloo,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
}


def test_every_estimator_has_a_reference() -> None:
    """A new one brings its own."""
    assert set(REFERENCES) == set(ADVANTAGES)


@pytest.mark.parametrize("name", list(REFERENCES))
@settings(deadline=None, max_examples=25)
@given(
    uid=st.lists(st.sampled_from("abcd"), min_size=1, max_size=9),
    density=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    seed=st.integers(0, 10_000),
)
def test_advantages(name: str, uid: list[str], density: float, seed: int) -> None:
    """To 1e-6 in float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(uid), WIDTH)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=torch.float64, generator=generator)

    styles = noise(len(uid)).tolist()
    fields = {
        "token_level_rewards": noise(*shape),
        "response_mask": (torch.rand(shape, generator=generator) < density).long(),
        "values": noise(*shape),
        "reward_baselines": noise(len(uid)),
        "old_log_probs": -noise(*shape).abs(),
        "sum_pi_squared": torch.rand(shape, dtype=torch.float64, generator=generator),
        "rollout_is_weights": 2 * torch.rand(shape, dtype=torch.float64, generator=generator),
        "reward_extra": np.array([{"style": style} for style in styles], dtype=object),
        "uid": np.array(uid, dtype=object),
        "data_source": ["game"] * len(uid),
        "agent": [("solver", "proposer")[(seed + row) % 3 == 0] for row in range(len(uid))],
        "turn_spans": [[(0, 2), (3, 4)] for _ in uid],
        "turn_states": [["start", "ab"[(seed + row) % 2]] for row in range(len(uid))],
    }
    advantages, _ = estimate_advantages(bind_options(ADVANTAGES.get(name), shared=SETTINGS), fields)
    expected = torch.tensor(REFERENCES[name](Rows(fields)), dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-6)
