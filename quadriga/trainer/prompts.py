# SPDX-License-Identifier: Apache-2.0
"""Endless, resumable stream of training prompts, and their `uid`s.

A step may take one batch or several; a checkpoint keeps the position after the last batch that was
taken. If the loader allows it, a thread reads the next batch in advance.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from copy import deepcopy
from typing import Any

from quadriga.background import in_background
from quadriga.data.rl_dataset import RLHFDataset
from quadriga.errors import CheckpointError, DataError
from quadriga.observe.watchdog import waiting, watched
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array

logger = logging.getLogger(__name__)

_BATCH = "a batch of prompts (data set, sampler, collation)"


class PromptStream:
    """Endless stream of batches of prompts: pass after pass over the data of a stateful loader.

    An epoch has as many batches as the loader reports at the start.

    Args:
        loader: the loader.
        num_epochs: number of passes of the run; None if it is not limited by passes.
        is_saved: whether checkpoints are written. Then a sampler that cannot be resumed causes a
            warning.

    Attributes:
        num_taken: number of batches since the start of the run, including those before a resume.
    """

    def __init__(
        self, loader: Any, *, num_epochs: int | None = None, is_saved: bool = False
    ) -> None:
        self.loader = loader
        self.num_epochs = num_epochs
        # Counted only once: a user's data set may grow, and later passes have more batches.
        self._epoch_batches = max(1, len(loader))
        self.num_taken = 0
        # The current pass; None if the next one has not begun.
        self._batches: Iterator[dict[str, Any]] | None = None
        # A user's loader need not have the method `lets_read_ahead`.
        self._reads_ahead = hasattr(loader, "lets_read_ahead") and loader.lets_read_ahead()
        # The batch that is read in advance, and the loader's state after it.
        self._next: Future[tuple[dict[str, Any], dict[str, Any]]] | None = None
        # The loader's state after the last batch taken; None if it is the loader's current state.
        self._state_after_taken: dict[str, Any] | None = None
        if is_saved and self.resume_obstacle:
            logger.warning(
                "data.sampler: no run can resume from the checkpoints: got %s.",
                self.resume_obstacle,
            )

    @property
    def resume_obstacle(self) -> str:
        """Why a resumed run would get other rows than an uninterrupted one; "" if it gets the same."""
        sampler = getattr(self.loader, "sampler", None)
        has_state = hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
        if hasattr(sampler, "update") and not has_state:
            name = type(sampler).__name__
            return (
                f"{name}, whose `update` learns from batches, without state_dict and "
                "load_state_dict"
            )
        return ""

    @property
    def epoch(self) -> int:
        """Number of complete passes over the data before the last batch that was taken."""
        return max(0, self.num_taken - 1) // self._epoch_batches

    @property
    def share_taken(self) -> float:
        """Fraction of all passes that has been taken, at most 1; 0 if passes are not limited."""
        if not self.num_epochs:
            return 0.0
        return min(1.0, self.num_taken / (self.num_epochs * self._epoch_batches))

    def take(self) -> DataProto:
        """Take the next batch, even after the last pass, so that a begun step can be completed.

        Raises:
            DataError: two passes in a row are empty.
        """
        if self._reads_ahead:
            reading = self._next or in_background(self._read_ahead, "reading prompts")
            # If reading fails, the next call must not get the same error again.
            self._next = None
            with waiting(_BATCH):
                batch, self._state_after_taken = reading.result()
            self._next = in_background(self._read_ahead, "reading prompts")
        else:
            batch = self._read()
        self.num_taken += 1
        return DataProto.from_single_dict(batch)

    def _read_ahead(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the next batch. Returns it, and a copy of the loader's state after it."""
        return self._read(), deepcopy(self.loader.state_dict())

    def _read(self) -> dict[str, Any]:
        """Read the next batch from the loader, from the next pass if the current one is over."""
        # The current pass may have ended. The pass after it may be empty if the loader was resumed at
        # the very end of an epoch. The third pass must have a batch.
        for _ in range(3):
            if self._batches is None:
                self._batches = watched(self.loader, _BATCH)
            batch = next(self._batches, None)
            if batch is not None:
                return batch
            self._batches = None
        raise DataError(
            "data.train_files",
            got="two passes in a row without a batch",
            expected="at least one batch a pass",
            fix="Check the sampler of data.sampler, if it is your own: it must yield a whole batch "
            "of rows.",
        )

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was taken."""
        state = self._state_after_taken
        # Without reading ahead, the loader itself is at this position.
        if state is None:
            state = self.loader.state_dict()
        return {"loader": state, "num_taken": self.num_taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position.

        Raises:
            CheckpointError: `state` has other entries than `state_dict` returns, or the sampler
                cannot be resumed.
        """
        if self.resume_obstacle:
            raise CheckpointError(
                "data.sampler",
                got=self.resume_obstacle,
                expected="both methods: without them a resumed run takes other rows",
                fix="Add the two methods to the sampler, or start anew with "
                "trainer.resume_mode=disable.",
            )
        if state.keys() != {"loader", "num_taken"}:
            raise CheckpointError(
                "the place in the training data",
                got=f"entries {', '.join(map(str, state))}",
                expected="loader and num_taken",
                fix="The checkpoint was written by another version of Quadriga: resume it with "
                "that one.",
            )
        if self._next is not None:
            # Wait until the thread has stopped using the loader; its result does not matter.
            self._next.exception()
        self.loader.load_state_dict(state["loader"])
        self.num_taken = state["num_taken"]
        self._batches = None
        self._next = None
        self._state_after_taken = None


def assign_uids(prompts: DataProto, prefix: str, first: int = 0) -> DataProto:
    """Give each prompt the `uid` "PREFIX-NUMBER", in place.

    What is sampled for a prompt depends on its uid. Uids are not random, so that a resumed run
    assigns the same ones.

    Args:
        prompts: a batch of prompts.
        prefix: makes the uids of different batches different.
        first: number of the first prompt.
    """
    uids = (f"{prefix}-{first + row}" for row in range(len(prompts)))
    prompts.non_tensor_batch["uid"] = object_array(uids)
    return prompts


def assign_row_uids(prompts: DataProto, dataset: Any, first: int) -> DataProto:
    """Give each prompt a `uid` made of the number of its file and of its row there, in place.

    Then what is sampled for a row depends neither on the size of a batch nor on which other rows
    are left out.

    Args:
        prompts: a batch of rows of `dataset`.
        dataset: a `RLHFDataset`. The rows of a class that overrides `__getitem__` are numbered
            consecutively instead.
        first: number of rows before the batch.
    """
    if getattr(type(dataset), "__getitem__", None) is not RLHFDataset.__getitem__:
        return assign_uids(prompts, "row", first)
    places = dataset.places(prompts.non_tensor_batch["item"])
    uids = (f"file-{file}-row-{row}" for file, row in places)
    prompts.non_tensor_batch["uid"] = object_array(uids)
    return prompts
