# SPDX-License-Identifier: Apache-2.0
"""A generator of rows: after each step a prompt that depends on its scores and on the steps before."""

from collections.abc import Iterable
from typing import Any

from quadriga.data import AbstractDataGenerator, DynamicGenDataset


class MoreRows(AbstractDataGenerator):
    """Remembers the sum of all scores."""

    total = 0.0

    def generate(self, dataset: DynamicGenDataset) -> Iterable[dict[str, Any]]:
        assert dataset.batch is not None
        self.total += float(dataset.batch.batch["token_level_scores"].sum())
        row = dataset.dataframe[len(dataset) - 1]
        yield {**row, "prompt": [{"role": "user", "content": f"say a {round(1000 * self.total)}"}]}

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total = state["total"]
