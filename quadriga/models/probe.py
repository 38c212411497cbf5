# SPDX-License-Identifier: Apache-2.0
"""Check of a model before it is used: compares what the scorer computes with transformers' forward.

The probe runs in float32, because bfloat16 would hide an error, on the model's own weights, where
one process has all of them. Elsewhere the trial in `models/architecture.py` stands in for it. It
draws nothing from torch's generator.

Legend: M predicted tokens, D hidden size.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
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
from quadriga.models.scorers import NumberScorer, PolicyScorer, RewardScorer, ScoreQuestion


@torch.no_grad()
def probe(scorer: PolicyScorer | NumberScorer, name: str) -> float | None:
    """Compare a scorer with transformers' own forward (eager) on a small batch.

    The batch is ragged and has a shared prompt; transformers computes its rows alone. A policy is
    compared in its log-probs [M]. A value or reward model is compared in its hidden states [M, D]
    and in what its head makes of them, each relative to the largest number.

    Args:
        scorer: the scorer to check.
        name: role of the model, for the message.

    Returns:
        The largest difference. None: not compared, because the model is not in float32 or takes
        images.

    Raises:
        EngineError: the difference is above the bound. The message names the architecture and the
            worst token.
    """
    model = scorer.model
    where = f"{name}, {type(model).__name__}"
    is_float32 = next(model.parameters()).dtype == torch.float32
    if not is_float32 or getattr(model.config, "vision_config", None) is not None:
        return None
    # Packed models compute all rows in one call, others one row per call.
    rows = sample_rows(model.config.get_text_config().vocab_size)
    groups = [rows] if is_packed(model) else [[row] for row in rows]
    batches = [packed_rows(group, model.device) for group in groups]
    if isinstance(scorer, PolicyScorer):
        kind = "log-probs"
        computed = torch.cat([scorer(batch, ScoreQuestion())["log_probs"] for batch in batches])
        with _as_in_transformers(model):
            expected = own_log_probs(model, rows)
    else:
        kind = "hidden states or scores"
        computed, expected = _states_and_numbers(scorer, rows, batches)
    if not expected.isfinite().all():
        raise EngineError(
            where,
            got=f"{kind} that are not finite, by transformers' own forward",
            expected="finite numbers",
            fix="The model's weights are damaged: download them again.",
        )
    differences = (computed - expected).abs().nan_to_num(nan=torch.inf)  # [M] or [M, D + 1]
    of_tokens = differences.view(len(computed), -1).amax(-1)  # [M]
    largest = float(of_tokens.max())
    if largest > BOUND:
        # Row and column of each of the M tokens.
        tokens = []
        for row, (_, response) in enumerate(rows):
            tokens += [(row, token) for token in range(len(response))]
        row, token = tokens[int(of_tokens.argmax())]
        raise EngineError(
            where,
            got=f"{kind} that differ by {largest:.2g}, most at token {token} of response {row} "
            "of a small batch",
            expected=f"those of transformers' own forward, within {BOUND}",
            fix="Take a model of another architecture; "
            "`quadriga doctor --model PATH` repeats this check alone.",
        )
    return largest


def _states_and_numbers(
    scorer: NumberScorer,
    rows: Sequence[tuple[list[int], list[int]]],
    batches: Sequence[PackedBatch],
) -> tuple[Tensor, Tensor]:
    """States at predicted tokens and, as a further column, the head's numbers: [M, D + 1] twice.

    First those of the batches, then those of the rows alone. Both are divided by the largest state
    or number of the rows, or by 1 if that is smaller.
    """
    model = scorer.model
    head = model.get_submodule(scorer.head)
    states = []

    def record(module: Any, inputs: Any, output: Any) -> None:
        states.append(output.last_hidden_state[0])

    hook = backbone(model).register_forward_hook(record)
    try:
        batch_numbers = [scorer(batch, ScoreQuestion())[scorer.output] for batch in batches]
        pairs = zip(batches, states, strict=True)
        batch_states = [hidden[batch.predictors] for batch, hidden in pairs]
        states.clear()
        row_numbers = []
        with _as_in_transformers(model):
            for prompt, response in rows:
                tokens = torch.tensor([prompt + response[:-1]], device=model.device)
                if isinstance(scorer, RewardScorer):
                    output = model(input_ids=tokens, use_cache=False)
                    row_numbers.append(output.logits[0])
                else:
                    backbone(model)(input_ids=tokens, use_cache=False)
                    row_numbers.append(head(states[-1][-1]))
    finally:
        hook.remove()

    # The token before each response token predicts it.
    pairs = zip(states, rows, strict=True)
    expected_states = torch.cat([hidden[len(prompt) - 1 :] for hidden, (prompt, _) in pairs])
    expected_numbers = head(expected_states)  # [M, 1]
    # Transformers' classifier gives one number per row, at its end.
    ends = torch.tensor([len(response) for _, response in rows]).cumsum(0) - 1
    expected_numbers[ends] = torch.stack(row_numbers)
    state_scale = expected_states.abs().max().clamp(min=1.0)
    number_scale = expected_numbers.abs().max().clamp(min=1.0)
    numbers = torch.cat(batch_numbers)[:, None]
    computed = torch.cat([torch.cat(batch_states) / state_scale, numbers / number_scale], 1)
    expected = torch.cat([expected_states / state_scale, expected_numbers / number_scale], 1)
    return computed, expected


@contextmanager
def _as_in_transformers(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: compute with transformers' own modules and eager attention.

    No token counts as padding.
    """
    config = model.config
    attention = config._attn_implementation
    padding = config.pad_token_id
    # Fused modules have a forward of their own, which hides the class's.
    fused = []
    for module in model.modules():
        if "forward" in vars(module):
            fused.append((module, vars(module).pop("forward")))
    config._attn_implementation = "eager"
    # Transformers' classifiers read the last token that is not padding.
    config.pad_token_id = None
    try:
        yield
    finally:
        config._attn_implementation = attention
        config.pad_token_id = padding
        for module, forward in fused:
            module.forward = forward


def about_model(path: str | Path, *, trust_remote_code: bool = False) -> Iterator[str]:
    """Describe how a model is computed, and how far its log-probs are from transformers'.

    Args:
        path: folder or hub name of the model.
        trust_remote_code: whether code that ships with the model may run.

    Returns:
        Iterator over lines of text.

    Raises:
        EngineError: the model cannot be loaded or computed, or its log-probs differ.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    start = time.perf_counter()
    way = way_of(config, trust_remote_code=trust_remote_code)
    yield f"architecture: {(config.architectures or [config.model_type])[0]}"
    description = "packed, with shared prompts"
    if way.reason:
        description = (
            f"one row at a time, by the attention '{way.attention}' of transformers ({way.reason})"
        )
    yield f"rows are computed {description}; {_seconds_since(start)}"
    model = load_causal_lm(path, dtype=torch.float32, trust_remote_code=trust_remote_code)
    start = time.perf_counter()
    difference = probe(PolicyScorer(model), "model")
    if difference is None:
        result = "not compared: it takes images"
    else:
        result = f"off by at most {difference:.1g} nats, {BOUND} allowed"
    yield (
        "log-probs beside transformers' own forward, on its weights in float32: "
        f"{result}; {_seconds_since(start)}"
    )


def _seconds_since(start: float) -> str:
    return f"{time.perf_counter() - start:.1f} s"
