# SPDX-License-Identifier: Apache-2.0
"""Putting data together: what counts as equal, the union of columns, the concatenation of rows.

Two entries of one name may only meet if they are equal; the error names the entry and the first row that differs.
Equality sees through nested containers, takes NaN as equal to NaN, and ends on structures that contain themselves.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from quadriga.errors import ProtocolError
from quadriga.protocol.memory import HUGE_PAGES_FROM_BYTES, allocate, is_lent, was_copied

METRICS = "metrics"
_PLAIN = frozenset({int, float, bool, str, type(None)})

# ---- equality -----------------------------------------------------------------------------------


def deep_equal(left: Any, right: Any) -> bool:
    """Whether two values are equal all the way down: NaN equals NaN, and cycles end.

    A pair of containers that is met again while it is being compared is taken as equal, so two
    structures are equal if no path from the roots leads to a difference.
    """
    pairs: list[tuple[Any, Any]] = [(left, right)]
    seen: set[tuple[int, int]] = set()
    while pairs:
        left, right = pairs.pop()
        if left is right or (id(left), id(right)) in seen:
            continue
        if isinstance(left, torch.Tensor):
            if not isinstance(right, torch.Tensor) or not _same_numbers(left, right.to(left.device)):
                return False
        elif _is_container(left):
            seen.add((id(left), id(right)))
            entries = _paired_entries(left, right)
            if entries is None:
                return False
            pairs.extend(entries)
        elif isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
            are_arrays = isinstance(left, np.ndarray) and isinstance(right, np.ndarray)
            if not are_arrays or not _same_numbers(left, right):
                return False
        else:
            both_nan = isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right)
            if not (both_nan or left == right):
                return False
    return True


def _same_numbers(left: Any, right: Any) -> bool:
    """Whether two tensors, or two arrays that hold no objects, are the same; NaN equals NaN."""
    if left.shape != right.shape:
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and (torch.equal(left, right) or not _unequal(left, right).any())
    unequal = left != right
    if left.dtype.kind in "fc" and right.dtype.kind in "fc":
        unequal &= ~(np.isnan(left) & np.isnan(right))
    return not np.any(unequal)


def _unequal(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Where two tensors of one shape and device differ; NaN equals NaN."""
    unequal = left != right
    if left.is_floating_point() or left.is_complex():
        unequal &= ~(torch.isnan(left) & torch.isnan(right))
    return unequal


def _is_container(value: Any) -> bool:
    """Whether a value is equal to another when what is in it is."""
    if isinstance(value, np.ndarray):
        return value.dtype == object
    if isinstance(value, (Mapping, list, tuple)):
        return True
    # A plain object compares by identity, a dataclass field by field with a truth value that tensors refuse.
    is_plain = type(value).__eq__ is object.__eq__ or hasattr(type(value), "__dataclass_fields__")
    return is_plain and hasattr(value, "__dict__") and not callable(value)


def _paired_entries(left: Any, right: Any) -> list[tuple[Any, Any]] | None:
    """Pairs that must be equal for two containers to be; None if they already differ in form."""
    if isinstance(left, Mapping):
        same = isinstance(right, Mapping) and left.keys() == right.keys()
        return [(left[key], right[key]) for key in left] if same else None
    if isinstance(left, np.ndarray):
        same = isinstance(right, np.ndarray) and left.shape == right.shape
        return list(zip(left.flat, right.flat, strict=True)) if same else None
    if isinstance(left, (list, tuple)):
        # Lists of token ids are long: let Python compare them at once before looking at each entry.
        if _PLAIN.issuperset(map(type, left)) and left == right:
            return []
        same = isinstance(right, (list, tuple)) and len(left) == len(right)
        return list(zip(left, right, strict=True)) if same else None
    return [(vars(left), vars(right))] if type(left) is type(right) else None


# ---- union --------------------------------------------------------------------------------------


def _conflict(name: str, got: str) -> ProtocolError:
    fix = "Remove one with pop, or rename it."
    return ProtocolError(f"union: {name}: got {got}, expected equal entries on both sides", fix=fix)


def _check_same_tensor(name: str, left: Any, right: Any) -> None:
    if isinstance(left, TensorDict) and isinstance(right, TensorDict):
        for key in left.keys() & right.keys():
            _check_same_tensor(f"{name}[{key!r}]", left[key], right[key])
        if left.keys() != right.keys():
            raise _conflict(name, f"keys {sorted(left.keys())} and {sorted(right.keys())}")
        return
    if left is right:
        return
    if left.shape != right.shape or left.dtype != right.dtype:
        raise _conflict(name, f"{tuple(left.shape)} {left.dtype} and {tuple(right.shape)} {right.dtype}")
    right = right.to(left.device)
    if not torch.equal(left, right):
        rows = _unequal(left, right).flatten(1).any(dim=1) if left.dim() > 1 else _unequal(left, right)
        if rows.any():
            numbers = rows.nonzero()
            raise _conflict(name, f"values that differ in {len(numbers)} row(s), the first being row {int(numbers[0])}")


def _check_same_array(name: str, left: np.ndarray, right: np.ndarray) -> None:
    if left is right:
        return
    if left.shape != right.shape:
        raise _conflict(name, f"shapes {left.shape} and {right.shape}")
    if left.dtype != object and right.dtype != object and _same_numbers(left, right):
        return
    for row in range(left.shape[0]):
        if not deep_equal(left[row], right[row]):
            raise _conflict(name, f"values that differ, the first in row {row}")


def union_tensor_dict(left: TensorDict, right: TensorDict) -> TensorDict:
    """Add the columns of `right` to `left`, in place, and return `left`.

    Raises:
        ProtocolError: the batch sizes differ, or a column of both is not equal (NaN equals NaN).
            `left` is then as it was.
    """
    if left.batch_size != right.batch_size:
        sizes = f"{tuple(left.batch_size)} and {tuple(right.batch_size)}"
        raise ProtocolError(f"union: batch size: got {sizes}, expected the same rows on both sides")
    present = set(left.keys())
    for key in right.keys() & present:
        _check_same_tensor(f"column {key!r}", left[key], right[key])
    for key, value in right.items():
        if key not in present:
            left[key] = value
    return left


def union_numpy_dict(left: dict[str, np.ndarray], right: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add the arrays of `right` to `left`, in place, and return `left`.

    Raises:
        ProtocolError: an array of both is not equal, compared row by row and deeply.
            `left` is then as it was.
    """
    for key, value in right.items():
        if key in left:
            _check_same_array(f"column {key!r}", left[key], value)
    left.update({key: value for key, value in right.items() if key not in left})
    return left


def union_meta_info(left: dict[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Add the entries of `right` to `left`, in place; entries of both must be equal."""
    for key, value in right.items():
        if key in left and not deep_equal(left[key], value):
            raise _conflict(f"meta_info[{key!r}]", f"{left[key]!r:.80} and {value!r:.80}")
    left.update({key: value for key, value in right.items() if key not in left})
    return left


# ---- concatenation ------------------------------------------------------------------------------


def merge_meta_info(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`meta_info` of concatenated parts: any entry but the metrics must be equal wherever it is.

    Metrics, a dictionary or a list of dictionaries in each part, become name -> list of the parts' values; values that
    are lists are extended.
    """
    merged: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for number, part in enumerate(parts):
        for key, value in part.items():
            if key == METRICS or key not in merged:
                merged[key] = value
            elif not deep_equal(merged[key], value):
                raise ProtocolError(
                    f"concat: meta_info[{key!r}]: got {merged[key]!r:.80} and, in part {number}, {value!r:.80}, "
                    "expected the same value in every part",
                    fix="Report what differs between parts as a metric or as a column.",
                )
        measured = part.get(METRICS) or {}
        for entries in measured if isinstance(measured, list) else [measured]:
            for name, value in entries.items():
                metrics.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return merged | ({METRICS: metrics} if METRICS in merged else {})


def _check_same_keys(kind: str, parts: Sequence[Any]) -> None:
    first = set(parts[0].keys())
    for number, part in enumerate(parts):
        if set(part.keys()) != first:
            raise ProtocolError(
                f"concat: {kind}: got columns {sorted(part.keys())} in part {number} and {sorted(first)} in part 0, "
                "expected the same columns in every part"
            )


def concat_tensors(parts: Sequence[TensorDict]) -> TensorDict:
    """Rows of all parts, one below the other: one allocation per column, none for a single part that is not lent."""
    if len(parts) == 1 and not any(map(is_lent, parts[0].values(True, True))):
        return parts[0].copy()
    _check_same_keys("batch", parts)
    rows = sum(part.batch_size[0] for part in parts)
    columns: dict[str, Any] = {}
    for key in parts[0].keys():  # a TensorDict iterates over rows
        values = [part[key] for part in parts]
        if isinstance(values[0], TensorDict):
            columns[key] = concat_tensors(values)
            continue
        shape, dtype = values[0].shape[1:], values[0].dtype
        for number, value in enumerate(values):
            if value.shape[1:] != shape or value.dtype != dtype:
                raise ProtocolError(
                    f"concat: column {key!r}: got {tuple(value.shape)} {value.dtype} in part {number}, "
                    f"expected (rows, {', '.join(map(str, shape))}) {dtype} as in part 0",
                    fix="Pad the parts to one length first.",
                )
        columns[key] = _concat_rows(values, rows)
    return TensorDict(columns, batch_size=[rows], device=parts[0].device)


def _concat_rows(values: Sequence[torch.Tensor], rows: int) -> torch.Tensor:
    is_plain = all(value.device.type == "cpu" and not value.requires_grad for value in values)
    is_small = sum(value.nbytes for value in values) < HUGE_PAGES_FROM_BYTES
    if not is_plain or (is_small and not any(map(is_lent, values))):
        return torch.cat(values)
    column = allocate((rows, *values[0].shape[1:]), values[0].dtype)
    for target, value in zip(column.split([value.shape[0] for value in values]), values, strict=True):
        target.copy_(value)
        was_copied(value)
    return column


def concat_arrays(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Rows of all parts, one below the other; a single part is not copied."""
    if len(parts) == 1:
        return dict(parts[0])
    _check_same_keys("non_tensor_batch", parts)
    for key, first in parts[0].items():
        for number, part in enumerate(parts):
            if part[key].shape[1:] != first.shape[1:]:
                raise ProtocolError(
                    f"concat: column {key!r}: got shape {part[key].shape} in part {number}, "
                    f"expected shape (rows, *{first.shape[1:]}) as in part 0"
                )
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
