# SPDX-License-Identifier: Apache-2.0
"""The program that test_trace.py starts: a training step of the playground with GRPO in one process, and the functions
of the package that it enters between `update_actor` in the loop and the first backward pass.

    python trace_update.py FOLDER

Prints `FILE FUNCTION` for each, in the order in which they are entered first; lambdas and comprehensions are left out.
"""

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import quadriga
from quadriga.cli.main import main
from quadriga.observe.timing import PhaseTimer
from quadriga_recipes import playground

PACKAGE = Path(quadriga.__file__).parent
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return len(solution_str) % 7"
phase = PhaseTimer.phase
entered: dict[str, None] = {}


def note(frame: FrameType, event: str, _: Any) -> None:
    """Called by Python for each call and return."""
    code = frame.f_code
    if (
        event == "call"
        and code.co_filename.startswith(f"{PACKAGE}/")
        and not code.co_name.startswith("<")
    ):
        entered[f"{Path(code.co_filename).relative_to(PACKAGE)} {code.co_qualname}"] = None


def begin(timer: PhaseTimer, name: str) -> Any:
    """The phase of the loop; that of the update is traced."""
    if name == "update_actor":
        sys.setprofile(note)
    return phase(timer, name)


def end(*_: Any, **__: Any) -> None:
    """In place of the first backward pass."""
    sys.setprofile(None)
    print("\n".join(["entered:", *entered]), flush=True)
    os._exit(0)


def train(folder: Path) -> None:
    """One step on a model that has learned nothing, whose responses differ in length."""
    playground.NUM_SFT_ROWS = 64
    playground.prepare_playground(folder)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    PhaseTimer.phase, torch.Tensor.backward = begin, end
    policy = "actor_rollout_ref"
    sizes = [
        "data.train_batch_size=4",
        f"{policy}.actor.ppo_mini_batch_size=4",
        f"{policy}.rollout.n=4",
    ]
    run = [
        f"trainer.default_local_dir={folder}/run",
        "trainer.save_freq=-1",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
    ]
    model = [
        f"{policy}.model.path={folder}/model",
        f"custom_reward_function.path={folder}/reward.py",
    ]
    main(["train", "--config", str(folder / "sums.yaml"), *sizes, *run, *model])


if __name__ == "__main__":
    train(Path(sys.argv[1]))
