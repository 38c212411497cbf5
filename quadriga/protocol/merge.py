# SPDX-License-Identifier: Apache-2.0
"""Equality, union and concatenation of a DataProto's parts.

Entries of the same name can only be merged if they are equal; else the error names the entry and
the first row that differs. The comparison looks into nested containers, treats NaN as equal to NaN,
and terminates on structures that contain themselves.
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
_PLAIN_TYPES = frozenset({int, float, bool, str, type(None)})

# ---- equality -----------------------------------------------------------------------------------


def deep_equal(left: Any, right: Any) -> bool:
    """Whether two values are equal, including everything that they contain.

    NaN equals NaN. A pair of containers that was compared before, as in a cycle, is not compared
    again.
    """
    # An explicit stack instead of recursion: nesting may be deeper than Python's limit.
    pairs: list[tuple[Any, Any]] = [(left, right)]
    seen = set()
    while pairs:
        left, right = pairs.pop()
        if left is right or (id(left), id(right)) in seen:
            continue
        if isinstance(left, torch.Tensor):
            if not isinstance(right, torch.Tensor) or not _equal_tensors(left, right):
                return False
            continue

        if _is_container(left):
            entries = _pair_entries(left, right)
            if entries is None:
                return False
            seen.add((id(left), id(right)))
            pairs.extend(entries)
        elif isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
            are_arrays = isinstance(left, np.ndarray) and isinstance(right, np.ndarray)
            if not are_arrays or left.shape != right.shape or np.any(unequal(left, right)):
                return False
        else:
            are_floats = isinstance(left, float) and isinstance(right, float)
            are_nan = are_floats and math.isnan(left) and math.isnan(right)
            if not (are_nan or left == right):
                return False
    return True


def _equal_tensors(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and values, on any devices."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    right = right.to(left.device)
    # `torch.equal` is fast, but false for NaN. Only then are the positions compared.
    return torch.equal(left, right) or not unequal(left, right).any()


def unequal(left: Any, right: Any) -> Any:
    """Mask of the positions at which two tensors, or two arrays without objects, differ.

    NaN counts as equal to NaN.
    """
    # Only NaN is not equal to itself, so the second factor is false where both are NaN.
    return (left != right) & ((left == left) | (right == right))


def _is_container(value: Any) -> bool:
    """Whether a value is compared by its entries (a container) or its attributes (an object).

    Any other value is compared by `==`.
    """
    if isinstance(value, np.ndarray):
        return value.dtype == object
    if isinstance(value, (Mapping, list, tuple)):
        return True
    # `==` is right for objects whose class defines it, except for dataclasses: theirs fails if an
    # attribute is a tensor. Without a definition, `==` compares only identities.
    compares_identity = type(value).__eq__ is object.__eq__
    if not compares_identity and not hasattr(type(value), "__dataclass_fields__"):
        return False
    return hasattr(value, "__dict__") and not callable(value)


def _pair_entries(left: Any, right: Any) -> list[tuple[Any, Any]] | None:
    """Pair the entries of two values, of which `left` is a container.

    Returns:
        The pairs of entries that must be equal. None: the values differ in their type, keys, shape
        or length.
    """
    if isinstance(left, Mapping):
        if not isinstance(right, Mapping) or left.keys() != right.keys():
            return None
        return [(left[key], right[key]) for key in left]
    if isinstance(left, np.ndarray):
        if not isinstance(right, np.ndarray) or left.shape != right.shape:
            return None
        return list(zip(left.flat, right.flat, strict=True))
    if isinstance(left, (list, tuple)):
        # A long list of plain values, such as token ids, is compared by a single `==`.
        if _PLAIN_TYPES.issuperset(map(type, left)) and left == right:
            return []
        if not isinstance(right, (list, tuple)) or len(left) != len(right):
            return None
        return list(zip(left, right, strict=True))
    # An object, which is compared by its attributes.
    if type(left) is not type(right):
        return None
    return [(vars(left), vars(right))]


# ---- union --------------------------------------------------------------------------------------


def _conflict(name: str, got: str) -> ProtocolError:
    """Make the error for an entry that differs between the sides of a union.

    Args:
        name: the entry, such as "column 'advantages'".
        got: what differs.
    """
    return ProtocolError(
        f"union: {name}: got {got}, expected equal entries on both sides",
        fix="Remove one with pop, or rename it.",
    )


def _check_same_tensor(name: str, left: Any, right: Any) -> None:
    """Raise a ProtocolError unless two tensors or nested columns are equal.

    Args:
        name: the column, for the error.
        left: a tensor or a TensorDict.
        right: a tensor or a TensorDict.
    """
    if isinstance(left, TensorDict) and isinstance(right, TensorDict):
        for key in left.keys() & right.keys():
            _check_same_tensor(f"{name}[{key!r}]", left[key], right[key])
        if left.keys() != right.keys():
            raise _conflict(name, f"keys {sorted(left.keys())} and {sorted(right.keys())}")
        return
    if left is right or _equal_tensors(left, right):
        return
    if left.shape != right.shape or left.dtype != right.dtype:
        left_form = f"{tuple(left.shape)} {left.dtype}"
        right_form = f"{tuple(right.shape)} {right.dtype}"
        raise _conflict(name, f"{left_form} and {right_form}")
    differs = unequal(left, right.to(left.device))
    if left.dim() > 1:
        differs = differs.flatten(1).any(dim=1)  # [rows]
    rows = differs.nonzero()
    first = int(rows[0])
    raise _conflict(name, f"values that differ in {len(rows)} row(s), the first being row {first}")


def union_tensor_dict(left: TensorDict, right: TensorDict) -> TensorDict:
    """Add the columns of `right` to `left` in place, and return `left`.

    Raises:
        ProtocolError: the batch sizes differ, or a column that both have is not equal in them.
            `left` is not changed then.
    """
    if left.batch_size != right.batch_size:
        sizes = f"{tuple(left.batch_size)} and {tuple(right.batch_size)}"
        raise ProtocolError(f"union: batch size: got {sizes}, expected the same rows on both sides")
    present = set(left.keys())
    # Check all columns before adding any.
    for key in right.keys() & present:
        _check_same_tensor(f"column {key!r}", left[key], right[key])
    for key, value in right.items():
        if key not in present:
            left[key] = value
    return left


def union_numpy_dict(
    left: dict[str, np.ndarray], right: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Add the arrays of `right` to `left` in place, and return `left`.

    Raises:
        ProtocolError: an array that both have is not equal in them; rows are compared with
            `deep_equal`. `left` is not changed then.
    """
    # Check all columns before adding any.
    for key, right_array in right.items():
        if key in left and left[key] is not right_array:
            _check_same_array(f"column {key!r}", left[key], right_array)
    for key, value in right.items():
        left.setdefault(key, value)
    return left


def _check_same_array(name: str, left: np.ndarray, right: np.ndarray) -> None:
    """Raise a ProtocolError unless two arrays are equal."""
    if left.shape != right.shape:
        raise _conflict(name, f"shapes {left.shape} and {right.shape}")
    has_objects = left.dtype == object or right.dtype == object
    if not has_objects and not np.any(unequal(left, right)):
        return
    # Find the first row that differs. `unequal` cannot compare objects, so here they may be equal.
    for row in range(len(left)):
        if not deep_equal(left[row], right[row]):
            raise _conflict(name, f"values that differ, the first in row {row}")


def union_meta_info(left: dict[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Add the entries of `right` to `left` in place, and return `left`.

    The dictionaries `metrics` of both are merged entry by entry, in the same way.

    Raises:
        ProtocolError: an entry that both have is not equal in them.
    """
    for key, value in right.items():
        if key not in left:
            continue
        if key == METRICS and isinstance(left[key], dict) and isinstance(value, dict):
            left[key] = union_meta_info(dict(left[key]), value)
        elif not deep_equal(left[key], value):
            # 80 characters of each value: entries may be long.
            raise _conflict(f"meta_info[{key!r}]", f"{left[key]!r:.80} and {value!r:.80}")
    for key, value in right.items():
        left.setdefault(key, value)
    return left


# ---- concatenation ------------------------------------------------------------------------------


def merge_meta_info(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the `meta_info` of concatenated parts.

    Metrics (a dictionary, or a list of dictionaries, in each part) become name -> list of the
    parts' values. Any other entry must be equal in all parts that have it.

    Raises:
        ProtocolError: an entry differs between parts.
    """
    merged = {}
    metrics = {}
    for number, part in enumerate(parts):
        for key, value in part.items():
            if key == METRICS or key not in merged:
                merged[key] = value
            elif not deep_equal(merged[key], value):
                raise ProtocolError(
                    f"concat: meta_info[{key!r}]",
                    got=f"{merged[key]!r:.80} and, in part {number}, {value!r:.80}",
                    expected="the same value in every part",
                    fix="Report what differs between parts as a metric or as a column.",
                )

        part_metrics = part.get(METRICS) or {}
        if not isinstance(part_metrics, list):
            part_metrics = [part_metrics]
        for entries in part_metrics:
            for name, value in entries.items():
                # In a part that is itself a result of merging, each metric is a list.
                values = value if isinstance(value, list) else [value]
                metrics.setdefault(name, []).extend(values)
    if METRICS in merged:
        merged[METRICS] = metrics
    return merged


def _check_same_keys(kind: str, parts: Sequence[Any]) -> None:
    """Raise a ProtocolError unless all parts have the same columns.

    Args:
        kind: "batch" or "non_tensor_batch", for the error.
        parts: for each part, its columns by name.
    """
    first_keys = set(parts[0].keys())
    for number, part in enumerate(parts):
        if set(part.keys()) != first_keys:
            keys = sorted(part.keys())
            raise ProtocolError(
                f"concat: {kind}",
                got=f"columns {keys} in part {number} and {sorted(first_keys)} in part 0",
                expected="the same columns in every part",
            )


def concat_tensors(parts: Sequence[TensorDict]) -> TensorDict:
    """Concatenate the rows of all parts, with one allocation per column.

    A single part is not copied, unless one of its columns is lent.

    Raises:
        ProtocolError: the parts differ in their columns, or in the shape or dtype of one.
    """
    if len(parts) == 1:
        values = parts[0].values(include_nested=True, leaves_only=True)
        if not any(map(is_lent, values)):
            # `copy` of a TensorDict copies no tensors.
            return parts[0].copy()

    _check_same_keys("batch", parts)
    num_rows = sum(part.batch_size[0] for part in parts)
    columns = {}
    for key in parts[0].keys():  # a TensorDict iterates over rows
        values = [part[key] for part in parts]
        if isinstance(values[0], TensorDict):
            columns[key] = concat_tensors(values)
        else:
            columns[key] = _concat_column(key, values, num_rows)
    return TensorDict(columns, batch_size=[num_rows], device=parts[0].device)


def _concat_column(key: str, values: list[torch.Tensor], num_rows: int) -> torch.Tensor:
    """Concatenate the parts of a column.

    Args:
        key: name of the column.
        values: the parts.
        num_rows: number of rows of all parts together.

    Raises:
        ProtocolError: the parts differ in row shape or dtype.
    """
    shape = values[0].shape[1:]
    dtype = values[0].dtype
    for number, value in enumerate(values):
        if value.shape[1:] != shape or value.dtype != dtype:
            raise ProtocolError(
                f"concat: column {key!r}",
                got=f"{tuple(value.shape)} {value.dtype} in part {number}",
                expected=f"(rows, {', '.join(map(str, shape))}) {dtype} as in part 0",
                fix="Pad the parts to one length first.",
            )

    # `torch.cat` uses no huge pages, and does not notify the lender of a lent tensor. It is needed
    # on other devices and for gradients.
    is_plain = all(value.device.type == "cpu" and not value.requires_grad for value in values)
    is_large = sum(value.nbytes for value in values) >= HUGE_PAGES_FROM_BYTES
    if not is_plain or not (is_large or any(map(is_lent, values))):
        return torch.cat(values)
    column = allocate((num_rows, *shape), dtype)
    targets = column.split(list(map(len, values)))
    for target, value in zip(targets, values, strict=True):
        copy_into(target, value)
    return column


def concat_arrays(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenate the rows of all parts. The arrays of a single part are not copied.

    Raises:
        ProtocolError: the parts differ in their columns, or in the row shape of one.
    """
    if len(parts) == 1:
        return dict(parts[0])
    _check_same_keys("non_tensor_batch", parts)
    columns = {}
    for key, first in parts[0].items():
        for number, part in enumerate(parts):
            if part[key].shape[1:] != first.shape[1:]:
                raise ProtocolError(
                    f"concat: column {key!r}",
                    got=f"shape {part[key].shape} in part {number}",
                    expected=f"shape (rows, *{first.shape[1:]}) as in part 0",
                )
        columns[key] = np.concatenate([part[key] for part in parts])
    return columns
