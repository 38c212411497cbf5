# SPDX-License-Identifier: Apache-2.0
"""What an engine gives up to need less memory."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """See the module.

    Attributes:
        gradient_checkpointing: keep a layer's inputs only, and compute the layer again for its gradient.
        activation_offload: keep what the backward pass needs in the memory of the CPU; with CUDA only.
        reshard_after_forward: drop a layer's gathered weights between its forward and backward pass; sharded ones only.
        offload_weights: masters and optimizer rest, and step, in the memory of the CPU; with CUDA, sharded ones only.
    """

    gradient_checkpointing: bool = False
    activation_offload: bool = False
    reshard_after_forward: bool = True
    offload_weights: bool = False
