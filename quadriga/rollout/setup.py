# SPDX-License-Identifier: Apache-2.0
"""Inputs of a rollout engine: the configuration, the tokenizer, the device, the model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quadriga.config import Config, RolloutConfig
from quadriga.errors import ConfigError
from quadriga.models.load import load_causal_lm, load_config, skeleton_causal_lm
from quadriga.rollout.group import RolloutGroup


@dataclass(frozen=True)
class EngineSetup:
    """Argument of every engine's `from_config`.

    Attributes:
        config: the whole configuration.
        tokenizer: the run's tokenizer.
        options: this engine's part of `rollout.engine_kwargs`.
        device: the engine's device.
        dtype: dtype of the model.
        actor: the actor's own module, if this process has all of its weights. An engine may compute
            with it instead of a copy. None: the process does not have them.
        group: the ranks that hold the engine together; None: this process holds all of it.
    """

    config: Config
    tokenizer: PreTrainedTokenizerBase
    options: dict[str, Any]
    device: torch.device
    dtype: torch.dtype
    actor: PreTrainedModel | None = None
    group: RolloutGroup | None = None

    @property
    def rollout(self) -> RolloutConfig:
        """The section `actor_rollout_ref.rollout`."""
        return self.config.actor_rollout_ref.rollout

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and response together."""
        data = self.config.data
        return self.rollout.max_model_len or data.max_prompt_length + data.max_response_length

    @property
    def bucket_bytes(self) -> int:
        """Size in bytes of one engine's buffer for weights."""
        # All engines of a process get weights at the same time, so they share the configured size.
        total = self.rollout.update_weights_bucket_megabytes << 20
        return total // self.rollout.data_parallel_size

    @property
    def can_sleep(self) -> bool:
        """Whether a third-party engine releases memory between phases. On a CPU none can."""
        return self.rollout.free_cache_engine and self.device.type != "cpu"

    @property
    def cache_gigabytes(self) -> float | None:
        """Size of a third-party engine's KV cache in GiB; None: as much as fits."""
        # On a CPU the cache would otherwise take most of the host's memory.
        if self.rollout.cache_gigabytes is None and self.device.type == "cpu":
            return 1.0
        return self.rollout.cache_gigabytes

    def require_no_options(self) -> None:
        """Refuse `rollout.engine_kwargs`, for an engine without options."""
        if self.options:
            raise ConfigError(
                "actor_rollout_ref.rollout.engine_kwargs",
                got=f"{self.rollout.engine_kwargs}",
                expected=f"nothing: the engine {self.rollout.name} has no options of its own",
                fix="Leave it out.",
            )

    def skeleton(self) -> PreTrainedModel:
        """The model on the device "meta", which has names and shapes of weights, but no values."""
        return skeleton_causal_lm(**self._model_arguments)

    @property
    def config_overrides(self) -> dict[str, Any]:
        """Entries of config.json to replace, for an engine that reads the model's folder itself."""
        section = self.config.actor_rollout_ref.model
        overrides = dict(section.override_config or {})
        has_file = (Path(section.path) / "config.json").is_file()
        if has_file and not load_config(**self._model_arguments).tie_word_embeddings:
            # config.json may say that head and embedding are tied although the files have different
            # weights. `load_config` looks at the files, but the engine would believe config.json.
            overrides["tie_word_embeddings"] = False
        return overrides

    def load_copy(self, attention: str) -> PreTrainedModel:
        """Load the model that the actor started from, with all weights.

        Args:
            attention: name of the attention, as in transformers.
        """
        return load_causal_lm(
            **self._model_arguments, dtype=self.dtype, device=self.device, attention=attention
        )

    @property
    def _model_arguments(self) -> dict[str, Any]:
        """Arguments that all loading functions of `quadriga.models.load` take."""
        section = self.config.actor_rollout_ref.model
        return {
            "path": section.path,
            "trust_remote_code": section.trust_remote_code,
            "override_config": section.override_config,
        }
