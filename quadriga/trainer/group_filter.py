# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling (DAPO, arXiv:2503.14476): a step learns from groups of responses that differ, and samples until it
has enough of them.

    prompts -> responses -> rewards -> groups that differ -> batch    until `data.train_batch_size` groups differ
       ^                                    | all equal: left out     (or `max_num_gen_batches` are used up: an error)
       └──────────────── next batch of prompts ──┘

A group whose responses have equal rewards has no advantage, and so no gradient. What goes beyond a full batch is left
out too, never taken along to the next step: a step learns from responses of its own weights only, and a resumed run
needs to know nothing but the place in the data.

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

logger = logging.getLogger(__name__)

SCORE_NAMES = frozenset({"score", "seq_reward", "seq_final_reward"})  # words for the score itself
REPORT_EVERY = 10  # batches of prompts after which a step that has no limit says how far it is
_KEY = "algorithm.filter_groups"


class GroupFilter:
    """The groups of a step while its batch fills; `num_groups` counts the prompts that have responses."""

    def __init__(self, config: Config) -> None:
        self.settings = config.algorithm.filter_groups
        self.num_wanted = config.data.train_batch_size
        self.num_groups = 0
        # Of each batch of prompts the rows of groups that differ, group after group, and the rows of each such group.
        self._parts: list[DataProto] = []
        self._sizes: list[int] = []
        # How many groups were equal, by their value.
        self._equal: Counter[float | None] = Counter()
        self._total, self._num_values = 0.0, 0

    @property
    def is_full(self) -> bool:
        return len(self._sizes) >= self.num_wanted

    def add(self, part: DataProto) -> set[Hashable]:
        """Take the groups that differ. Returns their `uid`s.
        `part`: graded responses to one batch of prompts, those of a prompt one below the other: `uid`,
        `token_level_scores` [B, T], `reward_extra`, and metrics in meta_info.
        Raises DataError: this was the last of `max_num_gen_batches`, and there are not enough groups.
        Raises RewardError: the graders do not return the metric, or it is no number."""
        values = metric_of_rows(part, self.settings.metric)
        groups: dict[Hashable, list[int]] = {}
        for row, uid in enumerate(part.non_tensor_batch["uid"]):
            groups.setdefault(uid, []).append(row)
        chosen: list[int] = []
        for rows in groups.values():
            found = [value for row in rows if (value := values[row]) is not None]
            # Not their deviation, which for equal numbers need not be exactly zero.
            if found and min(found) != max(found):
                chosen += rows
                self._sizes.append(len(rows))
            else:
                self._equal[found[0] if found else None] += 1
            self._total, self._num_values = (
                self._total + math.fsum(found),
                self._num_values + len(found),
            )
        self.num_groups += len(groups)
        self._parts.append(part.select_idxs(chosen))
        limit = self.settings.max_num_gen_batches
        if limit and len(self._parts) == limit and not self.is_full:
            got = f"{len(self._sizes)} groups of responses that differ in {self.settings.metric} after {self._so_far()}"
            fix = "Take prompts that the model solves sometimes and not always, raise actor_rollout_ref.rollout.n, "
            fix += f"or raise {_KEY}.max_num_gen_batches."
            raise DataError(
                _KEY, got=got, expected=f"{self.num_wanted}, data.train_batch_size", fix=fix
            )
        if not limit and len(self._parts) % REPORT_EVERY == 0:
            logger.warning(
                "%s: %d of %d groups after %s",
                _KEY,
                len(self._sizes),
                self.num_wanted,
                self._so_far(),
            )
        return set(self._parts[-1].non_tensor_batch["uid"])

    def state_dict(self) -> dict[str, Any]:
        """What was sampled so far; the rows of groups that differ as they are."""
        counts = (self._total, self._num_values, self.num_groups)
        return {
            "parts": list(self._parts),
            "sizes": list(self._sizes),
            "equal": dict(self._equal),
            "counts": counts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._parts, self._sizes, self._equal = (
            state["parts"],
            state["sizes"],
            Counter(state["equal"]),
        )
        self._total, self._num_values, self.num_groups = state["counts"]

    def _so_far(self) -> str:
        """What was sampled, and what the groups that are left out have in common."""
        values = (
            ("no value" if value is None else f"{value:g}", count)
            for value, count in self._equal.most_common(3)
        )
        most = ", ".join(f"{count} with {value}" for value, count in values)
        left_out = (
            f"{self._equal.total()} of them equal: {most}" if self._equal else "none of them equal"
        )
        return f"{len(self._parts)} batches of prompts ({self.num_groups} groups, {left_out})"

    def batch(self) -> DataProto:
        """`data.train_batch_size` groups in the order of their prompts, and metrics of all responses."""
        batch = DataProto.concat(self._parts).slice(0, sum(self._sizes[: self.num_wanted]))
        mean = self._total / max(self._num_values, 1)
        batch.meta_info["metrics"] = {
            **batch.meta_info.get("metrics", {}),
            "filter_groups/num_batches": Metric(len(self._parts), "sum"),
            "filter_groups/num_groups": Metric(self.num_groups, "sum"),
            "filter_groups/num_equal": Metric(self._equal.total(), "sum"),
            "filter_groups/num_surplus": Metric(len(self._sizes) - self.num_wanted, "sum"),
            # Of all responses: those of the batch are neither what the model does always nor what it never does.
            f"filter_groups/{self.settings.metric}/mean": Metric(mean, "mean", self._num_values),
        }
        return batch


def metric_of_rows(batch: DataProto, metric: str) -> list[float | None]:
    """The numbers by which responses are compared, [B]; None where a grader failed, or gave none for this row.
    Raises RewardError: no row has it, or one has what is no number."""
    if metric in SCORE_NAMES:
        return batch.batch["token_level_scores"].sum(-1).tolist()
    added = batch.non_tensor_batch["reward_extra"]
    values = [extra.get(metric) for extra in added]
    for value in values:
        if value is not None and not isinstance(value, Real):
            found = f"{type(value).__name__} {value!r:.80} from the grader"
            fix = f"Set {_KEY}.metric=score, or have the grader return a number under this name."
            raise RewardError(
                f"{_KEY}.metric={metric}", got=found, expected="a number for each response", fix=fix
            )
    if all(value is None for value in values):
        names = sorted({name for extra in added for name in extra} - {"reward_error"})
        found = (
            f"graders that return {', '.join(names)}"
            if names
            else "graders that return nothing but the score"
        )
        expected = f"score, or a number returned beside it as {metric!r}"
        fix = f"Set {_KEY}.metric=score, or add the entry to what the score function returns."
        raise RewardError(f"{_KEY}.metric={metric}", got=found, expected=expected, fix=fix)
    return [None if value is None or math.isnan(value) else float(value) for value in values]
