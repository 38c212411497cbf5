# SPDX-License-Identifier: Apache-2.0
"""Receiving end of the weight sync: a loader that SGLang calls in each process with the model.

A server needs `--custom-weight-loader quadriga.rollout.sglang.receiver.load`, and Quadriga in its
environment.
"""

from typing import Any

import torch.distributed as dist

from quadriga.weight_sync.fingerprint import tensor_fingerprint
from quadriga.weight_sync.publish import NamedWeights

LOADER = "quadriga.rollout.sglang.receiver.load"  # name by which SGLang imports `load`
FINGERPRINTS = "quadriga/fingerprints"  # name of a "weight" whose value are the fingerprints
_ATTRIBUTE = "quadriga_marks"  # attribute of SGLang's model with the fingerprints by name


def load(model: Any, weights: NamedWeights) -> None:
    """Load some weights of a set, and fingerprint the tensors that the model gets.

    SGLang has no request for fingerprints. They are read as if they were a weight of the model with
    the name `FINGERPRINTS`. The value of this weight is a list with a dictionary for each process
    with the model: the fingerprints of the weights that were loaded since the last reading.

    Args:
        model: SGLang's model.
        weights: names and tensors.
    """
    if not hasattr(model, _ATTRIBUTE):
        setattr(model, _ATTRIBUTE, {})
        original = getattr(model, "get_weights_by_name", None)

        def get_weights_by_name(name: str, *args: Any, **options: Any) -> Any:
            if name != FINGERPRINTS:
                return None if original is None else original(name, *args, **options)
            fingerprints = dict(getattr(model, _ATTRIBUTE))
            # The next load begins without fingerprints.
            getattr(model, _ATTRIBUTE).clear()
            if not dist.is_initialized() or dist.get_world_size() == 1:
                return [fingerprints]
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, fingerprints)
            return gathered

        # SGLang calls this method of the model for requests of a weight by its name.
        model.get_weights_by_name = get_weights_by_name
    fingerprints: dict[str, str] = getattr(model, _ATTRIBUTE)
    for name, tensor in weights:
        fingerprints[name] = tensor_fingerprint(tensor)
        model.load_weights(iter([(name, tensor)]))
