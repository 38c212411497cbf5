# SPDX-License-Identifier: Apache-2.0
"""Samplers for growing data, for mixtures, and for curricula, which learn from each batch.

    SuccessRateSampler     rates of the rows ── weights ──> a batch of rows ── update(batch) ──> rates

The state of a sampler holds everything that decides which rows come next.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from quadriga.errors import DataError
from quadriga.protocol import DataProto


class AbstractSampler(Sampler[int]):
    """Base class of samplers that are created from a data set and the section `data`."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        self.data_source = data_source
        self.data_config = data_config

    def __len__(self) -> int:
        return len(self.data_source)


class AbstractCurriculumSampler(AbstractSampler, ABC):
    """Base class of samplers whose choice of rows depends on the batches so far."""

    @abstractmethod
    def update(self, batch: DataProto) -> None:
        """Adapt the choice of rows to a finished batch, which has rewards and advantages."""


class PassSampler(AbstractSampler):
    """Draws each row once per pass, in a new order each time if `data.shuffle` is set.

    A pass has the rows that exist when it begins: the data set may grow.
    """

    def __init__(self, data_source: Any, data_config: Any) -> None:
        super().__init__(data_source, data_config)
        self._passes = 0
        self._position = 0
        self._num_rows = 0

    def __iter__(self) -> Iterator[int]:
        # A resumed pass keeps the number of rows that it began with, which is saved in the state.
        if self._position == 0:
            self._num_rows = len(self)
        order = self._order()
        while self._position < len(order):
            # Advanced before the row is handed out: a run that resumes from a state saved while the
            # row is in use goes on with the next row.
            self._position += 1
            yield int(order[self._position - 1])
        self._passes += 1
        self._position = 0

    def _order(self) -> np.ndarray:
        """Numbers of the rows of this pass, in the order in which they are drawn."""
        order = np.arange(self._num_rows)
        if self.data_config.shuffle:
            rng = np.random.default_rng([self.data_config.seed, self._passes])
            order = rng.permutation(order)
        return order

    def state_dict(self) -> dict[str, int]:
        """Number of finished passes, and of the current pass the position and number of rows."""
        return {"passes": self._passes, "position": self._position, "num_rows": self._num_rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the position of a state."""
        self._passes = state["passes"]
        self._position = state["position"]
        self._num_rows = state["num_rows"]


class MixtureSampler(PassSampler):
    """Mixes the entries of `data.train_files` by their shares, `data.mixture`.

    Any consecutive rows have the shares, up to a row or two per entry, so all batches are mixed
    alike. An entry whose rows come several times in a pass is shuffled again each time.

    Raises:
        DataError: an entry has no rows, or the data set has no method `items_by_entry`.
    """

    def __init__(self, data_source: Any, data_config: Any) -> None:
        super().__init__(data_source, data_config)
        if not hasattr(data_source, "items_by_entry"):
            raise DataError(
                "data.mixture",
                got=f"a {type(data_source).__name__}",
                expected="a data set with items_by_entry(), as RLHFDataset has",
                fix="Leave the key out with this data set.",
            )
        # For each entry, the numbers of its rows in the data set.
        self._items = data_source.items_by_entry()
        lengths = np.array([len(items) for items in self._items])
        if not lengths.all():
            empty_entry = int(np.argmin(lengths))
            raise DataError(
                "data.mixture",
                got=f"entry {empty_entry} of data.train_files without a row in use",
                expected="at least one row of each entry",
                fix="Remove the entry, or raise data.train_max_samples.",
            )
        self._shares = np.array(data_config.mixture) / sum(data_config.mixture)
        # For each entry, the length of a pass in which each of its rows comes exactly once. A pass
        # ends when the last entry has been used up, or the first (`data.mixture_until`).
        pass_lengths = lengths / self._shares
        pass_length = pass_lengths.max()
        if data_config.mixture_until == "first":
            pass_length = pass_lengths.min()
        # Rounding errors may leave 3 as 2.9999999, which must not become 2.
        counts = np.floor(self._shares * pass_length + 1e-9).astype(np.int64)
        # Rows that each entry has in a pass.
        self._counts = np.maximum(1, counts)

    def __len__(self) -> int:
        """Number of rows in a pass, which may differ from the number of rows in the data set."""
        return int(self._counts.sum())

    def _order(self) -> np.ndarray:
        """Numbers of the rows of this pass, with the entries evenly mixed.

        Each row gets a time between 0 and the length of the pass, such that the rows of one entry
        are equally far apart. Rows come in the order of their times.
        """
        rng = np.random.default_rng([self.data_config.seed, self._passes])
        rows = []
        times = []
        counts = self._counts.tolist()
        for items, count, share in zip(self._items, counts, self._shares, strict=True):
            if self.data_config.shuffle:
                num_rounds = -(-count // len(items))  # rounded up
                rounds = [rng.permutation(items) for _ in range(num_rounds)]
                rows.append(np.concatenate(rounds)[:count])
            else:
                # Go on in the entry where the previous pass ended.
                positions = self._passes * count + np.arange(count)
                rows.append(items[positions % len(items)])
            times.append((np.arange(count) + 0.5) / share)
        by_time = np.argsort(np.concatenate(times), kind="stable")
        return np.concatenate(rows)[by_time]


class SuccessRateSampler(AbstractCurriculumSampler):
    """Prefers rows that the policy solves sometimes over rows that it solves always or never.

    The weight of a row is `FLOOR + p (1 - p)`, p its success rate ("Learning to Reason at the
    Frontier of Learnability", Foster et al., 2025). The success of a row in a batch is the mean of
    `acc` over its responses (or of the score, where the grader returns no `acc`), clipped to [0,
    1]. After each batch that has the row, its rate becomes the mean of its old rate and this
    success. A row that no batch had counts as p = 1/2.

    The rows of a batch are drawn without replacement. A pass has as many rows as the data set, and
    may have a row several times. With `algorithm.filter_groups` the sampler learns only from groups
    that pass the filter.
    """

    FLOOR = 0.02
    """Weight of a row that is solved always or never: such rows are drawn too."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        super().__init__(data_source, data_config)
        self._rates = torch.empty(0, dtype=torch.float64)  # nan: no batch had the row
        self._num_draws = 0  # batches that were drawn, which seeds the next draw
        self._position = 0  # rows of this pass that were handed out
        self._waiting_rows: list[int] = []  # drawn rows that are not handed out yet

    def __iter__(self) -> Iterator[int]:
        while self._position < len(self):
            # Each batch changes the weights, so rows are drawn one batch at a time.
            if not self._waiting_rows:
                self._waiting_rows = self._draw_batch()
            self._position += 1
            yield self._waiting_rows.pop(0)
        self._position = 0

    @property
    def rates(self) -> torch.Tensor:
        """The success rate of each row, [rows]; nan if no batch had it."""
        # The data set may have grown since the last call.
        num_new = len(self) - len(self._rates)
        if num_new:
            new_rates = torch.full((num_new,), torch.nan, dtype=torch.float64)
            self._rates = torch.cat([self._rates, new_rates])
        return self._rates

    def _draw_batch(self) -> list[int]:
        """Draw the rows of the next batch, by weight and without replacement."""
        batch_size = self.data_config.gen_batch_size or self.data_config.train_batch_size
        # The last batch of a pass has the rows that the pass still lacks.
        size = min(batch_size, len(self) - self._position)
        # Rows that no batch had count as half solved, which is the largest weight.
        rates = self.rates.nan_to_num(nan=0.5).numpy()
        weights = self.FLOOR + rates * (1 - rates)
        rng = np.random.default_rng([self.data_config.seed, self._num_draws])
        noise = rng.gumbel(size=len(rates))
        self._num_draws += 1
        # The Gumbel-top-k trick: to draw by weight and without replacement, take the rows with the
        # largest `log(weight) + Gumbel noise`.
        order = np.argsort(-(np.log(weights) + noise), kind="stable")
        return order[:size].tolist()

    def update(self, batch: DataProto) -> None:
        """Update the success rates of the rows in a batch.

        Args:
            batch: a finished batch, in which each row of the data set has several responses.

        Raises:
            DataError: the batch has no column `item`.
        """
        items = batch.non_tensor_batch.get("item")
        if items is None:
            raise DataError(
                "data.sampler",
                got="a batch without the column `item`",
                expected="`item`, the number of each response's row in the data set",
                fix="Derive the data set from RLHFDataset, or return `item` from __getitem__.",
            )
        scores = batch.batch["token_level_scores"].sum(-1).numpy().astype(np.float64)
        # `acc` is a column if all responses have it; otherwise it is among what each grader
        # returned.
        accuracies = batch.non_tensor_batch.get("acc")
        if accuracies is None:
            extras = batch.non_tensor_batch.get("reward_extra", ())
            accuracies = [extra.get("acc") for extra in extras]
        # A grader may return `acc` for some responses only; the others keep their score.
        for response, accuracy in enumerate(accuracies):
            if accuracy is not None:
                scores[response] = float(accuracy)
        scores = np.clip(scores, 0, 1)
        # The distinct rows; and for each response, the position of its row among them.
        rows, positions = np.unique(items.astype(np.int64), return_inverse=True)
        # For each row, the sum of its scores over the number of its responses.
        mean_scores = np.bincount(positions, scores) / np.bincount(positions)
        success = torch.from_numpy(mean_scores)
        # The property gives new rows an entry in `_rates`, which is then updated in place.
        old_rates = self.rates[rows]
        self._rates[rows] = torch.where(old_rates.isnan(), success, (old_rates + success) / 2)

    def state_dict(self) -> dict[str, Any]:
        """The rates, the position, and the rows that are drawn but not yet handed out."""
        return {
            "rates": self.rates.clone(),
            "draws": self._num_draws,
            "position": self._position,
            "drawn": list(self._waiting_rows),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the rates and drawn rows of a state."""
        self._rates = state["rates"].clone()
        self._num_draws = state["draws"]
        self._position = state["position"]
        self._waiting_rows = list(state["drawn"])
