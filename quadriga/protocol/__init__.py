# SPDX-License-Identifier: Apache-2.0
"""DataProto, the batch that driver and workers exchange, and the table of its columns.

Names load on first use, and torch with them: processes that only count tokens need neither.
"""

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.protocol.columns import object_array
    from quadriga.protocol.fields import FIELDS, Field
    from quadriga.protocol.merge import deep_equal, union_numpy_dict, union_tensor_dict
    from quadriga.protocol.operations import (
        DataProtoFuture,
        all_gather_data_proto,
        fold_batch_dim,
        pad_dataproto_to_divisor,
        unfold_batch_dim,
        unpad_dataproto,
    )
    from quadriga.protocol.proto import DataProto, DataProtoItem

__all__, __getattr__ = lazy_names(__name__)
