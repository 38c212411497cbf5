# SPDX-License-Identifier: Apache-2.0
"""A reward model to be trained: a causal model's body under a new head, or a reward model that is trained further."""

from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from quadriga.errors import EngineError
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.fused import fuse
from quadriga.models.load import load_causal_lm, load_config
from quadriga.models.reward_scorer import load_reward_model


def fresh_reward_model(
    path: str,
    *,
    pad_token_id: int,
    device: torch.device,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """A sequence classifier with one label in float32, as `load_reward_model` gives it.

    The head of a causal model's classifier is new and zero: all scores are 0 at first, so that the first loss is ln 2.

    Args:
        path: a causal model or a sequence classifier with one label: a folder, or a name that transformers can resolve.
        pad_token_id: written into the configuration, from which transformers finds the last token of a padded row.
        device: where it lives.
        trust_remote_code: whether code that ships with the model may run.
        override_config: entries of the model's configuration to replace.

    Raises:
        EngineError: it cannot be loaded, or transformers has no classifier of its architecture.
    """
    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    if any(name.endswith("ForSequenceClassification") for name in config.architectures or []):
        return load_reward_model(path, dtype=torch.float32, device=device, trust_remote_code=trust_remote_code)
    source = load_causal_lm(
        path,
        dtype=torch.float32,
        device=device,
        trust_remote_code=trust_remote_code,
        override_config=override_config,
    )
    config.num_labels = 1
    config.pad_token_id = pad_token_id
    try:
        model = AutoModelForSequenceClassification.from_config(
            config, dtype=torch.float32, attn_implementation=ATTENTION_NAME, trust_remote_code=trust_remote_code
        )
    except (ValueError, KeyError) as error:
        raise EngineError(
            f"model {path}",
            got=str(error).strip().splitlines()[0],
            expected="an architecture of which transformers has a sequence classifier",
            fix="Choose another model for objective=reward_model.",
        ) from error
    fuse(model)
    model.base_model.load_state_dict(source.base_model.state_dict())
    torch.nn.init.zeros_(model.score.weight)
    model.config.architectures = [type(model).__name__]
    return model.to(device).eval()
