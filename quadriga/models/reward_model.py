# SPDX-License-Identifier: Apache-2.0
"""Reward models: a sequence classifier with one label, to score with or to be trained.

Of vision-language models transformers has no classifiers: here one is the model itself with a head `score` [1, D] in
place of the projection onto the vocabulary, in the same files.

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
from quadriga.models.load import explained, load_causal_lm, load_config, model_folder
from quadriga.models.vision import is_vision

_FIX = "Set reward_model.model.path to a model that was trained to score: a sequence classifier with one label."


def load_reward_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A sequence classifier in evaluation mode: its head `score` is [1, D], its attention an `AttentionPlan`.
    `path`: a folder with config.json and weights, or a name that transformers can resolve.
    `trust_remote_code`: whether code that ships with the model may run.
    Raises EngineError: it cannot be loaded, has no classification head, several labels, or attention in both
    directions."""
    disable_progress_bar()
    if is_vision(load_config(path, trust_remote_code=trust_remote_code)):
        source = load_causal_lm(
            path, dtype=dtype, device=device, trust_remote_code=trust_remote_code, needs_head=False
        )
        folder, missing = model_folder(path), ["score.weight"]
        if folder is not None and missing[0] in (files := open_model(folder)).shapes:
            add_score(source).score.weight.data.copy_(files.read(missing.pop()))
        require_judge(path, source, missing)
        return source
    options = {
        "attn_implementation": ATTENTION_NAME,
        "trust_remote_code": trust_remote_code,
        "dtype": dtype,
    }
    with explained(path, "sequence classifier", _FIX):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path, output_loading_info=True, **options
        )
    require_judge(path, model, sorted(info["missing_keys"]))
    choose_attention(model)
    if is_packed(model):
        fuse(model)
    return model.to(device).eval()


def add_score(model: PreTrainedModel) -> PreTrainedModel:
    """A vision-language model with a head `score` [1, D] of zeros, of which its configuration tells."""
    size, weight = model.config.get_text_config().hidden_size, next(model.parameters())
    model.score = nn.Linear(size, 1, bias=False, dtype=weight.dtype, device=weight.device)
    torch.nn.init.zeros_(model.score.weight)
    model.config.num_labels = 1
    model.config.architectures = [
        f"{type(model).__name__.partition('For')[0]}ForSequenceClassification"
    ]
    return model


def require_judge(path: str | Path, model: PreTrainedModel, missing: list[str]) -> None:
    """Refuse a model that does not give a sequence one score [1, D], read at its last token, whose state must not
    depend on what is packed behind it; `missing` are the parameters without values. Raises EngineError: says why."""
    head, kind, fix = getattr(model, "score", None), type(model).__name__, _FIX
    if missing:
        folder = Path(path).expanduser()
        files = sorted(
            file.name for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern)
        )
        place = f"in {', '.join(files)}" if files else "among its weights"
        got, expected = (
            f"no classification head: {missing[0]} is not {place}",
            "a head to score with",
        )
        if not any(name.startswith("score.") for name in missing):
            got = f"no weights for {len(missing)} parameters: {missing[0]} is not {place}"
            expected, fix = (
                "all weights of the model; the missing ones would be random",
                "Get the whole model.",
            )
    elif not isinstance(head, nn.Linear):
        got = f"{kind}, which has no projection named score"
        expected = "a decoder with a head at the last token, such as LlamaForSequenceClassification"
    elif head.out_features != 1:
        got, expected = f"a classifier with {head.out_features} labels", "one label, the score"
    elif any(getattr(module, "is_causal", True) is False for module in backbone(model).modules()):
        got, expected = (
            f"{kind}, whose tokens see those behind them",
            "a decoder with causal attention",
        )
    else:
        return
    raise EngineError(f"reward model {path}", got=got, expected=expected, fix=fix)


def fresh_reward_model(
    path: str,
    *,
    pad_token_id: int,
    device: torch.device,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """A sequence classifier with one label in float32, as `load_reward_model` gives it; made of a causal model, or of a
    classifier with one label, at `path`. A new head [1, D] is zero: scores are 0 at first, so the first loss is ln 2.
    `pad_token_id` goes into the configuration, from which transformers finds the last token of a padded row.
    Raises EngineError: it cannot be loaded, or transformers has no classifier of its architecture."""
    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    if any(name.endswith("ForSequenceClassification") for name in config.architectures or []):
        return load_reward_model(
            path, dtype=torch.float32, device=device, trust_remote_code=trust_remote_code
        )
    how: dict[str, Any] = {
        "trust_remote_code": trust_remote_code,
        "override_config": override_config,
    }
    source = load_causal_lm(
        path, dtype=torch.float32, device=device, needs_head=not is_vision(config), **how
    )
    if is_vision(config):
        return add_score(source)
    config.num_labels = 1
    # Transformers refuses a padding token that the embedding does not have.
    config.pad_token_id = pad_token_id if pad_token_id < config.vocab_size else None
    with explained(path, "sequence classifier", "Choose another model for objective=reward_model."):
        model = AutoModelForSequenceClassification.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=source.config._attn_implementation,
            trust_remote_code=trust_remote_code,
        )
    if is_packed(model):
        fuse(model)
    model.base_model.load_state_dict(source.base_model.state_dict())
    torch.nn.init.zeros_(model.score.weight)
    model.config.architectures = [type(model).__name__]
    return model.to(device).eval()
