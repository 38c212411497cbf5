# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout.serve`: the policy behind an HTTP API, while it is trained."""

from typing import Annotated

from pydantic import Field, PositiveFloat

from quadriga.config.base import Section
from quadriga.config.types import Name, PathText

KEY_VARIABLE = "QUADRIGA_SERVE_KEY"
"""Environment variable with the key that callers must have."""


class ServeConfig(Section):
    """The HTTP server in front of the rollout. `quadriga serve` reads the section, too."""

    enable: bool = False
    """Whether training serves the policy, beside its own rollouts. `server.json` in the run's directory has the
    address and the key."""
    host: Name = "127.0.0.1"
    """Address that the server listens on. Others than loopback need a key in QUADRIGA_SERVE_KEY."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the server. 0: a free one."""
    model_name: Name | None = None
    """Name of the model in calls. null: `actor_rollout_ref.model.path`."""
    timeout_s: PositiveFloat = 120.0
    """Time limit of a call, in seconds; the wait for the rollout between two generations counts."""
    record_file: PathText | None = None
    """JSONL file to which each answered call is appended: tokens, both log-probabilities, seed. null: none."""
