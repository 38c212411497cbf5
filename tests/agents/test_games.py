# SPDX-License-Identifier: Apache-2.0
"""Games of TextArena and GEM, played by random moves: many episodes at once, the same texts for the same seed."""

import asyncio
import random
from collections import Counter
from contextlib import closing

import pytest

from quadriga.config.environment import EnvironmentConfig
from quadriga.rollout.environments.pool import EnvironmentFailedError, EnvironmentPool
from tests.agents.moves import GARBAGE, GEM, TEXTARENA, Generator

EPISODES = 100
AT_ONCE = 8
MAX_STEPS = 40

CASES = [(f"textarena:{name}", move) for name, move in TEXTARENA.items()]
CASES += [(f"gem:{name}", move) for name, move in GEM.items()]


async def play(pool: EnvironmentPool, seed: int, move: Generator) -> list[str]:
    """Texts of an episode, with its rewards."""
    generator = random.Random(seed)
    texts = []
    async with pool.open(seed, {}) as episode:
        step = await episode.reset()
        while not step.is_done and len(texts) < MAX_STEPS:
            texts.append(step.text)
            is_garbage = generator.random() < 0.2
            action = generator.choice(GARBAGE) if is_garbage else move(generator, step.text)
            step = await episode.step(action)
        end = await episode.finish()
    return [*texts, step.text, repr(dict(step.rewards)), repr(dict(end.rewards))]


async def play_all(
    pool: EnvironmentPool, seeds: list[int], move: Generator, errors: Counter[str]
) -> dict[int, list[str]]:
    """Texts of the episodes by seed, `AT_ONCE` at a time; errors of the game itself are counted by name."""
    places = asyncio.Semaphore(AT_ONCE)
    texts = {}

    async def play_one(seed: int) -> None:
        async with places:
            try:
                texts[seed] = await play(pool, seed, move)
            except EnvironmentFailedError as error:
                assert "site-packages" in error.details, error.details
                last_line = error.details.strip().splitlines()[-1]
                errors[last_line.partition(":")[0]] += 1

    await asyncio.gather(*map(play_one, seeds))
    return texts


@pytest.mark.parametrize(("name", "move"), CASES, ids=[name for name, _ in CASES])
def test_a_game_runs_a_hundred_episodes(name: str, move: Generator) -> None:
    errors = Counter[str]()
    with closing(EnvironmentPool(EnvironmentConfig(name=name, num_processes=2))) as pool:
        texts = asyncio.run(play_all(pool, list(range(EPISODES)), move, errors))
        again = asyncio.run(play_all(pool, list(range(AT_ONCE)), move, Counter()))
    if errors:
        print(f"{name}: errors of the game itself: {dict(errors)}")
    assert len(texts) + errors.total() == EPISODES
    assert len(texts) >= EPISODES // 2
    assert again == {seed: texts[seed] for seed in again}
    assert len({tuple(text) for text in texts.values()}) > 1
