# SPDX-License-Identifier: Apache-2.0
"""Saves checkpoints while training continues: one starts between two steps and ends some later.

    driver                                    workers
      start    -- save_checkpoint ---------->   copy their state; threads write it
      step ...
      poll     -- checkpoint_written ------->   have the threads finished?
        | thread: list, sync, read back,
        |         rename, delete older ones
      step ...
      poll     report the checkpoint if the thread has finished

Consumes: the folder that the workers write. Waits for: nothing, except that `start` waits for the
previous checkpoint, and `finish` for the current one. Unblocked by: the threads of the workers,
which call no collective. An error in any thread is raised by the next call.

The second half of this file is the driver's part of a checkpoint: the position in the data, the KL
controller and the random states, which make a resumed run the same run.
"""

import io
import pickle
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quadriga.background import in_background
from quadriga.errors import CheckpointError, DamagedCheckpointError, QuadrigaError
from quadriga.observe.watchdog import waiting
from quadriga.trainer.checkpoint import Checkpoints

RUN_STATE = "state.pt"
_FIX = "Resume from another checkpoint."


@dataclass
class PendingCheckpoint:
    """A checkpoint that is being written."""

    step: int
    folder: Path
    begun: float  # second of `time.monotonic`, for durations
    begun_at: float  # seconds since 1970, for comparison with the times of files
    completion: Future[None] | None = None  # set once the workers have written their parts


class CheckpointSaver:
    """Writes the checkpoints of a run, one at a time.

    Args:
        checkpoints: where they are written.
        workers: worker groups with `save_checkpoint` and `checkpoint_written`, by the name of the
            folder that they write.
        write_own_part: writes the driver's part into a folder.
        report: called with a sentence when a checkpoint is complete.

    Attributes:
        longest_s: seconds from start to completion of the slowest checkpoint so far.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        workers: Mapping[str, Any],
        write_own_part: Callable[[Path], None],
        report: Callable[[str], None],
    ) -> None:
        self.checkpoints = checkpoints
        self.workers = workers
        self.write_own_part = write_own_part
        self.report = report
        self.longest_s = 0.0
        self._pending: PendingCheckpoint | None = None

    def start_where_due(self, step: int, *, is_due: bool, is_last: bool) -> None:
        """Start the checkpoint of a step if it is due or the run may end.

        Args:
            step: number of the step.
            is_due: whether `trainer.save_freq` asks for one after this step.
            is_last: whether the run may end with this step.
        """
        if is_due or is_last:
            self.start(step)

    def start(self, step: int) -> None:
        """Start the checkpoint of a step, after waiting for the previous one.

        Raises:
            CheckpointError: this checkpoint or the previous one cannot be written. Older ones are
                untouched.
        """
        # The workers' threads write one checkpoint at a time.
        self.finish()
        begun = time.monotonic()
        begun_at = time.time()
        folder = self.checkpoints.begin(step)
        try:
            wait = waiting(f"the checkpoint of step {step} to be begun", emit=self.report)
            with self.checkpoints.guarded(step), wait:
                for worker in self.workers.values():
                    worker.save_checkpoint(folder.absolute())
                self.write_own_part(folder)
        except KeyboardInterrupt:
            # `guarded` does not delete the folder then, and nothing would complete it.
            self.checkpoints.abandon(step)
            raise
        self._pending = PendingCheckpoint(step, folder, begun, begun_at)

    def poll(self, *, wait: bool = False) -> bool:
        """Check how far the current checkpoint is, and start its completion once it is written.

        Args:
            wait: wait until it is complete.

        Returns:
            True if no checkpoint is being written any more.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        pending = self._pending
        if pending is None:
            return True
        try:
            # First the workers write their parts, then a thread completes the checkpoint.
            if pending.completion is None:
                with self.checkpoints.guarded(pending.step):
                    # Whether each rank has written its part. Every group is asked, even if one has
                    # not finished: the call also lets the ranks of a group advance together.
                    outputs = []
                    for worker in self.workers.values():
                        outputs += worker.checkpoint_written(wait=wait)
                    if not all(outputs):
                        return False
                    self._require_shared_folder(pending.folder)
                # Checksums and fsync take seconds to minutes, so they run in a thread.
                pending.completion = in_background(partial(self.complete, pending), "checkpoint")
            if not wait and not pending.completion.done():
                return False
            pending.completion.result()
        # Not on KeyboardInterrupt: the threads continue, and `settle` may complete the checkpoint.
        except Exception:
            self._pending = None
            raise
        self._pending = None
        self.longest_s = max(self.longest_s, time.monotonic() - pending.begun)
        self.report(f"checkpoint: {self.checkpoints.path(pending.step)}")
        return True

    def complete(self, pending: PendingCheckpoint) -> None:
        """Turn the workers' files into a complete checkpoint. Called in a thread."""
        self.checkpoints.complete(pending.step)

    def _require_shared_folder(self, folder: Path) -> None:
        """Check that files which workers on other nodes have written are visible here.

        Raises:
            CheckpointError: a worker's folder is not there.
        """
        for part in self.workers:
            if not (folder / part).is_dir():
                raise CheckpointError(
                    str(folder / part),
                    got="nothing here, though the worker has written it",
                    expected="the same folder on every node",
                    fix="Set trainer.default_local_dir to a disk that all nodes share.",
                )

    def finish(self) -> None:
        """Wait until no checkpoint is being written.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        if self._pending is not None:
            awaited = f"the checkpoint of step {self._pending.step} to be written"
            with waiting(awaited, emit=self.report):
                self.poll(wait=True)

    def settle(self, *, can_ask: bool) -> None:
        """Complete or remove the current checkpoint when a run ends before its last step.

        Args:
            can_ask: whether the workers can still be called. If not, only a checkpoint whose files
                they have already written is completed.
        """
        pending = self._pending
        if pending is None:
            return
        try:
            if can_ask or pending.completion is not None:
                self.finish()
                return
            self.checkpoints.abandon(pending.step)
            print(
                f"The checkpoint of step {pending.step} was not yet complete and has been deleted."
            )
        except QuadrigaError as error:
            print(error)
        finally:
            self._pending = None


def save_run_state(
    directory: Path, state: dict[str, Any], *, with_random_states: bool = True
) -> None:
    """Write the driver's part of a checkpoint into `directory/trainer`.

    Args:
        directory: folder of the checkpoint.
        state: plain values and tensors.
        with_random_states: add the random states of this process.

    Raises:
        CheckpointError: a user's data set or sampler has a state that could not be read again.
    """
    target = directory / "trainer"
    target.mkdir(parents=True, exist_ok=True)
    if with_random_states:
        state = state | {"random": random_states()}
    # Through memory: on a full disk, torch would raise a RuntimeError instead of an OSError.
    content = io.BytesIO()
    torch.save(state, content)
    # A state that cannot be loaded must not become a checkpoint.
    _parse_state(content.getvalue(), target / RUN_STATE)
    (target / RUN_STATE).write_bytes(content.getvalue())


def load_run_state(directory: Path, step: int) -> dict[str, Any]:
    """Read the driver's part of a checkpoint; random states, if any, are under "random".

    Args:
        directory: folder of the checkpoint.
        step: the step after which it was written.

    Raises:
        DamagedCheckpointError: the file cannot be read, or belongs to another step.
    """
    path = directory / "trainer" / RUN_STATE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(
            str(path),
            got=error.strerror or str(error),
            expected="the state of a run",
            fix=_FIX,
        ) from error
    state = _parse_state(content, path)
    step_of_state = state.get("step") if isinstance(state, dict) else None
    if step_of_state != step:
        # If the folders of two checkpoints were swapped, their manifests are still right.
        raise DamagedCheckpointError(
            str(path),
            got=f"the state after step {step_of_state}",
            expected=f"the state after step {step}",
            fix=_FIX,
        )
    return state


def seed_generators(seed: int) -> None:
    """Seed the global random generators of Python, NumPy and torch.

    Users' data sets and rewards may draw from them. Quadriga's code has its own generators.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # takes 32 bits
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """Random states of Python, NumPy and torch in this process, as plain values and tensors."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": [],
    }
    # Without this check, reading the state would initialize CUDA, on a GPU that belongs to the
    # workers.
    if torch.cuda.is_initialized():
        states["cuda"] = [torch.cuda.get_rng_state()]
    return states


def restore_random_states(saved: dict[str, Any]) -> None:
    """Restore the states that `random_states` returned."""
    random.setstate(saved["python"])
    kind, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(saved["cuda"][0])


def _parse_state(content: bytes, path: Path) -> dict[str, Any]:
    """Parse a file of `save_run_state` without running code from it.

    Raises:
        DamagedCheckpointError: the file holds anything but plain values and tensors, or is damaged.
    """
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except (EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise DamagedCheckpointError(
            str(path),
            got=str(error).strip().partition("\n")[0] or type(error).__name__,
            expected="the state of a run, in numbers, texts, lists, dictionaries and tensors",
            fix=f"{_FIX} If the error comes at a save, it is the state_dict of your own data set "
            "or sampler.",
        ) from error
