# SPDX-License-Identifier: Apache-2.0
"""How weights get from an engine to a rollout, and how it is known that they did.

    shared      the rollout computes with the trainer's own parameters: only the version travels      shared.py
    in process  the rollout has a model of its own in the same process                                 inprocess.py
    elsewhere   the rollout is in other processes: buckets travel through a channel                    elsewhere.py
                    broadcast   gloo or nccl                                                           broadcast.py
                    disk        a folder that both can reach                                           disk.py
                    cuda_ipc    memory of a GPU that both processes use                                cuda_ipc.py

Each publication has a version and a fingerprint of every tensor, taken on both sides.
"""

from quadriga.weight_sync.base import WeightSync, WeightTarget
from quadriga.weight_sync.channels import Address, connect, offer
from quadriga.weight_sync.elsewhere import WeightReceiver, WeightSender
from quadriga.weight_sync.fingerprint import Fingerprint, fingerprint, tensor_fingerprint
from quadriga.weight_sync.inprocess import InProcessWeights
from quadriga.weight_sync.shared import SharedWeights

__all__ = [
    "Address",
    "Fingerprint",
    "InProcessWeights",
    "SharedWeights",
    "WeightReceiver",
    "WeightSender",
    "WeightSync",
    "WeightTarget",
    "connect",
    "fingerprint",
    "offer",
    "tensor_fingerprint",
]
