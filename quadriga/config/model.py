# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.model`: the pretrained model that actor, rollout and reference start from."""

from typing import Any

from pydantic import Field

from quadriga.config.base import Count, NonNegativeInt, PathText, Section

VISION_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Models that see, as the `model_type` of their config.json names them."""


class ModelConfig(Section):
    """The pretrained model."""

    path: PathText = ""
    """Folder with a Hugging Face model, or its name on the hub."""
    override_config: dict[str, Any] = Field(default_factory=dict)
    """Open dictionary: entries that replace those of the model's `config.json`."""
    enable_gradient_checkpointing: bool = False
    """Whether activations are computed again in the backward pass: less memory, about a third more time."""
    enable_activation_offload: bool = False
    """Whether what the backward pass needs rests in the memory of the CPU; with CUDA."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may be run."""
    custom_chat_template: str | None = None
    """Jinja text of a chat template. null: the tokenizer's own."""
    lora_rank: NonNegativeInt = 0
    """Rank of the adapter that is trained in place of the weights. 0: no adapter, all weights are trained."""
    lora_alpha: Count = 16
    """What the adapter adds is multiplied by this over its rank."""
    target_modules: str | list[str] = "all-linear"
    """Modules with an adapter: names or ends of names, or a regular expression. all-linear: all but the head."""
    exclude_modules: str | list[str] | None = None
    """Modules of `target_modules` without one: names or ends of names, or a regular expression."""
    lora_adapter_path: PathText | None = None
    """Folder of an adapter, as PEFT writes it, to start from; it brings its own rank, alpha and modules."""
    lora_merge: bool | None = None
    """Whether an engine with a copy of the weights gets the adapter merged into them. false: alone, after each step
    only its matrices travel; `vllm` can apply it so. null: alone where the engine can, else merged."""

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained, and the weights are not."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None
