# SPDX-License-Identifier: Apache-2.0
"""Check of a model before it is used: compares the scorer's outputs with transformers' forward.

The probe uses the model's own weights, which a single process must have in full, in float32,
because bfloat16 would hide an error. Otherwise, only the trial in `models/architecture.py` checks
the architecture. The probe does not advance torch's random generator.

Legend: M predicted tokens, D hidden size.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quadriga.errors import EngineError
from quadriga.models.architecture import (
    BOUND,
    backbone,
    draw_sample_rows,
    is_packed,
    pack_rows,
    transformers_log_probs,
    way_of,
)
from quadriga.models.attention import PackedBatch
from quadriga.models.load import load_causal_lm, load_config
from quadriga.models.scorers import NumberScorer, PolicyScorer, RewardScorer, ScoreQuestion


@torch.no_grad()
def probe(scorer: PolicyScorer | NumberScorer, name: str) -> float | None:
    """Compare a scorer with transformers' own forward (eager) on a small batch.

    The batch has rows of different lengths and a shared prompt; transformers computes it row by
    row. Of a policy, the log-probs [M] are compared; of a value or reward model, the hidden states
    [M, D] and the numbers of the head, each relative to the largest number.

    Args:
        scorer: the scorer to check.
        name: role of the model, for the message.

    Returns:
        The largest difference; None if the model was not compared, because it is not in float32, or
        takes images.

    Raises:
        EngineError: the difference is above the bound, or transformers' own numbers are not finite.
            The message names the architecture and the token with the largest difference.
    """
    model = scorer.model
    where = f"{name}, {type(model).__name__}"
    is_float32 = next(model.parameters()).dtype == torch.float32
    if not is_float32 or getattr(model.config, "vision_config", None) is not None:
        return None
    # Packed models compute all rows in one call, others one row per call.
    rows = draw_sample_rows(model.config.get_text_config().vocab_size)
    groups = [rows] if is_packed(model) else [[row] for row in rows]
    batches = [pack_rows(group, model.device) for group in groups]
    if isinstance(scorer, PolicyScorer):
        kind = "log-probs"
        computed = torch.cat([scorer(batch, ScoreQuestion())["log_probs"] for batch in batches])
        with _use_transformers_modules(model):
            expected = transformers_log_probs(model, rows)
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
    token_differences = differences.view(len(computed), -1).amax(-1)  # [M]
    largest = float(token_differences.max())
    if largest > BOUND:
        # Find the token with the largest difference among the M tokens, by row and column.
        tokens = []
        for row, (_, response) in enumerate(rows):
            tokens += [(row, token) for token in range(len(response))]
        row, token = tokens[int(token_differences.argmax())]
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
    """Compute hidden states and the head's numbers by the scorer, and by transformers row by row.

    Args:
        scorer: the scorer.
        rows: prompt and response of each row.
        batches: the same rows, packed.

    Returns:
        Two tensors [M, D + 1], by the scorer and by transformers: states at the tokens before the
        predicted ones, and in the last column the numbers. Both are divided by transformers'
        largest state or number, unless that is less than 1.
    """
    model = scorer.model
    head = model.get_submodule(scorer.head)
    states = []  # hidden states of each call of the backbone
    hook = backbone(model).register_forward_hook(
        lambda module, inputs, output: states.append(output.last_hidden_state[0])
    )
    try:
        # By the scorer.
        batch_numbers = []
        batch_states = []
        for batch in batches:
            batch_numbers.append(scorer(batch, ScoreQuestion())[scorer.output])
            batch_states.append(states.pop()[batch.predictors])

        # By transformers, which itself computes the score at the end of each row, but no values.
        row_scores = []
        with _use_transformers_modules(model):
            for prompt, response in rows:
                tokens = torch.tensor([prompt + response[:-1]], device=model.device)
                if isinstance(scorer, RewardScorer):
                    row_scores.append(model(input_ids=tokens, use_cache=False).logits[0])
                else:
                    # Only for the states that the hook collects.
                    backbone(model)(input_ids=tokens, use_cache=False)
    finally:
        hook.remove()

    # The token before each response token predicts it.
    pairs = zip(states, rows, strict=True)
    expected_states = torch.cat(
        [hidden[len(prompt) - 1 :] for hidden, (prompt, _) in pairs]
    )  # [M, D]
    expected_numbers = head(expected_states)  # [M, 1]
    if row_scores:
        # At a row's last predicted token, take the score that transformers itself has computed.
        ends = torch.tensor([len(response) for _, response in rows]).cumsum(0) - 1
        expected_numbers[ends] = torch.stack(row_scores)

    state_scale = expected_states.abs().max().clamp(min=1.0)
    number_scale = expected_numbers.abs().max().clamp(min=1.0)
    numbers = torch.cat(batch_numbers)[:, None]
    computed = torch.cat([torch.cat(batch_states) / state_scale, numbers / number_scale], 1)
    expected = torch.cat([expected_states / state_scale, expected_numbers / number_scale], 1)
    return computed, expected


@contextmanager
def _use_transformers_modules(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: compute with transformers' own modules, eager attention and no padding."""
    config = model.config
    attention = config._attn_implementation
    padding = config.pad_token_id
    # Remove the forwards that `fuse` has set on modules, so that the classes' own are called.
    fused = []
    for module in model.modules():
        if "forward" in vars(module):
            fused.append((module, vars(module).pop("forward")))
    config._attn_implementation = "eager"
    # Otherwise, transformers' classifiers would take tokens with the padding id for padding.
    config.pad_token_id = None
    try:
        yield
    finally:
        config._attn_implementation = attention
        config.pad_token_id = padding
        for module, forward in fused:
            module.forward = forward


def describe_model(path: str | Path, *, trust_remote_code: bool = False) -> Iterator[str]:
    """Describe how a model is computed, and how much its log-probs differ from transformers'.

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
    # A way has a reason only if rows are not packed.
    if way.reason:
        description = (
            f"one row at a time, by the attention '{way.attention}' of transformers ({way.reason})"
        )
    yield f"rows are computed {description}; {time.perf_counter() - start:.1f} s"
    model = load_causal_lm(path, dtype=torch.float32, trust_remote_code=trust_remote_code)
    start = time.perf_counter()
    difference = probe(PolicyScorer(model), "model")
    result = "not compared: it takes images"
    if difference is not None:
        result = f"off by at most {difference:.1g} nats, {BOUND} allowed"
    yield (
        "log-probs compared with transformers' own forward, on the model's weights in float32: "
        f"{result}; {time.perf_counter() - start:.1f} s"
    )
