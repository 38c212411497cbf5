# SPDX-License-Identifier: Apache-2.0
"""Data: from files to batches of prompts.

Names load on first use, and torch with them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.data.collate import collate_fn
    from quadriga.data.loading import (
        create_dataloader,
        create_rl_dataset,
        create_rl_sampler,
        create_validation_sampler,
    )
    from quadriga.data.model_folder import prepare_model
    from quadriga.data.positions import compute_position_id_with_mask, extend_position_ids
    from quadriga.data.rl_dataset import RLHFDataset
    from quadriga.data.rm_dataset import RMDataset
    from quadriga.data.sft_dataset import MultiTurnSFTDataset, SFTDataset
    from quadriga.data.tokenizing import load_tokenizer
    from quadriga.data.truncation import pad_left, pad_right, postprocess_data, truncate
    from quadriga.data.vision import VisionProcessor, load_processor

_HOMES = {
    "MultiTurnSFTDataset": "sft_dataset",
    "RLHFDataset": "rl_dataset",
    "RMDataset": "rm_dataset",
    "SFTDataset": "sft_dataset",
    "VisionProcessor": "vision",
    "collate_fn": "collate",
    "compute_position_id_with_mask": "positions",
    "create_dataloader": "loading",
    "create_rl_dataset": "loading",
    "create_rl_sampler": "loading",
    "create_validation_sampler": "loading",
    "extend_position_ids": "positions",
    "load_processor": "vision",
    "load_tokenizer": "tokenizing",
    "pad_left": "truncation",
    "pad_right": "truncation",
    "postprocess_data": "truncation",
    "prepare_model": "model_folder",
    "truncate": "truncation",
}

__all__ = [
    "MultiTurnSFTDataset",
    "RLHFDataset",
    "RMDataset",
    "SFTDataset",
    "VisionProcessor",
    "collate_fn",
    "compute_position_id_with_mask",
    "create_dataloader",
    "create_rl_dataset",
    "create_rl_sampler",
    "create_validation_sampler",
    "extend_position_ids",
    "load_processor",
    "load_tokenizer",
    "pad_left",
    "pad_right",
    "postprocess_data",
    "prepare_model",
    "truncate",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
