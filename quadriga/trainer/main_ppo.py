# SPDX-License-Identifier: Apache-2.0
"""`python -m quadriga.trainer.main_ppo key=value ...`, as in verl: runs `quadriga verl main_ppo`.

`quadriga train` is the command with the defaults of this package.
"""

import sys

from quadriga.cli.main import main
from quadriga.streams import install
from quadriga.trainer.launch import run_ppo
from quadriga.trainer.task_runner import TaskRunner

__all__ = ["TaskRunner", "run_ppo"]

if __name__ == "__main__":
    install()
    sys.exit(main(["verl", "main_ppo", *sys.argv[1:]]))
