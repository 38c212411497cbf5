# SPDX-License-Identifier: Apache-2.0
"""What the engines on a causal model of transformers share: its weights, its end-of-text tokens, its limits."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from quadriga.models.load import stop_token_ids
from quadriga.models.weight_names import weight_buffers
from quadriga.rollout.interface import Prompts, RolloutEngine, Sampling
from quadriga.rollout.manifest import Manifest
from quadriga.rollout.setup import EngineSetup
from quadriga.weight_sync.fingerprint import Fingerprint, fingerprint


class CausalModelEngine(RolloutEngine):
    """An engine that computes with a causal model of transformers; generation itself is the subclass's.

    Args:
        tokenizer: needed for stop strings only.
        eos_token_ids: end-of-text tokens; None takes those of the model's generation configuration.
        max_num_seqs: responses that are generated at the same time.
        max_model_len: tokens of the longest prompt and response together; None: as many as the model has positions.
    """

    takes_images = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] | None = None,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        self.eos_token_ids = (
            stop_token_ids(model, None) if eos_token_ids is None else tuple(eos_token_ids)
        )
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len

    @staticmethod
    def options_of(setup: EngineSetup, model: PreTrainedModel) -> dict[str, Any]:
        """The keyword arguments that a configuration gives for a model."""
        return {
            "tokenizer": setup.tokenizer,
            "eos_token_ids": stop_token_ids(model, setup.tokenizer.eos_token_id),
            "max_num_seqs": setup.rollout.max_num_seqs,
            "max_model_len": setup.rollout.max_model_len,
        }

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy a complete set of weights into the module; a tensor that is the module's own parameter is left alone."""
        self.weight_version = -1
        own = dict(self.named_weights())
        for name, tensor in Manifest.of(self.model).checked(weights):
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
        self.weight_version = version

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Every parameter under every name that it has (a tied head appears twice), and the buffers of the weights."""
        named = (
            *self.model.named_parameters(remove_duplicate=False),
            *weight_buffers(self.model).items(),
        )
        return [(name, tensor.detach()) for name, tensor in named]

    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.named_weights())

    def _require_room(self, prompts: Prompts, sampling: Sampling) -> None:
        """Refuse requests that may run past the positions that the model knows, or past `max_model_len`."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        limits = [
            (self.max_model_len, "actor_rollout_ref.rollout.max_model_len"),
            (positions, "the model's max_position_embeddings"),
        ]
        if known := [(limit, whose) for limit, whose in limits if limit is not None]:
            self._require_length(prompts, sampling, *min(known))


def cache_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes that the KV cache takes for one token, in all layers."""
    text = config.get_text_config()
    num_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * num_heads * size * dtype.itemsize
