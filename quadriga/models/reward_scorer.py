# SPDX-License-Identifier: Apache-2.0
"""A sequence classifier with one label as a judge of packed sequences.

Legend: n packed tokens in this process, M sequences, D hidden size.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from quadriga.errors import EngineError
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.fused import fuse
from quadriga.models.scorers import PackedTokens, Question, Scorer

_FIX = "Set reward_model.model.path to a model that was trained to score: a sequence classifier with one label."


class RewardScorer(Scorer):
    """`scores`: what the model says of each sequence, read at the token before the predicted one.

    Args:
        model: a decoder with the head `score` [1, D], as `load_reward_model` gives it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        # Nothing projects to the vocabulary: what the engine asks of every model's output embeddings is empty here.
        model.lm_head = nn.Identity()
        super().__init__(model)

    def output_names(self, question: Question) -> tuple[str, ...]:
        """See `Scorer.output_names`."""
        return ("scores",)

    def score(self, hidden: torch.Tensor, batch: PackedTokens, question: Question) -> dict[str, torch.Tensor]:
        """See `Scorer.score`; the question is about a distribution, and here is none."""
        part = self.sharing.scored(hidden, batch, is_vocabulary=False)
        head = self.model.score
        # In float32 whatever the model computes in: a bfloat16 score of 10 is off by up to 0.03.
        bias = None if head.bias is None else head.bias.float()
        return {"scores": part.join(linear(part.states.float(), head.weight.float(), bias)[:, 0])}


def load_reward_model(
    path: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", trust_remote_code: bool = False
) -> PreTrainedModel:
    """A sequence classifier in evaluation mode, with its attention behind our door.

    Args:
        path: a folder with config.json and weights, or a name that transformers can resolve.
        dtype: of the parameters.
        device: where they live.
        trust_remote_code: whether code that ships with the model may run.

    Raises:
        EngineError: it cannot be loaded, has no classification head, several labels, or attention in both directions.
    """
    where = f"reward model {path}"
    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise EngineError(
            where,
            got=str(error).strip().splitlines()[0],
            expected="a folder or hub name that transformers can load as a sequence classifier",
            fix=_FIX,
        ) from error
    _require_weights(where, path, sorted(info["missing_keys"]))
    _require_judge(where, model)
    fuse(model)
    return model.to(device).eval()


def _require_weights(where: str, path: str | Path, missing: list[str]) -> None:
    if not missing:
        return
    folder = Path(path).expanduser()
    files = sorted(file.name for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern))
    place = f"in {', '.join(files)}" if files else "among its weights"
    if any(name.startswith("score.") for name in missing):
        raise EngineError(
            where, got=f"no classification head: {missing[0]} is not {place}", expected="a head to score with", fix=_FIX
        )
    raise EngineError(
        where,
        got=f"no weights for {len(missing)} parameters: {missing[0]} is not {place}",
        expected="all weights of the model; the missing ones would be random",
        fix="Get the whole model.",
    )


def _require_judge(where: str, model: PreTrainedModel) -> None:
    """One score for a sequence, read at its last token, whose state must not depend on what is packed behind it."""
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise EngineError(
            where,
            got=f"{type(model).__name__}, which has no projection named score",
            expected="a decoder with a head at the last token, such as LlamaForSequenceClassification",
            fix=_FIX,
        )
    if head.out_features != 1:
        raise EngineError(
            where, got=f"a classifier with {head.out_features} labels", expected="one label, the score", fix=_FIX
        )
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise EngineError(
            where,
            got=f"{type(model).__name__}, whose tokens see those behind them",
            expected="a decoder with causal attention",
            fix=_FIX,
        )
