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
_FIX = "Resume from another checkpoint."


def save_run_state(
    directory: Path,
    *,
    step: int,
    loader: dict[str, Any],
    kl_controller: dict[str, Any],
    with_random_states: bool = True,
) -> None:
    """Write the driver's part of a checkpoint into `directory/trainer`.

    Args:
        directory: of the checkpoint.
        step: after which it is written.
        loader: state of the training data's loader.
        kl_controller: its state.
        with_random_states: whether those of this process are part of it.

    Raises:
        CheckpointError: `loader` holds, from a data set or sampler of a user's own, what could not be read again.
    """
    target = directory / "trainer"
    target.mkdir(parents=True, exist_ok=True)
    state = {"step": step, "loader": loader, "kl_controller": kl_controller}
    if with_random_states:
        state["random"] = random_states()
    # Through memory: torch reports a full disk in its own words, Python as what it is.
    content = io.BytesIO()
    torch.save(state, content)
    _parse(content.getvalue(), target / _FILE)
    (target / _FILE).write_bytes(content.getvalue())


def load_run_state(directory: Path, *, with_random_states: bool = True) -> dict[str, Any]:
    """Read what `save_run_state` wrote, and put the random states back if they are there and wanted.

    Returns:
        `step`, `loader` and `kl_controller`.

    Raises:
        CheckpointError: the file cannot be read.
    """
    path = directory / "trainer" / _FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(str(path), got=f"{error.strerror}", expected="the state of a run", fix=_FIX) from error
    state = _parse(content, path)
    if with_random_states and "random" in state:
        restore_random_states(state["random"])
    return {name: state[name] for name in ("step", "loader", "kl_controller")}


def random_states() -> dict[str, Any]:
    """Those of Python, numpy and torch in this process."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_states(saved: dict[str, Any]) -> None:
    """Put back what `random_states` gave."""
    random.setstate(saved["python"])
    kind, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(saved["cuda"])


def _parse(content: bytes, path: Path) -> dict[str, Any]:
    """Without running code from the file, so of plain values and tensors only."""
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except (EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            str(path),
            got=str(error).strip().partition("\n")[0] or type(error).__name__,
            expected="the state of a run, in numbers, texts, lists, dictionaries and tensors",
            fix=f"{_FIX} If the error comes at a save, it is the state_dict of your own data set or sampler.",
        ) from error
