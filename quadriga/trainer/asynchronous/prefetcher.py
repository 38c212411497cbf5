# SPDX-License-Identifier: Apache-2.0
"""Keeps groups of responses from the time they start until a step learns from them.

    prompts ── inputs_of ──> started ── finish ──> complete ── pop_batch ──> rows of a step
                                                      └ dynamic sampling, a round at a time:
                                                        find_round ─> graded ── close_round

Legend: B rows, T response positions.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from quadriga.config import Config
from quadriga.protocol import DataProto
from quadriga.trainer.asynchronous.rules import Drop, HandOver, Rules, Start
from quadriga.trainer.asynchronous.schedule import Group, Verdict
from quadriga.trainer.group_filter import GroupFilter
from quadriga.trainer.prompts import PromptStream, assign_uids
from quadriga.trainer.responses import repeat_prompts, rollout_inputs, with_prompt_columns
from quadriga.workers.stream import SavedResponse


class Prefetcher:
    """Takes prompts for groups, and keeps the groups until a step learns from them.

    It has neither threads nor a lock: `AsyncBatches` holds its lock when it calls a method.

    Args:
        rules: rules of the schedule.
        prompts: stream of the training prompts.
        config: the resolved configuration.

    Attributes:
        started: prompt of each unfinished group, one row, by number of the group.
        complete: rows of each complete group, graded or not, by number of the group.
        hand_over: decision to hand groups over that the trainer has not carried out yet (see
            `pop_batch`); None if there is none.
        rounds: for dynamic sampling, the numbers of the complete groups of each step that are not
            graded.
        counts: metrics since the last `take_counts`.
    """

    def __init__(self, rules: Rules, prompts: PromptStream, config: Config) -> None:
        self.started: dict[int, DataProto] = {}
        self.complete: dict[int, DataProto] = {}
        self.hand_over: HandOver | None = None
        self.counts: dict[str, float] = defaultdict(float)
        self._rules = rules
        self._prompts = prompts
        self._config = config
        # Prompts are assigned to groups in the order of the groups' numbers.
        self._unassigned: list[DataProto] = []  # prompts that have been taken, but have no group
        self._assigned: dict[int, DataProto] = {}  # prompts of groups that have not started yet
        self._num_assigned = 0  # number of the next group to get a prompt
        # Responses of unfinished groups in a checkpoint, until the groups start again.
        self._saved_responses: list[SavedResponse] = []
        self.rounds: dict[int, list[int]] = {}
        # For dynamic sampling, the filter of each step, which has the groups that are graded.
        self._filters: dict[int, GroupFilter] = {}

    def inputs_of(self, start: Start) -> DataProto:
        """Make the rows from which the rollout generates a group.

        A new group takes the next prompt; a group that starts again keeps its prompt.
        """
        if start.group not in self.started:
            self.started[start.group] = self._take_prompt(start)
        else:
            # A group either continues from the checkpoint, or starts again after a lost worker.
            resumed_groups = {number for number, *_ in self._saved_responses}
            if start.group not in resumed_groups:
                self.counts["restarted_groups"] += 1
        rows = repeat_prompts(self.started[start.group], self._rules.group_size)
        return rollout_inputs(rows, self._config)

    def _take_prompt(self, start: Start) -> DataProto:
        """Take the prompt of a new group from the data, and assign its `uid`."""
        # A schedule that repeats a record on several workers may start groups in another order. The
        # groups before this one keep their prompts until they start.
        while start.group not in self._assigned:
            if not self._unassigned:
                batch = self._prompts.take()
                self._unassigned = [batch.slice(row, row + 1) for row in range(len(batch))]
            self._assigned[self._num_assigned] = self._unassigned.pop(0)
            self._num_assigned += 1
        row = self._assigned.pop(start.group)
        # The uid follows from the place in the batch, so that a resumed run assigns the same one.
        meta_info = dict(row.meta_info)
        meta_info["global_steps"] = start.batch
        meta_info["total_training_steps"] = self._rules.num_steps
        prompt = DataProto(row.batch, dict(row.non_tensor_batch), meta_info)
        return assign_uids(prompt, str(start.batch), first=start.row)

    def pop_saved_responses(self, groups: Mapping[int, Any]) -> list[SavedResponse]:
        """Remove and return the responses that the checkpoint saved of some groups.

        Args:
            groups: the groups, by number. The values are not used.
        """
        # The first entry of a saved response is the number of its group.
        taken = [response for response in self._saved_responses if response[0] in groups]
        self._saved_responses = [
            response for response in self._saved_responses if response[0] not in groups
        ]
        return taken

    def finish(self, group: Group, rows: DataProto) -> None:
        """Add the responses of a group that has ended, and the columns of its prompt.

        Args:
            group: the group.
            rows: responses without the columns of the prompt.
        """
        prompt = self.started.pop(group.number)
        prompts = repeat_prompts(prompt, self._rules.group_size)
        complete = with_prompt_columns(prompts, rows)
        # Entries of `meta_info` that differ between groups would prevent their concatenation.
        complete.meta_info = {"metrics": rows.meta_info["metrics"]}
        self.complete[group.number] = complete
        if self._rules.round_size:
            self.rounds.setdefault(group.batch, []).append(group.number)

    def drop(self, decision: Drop) -> None:
        """Forget a group, and count it."""
        self.counts[f"dropped_{decision.reason}"] += 1
        self.started.pop(decision.group, None)
        rows = self.complete.pop(decision.group, None)
        if rows is not None:
            self.discard(rows)

    def discard(self, rows: DataProto) -> None:
        """Count the tokens of responses that no step learns from."""
        self.counts["discarded_tokens"] += int(rows.batch["response_mask"].sum())

    def pop_batch(self) -> tuple[HandOver, dict[int, DataProto], GroupFilter | None]:
        """Take the groups that are handed over.

        Returns:
            The decision; the rows of each group by its number; and the filter of the batch, which
            is None without dynamic sampling.
        """
        hand_over = self.hand_over
        assert hand_over is not None, "the caller has waited for it"
        self.hand_over = None
        groups = {number: self.complete.pop(number) for number in hand_over.groups}
        return hand_over, groups, self._filters.pop(hand_over.step, None)

    def take_counts(self) -> dict[str, float]:
        """Return the metrics since the last call, and start new ones."""
        counts = self.counts
        self.counts = defaultdict(float)
        return counts

    # Dynamic sampling.

    def find_round(self, batch: int) -> DataProto | None:
        """Copy the rows of the current round of a step. None if a group of the round is missing."""
        numbers = sorted(self.rounds[batch])
        if len(numbers) < self._rules.round_size:
            return None
        return DataProto.concat([self.complete[number] for number in numbers])

    def close_round(self, batch: int, rows: DataProto) -> dict[int, Verdict]:
        """Add the graded round of a step to the step's filter.

        Args:
            batch: number of the step.
            rows: rows from `find_round`, which have been graded since.

        Returns:
            For each group by its number, "kept", or "equal" if its rewards are equal.
        """
        # Removed only after grading: a checkpoint during grading has the round, and a resumed run
        # grades it again.
        numbers = sorted(self.rounds.pop(batch))
        group_filter = self._filters.setdefault(batch, GroupFilter(self._config))
        # The filter now has the rows of the batch. Those in `complete` are no longer needed, and are
        # dropped with their group or when the batch is taken.
        kept_uids = group_filter.add(rows)
        verdicts: dict[int, Verdict] = {}
        for number in numbers:
            uid = self.complete[number].non_tensor_batch["uid"][0]
            verdicts[number] = "kept" if uid in kept_uids else "equal"
        return verdicts

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """Shallow copy of the groups for a checkpoint; see `snapshot.py` for the entries."""
        return {
            "begun": dict(self.started),
            "groups": dict(self.complete),
            "rows": list(self._unassigned),
            "counts": dict(self.counts),
            "rounds": {batch: list(numbers) for batch, numbers in self.rounds.items()},
            "filters": {
                batch: group_filter.state_dict() for batch, group_filter in self._filters.items()
            },
        }

    def restore(self, state: dict[str, Any], num_groups: int) -> None:
        """Continue from a checkpoint.

        Args:
            state: entries from `state`, and `under_way`, the responses of unfinished groups.
            num_groups: number of groups that were started before the checkpoint.
        """
        self.started = state["begun"]
        self.complete = state["groups"]
        self.counts |= state["counts"]
        self._unassigned = state["rows"]
        self._num_assigned = num_groups
        self._saved_responses = state["under_way"]
        self.rounds = state["rounds"]
        for batch, filter_state in state["filters"].items():
            self._filters[batch] = GroupFilter(self._config)
            self._filters[batch].load_state_dict(filter_state)
