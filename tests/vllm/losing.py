# SPDX-License-Identifier: Apache-2.0
"""What a sleep on a GPU loses, for vLLM's build for CPUs, which does not sleep."""

from typing import Any

import torch


def lose(worker: Any, keeps_weights: bool = False) -> None:
    """Fill what a sleeping vLLM releases with NaN; for `collective_rpc`.

    Args:
        worker: vLLM's worker.
        keeps_weights: whether the weights are on the host meanwhile.
    """
    if not keeps_weights:
        for parameter in worker.model_runner.get_model().parameters():
            if parameter.is_floating_point():
                parameter.data.fill_(torch.nan)
    for tensor in worker.model_runner.kv_caches:
        tensor.fill_(torch.nan)
