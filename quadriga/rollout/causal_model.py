# SPDX-License-Identifier: Apache-2.0
"""Base class of engines on a causal model of transformers: weights, end-of-text tokens, limits."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from quadriga.models.load import stop_token_ids
from quadriga.models.weight_names import weight_buffers
from quadriga.rollout.interface import Prompts, RolloutEngine, Sampling
from quadriga.rollout.manifest import Manifest
from quadriga.rollout.setup import EngineSetup
from quadriga.weight_sync.fingerprint import Fingerprint, fingerprint
from quadriga.weight_sync.publish import NamedWeights


class CausalModelEngine(RolloutEngine):
    """An engine that computes with a causal model of transformers. Subclasses generate.

    Args:
        model: the model.
        tokenizer: decodes responses; needed for stop strings only.
        eos_token_ids: end-of-text tokens; None: those of the model's generation configuration.
        max_num_seqs: most responses that are generated at the same time.
        max_model_len: tokens of the longest prompt and response together; None: as many as the
            model has positions.
        frees_weights: whether a sleep frees the memory of the model's parameters, so that a load
            must bring them before the next generation. Ignored if the engine `shares_weights`, that
            is, computes with the actor's own parameters.
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
        frees_weights: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        if eos_token_ids is None:
            eos_token_ids = stop_token_ids(model, None)
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.frees_weights = frees_weights
        # Storages of parameters that a sleep has freed, and their sizes in bytes.
        self._freed: list[tuple[torch.UntypedStorage, int]] = []

    @staticmethod
    def options_of(setup: EngineSetup, model: PreTrainedModel) -> dict[str, Any]:
        """Keyword arguments of this class, as a configuration sets them.

        Args:
            setup: the configuration and the tokenizer.
            model: the engine's model.
        """
        return {
            "tokenizer": setup.tokenizer,
            "eos_token_ids": stop_token_ids(model, setup.tokenizer.eos_token_id),
            "max_num_seqs": setup.rollout.max_num_seqs,
            "max_model_len": setup.rollout.max_model_len,
            # Without the actor's module, the engine has a copy of the weights. On an accelerator,
            # training needs the memory of this copy.
            "frees_weights": setup.actor is None and setup.device.type != "cpu",
        }

    @property
    def has_dropped_weights(self) -> bool:
        """Whether a sleep has freed the parameters, and no load has brought them since."""
        return bool(self._freed)

    def sleep(self) -> None:
        """Free the parameters if `frees_weights`. Subclasses free what they need to generate."""
        super().sleep()
        if not self.frees_weights or self.shares_weights:
            return
        for parameter in self.model.parameters():
            storage = parameter.untyped_storage()
            # On a rank of a rollout group, parameters are on "meta" until the first shards arrive.
            # A storage that several parameters share is empty after the first of them.
            if parameter.device.type != "meta" and storage.nbytes():
                self._freed.append((storage, storage.nbytes()))
                storage.resize_(0)

    def allocate_weights(self) -> None:
        """Allocate the memory of parameters that a sleep has freed. It holds no values yet."""
        for storage, num_bytes in self._freed:
            storage.resize_(num_bytes)
        self._freed.clear()

    @torch.no_grad()
    def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Copy a complete set of weights into the model.

        Args:
            weights: names and tensors of the weights.
            version: version of the weights.

        Raises:
            WeightSyncError: a weight is unknown, has another shape, or is missing.
        """
        self.weight_version = -1
        self.allocate_weights()
        parameters = dict(self.named_weights())
        for name, tensor in Manifest.of(self.model).check_stream(weights):
            # An engine on the trainer's own model gets its own parameters, which need no copy.
            if parameters[name].data_ptr() != tensor.data_ptr():
                parameters[name].copy_(tensor)
        self.weight_version = version

    def named_weights(self) -> NamedWeights:
        """Parameters, and buffers that count as weights. A tied weight comes under each name."""
        parameters = self.model.named_parameters(remove_duplicate=False)
        buffers = weight_buffers(self.model).items()
        return [(name, tensor.detach()) for name, tensor in (*parameters, *buffers)]

    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the weights; empty while a sleep has freed them."""
        # Freed memory must not be read.
        return fingerprint(() if self.has_dropped_weights else self.named_weights())

    def _require_room(self, prompts: Prompts, sampling: Sampling) -> None:
        """Refuse requests that may exceed the model's positions or `max_model_len`.

        Args:
            prompts: token ids of each prompt.
            sampling: how each response is sampled.

        Raises:
            RolloutError: a prompt and its response may be too long for a limit.
        """
        config = self.model.config.get_text_config()
        num_positions = getattr(config, "max_position_embeddings", None)
        limits = []  # pairs of a limit in tokens and its source
        if self.max_model_len is not None:
            limits.append((self.max_model_len, "actor_rollout_ref.rollout.max_model_len"))
        if num_positions is not None:
            limits.append((num_positions, "the model's max_position_embeddings"))
        if limits:
            # The lower limit applies. The error names where it comes from.
            limit, source = min(limits)
            self._require_length(prompts, sampling, limit, source)


def cache_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes that the KV cache takes for one token, in all layers.

    Args:
        config: configuration of the model.
        dtype: dtype of the cache.
    """
    text = config.get_text_config()
    num_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    # 2: keys and values.
    return 2 * text.num_hidden_layers * num_heads * head_size * dtype.itemsize
