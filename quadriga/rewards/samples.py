# SPDX-License-Identifier: Apache-2.0
"""From a batch of token ids to what score functions read.

B sequences, P prompt positions, T response positions.
"""

from dataclasses import dataclass
from typing import Any

import torch

from quadriga.errors import RewardError
from quadriga.protocol import DataProto

OF_CONVERSATION = ("num_turns", "finish_reason", "tool_rewards", "turn_scores")
"""Columns of a conversation that score functions find in `extra_info`, whether it is graded alone or in its batch."""


@dataclass(frozen=True)
class Samples:
    """The responses of a batch, decoded, with the facts they are graded by.

    Attributes:
        rows: one dict a sample: data_source, solution_str, ground_truth, extra_info.
        lengths: [B] int64, valid tokens of each response.
        response_length: T.
    """

    rows: list[dict[str, Any]]
    lengths: torch.Tensor
    response_length: int


def read_samples(data: DataProto, tokenizer: Any, reward_fn_key: str, *, needs_truths: bool = True) -> Samples:
    """Decode the valid tokens of each response, special tokens left out, and gather its columns.

    Args:
        data: see `RewardManager`.
        tokenizer: anything with `batch_decode`.
        reward_fn_key: name of the data source's column.
        needs_truths: whether each row must have a ground truth; None stands for one that is not needed.

    Raises:
        RewardError: if a column or a ground truth is missing.
    """
    for key in ("responses", "attention_mask"):
        if data.batch is None or key not in data.batch:
            raise RewardError(
                f"reward batch column {key}", got="nothing", expected="a tensor; generate_sequences writes it"
            )
    responses = data.batch["responses"].cpu()
    response_length = responses.shape[1]
    # The attention mask, not the response mask: what a tool or the user said in between belongs to the text that is
    # graded.
    valid = data.batch["attention_mask"].cpu()[:, -response_length:] if response_length else responses
    lengths = valid.long().sum(dim=-1)
    token_ids = [row[:length] for row, length in zip(responses.tolist(), lengths.tolist(), strict=True)]
    texts = tokenizer.batch_decode(token_ids, skip_special_tokens=True)
    sources = _column(data, reward_fn_key, "data.reward_fn_key names it")
    if needs_truths:
        column = _column(data, "reward_model", "the data set's rows bring it, as {'ground_truth': ...}")
        truths = [_ground_truth(truth, row) for row, truth in enumerate(column)]
    else:
        truths = [None] * len(texts)
    rows = [
        {
            "data_source": sources[row],
            "solution_str": text,
            "ground_truth": truths[row],
            "extra_info": _facts(data, row),
        }
        for row, text in enumerate(texts)
    ]
    return Samples(rows, lengths, response_length)


def _facts(data: DataProto, row: int) -> Any:
    """What is known of a row beside its texts, with how its conversation went where it is one."""
    columns = data.non_tensor_batch
    known = columns["extra_info"][row] if "extra_info" in columns else None
    told = {name: columns[name][row] for name in OF_CONVERSATION if name in columns}
    return {**(known or {}), **told} if told else ({} if known is None else known)


def _column(data: DataProto, key: str, origin: str) -> Any:
    if key not in data.non_tensor_batch:
        there = ", ".join(sorted(data.non_tensor_batch)) or "none"
        raise RewardError(f"reward batch column {key}", got=f"only the columns {there}", expected=f"this one; {origin}")
    return data.non_tensor_batch[key]


def _ground_truth(reward_model: Any, row: int) -> Any:
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    got = f"a dict with {', '.join(map(str, reward_model))}" if isinstance(reward_model, dict) else repr(reward_model)
    raise RewardError(
        f"reward_model of row {row}", got=got, expected="a dict with 'ground_truth'", fix="Correct the data file."
    )
