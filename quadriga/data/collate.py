# SPDX-License-Identifier: Apache-2.0
"""Turns the rows that a data set yields into one batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quadriga.errors import DataError


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | np.ndarray]:
    """Stack tensors; put everything else, of whatever shape, into object arrays.

    Args:
        data_list: B rows with the same keys. The tensors of one key must agree in shape.

    Returns:
        For each key a tensor [B, ...] or an object array [B], ready for `DataProto.from_single_dict`.

    Raises:
        DataError: rows differ in their keys, or the tensors of a key in their shape.
    """
    if not data_list:
        raise DataError("collate_fn", got="no rows", expected="at least one")
    keys = list(data_list[0])
    for position, row in enumerate(data_list):
        if set(row) != set(keys):
            odd = ", ".join(sorted(set(row) ^ set(keys)))
            raise DataError(
                "collate_fn",
                got=f"row {position} of the batch and row 0, of which only one has {odd}",
                expected="the same keys in every row",
                fix="Let the data set give each row every key, with None where there is no value.",
            )
    return {key: _column(key, [row[key] for row in data_list]) for key in keys}


def _column(key: str, values: list[Any]) -> Tensor | np.ndarray:
    if all(isinstance(value, Tensor) for value in values):
        shapes = {tuple(value.shape) for value in values}
        if len(shapes) > 1:
            raise DataError(
                f"collate_fn, key {key!r}",
                got=f"tensors of the shapes {sorted(shapes)}",
                expected="one shape",
                fix="Pad them in the data set.",
            )
        return torch.stack(values)
    # Assigned element by element: numpy would otherwise make a matrix of lists that happen to be of equal length.
    column = np.empty(len(values), dtype=object)
    for position, value in enumerate(values):
        column[position] = value
    return column
