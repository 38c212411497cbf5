# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling (DAPO, arXiv:2503.14476): a step learns from groups of answers that differ, and asks until it has
enough of them.

    prompts -> answers -> rewards -> groups that differ -> kept      until `data.train_batch_size` groups are kept
       ^                                  | all equal: left out      (or `max_num_gen_batches` are used up: an error)
       └──────────────── next batch of prompts ──┘

A group whose answers all did equally well has no advantage and teaches nothing. What is kept beyond a full batch is
left out too, never taken along to the next step: a step learns from answers of its own weights only, and a resumed run
needs to know nothing but the place in the data.

Legend: B rows.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable
from numbers import Real

from quadriga.config import Config
from quadriga.errors import DataError, RewardError
from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto
from quadriga.trainer.ranks import in_first_order

logger = logging.getLogger(__name__)

SCORE_NAMES = frozenset({"score", "seq_reward", "seq_final_reward"})
"""Words for the score itself."""
TOLD_EVERY = 10
"""Batches of prompts after which a step that has no limit says how far it is."""
_KEY = "algorithm.filter_groups"


class GroupFilter:
    """Which groups of answers make the batch of a step.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config) -> None:
        self.settings = config.algorithm.filter_groups
        self.num_wanted = config.data.train_batch_size

    def fill(self, answered: Callable[[int], DataProto]) -> DataProto:
        """The batch of a step: without the filter, answers to one batch of prompts.

        Args:
            answered: the next batch of prompts, answered and graded: `uid`, `token_level_scores` [B, T],
                `reward_extra`, and metrics in meta_info. It is told how many prompts were answered before.

        Returns:
            With the filter: `data.train_batch_size` groups in the order of their prompts, and metrics of all answers.

        Raises:
            DataError: `max_num_gen_batches` did not give enough groups.
            RewardError: the metric is nothing that the graders say, or is no number.
        """
        if not self.settings.enable:
            return answered(0)
        filling = _Filling(self.settings.metric)
        while filling.num_kept < self.num_wanted:
            limit = self.settings.max_num_gen_batches
            if limit and filling.num_batches == limit:
                raise self._too_few(filling)
            filling.add(answered(filling.num_groups))
            if not limit and filling.num_batches % TOLD_EVERY == 0:
                logger.warning("%s: %d of %d groups after %s", _KEY, filling.num_kept, self.num_wanted, filling)
        return filling.batch(self.num_wanted)

    def _too_few(self, filling: "_Filling") -> DataError:
        return DataError(
            _KEY,
            got=f"{filling.num_kept} groups of answers that differ in {self.settings.metric} after {filling}",
            expected=f"{self.num_wanted}, data.train_batch_size",
            fix="Take prompts that the model answers well sometimes and not always, raise actor_rollout_ref.rollout.n, "
            f"or raise {_KEY}.max_num_gen_batches.",
        )


class _Filling:
    """The batch of a step while it fills."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.parts: list[DataProto] = []
        """Of each batch of prompts the rows of groups that differ, group after group."""
        self.sizes: list[int] = []
        """Rows of each group that is kept."""
        self.equal: Counter[float | None] = Counter()
        """How many groups were equal, by their value."""
        self.num_groups = 0
        self.total, self.num_values = 0.0, 0

    @property
    def num_batches(self) -> int:
        return len(self.parts)

    @property
    def num_kept(self) -> int:
        return len(self.sizes)

    def __str__(self) -> str:
        """What was asked, and what the groups that are left out have in common."""
        most = ", ".join(f"{count} with {_text(value)}" for value, count in self.equal.most_common(3))
        left_out = f"{self.equal.total()} of them equal: {most}" if self.equal else "none of them equal"
        return f"{self.num_batches} batches of prompts ({self.num_groups} groups, {left_out})"

    def add(self, part: DataProto) -> None:
        if "row_index" in part.batch.keys():
            part = part.select_idxs(in_first_order(range(len(part)), part))
            part.batch.pop("row_index")
        values = metric_of_rows(part, self.metric)
        groups: dict[Hashable, list[int]] = {}
        for row, uid in enumerate(part.non_tensor_batch["uid"]):
            groups.setdefault(uid, []).append(row)
        kept: list[int] = []
        for rows in groups.values():
            found = [value for row in rows if (value := values[row]) is not None]
            # Not their deviation, which for equal numbers need not be exactly zero.
            if found and min(found) != max(found):
                kept += rows
                self.sizes.append(len(rows))
            else:
                self.equal[found[0] if found else None] += 1
            self.total, self.num_values = self.total + math.fsum(found), self.num_values + len(found)
        self.num_groups += len(groups)
        self.parts.append(part.select_idxs(kept))

    def batch(self, num_wanted: int) -> DataProto:
        """The first groups that were kept, and metrics of everything that was answered."""
        batch = DataProto.concat(self.parts).slice(0, sum(self.sizes[:num_wanted]))
        batch.meta_info["metrics"] = {**batch.meta_info.get("metrics", {}), **self._metrics(num_wanted)}
        return batch

    def _metrics(self, num_wanted: int) -> dict[str, Metric]:
        return {
            "filter_groups/num_batches": Metric(self.num_batches, "sum"),
            "filter_groups/num_groups": Metric(self.num_groups, "sum"),
            "filter_groups/num_equal": Metric(self.equal.total(), "sum"),
            "filter_groups/num_surplus": Metric(self.num_kept - num_wanted, "sum"),
            # Of all that was answered: what is kept is neither what the model does always nor what it never does.
            f"filter_groups/{self.metric}/mean": Metric(self.total / max(self.num_values, 1), "mean", self.num_values),
        }


def metric_of_rows(batch: DataProto, metric: str) -> list[float | None]:
    """The numbers by which answers are compared, [B]; None where a grader failed, or gave none for this row.

    Raises:
        RewardError: no row has it, or one has what is no number.
    """
    if metric in SCORE_NAMES:
        return batch.batch["token_level_scores"].sum(-1).tolist()
    said = batch.non_tensor_batch["reward_extra"]
    values = [extra.get(metric) for extra in said]
    for value in values:
        if value is not None and not isinstance(value, Real):
            raise RewardError(
                f"{_KEY}.metric={metric}",
                got=f"{type(value).__name__} {value!r:.80} from the grader",
                expected="a number for each answer",
                fix=f"Set {_KEY}.metric=score, or have the grader return a number under this name.",
            )
    if all(value is None for value in values):
        names = sorted({name for extra in said for name in extra} - {"reward_error"})
        raise RewardError(
            f"{_KEY}.metric={metric}",
            got=f"graders that say {', '.join(names)}" if names else "graders that say nothing but the score",
            expected=f"score, or a number that they return beside it as {metric!r}",
            fix=f"Set {_KEY}.metric=score, or add the entry to what the score function returns.",
        )
    return [None if value is None or math.isnan(value) else float(value) for value in values]


def _text(value: float | None) -> str:
    return "no value" if value is None else f"{value:g}"
