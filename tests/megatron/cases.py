# SPDX-License-Identifier: Apache-2.0
"""Which models each layout of test_layouts.py has. The test reads these tables, also without Megatron-core, and so does
the program that it starts."""

from collections.abc import Mapping

import torch

RUNS: Mapping[str, tuple[str, ...]] = {
    "one process": ("policy", "critic", "llama", "qwen3"),
    "dp 2": ("critic",),
    "dp 2, distributed optimizer": ("llama",),
    "tp 2": ("critic",),
    "tp 2, sequence parallel": ("llama",),
    "sp 2": ("policy",),
    "pp 2": ("llama",),
    "pp 2, uneven": ("policy",),
    "pp 2, virtual 2": ("policy", "critic"),
    "tp 2 x pp 2": ("policy",),
    "dp 2 x tp 2, distributed optimizer": ("policy",),
    "sp 2 x tp 2": ("qwen3",),
    "sp 2 x tp 2, whole tokens": ("llama",),
    "sp 2 x pp 2": ("critic",),
    "dp 2 x pp 2": ("qwen3",),
}
"""Models of each layout. Data, tensor, sequence and pipeline parallelism each meet a tied head (`policy`), a critic's,
recomputed layers (`llama`) and normalised queries and keys (`qwen3`), in one layout or in another."""
PLAIN_MIXTURES = ("one process", "ep 2", "dp 4 x ep 2, distributed optimizer", "tp 2 x pp 2, ep 2")
"""Layouts in which a mixture of experts learns by the choices of its own routers."""
TOLD_MIXTURES = (
    "one process",
    "dp 2, distributed optimizer",
    "tp 2, sequence parallel",
    "ep 2, tp 2",
)
TOLD_MIXTURES += ("dp 4 x ep 2", "tp 2 x pp 2, ep 2", "sp 2 x tp 2, ep 4")
"""Layouts in which routers are told some experts, and learn with losses of their own."""
CHAINS = {
    "policy": "tp 2, sequence parallel",
    "critic": "tp 2, sequence parallel",
    "mixture": "ep 2, tp 2",
}
"""Models, and the layouts of the first engine, whose checkpoints go from engine to engine."""
PUBLISHED = {"tp 2 x pp 2": "llama", "tp 2 x pp 2, ep 2": "mixture"}
"""Layouts that send their weights to a rollout, and the model."""
NARROW: Mapping[str, tuple[torch.dtype, ...]] = {
    "one process": (torch.bfloat16, torch.float16),
    "tp 2, sequence parallel": (torch.bfloat16,),
    "pp 2": (torch.float16,),
}
SAVED = "dp 2 x tp 2, distributed optimizer"
"""The layout of Megatron whose checkpoint the others go on from."""
GOES_ON = ("one process", "pp 2")
"""Layouts of Megatron that go on from it."""
