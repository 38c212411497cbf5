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
from quadriga.protocol.memory import HUGE_PAGES_FROM_BYTES, allocate, copy_into, is_lent

METRICS = "metrics"
_PLAIN = frozenset({int, float, bool, str, type(None)})

# ---- equality -----------------------------------------------------------------------------------


def deep_equal(left: Any, right: Any) -> bool:
    """Whether two values are equal all the way down: NaN equals NaN, and cycles end.
    A pair of containers that is met again while it is being compared is taken as equal."""
    pairs: list[tuple[Any, Any]] = [(left, right)]
    seen: set[tuple[int, int]] = set()
    while pairs:
        left, right = pairs.pop()
        if left is right or (id(left), id(right)) in seen:
            continue
        if isinstance(left, torch.Tensor):
            if (
                not isinstance(right, torch.Tensor)
                or left.shape != right.shape
                or left.dtype != right.dtype
            ):
                return False
            right = right.to(left.device)
            if not torch.equal(left, right) and unequal(left, right).any():
                return False
        elif (entries := _paired_entries(left, right)) is not None:
            if not isinstance(entries, list):
                return False
            seen.add((id(left), id(right)))
            pairs.extend(entries)
        elif isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
            are_arrays = isinstance(left, np.ndarray) and isinstance(right, np.ndarray)
            if not are_arrays or left.shape != right.shape or np.any(unequal(left, right)):
                return False
        else:
            both_nan = (
                isinstance(left, float)
                and isinstance(right, float)
                and math.isnan(left)
                and math.isnan(right)
            )
            if not (both_nan or left == right):
                return False
    return True


def unequal(left: Any, right: Any) -> Any:
    """Where two tensors, or two arrays that hold no objects, differ; NaN, which is not equal to itself, equals NaN."""
    return (left != right) & ((left == left) | (right == right))


def _paired_entries(left: Any, right: Any) -> list[tuple[Any, Any]] | bool | None:
    """Pairs that must be equal for two containers to be; False if they differ in form, None if `left` is none."""
    if isinstance(left, Mapping):
        same = isinstance(right, Mapping) and left.keys() == right.keys()
        return same and [(left[key], right[key]) for key in left]
    if isinstance(left, np.ndarray):
        if left.dtype != object:
            return None
        same = isinstance(right, np.ndarray) and left.shape == right.shape
        return same and list(zip(left.flat, right.flat, strict=True))
    if isinstance(left, (list, tuple)):
        # Lists of token ids are long: let Python compare them at once before looking at each entry.
        if _PLAIN.issuperset(map(type, left)) and left == right:
            return []
        same = isinstance(right, (list, tuple)) and len(left) == len(right)
        return same and list(zip(left, right, strict=True))
    # A plain object compares by identity, a dataclass field by field with a truth value that tensors refuse.
    is_plain = type(left).__eq__ is object.__eq__ or hasattr(type(left), "__dataclass_fields__")
    if not is_plain or not hasattr(left, "__dict__") or callable(left):
        return None
    return type(left) is type(right) and [(vars(left), vars(right))]


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
        raise _conflict(
            name, f"{tuple(left.shape)} {left.dtype} and {tuple(right.shape)} {right.dtype}"
        )
    right = right.to(left.device)
    if not torch.equal(left, right):
        rows = unequal(left, right)
        rows = rows.flatten(1).any(dim=1) if left.dim() > 1 else rows
        if rows.any():
            numbers = rows.nonzero()
            raise _conflict(
                name,
                f"values that differ in {len(numbers)} row(s), the first being row {int(numbers[0])}",
            )


def union_tensor_dict(left: TensorDict, right: TensorDict) -> TensorDict:
    """Add the columns of `right` to `left`, in place, and return `left`.
    Raises ProtocolError: the batch sizes differ, or a column of both is not equal; `left` is then as it was."""
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


def union_numpy_dict(
    left: dict[str, np.ndarray], right: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Add the arrays of `right` to `left`, in place, and return `left`.
    Raises ProtocolError: an array of both is not equal, compared row by row and deeply; `left` is then as it was."""
    for key in [key for key in right if key in left]:
        first, second, name = left[key], right[key], f"column {key!r}"
        if first is second:
            continue
        if first.shape != second.shape:
            raise _conflict(name, f"shapes {first.shape} and {second.shape}")
        if first.dtype != object and second.dtype != object and not np.any(unequal(first, second)):
            continue
        for row in range(len(first)):
            if not deep_equal(first[row], second[row]):
                raise _conflict(name, f"values that differ, the first in row {row}")
    left.update({key: value for key, value in right.items() if key not in left})
    return left


def union_meta_info(left: dict[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Add the entries of `right` to `left`, in place; entries of both must be equal, of metrics those of one name."""
    for key, value in right.items():
        if key == METRICS and isinstance(left.get(key), dict) and isinstance(value, dict):
            left[key] = union_meta_info(dict(left[key]), value)
        elif key in left and not deep_equal(left[key], value):
            raise _conflict(f"meta_info[{key!r}]", f"{left[key]!r:.80} and {value!r:.80}")
    left.update({key: value for key, value in right.items() if key not in left})
    return left


# ---- concatenation ------------------------------------------------------------------------------


def merge_meta_info(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`meta_info` of concatenated parts: any entry but the metrics must be equal wherever it is.
    Metrics (a dictionary, or a list of them, in each part) become name -> list of the parts' values."""
    merged: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for number, part in enumerate(parts):
        for key, value in part.items():
            if key == METRICS or key not in merged:
                merged[key] = value
            elif not deep_equal(merged[key], value):
                where, got = (
                    f"concat: meta_info[{key!r}]",
                    f"{merged[key]!r:.80} and, in part {number}, {value!r:.80}",
                )
                fix = "Report what differs between parts as a metric or as a column."
                raise ProtocolError(
                    where, got=got, expected="the same value in every part", fix=fix
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
            got = f"columns {sorted(part.keys())} in part {number} and {sorted(first)} in part 0"
            raise ProtocolError(
                f"concat: {kind}", got=got, expected="the same columns in every part"
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
                where, got = (
                    f"concat: column {key!r}",
                    f"{tuple(value.shape)} {value.dtype} in part {number}",
                )
                expected = f"(rows, {', '.join(map(str, shape))}) {dtype} as in part 0"
                raise ProtocolError(
                    where, got=got, expected=expected, fix="Pad the parts to one length first."
                )
        is_plain = all(value.device.type == "cpu" and not value.requires_grad for value in values)
        is_small = sum(value.nbytes for value in values) < HUGE_PAGES_FROM_BYTES
        if not is_plain or (is_small and not any(map(is_lent, values))):
            columns[key] = torch.cat(values)
            continue
        columns[key] = column = allocate((rows, *shape), dtype)
        for target, value in zip(
            column.split([len(value) for value in values]), values, strict=True
        ):
            copy_into(target, value)
    return TensorDict(columns, batch_size=[rows], device=parts[0].device)


def concat_arrays(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Rows of all parts, one below the other; a single part is not copied."""
    if len(parts) == 1:
        return dict(parts[0])
    _check_same_keys("non_tensor_batch", parts)
    for key, first in parts[0].items():
        for number, part in enumerate(parts):
            if part[key].shape[1:] != first.shape[1:]:
                where, got = f"concat: column {key!r}", f"shape {part[key].shape} in part {number}"
                raise ProtocolError(
                    where, got=got, expected=f"shape (rows, *{first.shape[1:]}) as in part 0"
                )
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
