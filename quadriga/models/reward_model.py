# SPDX-License-Identifier: Apache-2.0
"""Reward models: sequence classifiers with one label, for scoring or for training.

Transformers has no classifiers for vision-language models. Here, such a classifier is the model
with a head `score` [1, D] in place of the vocabulary projection, saved in the same files.

Legend: D hidden size.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from quadriga.errors import EngineError
from quadriga.models.adapter_files import open_model
from quadriga.models.architecture import backbone, choose_attention, is_packed
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.fused import fuse
from quadriga.models.load import explain_load_errors, load_causal_lm, load_config, model_folder
from quadriga.models.vision import is_vision

_FIX = (
    "Set reward_model.model.path to a model that was trained to score: "
    "a sequence classifier with one label."
)
_SCORE = "score.weight"


def load_reward_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """Load a sequence classifier in evaluation mode, with a head `score` [1, D].

    Args:
        path: folder with config.json and weights, or a name that transformers can resolve.
        dtype: dtype of the parameters.
        device: device of the parameters.
        trust_remote_code: whether code that ships with the model may run.
        override_config: entries of the model's configuration to replace.

    Raises:
        EngineError: the model cannot be loaded, lacks weights, has no classification head or
            several labels, or has attention in both directions.
    """
    disable_progress_bar()
    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    if is_vision(config):
        return _load_vision_reward_model(path, dtype, device, trust_remote_code, override_config)
    with explain_load_errors(path, "sequence classifier", _FIX):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path,
            output_loading_info=True,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            config=config,
        )
    require_scoring_model(path, model, sorted(info["missing_keys"]))
    choose_attention(model, trust_remote_code=trust_remote_code)
    if is_packed(model):
        fuse(model)
    return model.to(device).eval()


def _load_vision_reward_model(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device | str,
    trust_remote_code: bool,
    override_config: dict[str, Any] | None,
) -> PreTrainedModel:
    """Load a vision-language model with a head `score`; see `load_reward_model`."""
    model = load_causal_lm(
        path,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        override_config=override_config,
        needs_head=False,
    )
    # Transformers ignores the head in the files, because the model class has none.
    missing = [_SCORE]
    folder = model_folder(path)
    if folder is not None:
        files = open_model(folder)
        if _SCORE in files.shapes:
            add_score_head(model).score.weight.data.copy_(files.read(_SCORE))
            missing = []
    require_scoring_model(path, model, missing)
    return model


def add_score_head(model: PreTrainedModel) -> PreTrainedModel:
    """Add a head `score` [1, D] of zeros to a vision-language model and its configuration.

    Returns:
        The model, changed in place.
    """
    size = model.config.get_text_config().hidden_size
    parameter = next(model.parameters())
    model.score = nn.Linear(size, 1, bias=False, dtype=parameter.dtype, device=parameter.device)
    torch.nn.init.zeros_(model.score.weight)
    family = type(model).__name__.partition("For")[0]
    model.config.num_labels = 1
    model.config.architectures = [f"{family}ForSequenceClassification"]
    return model


def require_scoring_model(path: str | Path, model: PreTrainedModel, missing: list[str]) -> None:
    """Check that a model computes one score for a sequence, at the last token of the sequence.

    Attention must be causal: the state of this token must not depend on tokens that are packed
    behind it.

    Args:
        path: folder or hub name of the model, for the message.
        model: the loaded model.
        missing: names of parameters for which the model's files have no weights.

    Raises:
        EngineError: the model has no weights for some parameters, no head, several labels, or
            attention in both directions.
    """
    kind = type(model).__name__
    head = getattr(model, "score", None)
    fix = _FIX
    if missing:
        folder = Path(path).expanduser()
        files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
        names = sorted(file.name for file in files)
        place = f"in {', '.join(names)}" if names else "among its weights"
        missing_of_head = [name for name in missing if name.startswith("score.")]
        if missing_of_head:
            got = f"no classification head: {missing_of_head[0]} is not {place}"
            expected = "a head to score with"
        else:
            got = f"no weights for {len(missing)} parameters: {missing[0]} is not {place}"
            expected = "all weights of the model; the missing ones would be random"
            fix = "Get the complete model."
    elif not isinstance(head, nn.Linear):
        got = f"{kind}, which has no projection named score"
        expected = "a decoder with a head at the last token, such as LlamaForSequenceClassification"
    elif head.out_features != 1:
        got = f"a classifier with {head.out_features} labels"
        expected = "one label, the score"
    elif any(getattr(module, "is_causal", True) is False for module in backbone(model).modules()):
        got = f"{kind}, whose tokens attend to later ones"
        expected = "a decoder with causal attention"
    else:
        return
    raise EngineError(f"reward model {path}", got=got, expected=expected, fix=fix)


def build_reward_model(
    path: str,
    *,
    pad_token_id: int,
    device: torch.device,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """Load or build a sequence classifier for training, in float32; see `load_reward_model`.

    A new head [1, D] is zero, so all scores are 0 at first, and the first loss is ln 2.

    Args:
        path: folder or hub name of a causal model, or of a classifier with one label.
        pad_token_id: padding token, by which transformers finds the last token of a padded row.
        device: device of the parameters.
        trust_remote_code: whether code that ships with the model may run.
        override_config: entries of the model's configuration to replace.

    Raises:
        EngineError: the model cannot be loaded, or transformers has no classifier of its
            architecture.
    """
    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    architectures = config.architectures or []
    if any(name.endswith("ForSequenceClassification") for name in architectures):
        return load_reward_model(
            path,
            dtype=torch.float32,
            device=device,
            trust_remote_code=trust_remote_code,
            override_config=override_config,
        )
    source = load_causal_lm(
        path,
        dtype=torch.float32,
        device=device,
        trust_remote_code=trust_remote_code,
        override_config=override_config,
        needs_head=not is_vision(config),
    )
    if is_vision(config):
        return add_score_head(source)
    # Transformers' classifiers read the state of the last token that is not padding. They refuse a
    # padding token that the vocabulary does not have.
    config.num_labels = 1
    config.pad_token_id = pad_token_id if pad_token_id < config.vocab_size else None
    with explain_load_errors(
        path, "sequence classifier", "Choose another model for objective=reward_model."
    ):
        model = AutoModelForSequenceClassification.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=source.config._attn_implementation,
            trust_remote_code=trust_remote_code,
        )
    if is_packed(model):
        fuse(model)
    # Take all weights except those of the head from the causal model.
    model.base_model.load_state_dict(source.base_model.state_dict())
    torch.nn.init.zeros_(model.score.weight)
    model.config.architectures = [type(model).__name__]
    return model.to(device).eval()
