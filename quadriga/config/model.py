# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.model`: the pretrained model that actor, rollout and reference start from."""

from typing import Any

from pydantic import Field

from quadriga.config.base import PathText, Section


class ModelConfig(Section):
    """The pretrained model."""

    path: PathText = ""
    """Folder with a Hugging Face model, or its name on the hub."""
    override_config: dict[str, Any] = Field(default_factory=dict)
    """Open dictionary: entries that replace those of the model's `config.json`."""
    enable_gradient_checkpointing: bool = False
    """Whether activations are computed again in the backward pass: less memory, about a third more time."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may be run."""
    custom_chat_template: str | None = None
    """Jinja text of a chat template. null: the tokenizer's own."""
