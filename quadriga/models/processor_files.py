# SPDX-License-Identifier: Apache-2.0
"""The settings by which images become patches: files that go with a model that sees, wherever it goes.

They are copied as they are. To load and save them would need torchvision, and nothing of them changes in training.
"""

import shutil
from pathlib import Path

from transformers import PreTrainedConfig
from transformers.utils import cached_file

from quadriga.models.vision import is_vision

FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def copy_processor(config: PreTrainedConfig, target: Path, source: str | Path | None = None) -> None:
    """Copy those that there are; of a model for text none.

    Args:
        config: of the model.
        target: a folder that exists.
        source: the folder, or the name on a hub, of the model; None: where its configuration came from.
    """
    if not is_vision(config):
        return
    for name in FILES:
        found = cached_file(
            source or config.name_or_path,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is not None and Path(found).resolve() != (target / name).resolve():
            shutil.copyfile(found, target / name)
