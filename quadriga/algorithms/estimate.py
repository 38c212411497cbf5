# SPDX-License-Identifier: Apache-2.0
"""One call of an advantage estimator, with its fields taken from the batch and its answer checked.

Shapes: B sequences, T response positions.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms.signature import required_fields
from quadriga.errors import ConfigError

WHERE = "algorithm.adv_estimator"


def estimate_advantages(
    estimator: Callable[..., tuple[Tensor, Tensor]], fields: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Run an estimator whose options are bound on the fields that it names.

    Args:
        estimator: from `bind_options(get_adv_estimator_fn(name), ...)`.
        fields: the columns of the batch by name, tensors and arrays alike; `response_mask` [B, T] must be among them.

    Returns:
        advantages and returns, both [B, T] and 0 outside the mask.

    Raises:
        ConfigError: the estimator names a field that the batch does not have, or what it returns is not two finite
            tensors of the shape of the mask.
    """
    missing = [name for name in required_fields(estimator) if name not in fields]
    if missing:
        raise ConfigError(
            WHERE,
            got=f"an estimator that reads {', '.join(missing)}",
            expected=f"fields of the batch: {', '.join(sorted(fields))}",
            fix="Name its positional parameters after fields; put options after a `*`.",
        )
    result = estimator(*(fields[name] for name in required_fields(estimator)))
    mask = fields["response_mask"].bool()
    if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, Tensor) for part in result)):
        raise ConfigError(WHERE, got=f"a {type(result).__name__}", expected="two tensors: advantages, returns")
    advantages, returns = (
        _checked(name, part, mask) for name, part in zip(("advantages", "returns"), result, strict=True)
    )
    return advantages, returns


def _checked(name: str, values: Tensor, mask: Tensor) -> Tensor:
    if values.shape != mask.shape:
        raise ConfigError(
            WHERE,
            got=f"{name} of shape {list(values.shape)}",
            expected=f"{list(mask.shape)}, one value per token of the response",
            fix="A value per sequence becomes one per token by `values[:, None] * response_mask`.",
        )
    kept = values.masked_fill(~mask, 0)
    num_bad = int((~torch.isfinite(kept)).any(-1).sum())
    if num_bad:
        raise ConfigError(
            WHERE,
            got=f"{name} that are not finite in {num_bad} of {len(kept)} sequences",
            expected="finite numbers",
            fix="Look for a division by zero, such as by the deviation of a group whose scores are all alike.",
        )
    return kept
