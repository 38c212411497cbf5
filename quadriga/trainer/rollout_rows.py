# SPDX-License-Identifier: Apache-2.0
"""Properties of a batch's rows: the rollouts that they form, scores, turn rewards and times.

Legend: B rows, P prompt positions, T response positions.
"""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from quadriga.algorithms.registry import ROLLOUT_ID
from quadriga.protocol import DataProto
from quadriga.protocol.times import GRADED_AT, TIMES
from quadriga.rewards.outcome import UNSCORED


def name_rollouts(uids: Iterable[Any]) -> list[str]:
    """Name rollouts of one row each as `repeat_prompts` does.

    Args:
        uids: uid of the prompt of each rollout.
    """
    num_before = Counter[str]()
    names = []
    for uid in map(str, uids):
        names.append(f"{uid}/{num_before[uid]}")
        num_before[uid] += 1
    return names


def rollout_numbers(rows: DataProto) -> list[int]:
    """The number of each row's rollout, [B]. Rollouts are numbered in order of appearance."""
    ids = rows.non_tensor_batch.get(ROLLOUT_ID, range(len(rows)))
    numbers = {}
    return [numbers.setdefault(rollout_id, len(numbers)) for rollout_id in ids]


def has_larger_rollouts(rows: DataProto) -> bool:
    """Whether a rollout has several rows."""
    return len(set(rollout_numbers(rows))) < len(rows)


def scored_rows(batch: DataProto) -> torch.Tensor:
    """Whether each row of a graded batch has a score, [B] bool."""
    extras = batch.non_tensor_batch.get("reward_extra", [{}] * len(batch))
    return torch.tensor([not extra.get(UNSCORED) for extra in extras])


def scores_of_rows(batch: DataProto) -> list[float | None]:
    """The score of each row of a graded batch, [B]; None for a row without one."""
    scores = batch.batch["token_level_scores"].sum(-1).tolist()
    for row in (~scored_rows(batch)).nonzero().flatten().tolist():
        scores[row] = None
    return scores


def with_turn_rewards(scores: torch.Tensor, batch: DataProto) -> torch.Tensor:
    """Move each turn's share of the score from the last token to the end of the turn.

    Args:
        scores: [B, T], with the score of each row at its last token.
        batch: rows with `turn_spans`, `turn_rewards`, and `attention_mask` [B, P + T].

    Returns:
        The rewards, [B, T]: the reward of each turn at the turn's last token, and the rest of the
        score at the last token of the row. The sum of a row is its score.
    """
    columns = batch.non_tensor_batch
    lengths = batch.batch["attention_mask"][:, -scores.shape[1] :].sum(-1).tolist()
    rewards = scores.clone()
    # `turn_rewards` is empty in rows of which only the score counts.
    for row, rewards_of_turns in enumerate(columns["turn_rewards"]):
        for (_, end), reward in zip(columns["turn_spans"][row], rewards_of_turns, strict=False):
            # The last turn ends at the last token, which has the rest.
            if end < lengths[row]:
                rewards[row, end - 1] += reward
                rewards[row, lengths[row] - 1] -= reward
    return rewards


def forget_times(rows: DataProto) -> None:
    """Set the times of responses that this run did not generate to NaN; add the columns if missing.

    Args:
        rows: prompts, which have no times, or responses, which may be graded. Conversations have
            only the time of grading.
    """
    names = rows.batch.keys()
    # [B, 3], because `TIMES` has three times of each row.
    unknown = torch.full((len(rows), 3), math.nan, dtype=torch.float64)
    # Only conversations have `num_turns`.
    if "responses" in names and "num_turns" not in rows.non_tensor_batch:
        rows.batch[TIMES] = unknown
    if "token_level_scores" in names:
        rows.batch[GRADED_AT] = unknown[:, 0]
