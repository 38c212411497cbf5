# SPDX-License-Identifier: Apache-2.0
"""The HTTP server in front of a rollout, in training and for `quadriga serve`."""

import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from os import environ
from pkgutil import resolve_name
from typing import Any

from quadriga.config import Config
from quadriga.config.placement import rollout_group_size
from quadriga.config.serve import KEY_VARIABLE
from quadriga.errors import MachineError
from quadriga.single_controller import WorkerGroup
from quadriga.workers.generation import build_processor, num_positions, vocabulary_size

ADDRESS_FILE = "server.json"


def check_server(config: Config) -> None:
    """Check that a server can be started, if the configuration asks for one.

    Raises:
        MachineError: a package is missing.
        ConfigError: the server cannot listen on its address.
    """
    if not config.actor_rollout_ref.rollout.serve.enable:
        return
    try:
        require_address = resolve_name("quadriga.serve.server:require_address")
    except ModuleNotFoundError as error:
        raise MachineError(
            "actor_rollout_ref.rollout.serve",
            got=f"no package {error.name}",
            expected="starlette and uvicorn",
            fix="Install them: pip install -e '.[serve]'.",
        ) from error
    require_address(config)


def start_server(
    config: Config, tokenizer: Any, rollout: WorkerGroup[Any], *, makes_key: bool
) -> tuple[Any, str]:
    """Start a server in front of a rollout.

    Args:
        config: the resolved configuration.
        tokenizer: the tokenizer of the policy.
        rollout: worker group of the rollout.
        makes_key: whether to make an API key if the environment has none.

    Returns:
        The `quadriga.serve.server.PolicyServer`, and its API key; "" if it needs none.

    Raises:
        ConfigError: the server cannot listen on its address.
    """
    # Imported on demand: Starlette and uvicorn are an extra.
    policy = resolve_name("quadriga.serve.policy:ServedPolicy").of(
        config,
        tokenizer,
        vocabulary_size=vocabulary_size(config),
        positions=num_positions(config),
        processor=build_processor(config),
    )
    # In a rollout group, the first rank takes the requests.
    leaders = rollout.ranks[:: rollout_group_size(config)]
    exchanges = [partial(_exchange, rollout, rank) for rank in leaders]
    key = environ.get(KEY_VARIABLE, "")
    if not key and makes_key:
        key = secrets.token_urlsafe(32)
    return resolve_name("quadriga.serve.server:PolicyServer")(config, policy, exchanges, key), key


class TrainingServer:
    """The server of a run, whose address and API key are in a file in the run's directory.

    Args:
        config: the resolved configuration.
        tokenizer: the tokenizer of the policy.
        rollout: worker group of the rollout.
    """

    def __init__(self, config: Config, tokenizer: Any, rollout: WorkerGroup[Any]) -> None:
        self._server, key = start_server(config, tokenizer, rollout, makes_key=True)
        self._file = config.trainer.directory / ADDRESS_FILE
        resolve_name("quadriga.serve.server:write_address")(self._server, key, self._file)
        server = self._server
        print(f"  serving the policy at {server.url}, key in {self._file}; {server.limits}")

    def close(self) -> None:
        """Stop the server, and remove the file."""
        self._server.close()
        with suppress(FileNotFoundError):
            self._file.unlink()


def _exchange(
    rollout: WorkerGroup[Any], rank: int, calls: Sequence[Any], cancelled: Collection[int]
) -> Any:
    """Exchange calls with the engine of a rank. Arguments and result are `CallQueue.exchange`'s."""
    # A copy of the group that calls only this rank.
    engine = copy(rollout).use_ranks([rank])
    [reply] = engine.resolve(engine.start_all("exchange_calls", [((calls, cancelled), {})]))
    return reply
