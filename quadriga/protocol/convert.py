# SPDX-License-Identifier: Apache-2.0
"""Between a DataProto's three stores and one TensorDict that holds everything.

A TensorDict keeps objects row by row and knows no array of numbers or strings; the entry ARRAY_TYPES
remembers dtype and row shape of such columns, so that nothing is lost on the way there and back.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import NonTensorData, NonTensorStack, TensorDict

from quadriga.errors import ProtocolError
from quadriga.protocol.columns import object_array

ARRAY_TYPES = "_array_types"


def split_tensordict(tensor_dict: TensorDict) -> tuple[TensorDict | None, dict[str, np.ndarray], dict[str, Any]]:
    """Tensors, stacks of objects (as arrays) and single objects of a TensorDict."""
    tensors: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    for key in tensor_dict.keys():  # a TensorDict iterates over rows
        value = tensor_dict.get(key)
        if isinstance(value, NonTensorStack):
            arrays[key] = object_array(value.tolist())
        elif isinstance(value, NonTensorData):
            facts[key] = value.data
        else:
            tensors[key] = value
    for key, (dtype, shape) in facts.pop(ARRAY_TYPES, {}).items():
        if key in arrays:
            rows = arrays[key]
            arrays[key] = np.empty((len(rows), *shape), dtype=np.dtype(dtype))
            for row, value in enumerate(rows):
                arrays[key][row] = value
    # Without any column, the TensorDict's batch size still counts the rows.
    has_rows = tensors or not arrays
    batch = TensorDict(tensors, batch_size=tensor_dict.batch_size, device=tensor_dict.device) if has_rows else None
    return batch, arrays, facts


def join_tensordict(
    batch: TensorDict | None, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], rows: int
) -> TensorDict:
    """Inverse of `split_tensordict`: arrays become stacks of objects, facts single objects."""
    joined = TensorDict({}, batch_size=[rows]) if batch is None else batch.copy()
    tensors = set(joined.keys())
    for key in [*arrays, *facts]:
        if key in tensors or (key in arrays and key in facts):
            raise ProtocolError(
                f"to_tensordict: {key!r}", got="two entries of this name", expected="one", fix="Rename one."
            )
    for key, array in arrays.items():
        entries = [NonTensorData(value, batch_size=[]) for value in array]
        joined.set(key, NonTensorStack(*entries) if entries else NonTensorStack(batch_size=[0]))
    types = {key: (a.dtype.str, a.shape[1:]) for key, a in arrays.items() if a.dtype != object or a.ndim > 1}
    if types:
        joined.set(ARRAY_TYPES, NonTensorData(types, batch_size=[rows]))
    for key, value in facts.items():
        joined.set(key, NonTensorData(value, batch_size=[rows]))
    return joined
