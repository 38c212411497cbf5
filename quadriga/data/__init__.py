# SPDX-License-Identifier: Apache-2.0
"""Data: from files to batches of prompts.

Names load on first use, and torch with them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.data.loading import create_dataloader, create_rl_dataset, create_rl_sampler
    from quadriga.data.padding import collate_fn
    from quadriga.data.rl_dataset import RLHFDataset
    from quadriga.data.rm_dataset import RMDataset
    from quadriga.data.sft_dataset import MultiTurnSFTDataset, SFTDataset
    from quadriga.data.tokenizing import load_tokenizer
    from quadriga.data.vision import VisionProcessor, load_processor

_HOMES = {
    "loading": "create_dataloader create_rl_dataset create_rl_sampler",
    "padding": "collate_fn",
    "rl_dataset": "RLHFDataset",
    "rm_dataset": "RMDataset",
    "sft_dataset": "MultiTurnSFTDataset SFTDataset",
    "tokenizing": "load_tokenizer",
    "vision": "VisionProcessor load_processor",
}

__all__ = [
    "MultiTurnSFTDataset", "RLHFDataset", "RMDataset", "SFTDataset", "VisionProcessor", "collate_fn",
    "create_dataloader", "create_rl_dataset", "create_rl_sampler", "load_processor", "load_tokenizer",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
