# SPDX-License-Identifier: Apache-2.0
"""`quadriga serve`: serve a model or a checkpoint over HTTP, until Ctrl-C."""

import argparse
import os
import threading
from collections.abc import Sequence

from quadriga.cli.config import add_config_arguments, load_from
from quadriga.config import Config
from quadriga.config.placement import rollout_group_size
from quadriga.config.rollout import ROLLOUT
from quadriga.config.serve import KEY_VARIABLE
from quadriga.errors import ConfigError
from quadriga.trainer.build import build_tokenizer, frozen_team, rollout_of
from quadriga.trainer.checkpoint import model_folder
from quadriga.trainer.roles import Role
from quadriga.trainer.serving import check_server, start_server
from quadriga.workers.generation import num_positions

_ABOUT = f"""Serve a model: POST /v1/chat/completions and /inference/v1/generate, GET /v1/models.

Callers need the key in the environment variable {KEY_VARIABLE}, if it is set."""
_LONGEST = 8192  # default limit for tokens of prompt and response
# Ctrl-C ends the command within this time, even in the middle of a long computation.
_END_S = 1.2
_STATUS_OF_INTERRUPT = 130


def main(argv: Sequence[str]) -> int:
    """Run `quadriga serve`, until KeyboardInterrupt."""
    parser = argparse.ArgumentParser(
        prog="quadriga serve",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        help="a Hugging Face folder or name, a run's directory, or one of its global_step_N",
    )
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one (default: 8000)")
    parser.add_argument("--name", help="name of the model in calls (default: as it is given here)")
    parser.add_argument(
        "--max-model-len",
        type=int,
        help=f"tokens of prompt and response (default: the model's positions, at most {_LONGEST})",
    )
    parser.add_argument("--timeout", type=float, help="seconds of a call (default: 120)")
    parser.add_argument("--record", help="a JSONL file to which each answered call is appended")
    add_config_arguments(parser)
    arguments = parser.parse_intermixed_args(list(argv))
    settings = {
        "actor_rollout_ref.model.path": model_folder(arguments.model),
        f"{ROLLOUT}.max_model_len": arguments.max_model_len,
        f"{ROLLOUT}.serve.enable": True,
        f"{ROLLOUT}.serve.host": arguments.host,
        f"{ROLLOUT}.serve.port": arguments.port,
        f"{ROLLOUT}.serve.model_name": arguments.name or arguments.model,
        f"{ROLLOUT}.serve.timeout_s": arguments.timeout,
        f"{ROLLOUT}.serve.record_file": arguments.record,
    }
    serve(_limit_length(load_from(arguments, settings)))
    return 0


def serve(config: Config) -> None:
    """Serve the configured model until KeyboardInterrupt.

    Raises:
        ConfigError: several ranks would hold the model together, or the server cannot listen.
    """
    size = rollout_group_size(config)
    if size > 1:
        raise ConfigError(
            f"{ROLLOUT}.tensor_model_parallel_size",
            got=f"groups of {size} ranks",
            expected="engines that hold the whole model",
            fix="Leave out trainer.backend=ray, or serve with vLLM itself.",
        )
    check_server(config)
    tokenizer = build_tokenizer(config)
    with frozen_team(config, tokenizer, Role.ActorRollout) as team:
        server, key = start_server(config, tokenizer, rollout_of(team), makes_key=False)
        access = f"with the key in {KEY_VARIABLE}" if key else "without a key"
        print(f"serving {server.app.policy.name} at {server.url}, {access}; Ctrl-C ends it")
        print(f"limits: {server.limits}", flush=True)
        try:
            # Other threads answer requests; this one waits for Ctrl-C.
            threading.Event().wait()
        finally:
            # Closing may have to wait for a computation in C code. After this time the process ends
            # anyway, with the status of an interrupted command.
            deadline = threading.Timer(_END_S, os._exit, (_STATUS_OF_INTERRUPT,))
            deadline.daemon = True
            deadline.start()
            server.close()
            rollout_of(team).method("close")()


def _limit_length(config: Config) -> Config:
    """Set `rollout.max_model_len` to the model's positions or `_LONGEST`, unless it is set."""
    policy = config.actor_rollout_ref
    if policy.rollout.max_model_len is not None:
        return config
    limit = min(num_positions(config) or _LONGEST, _LONGEST)
    rollout = policy.rollout.model_copy(update={"max_model_len": limit})
    policy = policy.model_copy(update={"rollout": rollout})
    return config.model_copy(update={"actor_rollout_ref": policy})
