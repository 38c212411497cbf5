# SPDX-License-Identifier: Apache-2.0
"""The program that test_rollout_groups.py starts in four processes: a model of over 100 MB is loaded, published to
groups of two, generates, learns and is published again, while each allocation of a tensor is counted.

    python whole_model.py RANK FOLDER PORT
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quadriga.config import Layout
from quadriga.engines import process_group
from quadriga.models.load import skeleton_causal_lm
from quadriga.rollout import NativeEngine, SamplingParams
from quadriga.rollout.group import RolloutGroup
from quadriga.single_controller import WorkerPlace
from quadriga.weight_sync import ReshardedWeights
from tests.numerics.conftest import ragged_batch
from tests.numerics.layouts import learn
from tests.numerics.rollout_groups import CPU, held_shards, make_trainer

RANKS, SIZE, ACTIVATIONS = 4, 2, 4 << 20


class LiveBytes(TorchDispatchMode):
    """Counts the memory of the tensors that are alive, at each operation, and where a storage is given other memory, as
    FSDP does with gathered weights. Raises MemoryError: it is over the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.total, self.peak = limit, 0, 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __enter__(self) -> "LiveBytes":
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = lambda storage, size: self._resized(storage, size)  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if (
                type(tensor) not in (torch.Tensor, torch.nn.Parameter)
                or tensor.device.type != "cpu"
            ):
                continue
            # The rollout's weights in MKL's order, which generation makes of them on a CPU, have no storage to count.
            if tensor.layout == torch.strided:
                self._note(tensor.untyped_storage())
        self._check(func)
        return output

    def _resized(self, storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        self._resize(storage, size)
        self._note(storage)
        self._check("a storage")
        return storage

    def _note(self, storage: torch.UntypedStorage) -> None:
        reference = StorageWeakRef(storage)
        known, size = self.alive.get(reference.cdata), storage.nbytes()
        self.total += size - (0 if known is None else known[1])
        self.alive[reference.cdata] = (reference if known is None else known[0]), size

    def _check(self, where: Any) -> None:
        if self.total > min(self.limit, self.peak):
            self.peak = max(self.peak, self.count())
        if self.total > self.limit:
            raise MemoryError(
                f"{self.total} bytes of tensors are alive in {where}, expected at most {self.limit}"
            )

    def count(self) -> int:
        """Bytes that are alive."""
        self.alive = {key: one for key, one in self.alive.items() if not one[0].expired()}
        self.total = sum(size for _, size in self.alive.values())
        return self.total


def main(rank: int, folder: Path, port: int) -> None:
    skeleton = skeleton_causal_lm(folder)
    unit = sum(one.numel() for one in skeleton.model.layers[0].parameters()) * 4
    whole = sum(one.numel() for one in skeleton.parameters()) * 4
    bucket = whole // 16
    # Masters, gradients and two moments, and the shards of generation; a layer is gathered, with its gradient, while
    # the next one comes and the last one goes; and what a micro-batch of 24 tokens takes (3.6 MB, as counted).
    limit = 4 * whole // RANKS + whole // SIZE + bucket + 4 * unit + ACTIVATIONS
    world = process_group.join(WorkerPlace(rank, RANKS, master_port=port), CPU)
    group = RolloutGroup(rank, RANKS, SIZE, CPU)
    with LiveBytes(limit) as live:
        trainer = make_trainer(folder, Layout(dp_shard=RANKS), world)
        engine = NativeEngine(skeleton, group=group, dtype=torch.float32, eos_token_ids=(0,))
        sync = ReshardedWeights(rank, RANKS, CPU, bucket)
        sync.publish(held_shards(trainer), engine, 1)
        if group.is_leader:
            engine.generate_batch(
                [[5, 6, 7]] * 2, [SamplingParams(3, seed=seed) for seed in range(2)]
            )
            engine.release()
        else:
            engine.follow()
        engine.sleep()
        learn(trainer, ragged_batch(), "policy")
        highest, before = live.peak, live.count()
        live.peak = before
        sync.publish(held_shards(trainer), engine, 2)
        found: dict[str, Any] = {
            "peak": max(highest, live.peak),
            "limit": limit,
            "whole": whole,
            "refused": False,
        }
        found |= {
            "sync": live.peak - before,
            "bucket": bucket,
            "shards": whole // RANKS + whole // SIZE,
        }
        try:
            dict(trainer.weights())
        except MemoryError:
            found["refused"] = True
        except RuntimeError as error:
            found["left by"] = str(error)  # another rank was the first to be refused
    (folder / f"{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # the others may still wait for this rank's part of a weight


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
