# SPDX-License-Identifier: Apache-2.0
"""The `external_lib` of a run on Ray: its workers have the stand-in for as long as they live.

They may be killed at any time, so what is found goes to a file, behind a line for each worker.
"""

import os
from pathlib import Path

import torch

from tests.rehearsal.stand_in import StandIn

FINDINGS = "QUADRIGA_REHEARSAL_FINDINGS"
"""The variable that names the file."""
STARTED = "a worker with the stand-in"

if not torch.cuda.is_available():  # the process of the tests has it already
    with Path(os.environ[FINDINGS]).open("a") as file:
        file.write(f"{STARTED}\n")
    installed = StandIn(num_devices=1, file=Path(os.environ[FINDINGS])).installed()
    installed.__enter__()
