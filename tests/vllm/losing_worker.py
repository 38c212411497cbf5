# SPDX-License-Identifier: Apache-2.0
"""vLLM's workers on a CPU with what a sleep on a GPU loses."""

import torch

from quadriga.rollout.vllm.engine import WorkerExtension


class LosingExtension(WorkerExtension):
    """The methods of vLLM's workers, and one that loses memory as a sleep does."""

    def lose(self, keeps_weights: bool) -> None:
        """Fill what a sleeping vLLM releases with NaN."""
        if not keeps_weights:
            for parameter in self.model_runner.get_model().parameters():
                if parameter.is_floating_point():
                    parameter.data.fill_(torch.nan)
        for tensor in self.model_runner.kv_caches:
            tensor.fill_(torch.nan)
