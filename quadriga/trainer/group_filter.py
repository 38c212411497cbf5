# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling (DAPO, arXiv:2503.14476): a step learns only from groups with unequal rewards.

    prompts -> responses -> rewards -> unequal groups -> batch
       ^                                    | equal groups are left out
       └──────────────── next prompts ──────┘

A step samples until it has `data.train_batch_size` groups, or fails after `max_num_gen_batches`.

The responses of a group with equal rewards have no advantage, and so no gradient. Groups beyond a
full batch are left out, too, rather than kept for the next step: a step then learns only from
responses of its own weights, and a resumed run only has to know its position in the data.

Legend: B rows, T response positions.
"""

import logging
import math
from collections import Counter
from collections.abc import Hashable
from numbers import Real
from typing import Any

from quadriga.config import Config
from quadriga.errors import DataError, RewardError
from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto
from quadriga.trainer.rollout_rows import scores_of_rows

logger = logging.getLogger(__name__)

SCORE_NAMES = frozenset({"score", "seq_reward", "seq_final_reward"})  # metrics that are the score
REPORT_EVERY = 10  # batches of prompts between progress reports, if a step has no limit
_KEY = "algorithm.filter_groups"


class GroupFilter:
    """Collects the groups with unequal rewards of a step until they fill a batch.

    Attributes:
        num_wanted: number of groups in a full batch.
        num_groups: number of groups so far, equal ones included.
    """

    def __init__(self, config: Config) -> None:
        self.settings = config.algorithm.filter_groups
        self.num_wanted = config.data.train_batch_size
        self.num_groups = 0
        # For each batch of prompts the rows of its unequal groups, group after group.
        self._parts: list[DataProto] = []
        # Number of rows of each unequal group.
        self._sizes: list[int] = []
        # Number of equal groups by the value that their responses share. Key None: groups of which
        # no response has a value.
        self._equal: Counter[float | None] = Counter()
        # Sum and number of the values of all responses, those in equal groups included.
        self._total = 0.0
        self._num_values = 0

    @property
    def is_full(self) -> bool:
        """Whether there are enough groups for a batch."""
        return len(self._sizes) >= self.num_wanted

    def add(self, part: DataProto) -> set[Hashable]:
        """Add the unequal groups of a batch of prompts.

        Args:
            part: graded responses with `uid`, `token_level_scores` [B, T], `reward_extra`, and
                metrics in meta_info.

        Returns:
            The uids of the unequal groups.

        Raises:
            DataError: this was the last of `max_num_gen_batches`, and there are not enough groups.
            RewardError: the graders do not return the metric, or it is not a number.
        """
        values = metric_of_rows(part, self.settings.metric)
        rows_of_group = {}
        for row, uid in enumerate(part.non_tensor_batch["uid"]):
            rows_of_group.setdefault(uid, []).append(row)

        unequal_rows = []
        for rows in rows_of_group.values():
            values_of_group = [values[row] for row in rows]
            numbers = [value for value in values_of_group if value is not None]
            # The extremes are compared because the standard deviation of equal numbers need not be
            # exactly zero.
            if numbers and min(numbers) != max(numbers):
                unequal_rows += rows
                self._sizes.append(len(rows))
            else:
                self._equal[numbers[0] if numbers else None] += 1
            self._total += math.fsum(numbers)
            self._num_values += len(numbers)

        self.num_groups += len(rows_of_group)
        unequal = part.select_idxs(unequal_rows)
        self._parts.append(unequal)
        self._check_progress()
        return set(unequal.non_tensor_batch["uid"])

    def _check_progress(self) -> None:
        """Raise an error at the limit of batches; without a limit, log progress now and then."""
        num_batches = len(self._parts)
        limit = self.settings.max_num_gen_batches
        if limit and num_batches == limit and not self.is_full:
            raise DataError(
                _KEY,
                got=f"{len(self._sizes)} groups of responses that differ in "
                f"{self.settings.metric} after {self._describe_progress()}",
                expected=f"{self.num_wanted}, data.train_batch_size",
                fix="Take prompts that the model solves sometimes and not always, raise "
                f"actor_rollout_ref.rollout.n, or raise {_KEY}.max_num_gen_batches.",
            )
        if not limit and num_batches % REPORT_EVERY == 0:
            logger.warning(
                "%s: %d of %d groups after %s",
                _KEY,
                len(self._sizes),
                self.num_wanted,
                self._describe_progress(),
            )

    def state_dict(self) -> dict[str, Any]:
        """State of a partly filled batch, for a checkpoint in the middle of a step."""
        return {
            "parts": list(self._parts),
            "sizes": list(self._sizes),
            "equal": dict(self._equal),
            "counts": (self._total, self._num_values, self.num_groups),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._parts = state["parts"]
        self._sizes = state["sizes"]
        self._equal = Counter(state["equal"])
        self._total, self._num_values, self.num_groups = state["counts"]

    def _describe_progress(self) -> str:
        """Describe the batches and groups so far, with the commonest values of equal groups."""
        equal = "none of them equal"
        if self._equal:
            counts = []
            for value, count in self._equal.most_common(3):
                counts.append(f"{count} with {'no value' if value is None else f'{value:g}'}")
            equal = f"{self._equal.total()} of them equal: {', '.join(counts)}"
        return f"{len(self._parts)} batches of prompts ({self.num_groups} groups, {equal})"

    def batch(self) -> DataProto:
        """Return the first `num_wanted` groups in the order of their prompts, with metrics."""
        num_rows = sum(self._sizes[: self.num_wanted])
        batch = DataProto.concat(self._parts).slice(0, num_rows)
        mean = self._total / max(self._num_values, 1)
        batch.meta_info["metrics"] = {
            **batch.meta_info.get("metrics", {}),
            "filter_groups/num_batches": Metric(len(self._parts), "sum"),
            "filter_groups/num_groups": Metric(self.num_groups, "sum"),
            "filter_groups/num_equal": Metric(self._equal.total(), "sum"),
            "filter_groups/num_surplus": Metric(len(self._sizes) - self.num_wanted, "sum"),
            # Over all responses: the mean over the batch would omit the prompts that are always or
            # never solved.
            f"filter_groups/{self.settings.metric}/mean": Metric(mean, "mean", self._num_values),
        }
        return batch


def metric_of_rows(batch: DataProto, metric: str) -> list[float | None]:
    """The numbers by which the responses of a group are compared.

    Args:
        batch: graded responses.
        metric: a name of the score, or of a number that graders return beside it.

    Returns:
        A number for each row, [B]; None if its grader failed or returned no such number.

    Raises:
        RewardError: no row has the metric, or a row's metric is not a number.
    """
    if metric in SCORE_NAMES:
        return scores_of_rows(batch)

    extras = batch.non_tensor_batch["reward_extra"]
    values = [extra.get(metric) for extra in extras]
    for value in values:
        if value is not None and not isinstance(value, Real):
            raise RewardError(
                f"{_KEY}.metric={metric}",
                got=f"{type(value).__name__} {value!r:.80} from the grader",
                expected="a number for each response",
                fix=f"Set {_KEY}.metric=score, or have the grader return a number under this name.",
            )
    # No value at all is probably a wrong name, and not a failure of every grader.
    if all(value is None for value in values):
        names = sorted({name for extra in extras for name in extra} - {"reward_error"})
        raise RewardError(
            f"{_KEY}.metric={metric}",
            got=f"graders that return {', '.join(names) or 'nothing but the score'}",
            expected=f"score, or a number returned beside it as {metric!r}",
            fix=f"Set {_KEY}.metric=score, or add the entry to what the score function returns.",
        )
    return [None if value is None or math.isnan(value) else float(value) for value in values]
