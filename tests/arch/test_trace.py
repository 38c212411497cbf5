# SPDX-License-Identifier: Apache-2.0
"""The way of an update stays short: how many functions of ours a reader meets until the first backward pass."""

import os
import subprocess
import sys
from pathlib import Path

from arch_tree import REPOSITORY
from tests.limits import PROGRAM_S

# To be lowered as the way gets shorter; raised only with a reason: 80 functions in 22 files before attention was
# computed in blocks, without masks, and before the engine rested between phases; 88 in 23 before windows, capped
# logits and layers that are computed one row at a time; 93 before CUDA had ways of its own, which are chosen there; 95
# before `zero_outside`, `map_rows` and the check of row numbers were functions instead of repeated expressions;
# 98 before waiting for a future among the arguments was a function;
# 100 before an update could return its first outputs; 101 before all objectives shared one aggregation, the losses
# beside the policy loss had a function of their own, and tokens of tools and users could have a loss; 105 before
# the mean over tokens was one function instead of five expressions, and the even division of rows had one too;
# 108 in 25 before expressions that were written in several places became functions (selecting entries, joining
# neighbours, the logit rule, the tokens of images, a model's backbone, dividing rows into balanced parts).
MAX_FUNCTIONS, MAX_FILES = 118, 26


def test_the_way_of_an_update(tmp_path: Path) -> None:
    """From `update_actor` in the loop to the first backward pass: the playground, GRPO, one process, traced.

    Distinct functions with a name, each with its file; Ray's way and the optimizer step are not in it.
    """
    program = Path(__file__).with_name("trace_update.py")
    environment = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    environment["PYTHONPATH"] = (
        f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'recipes'}{os.pathsep}{REPOSITORY / 'packages'}"
    )
    command = [sys.executable, str(program), str(tmp_path)]
    run = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=PROGRAM_S
    )
    _, _, trace = run.stdout.partition("entered:\n")
    entered = [line.split(" ", 1) for line in trace.splitlines()]
    assert any(name == "FSDPEngine.backward" for _, name in entered), run.stdout + run.stderr
    files = {file for file, _ in entered}
    assert len(entered) <= MAX_FUNCTIONS and len(files) <= MAX_FILES, (
        f"{len(entered)} in {len(files)}:\n{trace}"
    )
