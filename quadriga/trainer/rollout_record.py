# SPDX-License-Identifier: Apache-2.0
"""Records the rollouts of a run in its directory while training continues.

    driver                          thread
      make the rows of a step         write the file of the step
      next step ...                   remove texts and older steps if the record is too large

Consumes: the batch of a step, before anything else may change it. Waits for: the file of the
previous step, so that at most two steps are in memory. Unblocked by: the thread. If the disk is full
or cannot be written, the record ends, which is logged once; training continues.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from math import inf
from typing import Any

import pyarrow as pa
import torch

from quadriga.background import in_background
from quadriga.config import Config
from quadriga.errors import DataError
from quadriga.observe.call_times import CallTime, step_calls
from quadriga.observe.machine import describe_numerics
from quadriga.observe.records import STEP, VALIDATION, RecordFolder
from quadriga.protocol import DataProto
from quadriga.trainer.checkpoint import Checkpoints
from quadriga.trainer.record_rows import ROUTES, join_tables, record_table

logger = logging.getLogger(__name__)

# Reasons in the record why the trainer has no log-probs of a row.
_NOT_SAMPLED = "algorithm.use_pf_ppo did not draw the row"
_NOT_UPDATED = "the actor was not updated (trainer.critic_warmup)"
_ONLY_VALIDATED = "validation"


class RolloutRecorder:
    """Writes the rollout record of a run.

    Args:
        config: the resolved configuration.
        tokenizer: tokenizer of the policy, whose tokens are written once.
        checkpoints: checkpoints of this run. Steps after the oldest one are never removed, because a
            replay needs them.

    Attributes:
        is_on: whether rollouts are recorded; False before `begin`, and after an error.
        take_call_times: returns the times of the workers' calls since it was last called. Until the
            run is built it returns none.
    """

    take_call_times: Callable[[], Sequence[CallTime]] = staticmethod(tuple)

    def __init__(self, config: Config, tokenizer: Any, checkpoints: Checkpoints) -> None:
        trainer = config.trainer
        self.is_on = False
        self._config = config
        self._tokenizer = tokenizer
        self._checkpoints = checkpoints
        self._folder = RecordFolder(trainer.directory)
        self._max_bytes = int(trainer.rollout_record_gib * 2**30)
        # The key is a number of steps, or "all" or "off".
        self._max_steps = inf
        if isinstance(trainer.rollout_record, int):
            self._max_steps = trainer.rollout_record
        self._machine = ""
        self._num_bytes = 0
        self._is_over_limit = False
        self._validation_tables: list[pa.Table] = []
        self._pending: Future[None] | None = None

    def begin(self, after_step: int, *, is_continued: bool) -> None:
        """Prepare the folder and start to record, unless `trainer.rollout_record` is off.

        Args:
            after_step: step from which the run continues, or 0.
            is_continued: whether an existing record belongs to this run.
        """
        if self._config.trainer.rollout_record == "off":
            return
        self.is_on = True
        # A replay on a machine with other numerics need not be bit-identical.
        self._machine = describe_numerics()
        try:
            if self._config.trainer.val_only:
                # The run takes no steps, so it must not remove recorded ones.
                self._folder.begin(inf, is_continued=True)
            else:
                self._folder.begin(after_step, is_continued=is_continued)
            self._folder.write_tokens_once(self._tokenizer)
            self._num_bytes = self._folder.num_bytes()
        except (OSError, DataError) as error:
            self._end(error)

    def add_step(self, step: int, batch: DataProto, facts: Mapping[str, Any]) -> None:
        """Record the rollouts of a step.

        Args:
            step: number of the step.
            batch: rows of the step with everything that was computed for them.
            facts: metrics and the like, for the file's metadata.
        """
        if not self.is_on:
            return
        # Computed before the rows, because the step ends at this moment.
        calls = step_calls(
            self.take_call_times(), facts["metrics"].get("timing_s/step", 0.0), end_s=time.time()
        )
        not_computed = ""
        if "is_computed" not in batch.batch.keys():
            not_computed = _NOT_UPDATED
        elif self._config.algorithm.use_pf_ppo:
            not_computed = _NOT_SAMPLED
        rows = record_table(batch, self._config.data, not_computed=not_computed)
        widths = [batch.batch[name].shape[1] for name in ("prompts", "responses")]
        facts = {**facts, "widths": widths, "machine": self._machine}
        if calls:
            facts["calls"] = calls
        if ROUTES in batch.batch.keys():
            facts["route_shape"] = list(batch.batch[ROUTES].shape[2:])
        self._write(step, STEP, rows, facts)

    def add_validation(self, batch: DataProto) -> None:
        """Add graded responses to a batch of validation prompts; `end_validation` writes them."""
        if not self.is_on:
            return
        table = record_table(batch, self._config.data, not_computed=_ONLY_VALIDATED)
        self._validation_tables.append(table)

    def end_validation(self, step: int) -> None:
        """Write the responses of the validation after a step."""
        tables = self._validation_tables
        self._validation_tables = []
        if self.is_on and tables:
            self._write(step, VALIDATION, join_tables(tables), {})

    def finish(self) -> None:
        """Wait until everything is on disk."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        try:
            pending.result()
        except (OSError, DataError) as error:
            self._end(error)

    def _write(self, step: int, kind: str, rows: pa.Table, facts: Mapping[str, Any]) -> None:
        """Write a file of the record in a thread, after the previous one is on disk."""
        self.finish()
        if not self.is_on:
            return

        def write() -> None:
            """Write the file, and shrink the record if needed. Called in a thread."""
            self._num_bytes += self._folder.write(step, kind, rows, dict(facts))
            self._thin()

        self._pending = in_background(write, "rollout record")

    def _thin(self) -> None:
        """Shrink the record if it has too many bytes or steps."""
        is_too_large = self._num_bytes > self._max_bytes
        if not is_too_large and self._max_steps == inf:
            return
        # A replay starts at a checkpoint and needs all steps after it. Without a checkpoint no step
        # is needed.
        first_needed_step = min(self._checkpoints.steps(), default=inf) + 1
        self._num_bytes = self._folder.thin(
            self._max_bytes, self._max_steps, first_needed_step=first_needed_step
        )
        if self._num_bytes > self._max_bytes and not self._is_over_limit:
            self._is_over_limit = True
            logger.warning(
                "trainer.rollout_record_gib=%g: the record of rollouts takes %.2f GiB, for its "
                "steps since the oldest checkpoint are needed to replay them. Raise the limit, or "
                "keep fewer checkpoints with trainer.max_ckpt_to_keep.",
                self._max_bytes / 2**30,
                self._num_bytes / 2**30,
            )

    def _end(self, error: Exception) -> None:
        """Stop to record after an error."""
        self.is_on = False
        reason = getattr(error, "strerror", None) or str(error)
        logger.warning(
            "The record of rollouts ends here: %s (%s). Training goes on; "
            "trainer.rollout_record=off turns it off.",
            self._folder.folder,
            reason,
        )


def add_update_outputs(batch: DataProto, outputs: DataProto, rows: torch.Tensor | None) -> None:
    """Add the outputs of the update's first forward pass to the batch, if there are any.

    Args:
        batch: all rows of the step.
        outputs: what `update_actor` has returned for the rows that were learned from.
        rows: [B'], places in the batch of the rows that were learned from; None: all.
    """
    if outputs.batch is None:
        return
    for name, values in outputs.batch.items():
        if rows is not None:
            # Move the values to the rows' places in the batch; other rows get 0. A row that was drawn
            # several times has the same values each time.
            scattered = values.new_zeros(len(batch), *values.shape[1:])
            scattered[rows] = values
            values = scattered
        batch.batch[name] = values
