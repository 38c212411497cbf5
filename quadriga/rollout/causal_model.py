# SPDX-License-Identifier: Apache-2.0
"""What the engines on a causal model of transformers share: its weights, its end-of-text tokens, its room."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from quadriga.errors import WeightSyncError
from quadriga.models.load import stop_token_ids
from quadriga.rollout.base import EngineBase, SamplingParams, require_length
from quadriga.weight_sync.fingerprint import Fingerprint, fingerprint

_NUM_NAMED = 5


class CausalModelEngine(EngineBase):
    """An engine that computes with a causal model of transformers; generation itself is the subclass's.

    Args:
        model: the model.
        eos_token_ids: end-of-text tokens; None takes those of the model's generation configuration.
        max_num_seqs: answers that are generated at the same time.
    """

    def __init__(self, model: PreTrainedModel, eos_token_ids: Sequence[int] | None, max_num_seqs: int) -> None:
        super().__init__()
        self.model = model
        self.eos_token_ids = stop_token_ids(model, None) if eos_token_ids is None else tuple(eos_token_ids)
        self.max_num_seqs = max_num_seqs

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `RolloutEngine.load_weights`; a tensor that is the module's own parameter is not copied."""
        self.weight_version = -1
        copy_weights(self.model, weights)
        self.weight_version = version

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """See `RolloutEngine.named_weights`."""
        return named_weights(self.model).items()

    def fingerprint(self) -> Fingerprint:
        """See `RolloutEngine.fingerprint`."""
        return fingerprint(self.named_weights())


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter under every name that it has: a tied head appears twice."""
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}


@torch.no_grad()
def copy_weights(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copies the stream into the model's parameters; a tensor that is the parameter itself is left alone.

    A tied parameter is complete under any one of its names.

    Raises:
        WeightSyncError: a name or a shape does not fit, or a parameter did not come.
    """
    targets = named_weights(model)
    complete: set[int] = set()
    for name, tensor in weights:
        target = targets.get(name)
        if target is None or target.shape != tensor.shape:
            expected = "a parameter of the rollout's model" if target is None else f"shape {tuple(target.shape)}"
            raise WeightSyncError(
                f"weight {name}",
                got=f"shape {tuple(tensor.shape)}",
                expected=expected,
                fix="Trainer and rollout must hold the same architecture.",
            )
        if target.data_ptr() != tensor.data_ptr():
            target.copy_(tensor)
        complete.add(target.data_ptr())
    missing = [name for name, target in targets.items() if target.data_ptr() not in complete]
    if missing:
        named = ", ".join(missing[:_NUM_NAMED]) + (", ..." if len(missing) > _NUM_NAMED else "")
        raise WeightSyncError(
            "rollout weights",
            got=f"a stream without {len(missing)} of {len(targets)} weights: {named}",
            expected="every weight of the model",
        )


def require_room(
    name: str,
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    max_model_len: int | None = None,
) -> None:
    """Refuses requests that may run past the positions that the model knows, or past `max_model_len`."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = [
        (max_model_len, "actor_rollout_ref.rollout.max_model_len"),
        (positions, "the model's max_position_embeddings"),
    ]
    known = [(limit, whose) for limit, whose in limits if limit is not None]
    if known:
        require_length(name, prompts, sampling, *min(known))
