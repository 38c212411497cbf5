# SPDX-License-Identifier: Apache-2.0
"""Answers to prompts: what training, its greedy baseline and validation all ask for.

Legend: B rows, T response positions.
"""

from typing import Protocol

import numpy as np

from quadriga.config import Config
from quadriga.protocol import DataProto
from quadriga.trainer.ranks import with_samples
from quadriga.workers import ActorRolloutRefWorker, RolloutWorker
from quadriga.workers.base import PROMPT_TENSORS, prompt_inputs

PASSING = (*PROMPT_TENSORS, "raw_prompt_ids", "sample_index", "multi_modal_data")
"""Columns of a prompt that its answers have in another form, or do without."""


class Answers(Protocol):
    """Where answers come from."""

    def __call__(self, prompts: DataProto, num_samples: int) -> DataProto:
        """Answers to prompts.

        Args:
            prompts: with a `uid` each; meta_info says the step and how to sample. They stay as they are.
            num_samples: of each prompt.

        Returns:
            `num_samples` rows for each prompt, one below the other: all that is known of it, and its answers. meta_info
            is that of the prompts, with `metrics`.
        """
        ...


class RolloutAnswers:
    """See `Answers`: a worker group generates.

    Args:
        rollout: the group.
        config: of the run.
    """

    def __init__(self, rollout: ActorRolloutRefWorker | RolloutWorker, config: Config) -> None:
        self.rollout, self.config = rollout, config

    def __call__(self, prompts: DataProto, num_samples: int) -> DataProto:
        """See `Answers`."""
        rows = with_samples(prompts, num_samples)
        return without_passing(rows).union(self.rollout.generate_sequences(prompt_inputs(rows, self.config)))


def without_passing(rows: DataProto) -> DataProto:
    """Prompts as their answers keep them."""
    tensors = [key for key in rows.batch.keys() if key not in PASSING]
    return rows.select(tensors, [key for key in rows.non_tensor_batch if key not in PASSING])


def named(prompts: DataProto, prefix: str, first: int = 0) -> DataProto:
    """Give each prompt a `uid`, in place: its number behind a prefix.

    Names are derived, not drawn: a resumed run gives its prompts the names that it would have given them, and so they
    are answered in the same way.
    """
    names = [f"{prefix}-{row}" for row in range(first, first + len(prompts))]
    prompts.non_tensor_batch["uid"] = np.array(names, dtype=object)
    return prompts
