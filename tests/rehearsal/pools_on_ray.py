# SPDX-License-Identifier: Apache-2.0
"""Two ranks with a GPU each, and one with two, on a Ray node that claims four; prints what each sees.

python pools_on_ray.py CUDA_VISIBLE_DEVICES-or-"" NOSET
"""

import json
import os
import sys

visible, noset = sys.argv[1:]
os.environ |= {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": noset, "OMP_NUM_THREADS": "1"}
if visible:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible

import ray  # noqa: E402

from quadriga.single_controller import Dispatch, Worker, register  # noqa: E402
from quadriga.single_controller.ray.cluster import cluster  # noqa: E402
from quadriga.single_controller.ray.group import RayClassWithInitArgs, RayWorkerGroup  # noqa: E402
from quadriga.single_controller.ray.pools import RayResourcePool  # noqa: E402


class Looker(Worker):
    """Says which devices its process sees."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def devices(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")


if __name__ == "__main__":
    ray.cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    seen = []
    with cluster({"num_gpus": 4, "num_cpus": 4}, 4):
        # As in a run, a pool has one group. Ray gives a process with a part of a bundle one GPU.
        pools = [
            RayResourcePool([2], use_gpu=True, name_prefix="train", max_colocate_count=1),
            RayResourcePool(
                [1], use_gpu=True, name_prefix="roll", max_colocate_count=1, num_devices=2
            ),
        ]
        groups = [RayWorkerGroup(pool, RayClassWithInitArgs(Looker)) for pool in pools]
        for group in groups:
            seen += group.devices()
        for group in groups:
            group.shutdown()
    print(json.dumps(seen))
