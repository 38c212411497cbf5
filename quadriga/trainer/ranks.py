# SPDX-License-Identifier: Apache-2.0
"""What makes a batch the same batch however it is spread over ranks: samples and rows that know their numbers.

    prompts ─ with_samples ─> generate ─ deal_rows ─> all that follows ─ in_first_order ─> rows for people

Legend: B rows.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch

from quadriga.config import ActorConfig
from quadriga.protocol import DataProto
from quadriga.trainer.balance import Row, SequenceCost, balance

T = TypeVar("T")


def with_samples(prompts: DataProto, count: int) -> DataProto:
    """Each row `count` times, its copies numbered by `sample_index`, so that they may be answered on several ranks."""
    samples = prompts.repeat(count)
    numbers = np.tile(np.arange(count), len(prompts)).astype(object)
    samples.non_tensor_batch["sample_index"] = numbers
    return samples


def deal_rows(
    batch: DataProto, num_ranks: int, responses_per_prompt: int, config: ActorConfig, cost: SequenceCost | None = None
) -> dict[str, float]:
    """Put the rows into an order whose chunks are equal work, in place, and number them as they were by `row_index`.

    Args:
        batch: prompts with answers, [B]; with one rank it stays as it is.
        num_ranks: how many chunks it will be cut into.
        responses_per_prompt: samples of a prompt.
        config: of the update, whose mini-batches are to be even.
        cost: of rows; None: of a model whose size is not known.

    Returns:
        Metrics of the balance.
    """
    if num_ranks == 1:
        return {}
    lengths = batch.batch["attention_mask"].sum(-1)
    responses = batch.batch["attention_mask"][:, -batch.batch["responses"].shape[1] :].sum(-1)
    # Without sharing each row computes a prompt of its own.
    prompts = batch.non_tensor_batch["uid"] if config.use_prefix_sharing else range(len(batch))
    rows = [
        Row(prompt, total - response, response)
        for prompt, total, response in zip(prompts, lengths.tolist(), responses.tolist(), strict=True)
    ]
    # A shuffled order is another one in each pass: only the batch as a whole can be even.
    size = len(batch) if config.shuffle else config.ppo_mini_batch_size * responses_per_prompt
    dealt = balance(rows, num_ranks, size, cost or SequenceCost())
    batch.batch["row_index"] = torch.arange(len(batch))
    batch.reorder(dealt.order)
    return dealt.metrics()


def in_first_order(rows: Sequence[T], batch: DataProto) -> list[T]:
    """What belongs to the rows of a batch, in the order that they had before they were dealt to ranks."""
    if "row_index" not in batch.batch.keys():
        return list(rows)
    return [rows[place] for place in batch.batch["row_index"].argsort().tolist()]
