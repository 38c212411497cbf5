# SPDX-License-Identifier: Apache-2.0
"""A pool of environments: limits, failures, restarts and equal texts for equal seeds."""

import asyncio
import os
import signal
from contextlib import closing
from typing import Any

import pytest

from quadriga.config.environment import EnvironmentConfig
from quadriga.errors import ConfigError
from quadriga.rollout.environments.pool import EnvironmentFailedError, EnvironmentPool

SOURCE = """
import os, random, socket, time

class Game:
    def __init__(self, fault=""):
        self.fault = fault

    def reset(self, seed=None):
        if self.fault == "reset":
            raise RuntimeError("no board")
        return f"{random.random()}", {"agent": 0}

    def step(self, action):
        if action == "pid":
            return str(os.getpid()), 0, False, False, {}
        if self.fault == "hang":
            time.sleep(3600)
        if self.fault == "die":
            os._exit(3)
        if self.fault == "network":
            socket.create_connection(("127.0.0.1", 9))
        reward = {"nan": float("nan"), "inf": float("inf"), "text": "much"}.get(self.fault, 0.5)
        text = "x" * 10_000_000 if self.fault == "long" else f"{action} {random.random()}"
        return text, reward, action == "end", False, {"agent": 5 if self.fault == "agents" else 0}
"""


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Reference of the class `Game`."""
    path = tmp_path_factory.mktemp("games") / "game.py"
    path.write_text(SOURCE)
    return f"{path}:Game"


def pool_of(game: str, fault: str = "", **settings: Any) -> EnvironmentPool:
    """A pool of one process."""
    settings = {"num_processes": 1, **settings}
    return EnvironmentPool(EnvironmentConfig(name=game, options={"fault": fault}, **settings))


async def play(pool: EnvironmentPool, seed: int, actions: list[str]) -> list[str]:
    """Texts of an episode."""
    async with pool.open(seed, {}) as episode:
        texts = [(await episode.reset()).text]
        for action in actions:
            texts.append((await episode.step(action)).text)
            await asyncio.sleep(0)
        await episode.finish()
    return texts


FAULTS = {
    "reset": "got RuntimeError: no board",
    "die": "ended with exit status 3, 3 times",
    "nan": "got the reward nan, expected a finite number",
    "inf": "got the reward inf, expected a finite number",
    "text": "got the reward 'much', expected a finite number",
    "agents": "agent 5 is to act, expected one of 1 agents",
    "network": r"environments have no network. Set env.network=True",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_an_environment_is_a_sentence(game: str, fault: str) -> None:
    with closing(pool_of(game, fault)) as pool:
        with pytest.raises(EnvironmentFailedError, match=FAULTS[fault]):
            asyncio.run(play(pool, 1, ["a"]))
        name = "died" if fault == "die" else "raised"
        assert pool.take_metrics()[f"env/{name}"].value == 1


def test_an_error_counts_steps_but_no_choices_of_actions(game: str) -> None:
    async def run(pool: EnvironmentPool) -> None:
        async with pool.open(1, {}) as episode:
            await episode.reset()
            await episode.sample("Guess, as in [3].", 1, "random")
            with pytest.raises(EnvironmentFailedError, match="step after 0 steps"):
                await episode.step("a")

    with closing(pool_of(game, "nan")) as pool:
        asyncio.run(run(pool))


def test_a_step_that_hangs_costs_its_own_episode(game: str) -> None:
    async def run(pool: EnvironmentPool) -> tuple[Any, Any]:
        async with pool.open(1, {}) as episode:
            first = await episode.reset()
            with pytest.raises(
                EnvironmentFailedError, match=r"no answer within 2 s \(env.timeout_s\)"
            ):
                await play(pool, 2, ["a"])
            # The process of this episode was killed, and a new one knows the episode.
            step = await episode.step("pid")
            return first, step

    with closing(pool_of(game, "hang", timeout_s=2.0)) as pool:
        _, step = asyncio.run(run(pool))
        assert int(step.text) != os.getpid()
        metrics = pool.take_metrics()
    assert metrics["env/timeouts"].value == 1
    assert metrics["env/replayed_episodes"].value == 1


def test_killed_processes_change_no_text(game: str) -> None:
    seeds = [3, 4, 3, 5, 6, 7, 8, 3]
    actions = ["a", "b", "c", "end"]

    async def play_all(pool: EnvironmentPool) -> list[list[str]]:
        return await asyncio.gather(*[play(pool, seed, actions) for seed in seeds])

    async def play_and_kill(pool: EnvironmentPool) -> list[list[str]]:
        async with pool.open(1, {}) as victim:
            await victim.reset()
            episodes = asyncio.create_task(play_all(pool))
            os.kill(int((await victim.step("pid")).text), signal.SIGKILL)
            return await episodes

    with closing(pool_of(game)) as pool:
        expected = asyncio.run(play_all(pool))
        assert asyncio.run(play_and_kill(pool)) == expected
        metrics = pool.take_metrics()
    assert expected[0] == expected[2] == expected[7] != expected[1]
    assert metrics["env/restarts"].value == 1
    assert metrics["env/irreproducible"].value == 0


def test_episodes_wait_for_their_place(game: str) -> None:
    async def count_open(pool: EnvironmentPool) -> int:
        async with pool.open(1, {}) as episode:
            await episode.reset()
            return len(pool._hosts[0].episodes)

    async def count_all(pool: EnvironmentPool) -> list[int]:
        return await asyncio.gather(*[count_open(pool) for _ in range(4)])

    with closing(pool_of(game, max_concurrent_episodes=1)) as pool:
        assert asyncio.run(count_all(pool)) == [1, 1, 1, 1]


def test_a_long_observation_is_cut(game: str) -> None:
    with closing(pool_of(game, "long", max_observation_length=100)) as pool:
        assert len(asyncio.run(play(pool, 1, ["a"]))[1]) == 100


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chess:Chess-v0", "expected one of textarena:ID, gem:ID"),
        ("nothing.py:Game", "which is not a file"),
    ],
)
def test_an_unknown_environment_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pool_of(name)
