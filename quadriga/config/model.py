# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.model`: the pretrained model that actor, rollout and reference start from."""

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from quadriga.config.base import Count, Finding, NonNegativeInt, PathText, Section, unused, wrong

VISION_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Vision-language models, as the `model_type` of their config.json names them."""
ADAPTER_DETAILS = ("lora_alpha", "target_modules", "exclude_modules")
"""Keys of a new adapter beside its rank; one that is started from brings them."""


class ModelConfig(Section):
    """The pretrained model."""

    path: PathText = ""
    """Folder with a Hugging Face model, or its name on the hub."""
    override_config: dict[str, Any] = Field(default_factory=dict)
    """Open dictionary: entries that replace those of the model's `config.json`."""
    enable_gradient_checkpointing: bool = False
    """Gradient (activation) checkpointing: activations are computed again in the backward pass: less memory, about a
    third more time."""
    enable_activation_offload: bool = False
    """Whether activations are offloaded to the memory of the CPU until the backward pass; with CUDA."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may be run."""
    custom_chat_template: str | None = None
    """Jinja text of a chat template. null: the tokenizer's own."""
    lora_rank: NonNegativeInt = 0
    """Rank of the LoRA adapter that is trained in place of the weights. 0: no adapter, all weights are trained."""
    lora_alpha: Count = 16
    """What the adapter adds is multiplied by this over its rank."""
    target_modules: str | list[str] = "all-linear"
    """Modules with an adapter: names or ends of names, or a regular expression. all-linear: all but the head."""
    exclude_modules: str | list[str] | None = None
    """Modules of `target_modules` without one: names or ends of names, or a regular expression."""
    lora_adapter_path: PathText | None = None
    """Folder of an adapter, as PEFT writes it, to start from; it brings its own rank, alpha and modules."""
    lora_merge: bool | None = None
    """Whether a rollout engine with a copy of the weights gets the adapter merged into them. false: alone, weight sync
    sends its matrices only; `vllm` can apply it so. null: alone where the engine can, else merged."""

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained, and the weights are not."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None

    def findings(self, at: str) -> Iterator[Finding]:
        if not self.has_adapter:
            names = [f"{at}.{one}" for one in (*ADAPTER_DETAILS, "lora_merge") if one in self.model_fields_set]
            yield from unused(names, f"{at}.lora_rank is 0")
            return
        for name in ("target_modules", "exclude_modules"):
            if getattr(self, name) in ([], ""):
                yield wrong(f"{at}.{name}", "nothing", "names of modules", "Leave the key out.")
