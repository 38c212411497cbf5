# SPDX-License-Identifier: Apache-2.0
"""Weight sync: publish the weights of a training engine to a rollout engine, and verify them.

    shared      the rollout uses the trainer's parameters: only the version is sent
    copy        the rollout has a copy of the model: parameters are copied one by one
    reshard     rollout ranks hold shards: all-to-all between the ranks, one bucket at a time
    broadcast   the rollout is in other processes: buckets are broadcast over gloo or nccl

The first two are in `publish.py`, the others in files of their names.

Each publication has a version, and a fingerprint of every parameter, which both sides compute.
"""

from quadriga.weight_sync.broadcast import Address, WeightReceiver, WeightSender, meet, open_store
from quadriga.weight_sync.fingerprint import Fingerprint, fingerprint, tensor_fingerprint
from quadriga.weight_sync.publish import CopiedWeights, SharedWeights, WeightTarget
from quadriga.weight_sync.reshard import Box, Held, Piece, ReshardedWeights, Shard, StreamedWeights
