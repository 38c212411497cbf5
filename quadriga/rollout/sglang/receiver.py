# SPDX-License-Identifier: Apache-2.0
"""The end of the weights' way: what SGLang calls, by its name, in each process that holds the model.

A server needs `--custom-weight-loader quadriga.rollout.sglang.receiver.load` for it, and Quadriga in its environment.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from quadriga.weight_sync.fingerprint import tensor_fingerprint

LOADER = "quadriga.rollout.sglang.receiver.load"
FINGERPRINTS = "quadriga/fingerprints"
_MARKS = "quadriga_marks"


def load(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Some weights of a set. Fingerprints are of the very tensors that the model gets.

    They are asked for as a weight named `FINGERPRINTS`, which is then new again: a list with, for each process that
    holds the model, the fingerprint of each weight since it was asked last.
    """
    if not hasattr(model, _MARKS):
        setattr(model, _MARKS, {})
        of_weights = getattr(model, "get_weights_by_name", None)

        def get_weights_by_name(name: str, *args: Any, **options: Any) -> Any:
            if name != FINGERPRINTS:
                return None if of_weights is None else of_weights(name, *args, **options)
            marks = dict(getattr(model, _MARKS))
            getattr(model, _MARKS).clear()
            if not dist.is_initialized() or dist.get_world_size() == 1:
                return [marks]
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, marks)
            return every

        model.get_weights_by_name = (
            get_weights_by_name  # SGLang asks the model itself for a weight by its name
        )
    marks: dict[str, str] = getattr(model, _MARKS)
    for name, tensor in weights:
        marks[name] = tensor_fingerprint(tensor)
        model.load_weights(iter([(name, tensor)]))
