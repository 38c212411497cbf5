# SPDX-License-Identifier: Apache-2.0
"""Samplers: of data that change between batches, and of curricula, which learn from each batch.

    SuccessRateSampler     rates of the rows ── weights ──> a batch of rows ── update(batch) ──> rates

Their state holds all that decides which rows come next.
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
    """A sampler that is made of a data set and the section `data`."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        self.data_source, self.data_config = data_source, data_config

    def __len__(self) -> int:
        return len(self.data_source)


class AbstractCurriculumSampler(AbstractSampler, ABC):
    """A sampler that learns from each finished batch."""

    @abstractmethod
    def update(self, batch: DataProto) -> None:
        """Take note of a batch with rewards and advantages."""


class PassSampler(AbstractSampler):
    """Each pass has the rows that are there when it begins, shuffled anew where `data.shuffle` says so."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        super().__init__(data_source, data_config)
        self._passes = self._position = self._num_rows = 0

    def __iter__(self) -> Iterator[int]:
        if self._position == 0:
            self._num_rows = len(self)
        order = self._order()
        while self._position < len(order):
            self._position += 1
            yield int(order[self._position - 1])
        self._passes, self._position = self._passes + 1, 0

    def _order(self) -> np.ndarray:
        """The rows of the pass, in their order."""
        order = np.arange(self._num_rows)
        if self.data_config.shuffle:
            order = np.random.default_rng([self.data_config.seed, self._passes]).permutation(order)
        return order

    def state_dict(self) -> dict[str, int]:
        """The pass, its rows and the position in it."""
        return {"passes": self._passes, "position": self._position, "num_rows": self._num_rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self._passes, self._position, self._num_rows = (
            state["passes"],
            state["position"],
            state["num_rows"],
        )


class MixtureSampler(PassSampler):
    """Rows of the entries of `data.train_files` by their shares, `data.mixture`: of any rows in a row an entry has its
    share, to a row or two, so that each batch is mixed alike. An entry that is drawn anew in a pass is shuffled anew.
    Raises DataError: an entry has no rows, or the data set does not know of entries."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        super().__init__(data_source, data_config)
        if not hasattr(data_source, "items_by_entry"):
            got, expected = (
                f"a {type(data_source).__name__}",
                "a data set with items_by_entry(), as RLHFDataset has",
            )
            raise DataError(
                "data.mixture",
                got=got,
                expected=expected,
                fix="Leave the key out with this data set.",
            )
        self._items = data_source.items_by_entry()
        lengths = np.array([len(items) for items in self._items])
        if not lengths.all():
            got = f"entry {int(np.argmin(lengths))} of data.train_files without a row in use"
            raise DataError(
                "data.mixture",
                got=got,
                expected="rows of each",
                fix="Leave it out, or use all samples.",
            )
        self._shares = np.array(data_config.mixture) / sum(data_config.mixture)
        passes = lengths / self._shares
        total = passes.min() if data_config.mixture_until == "first" else passes.max()
        self._counts = np.maximum(1, np.floor(self._shares * total + 1e-9).astype(np.int64))

    def __len__(self) -> int:
        return int(self._counts.sum())

    def _order(self) -> np.ndarray:
        rng = np.random.default_rng([self.data_config.seed, self._passes])
        rows, times = [], []
        for items, count, share in zip(
            self._items, self._counts.tolist(), self._shares, strict=True
        ):
            if self.data_config.shuffle:
                rounds = -(-count // len(items))
                rows.append(np.concatenate([rng.permutation(items) for _ in range(rounds)])[:count])
            else:
                rows.append(items[(self._passes * count + np.arange(count)) % len(items)])
            times.append((np.arange(count) + 0.5) / share)
        return np.concatenate(rows)[np.argsort(np.concatenate(times), kind="stable")]


class SuccessRateSampler(AbstractCurriculumSampler):
    """Rows that the policy solves at times are drawn most, those that it always or never solves least.

    The weight of a row is `FLOOR + p (1 - p)`, p its success rate ("Learning to Reason at the Frontier of
    Learnability", Foster et al., 2025): the mean over its responses of `acc`, or else of the score, cut to [0, 1], half
    of it of the last batch that had the row and half of those before. A row that no batch had has p = 1/2. The rows of
    a batch are drawn without replacement; a pass has as many rows as the data set, and may have a row several times.

    With `algorithm.filter_groups` a batch has only the groups that were kept, and the sampler learns from these."""

    FLOOR = 0.02

    def __init__(self, data_source: Any, data_config: Any) -> None:
        super().__init__(data_source, data_config)
        self._rates = torch.empty(0, dtype=torch.float64)  # nan: no batch had the row
        self._draws = self._position = 0
        self._drawn: list[int] = []

    def __iter__(self) -> Iterator[int]:
        while self._position < len(self):
            if not self._drawn:
                self._drawn = self._draw()
            self._position += 1
            yield self._drawn.pop(0)
        self._position = 0

    @property
    def rates(self) -> torch.Tensor:
        """The success rate of each row, [rows]; nan where no batch had it. Rows may come to the data set."""
        if missing := len(self) - len(self._rates):
            self._rates = torch.cat(
                [self._rates, torch.full((missing,), torch.nan, dtype=torch.float64)]
            )
        return self._rates

    def _draw(self) -> list[int]:
        """The rows of the next batch: the largest of `log(weight) + Gumbel noise` are a draw without replacement."""
        size = min(
            self.data_config.gen_batch_size or self.data_config.train_batch_size,
            len(self) - self._position,
        )
        rates = self.rates.nan_to_num(nan=0.5).numpy()
        noise = np.random.default_rng([self.data_config.seed, self._draws]).gumbel(size=len(rates))
        self._draws += 1
        return np.argsort(-(np.log(self.FLOOR + rates * (1 - rates)) + noise), kind="stable")[
            :size
        ].tolist()

    def update(self, batch: DataProto) -> None:
        """Take note of the success of each row of a batch.
        Raises DataError: the rows do not say which ones of the data set they are."""
        items = batch.non_tensor_batch.get("item")
        if items is None:
            expected = "a column `item`, the number of each row in its data set"
            fix = "A data set of your own that derives from RLHFDataset has it; else return it from __getitem__."
            raise DataError("data.sampler", got="a batch without it", expected=expected, fix=fix)
        graded = batch.non_tensor_batch.get("acc")
        scores = batch.batch["token_level_scores"].sum(-1).numpy() if graded is None else graded
        rows, places = np.unique(items.astype(np.int64), return_inverse=True)
        found = np.bincount(places, np.clip(scores.astype(np.float64), 0, 1)) / np.bincount(places)
        new, before = torch.from_numpy(found), self.rates[rows]
        self._rates[rows] = torch.where(before.isnan(), new, (before + new) / 2)

    def state_dict(self) -> dict[str, Any]:
        """The rates, and what is drawn and not yet taken."""
        return {
            "rates": self.rates.clone(), "draws": self._draws, "position": self._position, "drawn": list(self._drawn)
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._rates, self._draws = state["rates"].clone(), state["draws"]
        self._position, self._drawn = state["position"], list(state["drawn"])
