# SPDX-License-Identifier: Apache-2.0
"""A check of a model before it is used: what the scorer computes, beside transformers' own forward.

In float32, on the weights themselves, where one process has all of them; bfloat16 would hide an error. Everywhere else
the trial in `models/architecture.py` stands for it. Nothing is drawn from torch's generator.

Legend: M predicted tokens, D hidden size.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from quadriga.errors import EngineError
from quadriga.models.architecture import (
    BOUND,
    backbone,
    is_packed,
    own_log_probs,
    packed_rows,
    sample_rows,
    way_of,
)
from quadriga.models.attention import PackedBatch
from quadriga.models.load import load_causal_lm, load_config
from quadriga.models.scorers import NumberScorer, PolicyScorer, Question, RewardScorer


@torch.no_grad()
def probe(scorer: PolicyScorer | NumberScorer, name: str) -> float | None:
    """The largest difference between the log-probs [M] of a small ragged batch with a shared prompt and those of the
    same rows alone by transformers' forward (eager). Of a value or reward model it is that of the hidden states [M, D]
    and of what the head makes of them, as a share of the largest. None: not in float32, or a model of images.
    Raises EngineError: it is over the bound; names the architecture and the worst token."""
    model, where = scorer.model, f"{name}, {type(scorer.model).__name__}"
    if (
        next(model.parameters()).dtype != torch.float32
        or getattr(model.config, "vision_config", None) is not None
    ):
        return None
    rows = sample_rows(model.config.get_text_config().vocab_size)
    groups = [rows] if is_packed(model) else [[row] for row in rows]
    batches = [packed_rows(group, model.device) for group in groups]
    if isinstance(scorer, PolicyScorer):
        kind, found = (
            "log-probs",
            torch.cat([scorer(batch, Question())["log_probs"] for batch in batches]),
        )
        with _as_in_transformers(model):
            expected = own_log_probs(model, rows)
    else:
        kind = "hidden states or scores"
        found, expected = _read_by_a_head(scorer, rows, batches)
    if not expected.isfinite().all():
        got = f"{kind} that are not finite, by transformers' own forward"
        fix = "Its weights are damaged: get them anew."
        raise EngineError(where, got, "finite numbers", fix)
    off = (found - expected).abs().nan_to_num(nan=torch.inf).view(len(found), -1).amax(-1)
    if (largest := float(off.max())) > BOUND:
        places = [
            (row, place) for row, (_, response) in enumerate(rows) for place in range(len(response))
        ]
        row, place = places[int(off.argmax())]
        got = f"{kind} that differ by {largest:.2g}, most at token {place} of response {row} of a small batch"
        fix = "Take a model of another architecture; `quadriga doctor --model PATH` repeats this check alone."
        raise EngineError(
            where, got=got, expected=f"those of transformers' own forward, within {BOUND}", fix=fix
        )
    return largest


def _read_by_a_head(
    scorer: NumberScorer,
    rows: Sequence[tuple[list[int], list[int]]],
    batches: Sequence[PackedBatch],
) -> tuple[torch.Tensor, torch.Tensor]:
    """States [M, D] at predicted tokens and, as a further column, what the head makes of them: of the batches, and of
    the rows alone. Each is a share of its largest number, and of 1 where this is less."""
    model, head = scorer.model, cast(Any, scorer.model.get_submodule(scorer.head))
    states: list[torch.Tensor] = []
    hook = backbone(model).register_forward_hook(
        lambda *call: states.append(call[-1].last_hidden_state[0])
    )
    try:
        numbers = torch.cat([scorer(batch, Question())[scorer.output] for batch in batches])
        ours = torch.cat(
            [one[batch.predictors] for one, batch in zip(states, batches, strict=True)]
        )
        states.clear()
        scores = []
        with _as_in_transformers(model):
            call = model if isinstance(scorer, RewardScorer) else backbone(model)
            for prompt, response in rows:
                tokens = torch.tensor([prompt + response[:-1]], device=model.device)
                output = call(input_ids=tokens, use_cache=False)
                scores.append(
                    output.logits[0] if isinstance(scorer, RewardScorer) else head(states[-1][-1])
                )
    finally:
        hook.remove()
    alone = torch.cat(
        [one[len(prompt) - 1 :] for one, (prompt, _) in zip(states, rows, strict=True)]
    )
    ends = torch.tensor([len(response) for _, response in rows]).cumsum(0) - 1
    expected = head(alone)
    expected[ends] = torch.stack(scores)  # transformers' classifier gives one for each row
    state_scale, scale = (one.abs().max().clamp(min=1.0) for one in (alone, expected))
    found = torch.cat([ours / state_scale, numbers[:, None] / scale], 1)
    return found, torch.cat([alone / state_scale, expected / scale], 1)


@contextmanager
def _as_in_transformers(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model computes with its own modules and eager attention, and no token is padding."""
    attention, padding = model.config._attn_implementation, model.config.pad_token_id
    replaced = [
        (one, vars(one).pop("forward")) for one in model.modules() if "forward" in vars(one)
    ]
    model.config._attn_implementation, model.config.pad_token_id = "eager", None
    try:
        yield
    finally:
        model.config._attn_implementation, model.config.pad_token_id = attention, padding
        for module, forward in replaced:
            module.forward = forward


def about_model(path: str | Path, *, trust_remote_code: bool = False) -> Iterator[str]:
    """How a model is computed, and how far its log-probs are from transformers', for people to read.
    Raises EngineError: it cannot be loaded, cannot be computed, or differs."""
    config = load_config(path, trust_remote_code=trust_remote_code)
    start = time.perf_counter()
    way = way_of(config, trust_remote_code=trust_remote_code)
    how = f"one row at a time, by the attention '{way.attention}' of transformers ({way.reason})"
    yield f"architecture: {(config.architectures or [config.model_type])[0]}"
    yield f"rows are computed {how if way.reason else 'packed, with shared prompts'}; {_seconds(start)}"
    model = load_causal_lm(path, dtype=torch.float32, trust_remote_code=trust_remote_code)
    start = time.perf_counter()
    off = probe(PolicyScorer(model), "model")
    found = (
        "not compared: it takes images"
        if off is None
        else f"off by at most {off:.1g} nats, {BOUND} allowed"
    )
    yield f"log-probs beside transformers' own forward, on its weights in float32: {found}; {_seconds(start)}"


def _seconds(start: float) -> str:
    return f"{time.perf_counter() - start:.1f} s"
