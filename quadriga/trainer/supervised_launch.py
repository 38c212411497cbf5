# SPDX-License-Identifier: Apache-2.0
"""Where a run of `quadriga sft` runs, as `launch.py` decides it for `quadriga train`. Loads neither torch nor Ray."""

from quadriga.config.sft import SFTConfig
from quadriga.trainer.launch import launch

RUN = "quadriga.trainer.supervised_run:run"


def run_sft(config: SFTConfig) -> None:
    """Train as `trainer.backend` says, and return when the run has ended.

    Raises:
        ConfigError: Ray is asked for and not installed.
        QuadrigaError: what went wrong in the run, wherever that was.
    """
    launch(RUN, config, num_processes=config.trainer.nnodes * config.trainer.n_gpus_per_node)
