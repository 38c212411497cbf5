# SPDX-License-Identifier: Apache-2.0
"""`python -m quadriga.trainer.main_ppo key=value ...`: train. The same as `quadriga train`."""

import sys

from quadriga.cli.main import main
from quadriga.trainer.launch import run_ppo
from quadriga.trainer.task_runner import TaskRunner

__all__ = ["TaskRunner", "run_ppo"]

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
