# SPDX-License-Identifier: Apache-2.0
"""`quadriga env`: list environments, and play episodes of one."""

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from quadriga.cli.config import add_config_arguments, load_from
from quadriga.cli.loading import LazyModule
from quadriga.config import Config
from quadriga.config.rollout import ROLLOUT
from quadriga.data.episodes import episode_seed
from quadriga.errors import MachineError
from quadriga.rollout.environments.adapters import LIBRARIES
from quadriga.rollout.environments.interface import RANDOM
from quadriga.rollout.environments.libraries import identifiers
from quadriga.rollout.environments.pool import EnvironmentFailedError, EnvironmentPool
from quadriga.trainer.checkpoint import model_folder

if TYPE_CHECKING:
    from quadriga.trainer import evaluate
else:
    # It loads torch, which only a model needs.
    evaluate = LazyModule("quadriga.trainer.evaluate")

_SERVER_LIBRARIES = frozenset({"openenv"})
"""Libraries whose environments are named by the address of a server, so that none can be listed."""
_MAX_SHOWN_CHARACTERS = 2000


def main(argv: Sequence[str]) -> int:
    """List environments, or play episodes of one and print its turns."""
    parser = argparse.ArgumentParser(prog="quadriga env", description=main.__doc__)
    parser.add_argument("action", choices=("list", "try"), help="what to do")
    parser.add_argument(
        "name", nargs="?", help="list: a library; default: all. try: an environment, as env.name"
    )
    parser.add_argument("--episodes", type=int, default=1, metavar="N", help="try; default: 1")
    parser.add_argument(
        "--model", help="try: a model, run or checkpoint that plays; default: random actions"
    )
    parser.add_argument("--max-turns", type=int, default=50, metavar="N", help="try; default: 50")
    add_config_arguments(parser)
    options = parser.parse_intermixed_args(list(argv))
    if options.action == "list":
        if options.name not in (None, *LIBRARIES):
            parser.error(f"no library {options.name!r}; there are {', '.join(LIBRARIES)}")
        list_environments(options.name)
        return 0
    if options.name is None:
        parser.error("name an environment, such as my_env.py:MyEnv")
    if options.episodes < 1:
        parser.error(f"--episodes: got {options.episodes}, expected a positive number")
    if options.model is not None:
        return play_with_model(options)
    config = load_from(options, {"env.name": options.name})
    return play_at_random(config, options.episodes, options.max_turns)


def play_with_model(options: argparse.Namespace) -> int:
    """Play episodes with a model; return 1 if one failed, else 0.

    Args:
        options: arguments of the command.
    """
    status = 0
    with TemporaryDirectory(prefix="quadriga-") as folder:
        settings = {
            "env.name": options.name,
            "env.num_val_episodes": options.episodes,
            "actor_rollout_ref.model.path": model_folder(options.model),
            f"{ROLLOUT}.multi_turn.max_assistant_turns": options.max_turns,
            f"{ROLLOUT}.trace_dir": folder,
        }
        evaluate.evaluate(load_from(options, settings))
        # The traces have a line of JSON for each episode.
        lines = [
            line
            for file in sorted(Path(folder).iterdir())
            for line in file.read_text(encoding="utf-8").splitlines()
        ]
    for number, line in enumerate(lines):
        record = json.loads(line)
        print(f"---- episode {number}")
        print(record["prompt"][:_MAX_SHOWN_CHARACTERS])
        # The episode has ended before the model read the turns in `unread`.
        for turn in [*record["turns"], *record["unread"]]:
            if turn["role"] == "assistant":
                # `text` includes special tokens, so that a reply of nothing else is visible, too.
                print(f"> {turn['text'][:_MAX_SHOWN_CHARACTERS]}")
                continue
            for message in turn["messages"]:
                print(f"[{turn['role']}] {str(message['content'])[:_MAX_SHOWN_CHARACTERS]}")
        if record["failure"]:
            print(record["failure"])
            status = 1
        score = "none" if record["score"] is None else f"{record['score']:g}"
        print(f"= reward {score}; {record['finish_reason']}")
    return status


def list_environments(library: str | None) -> None:
    """Print the environments of a library, or, for None, each library with its number of environments."""
    for name in LIBRARIES if library is None else [library]:
        if name in _SERVER_LIBRARIES:
            print(f"{name}:ws://HOST:PORT    a server of OpenEnv")
            continue
        try:
            names = identifiers(name)
        except MachineError as error:
            print(f"{name}: not installed. {error.fix}")
            continue
        if library is None:
            print(f"{name}: {len(names)} environments, such as {name}:{names[0]}")
        else:
            print("\n".join(f"{name}:{identifier}" for identifier in names))
    if library is None:
        print("file.py:Class    a class of your own: docs/environments.md")


def play_at_random(config: Config, num_episodes: int, max_turns: int) -> int:
    """Play episodes with random actions; return 1 if one failed, else 0.

    Args:
        config: a configuration whose section `env` names the environment.
        num_episodes: number of episodes.
        max_turns: number of turns after which an episode is ended.
    """
    status = 0
    with closing(EnvironmentPool(config.env)) as pool:
        for number in range(num_episodes):
            seed = episode_seed(config.data.seed, number, is_validation=True)
            print(f"---- episode {number}, seed {seed}")
            try:
                asyncio.run(_play(pool, seed, max_turns))
            except EnvironmentFailedError as error:
                print(error.details or error)
                status = 1
    return status


async def _play(pool: EnvironmentPool, seed: int, max_turns: int) -> None:
    """Play one episode with random actions, and print its turns and rewards."""
    totals = dict.fromkeys(range(pool.config.num_agents), 0.0)
    generator = random.Random(seed)
    async with pool.open(seed, {}) as episode:
        step = await episode.reset()
        print(f"[agent {step.agent}] {step.text[:_MAX_SHOWN_CHARACTERS]}")
        for _ in range(max_turns):
            if step.is_done:
                break
            action = await episode.sample(step.text, generator.randrange(2**31), RANDOM)
            print(f"> {action}")
            # A call of a tool arrives as JSON.
            step = await episode.step(json.loads(action) if pool.description.schemas else action)
            print(f"[agent {step.agent}] {step.text[:_MAX_SHOWN_CHARACTERS]}")
            for agent, reward in step.rewards.items():
                totals[agent] += reward or 0.0
        for agent, reward in (await episode.finish()).rewards.items():
            totals[agent] += reward or 0.0
    rewards = ", ".join(f"{reward:g}" for reward in totals.values())
    print(f"= reward {rewards}; {'over' if step.is_done else 'not over'}")
