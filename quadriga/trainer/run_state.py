# SPDX-License-Identifier: Apache-2.0
"""What the driver must remember for a resumed run to be the same run: position, controller, random states."""

import io
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quadriga.errors import CheckpointError

_FILE = "state.pt"


def save_run_state(directory: Path, *, step: int, loader: dict[str, Any], kl_controller: dict[str, Any]) -> None:
    """Write the driver's part of a checkpoint into `directory/trainer`."""
    target = directory / "trainer"
    target.mkdir(parents=True, exist_ok=True)
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "step": step,
        "loader": loader,
        "kl_controller": kl_controller,
        "random": {
            "python": random.getstate(),
            "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        },
    }
    # Through memory: torch reports a full disk in its own words, Python as what it is.
    content = io.BytesIO()
    torch.save(state, content)
    (target / _FILE).write_bytes(content.getvalue())


def load_run_state(directory: Path) -> dict[str, Any]:
    """Read what `save_run_state` wrote, and put the random states back.

    Returns:
        `step`, `loader` and `kl_controller`.

    Raises:
        CheckpointError: the file cannot be read.
    """
    path = directory / "trainer" / _FILE
    try:
        state = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            str(path),
            got=str(error).strip().partition("\n")[0],
            expected="the state of a run",
            fix="Resume from another checkpoint. The state of a data set or sampler of your own must be made of "
            "numbers, texts, lists, dictionaries and tensors.",
        ) from error
    saved = state["random"]
    random.setstate(saved["python"])
    kind, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(saved["cuda"])
    return {name: state[name] for name in ("step", "loader", "kl_controller")}
