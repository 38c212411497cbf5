# SPDX-License-Identifier: Apache-2.0
"""The training prompts as one stream without end, pass after pass over the data, that knows where it is; their names.

A step may take one batch or several; a checkpoint keeps the place after the last one that was taken. Where the loader
allows it, a thread reads the next batch meanwhile.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from copy import deepcopy
from typing import Any

import numpy as np

from quadriga.background import in_background
from quadriga.data.rl_dataset import RLHFDataset
from quadriga.errors import CheckpointError, DataError
from quadriga.observe.watchdog import waiting, watched
from quadriga.protocol import DataProto

logger = logging.getLogger(__name__)

_BATCH = "a batch of prompts (data set, sampler, collation)"


class PromptStream:
    """Batches of prompts from a stateful loader; as many as its first pass has are an epoch.

    With `is_saved` (checkpoints are written) it warns of a sampler that cannot be resumed. `num_taken` counts the
    batches since the run began, those before a resume included; `num_epochs` are the passes of the run, None without
    end.
    """

    def __init__(
        self, loader: Any, *, num_epochs: int | None = None, is_saved: bool = False
    ) -> None:
        self.loader, self.num_epochs = loader, num_epochs
        # Of data that grow the passes after the first have more.
        self._epoch_batches = max(1, len(loader))
        self.num_taken = 0
        self._batches: Iterator[dict[str, Any]] | None = None
        self._reads_ahead: bool = getattr(loader, "lets_read_ahead", bool)()
        self._next: Future[tuple[dict[str, Any], dict[str, Any]]] | None = None
        self._place: dict[str, Any] | None = None
        """The loader's, after the last batch that was taken, where it is further already."""
        if is_saved and self.cannot_resume:
            logger.warning(
                "data.sampler: no run can resume from the checkpoints: got %s.", self.cannot_resume
            )

    @property
    def cannot_resume(self) -> str:
        """Why a resumed run would see other rows than the run that was cut short; empty if it would not."""
        sampler = getattr(self.loader, "sampler", None)
        if hasattr(sampler, "update") and not (
            hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
        ):
            name = type(sampler).__name__
            return f"{name}, whose `update` learns from batches, without state_dict and load_state_dict"
        return ""

    @property
    def epoch(self) -> int:
        """Passes over the data that were complete before the batch that was taken last."""
        return max(0, self.num_taken - 1) // self._epoch_batches

    @property
    def share_taken(self) -> float:
        """The share of all passes that was taken, 1 from their end on; 0 where they have no end."""
        return (
            min(1.0, self.num_taken / (self.num_epochs * self._epoch_batches))
            if self.num_epochs
            else 0.0
        )

    def take(self) -> DataProto:
        """The next batch, after the last pass too: a step that has begun is completed.
        Raises DataError: two passes in a row are empty."""
        if not self._reads_ahead:
            batch = self._read()
        else:
            ahead, self._next = (
                self._next or in_background(self._read_ahead, "reading prompts"),
                None,
            )
            with waiting(_BATCH):
                batch, self._place = ahead.result()
            self._next = in_background(self._read_ahead, "reading prompts")
        self.num_taken += 1
        return DataProto.from_single_dict(batch)

    def _read_ahead(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._read(), deepcopy(self.loader.state_dict())

    def _read(self) -> dict[str, Any]:
        # The rest of this pass may be empty, and so may one whole pass: that of a loader which goes on from the very
        # end of an epoch.
        for _ in range(3):
            if self._batches is None:
                self._batches = watched(self.loader, _BATCH)
            batch = next(self._batches, None)
            if batch is not None:
                return batch
            self._batches = None
        where = "data.train_files"
        fix = "Check the sampler of data.sampler, if it is your own: it must yield a whole batch of rows."
        raise DataError(
            where,
            got="two passes in a row without a batch",
            expected="at least one batch a pass",
            fix=fix,
        )

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch."""
        place = self.loader.state_dict() if self._place is None else self._place
        return {"loader": place, "num_taken": self.num_taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place.
        Raises CheckpointError: it is not what `state_dict` gives, or the sampler has a state that was not written."""
        if self.cannot_resume:
            expected = "both: a resumed run would take other rows"
            fix = "Add the two methods to the sampler, or start anew with trainer.resume_mode=disable."
            raise CheckpointError(
                "data.sampler", got=self.cannot_resume, expected=expected, fix=fix
            )
        if state.keys() != {"loader", "num_taken"}:
            entries = ", ".join(map(str, state))
            where = "the place in the training data"
            fix = "The checkpoint was written by another version of Quadriga: resume it with that one."
            raise CheckpointError(
                where, got=f"entries {entries}", expected="loader and num_taken", fix=fix
            )
        if self._next is not None:
            self._next.exception()  # the loader is not in use any more
        self.loader.load_state_dict(state["loader"])
        self.num_taken = state["num_taken"]
        self._batches = self._next = self._place = None


def assign_uids(prompts: DataProto, prefix: str, first: int = 0) -> DataProto:
    """Give each prompt a `uid`, in place: its number behind a prefix.

    Names are derived, not drawn: a resumed run gives its prompts the names that it would have given them, and so their
    responses are the same.
    """
    names = [f"{prefix}-{row}" for row in range(first, first + len(prompts))]
    prompts.non_tensor_batch["uid"] = np.array(names, dtype=object)
    return prompts


def assign_row_uids(prompts: DataProto, dataset: Any, first: int) -> DataProto:
    """Give each prompt a `uid` made of the numbers of its file and of its row in that file, in place.

    What is sampled for a row then depends neither on the size of a batch nor on which other rows are left out.

    Args:
        prompts: a batch of rows of `dataset`.
        dataset: `RLHFDataset`. Rows of classes that make their own rows are numbered in their order instead.
        first: the number of rows before the batch.
    """
    if getattr(type(dataset), "__getitem__", None) is not RLHFDataset.__getitem__:
        return assign_uids(prompts, "row", first)
    places = dataset.places(prompts.non_tensor_batch["item"])
    names = [f"file-{file}-row-{row}" for file, row in places]
    prompts.non_tensor_batch["uid"] = np.array(names, dtype=object)
    return prompts
