# SPDX-License-Identifier: Apache-2.0
"""Data: from files to batches of prompts.

Names load on first use, and torch with them.
"""

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.data.curriculum import (
        AbstractCurriculumSampler,
        AbstractSampler,
        SuccessRateSampler,
    )
    from quadriga.data.generated import AbstractDataGenerator, DynamicGenDataset
    from quadriga.data.loading import create_dataloader, create_rl_dataset, create_rl_sampler
    from quadriga.data.padding import collate_fn
    from quadriga.data.rl_dataset import RLHFDataset
    from quadriga.data.rm_dataset import RMDataset
    from quadriga.data.sft_dataset import MultiTurnSFTDataset, SFTDataset
    from quadriga.data.tokenizing import load_tokenizer
    from quadriga.data.vision import VisionProcessor, load_processor

__all__, __getattr__ = lazy_names(__name__)
