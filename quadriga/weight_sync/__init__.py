# SPDX-License-Identifier: Apache-2.0
"""How weights get from a training engine to a rollout engine, and how both know that they did.

    shared      the rollout computes with the trainer's own parameters: only the version travels      publish.py
    copy        the rollout has a copy of the model: tensors are copied one by one                     publish.py
    reshard     ranks of the rollout have shards: all-to-all between the ranks, a bucket at a time      reshard.py
    broadcast   the rollout is in other processes: buckets are broadcast over gloo or nccl             broadcast.py

Each publication has a version and a fingerprint of every tensor, taken on both sides.
"""

from quadriga.weight_sync.broadcast import Address, WeightReceiver, WeightSender, meet, open_store
from quadriga.weight_sync.fingerprint import Fingerprint, fingerprint, tensor_fingerprint
from quadriga.weight_sync.publish import CopiedWeights, SharedWeights, WeightTarget
from quadriga.weight_sync.reshard import Held, Piece, ReshardedWeights, StreamedWeights
