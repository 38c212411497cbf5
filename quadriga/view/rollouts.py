# SPDX-License-Identifier: Apache-2.0
"""Rollouts of a step as rows without tokens, and one rollout with its tokens, as JSON."""

import codecs
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from quadriga.errors import DataError
from quadriga.observe.records import COLUMNS, RecordFolder, TokenTable
from quadriga.view.index import (
    flat_values,
    has_values,
    list_sums,
    number_leaves,
    preview,
    prompt_names,
    row_lengths,
    row_sums,
    text_of,
    truncated_rows,
)
from quadriga.view.runs import stamp_of

MAX_TOKENS = 20_000
"""Tokens of a response that are sent at once. A page asks for the others."""
MAX_TEXT = 200_000
"""Characters of a text of the record that are sent."""
_PREVIEW_TOKENS = 80
_PREVIEW_CHARACTERS = 240
_ERROR_CHARACTERS = 600
_PLAIN_COLUMNS = (
    *("rollout_id", "uid", "agent", "source_row", "data_source", "score", "reward"),
    *("reward_baseline", "reward_error", "finish_reason", "num_turns", "not_computed"),
    *("image_hash", "row_index", "position"),
)
_LIST_COLUMNS = (
    *("prompt_ids", "response_ids", "response_mask", "trained_mask", "rollout_log_probs"),
    *("log_probs", "entropies", "advantages", "token_versions", "token_staleness"),
)
_JSON_COLUMNS = (*("turn_spans", "tool_rewards", "turn_scores", "messages", "reward_parts", "row"),)
_TOKEN_COLUMNS = [
    column.name
    for column in COLUMNS.values()
    if column.group == "token" and not column.name.endswith("_ids")
]


def rollout_rows(
    record: RecordFolder, step: int, kind: str, limit: int, tokens: TokenTable | None
) -> list[dict[str, Any]]:
    """Rows of a step without their tokens.

    Args:
        record: the record of a run.
        step: the step.
        kind: `STEP` or `VALIDATION`.
        limit: longest response in tokens; 0 if it is not known.
        tokens: texts of the tokens; None: ids are shown.

    Raises:
        DataError: the step is not recorded, or its file is damaged.
    """
    columns = [*_PLAIN_COLUMNS, *_LIST_COLUMNS, "reward_parts", "row"]
    rows = record.read(step, kind, columns).rows
    num_tokens = row_lengths(rows["response_mask"])
    prompts = prompt_names(rows)
    truncated = truncated_rows(rows, limit).tolist()
    numbers = {
        "length": num_tokens.tolist(),
        "prompt_length": row_lengths(rows["prompt_ids"]).tolist(),
        **_means(rows, num_tokens),
    }
    previews: dict[str, str] = {}
    truths: dict[str | None, Any] = {}
    listed = []
    plain_rows = rows.select([*_PLAIN_COLUMNS, "reward_parts", "row"]).to_pylist()
    for place, row in enumerate(plain_rows):
        parts = json.loads(row.pop("reward_parts") or "{}")
        row |= {name: values[place] for name, values in numbers.items()}
        row["place"] = place
        row["prompt"] = prompts[place]
        row["truncated"] = truncated[place]
        row["parts"] = dict(number_leaves(parts))
        # The end of a traceback names the error.
        row["reward_error"] = (row["reward_error"] or "")[-_ERROR_CHARACTERS:]
        if prompts[place] not in previews:
            prompt_ids = rows["prompt_ids"][place].values[-2 * _PREVIEW_TOKENS :].to_pylist()
            previews[prompts[place]] = preview(prompt_ids, tokens)
        data_row = row.pop("row")
        if data_row not in truths:
            reward_model = json.loads(data_row or "{}").get("reward_model") or {}
            truths[data_row] = shortened(reward_model.get("ground_truth"))
        row["truth"] = truths[data_row]
        row["prompt_text"] = previews[prompts[place]]
        response_ids = rows["response_ids"][place].values[:_PREVIEW_TOKENS].to_pylist()
        row["text"] = text_of(response_ids, tokens)[:_PREVIEW_CHARACTERS]
        listed.append(row)
    return listed


def _means(rows: pa.Table, num_tokens: np.ndarray) -> dict[str, list[float | None]]:
    """Means over the tokens of each row that the model generated; None where they are not known."""
    mask = flat_values(rows["response_mask"])
    num_generated = row_sums(rows["response_mask"])
    divisor = np.maximum(num_generated, 1)
    means: dict[str, np.ndarray] = {"generated": num_generated}
    trained = rows["trained_mask"] if has_values(rows["trained_mask"]) else rows["response_mask"]
    means["trained"] = row_sums(trained)
    for name, column in (("advantage", "advantages"), ("rollout_log_prob", "rollout_log_probs")):
        if rows[column].null_count == 0:
            means[name] = row_sums(rows[column], mask) / divisor
    # Rows that the update did not compute have no values of the trainer.
    is_known = ~rows["log_probs"].is_null().to_numpy()
    of_known_rows = np.repeat(is_known, num_tokens)
    if is_known.any():
        sampled = flat_values(rows["rollout_log_probs"])
        if len(sampled) == len(mask):
            difference = np.abs(flat_values(rows["log_probs"]) - sampled[of_known_rows])
            lengths = np.where(is_known, num_tokens, 0)
            sums = list_sums(difference * mask[of_known_rows], lengths)
            means["mismatch"] = np.where(is_known, sums / divisor, np.nan)
        if rows["entropies"].null_count == rows["log_probs"].null_count:
            sums = row_sums(rows["entropies"], mask[of_known_rows])
            means["entropy"] = np.where(is_known, sums / divisor, np.nan)
    if has_values(rows["token_staleness"]):
        means["staleness"] = row_sums(rows["token_staleness"]) / divisor
    return {name: rounded(values) for name, values in means.items()}


def shortened(value: Any) -> str | None:
    """The beginning of a value as text; None if there is none."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text[:_PREVIEW_CHARACTERS]


def rounded(values: np.ndarray) -> list[float | None]:
    """Numbers with six digits, for JSON; None for those that are not finite."""
    is_finite = np.isfinite(values)
    numbers = np.where(is_finite, values, 0.0).astype(np.float64)
    sizes = np.where(numbers == 0.0, 1.0, np.abs(numbers))
    # Numbers beyond 1e300 are not rounded: their factor would overflow.
    factors = 10.0 ** np.clip(5 - np.floor(np.log10(sizes)), -300, 300)
    shortened_numbers = (np.round(numbers * factors) / factors).tolist()
    return [
        number if known else None
        for number, known in zip(shortened_numbers, is_finite.tolist(), strict=True)
    ]


def matching_rows(
    record: RecordFolder, step: int, kind: str, text: str, tokens: TokenTable | None
) -> list[int]:
    """Places of the rows whose prompt, response or messages have a text, in any case.

    Args:
        record: the record of a run.
        step: the step.
        kind: `STEP` or `VALIDATION`.
        text: the text.
        tokens: texts of the tokens; None: only messages and data rows are searched.

    Raises:
        DataError: the step is not recorded, or its file is damaged.
    """
    columns = ("prompt_ids", "response_ids", "messages", "row", "reward_error")
    rows = record.read(step, kind, columns).rows
    wanted = text.casefold()
    places = []
    for place in range(len(rows)):
        texts = [rows[name][place].as_py() or "" for name in columns[2:]]
        if tokens is not None:
            for name in columns[:2]:
                texts.append(tokens.decode(rows[name][place].as_py()))
        if any(wanted in candidate.casefold() for candidate in texts):
            places.append(place)
    return places


def rollout_details(
    record: RecordFolder,
    step: int,
    kind: str,
    place: int,
    tokens: TokenTable | None,
    start: int = 0,
) -> dict[str, Any]:
    """Read a rollout with its tokens and their numbers.

    Args:
        record: the record of a run.
        step: the step.
        kind: `STEP` or `VALIDATION`.
        place: place of the row in its file.
        tokens: texts of the tokens; None: ids are shown.
        start: first token of the response that is sent, with at most `MAX_TOKENS`.

    Returns:
        The row; `prompt` and `response` with ids, texts and the columns of tokens; `turns`.

    Raises:
        DataError: the step is not recorded, its file is damaged, or it has no such row.
    """
    path = record.path(step, kind)
    rows = _detail_rows(record, step, kind, path.is_file() and stamp_of(path))
    if not 0 <= place < len(rows):
        got = f"row {place} of {len(rows)}"
        raise DataError(str(path), got=got, expected="a row of the step")
    row = rows.slice(place, 1)
    details: dict[str, Any] = row.select(_PLAIN_COLUMNS).to_pylist()[0]
    details["reward_error"] = (details["reward_error"] or "")[:MAX_TEXT]
    for name in _JSON_COLUMNS:
        text = row[name][0].as_py()
        if text is not None and len(text) > MAX_TEXT and name != "turn_spans":
            details[name] = f"{text[:MAX_TEXT]}... ({len(text):,} characters)"
        else:
            details[name] = None if text is None else json.loads(text)
    prompt_ids = row["prompt_ids"][0].values
    response_ids = row["response_ids"][0].values
    prompt_start = max(0, len(prompt_ids) - MAX_TOKENS)
    shown_prompt = prompt_ids[prompt_start:].to_pylist()
    shown_response = response_ids[start : start + MAX_TOKENS].to_pylist()
    details["prompt_start"] = prompt_start
    details["prompt"] = _token_texts(shown_prompt, tokens)
    details["start"] = start
    details["length"] = len(response_ids)
    details["response"] = _token_texts(shown_response, tokens)
    columns: dict[str, Any] = {}
    for name in _TOKEN_COLUMNS:
        values = row[name][0]
        if values.is_valid:
            numbers = np.asarray(values.values[start : start + MAX_TOKENS].to_numpy(False))
            columns[name] = rounded(numbers.astype(np.float64))
    details["columns"] = columns
    details["turns"] = _turns(row, details["turn_spans"] or [])
    return details


@lru_cache(maxsize=1)
def _detail_rows(record: RecordFolder, step: int, kind: str, _: Any) -> pa.Table:
    """Rows of a step. Those that were read last stay, until their file changes."""
    names = [*_PLAIN_COLUMNS, *_JSON_COLUMNS, "prompt_ids", "response_ids", *_TOKEN_COLUMNS]
    return record.read(step, kind, names).rows


def _token_texts(ids: Sequence[int], tokens: TokenTable | None) -> dict[str, Any]:
    """Ids, texts and special tokens of a sequence.

    The text of a character stands at the last of the tokens that it consists of.
    """
    if tokens is None:
        return {"ids": ids, "texts": [f"⟨{number}⟩" for number in ids], "special": []}
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = []
    special_places = []
    for place, number in enumerate(ids):
        is_known = 0 <= number < len(tokens.texts)
        text = tokens.texts[number] if is_known else b"<|%d|>" % number
        texts.append(decoder.decode(text))
        if number in tokens.special_ids:
            special_places.append(place)
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return {"ids": ids, "texts": texts, "special": special_places}


def _turns(row: pa.Table, spans: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Tokens of each turn of the model, with what it earned: its scores, and its mean advantage."""
    turns = []
    for start, end in spans:
        turn: dict[str, Any] = {"start": start, "end": end}
        for name, column in (("score", "token_scores"), ("advantage", "advantages")):
            if row[column][0].is_valid and start < end:
                values = row[column][0].values[start:end].to_numpy(False)
                turn[name] = float(values.sum() if name == "score" else values.mean())
        turns.append(turn)
    return turns
