# SPDX-License-Identifier: Apache-2.0
"""Rollouts of a step as rows without their tokens, and a single rollout with its tokens."""

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
    trained_column,
    truncated_rows,
)
from quadriga.view.runs import Answer, ViewedRun, stamp_of

MAX_TOKENS = 20_000
"""Tokens of a response that are sent at once. The page asks for more as it needs them."""
MAX_TEXT = 200_000
"""Characters of a text of the record that are sent; the rest is cut."""
_PREVIEW_TOKENS = 80
_PREVIEW_CHARACTERS = 240
_ERROR_CHARACTERS = 600
# Columns of the record, by what their values are: numbers and texts, lists of numbers, and JSON as text.
_PLAIN_COLUMNS = (
    *("rollout_id", "uid", "agent", "source_row", "data_source", "score", "reward"),
    *("reward_baseline", "reward_error", "finish_reason", "not_computed", "image_hash"),
)
_LIST_COLUMNS = (
    *("prompt_ids", "response_ids", "response_mask", "trained_mask", "rollout_log_probs"),
    *("log_probs", "entropies", "advantages", "token_staleness"),
)
_JSON_COLUMNS = ("turn_spans", "tool_rewards", "turn_scores", "messages", "reward_parts", "row")
# Columns with a number for each token of the response.
_TOKEN_COLUMNS = [
    column.name
    for column in COLUMNS.values()
    if column.group == "token" and not column.name.endswith("_ids")
]


def rollout_rows(run: ViewedRun, step: int, kind: str) -> list[Answer]:
    """Read the rollouts of a step without their tokens.

    Args:
        run: the run.
        step: the step.
        kind: `STEP` or `VALIDATION`.

    Returns:
        For each rollout: `_PLAIN_COLUMNS`; `place`, its number in the file; `prompt`, the name of its
        prompt; `truncated`; `length`; means over its tokens (see `_token_means`); `parts`, numbers of
        the grader; `truth`; `prompt_text`, the end of the prompt; and `text`, the begin of the response.

    Raises:
        DataError: the step is not recorded, or its file is damaged.
    """
    columns = [*_PLAIN_COLUMNS, *_LIST_COLUMNS, "reward_parts", "row"]
    rows = run.record.read(step, kind, columns).rows
    tokens = run.tokens()
    num_tokens = row_lengths(rows["response_mask"])
    prompts = prompt_names(rows)
    columns_of_page = {
        "place": range(len(rows)),
        "prompt": prompts,
        "truncated": truncated_rows(rows, run.response_limit()).tolist(),
        "length": num_tokens.tolist(),
        **_token_means(rows, num_tokens),
    }
    # Responses to a prompt share its text and its data row.
    previews = {}
    truths = {}
    plain_rows = rows.select([*_PLAIN_COLUMNS, "reward_parts", "row"]).to_pylist()
    for place, row in enumerate(plain_rows):
        prompt = prompts[place]
        if prompt not in previews:
            # `preview` leaves out special tokens, so more are read than for the response.
            prompt_ids = rows["prompt_ids"][place].values[-2 * _PREVIEW_TOKENS :].to_pylist()
            previews[prompt] = preview(prompt_ids, tokens)
        data_row = row.pop("row")
        if data_row not in truths:
            reward_model = json.loads(data_row or "{}").get("reward_model") or {}
            truths[data_row] = shorten(reward_model.get("ground_truth"))
        response_ids = rows["response_ids"][place].values[:_PREVIEW_TOKENS].to_pylist()
        for name, values in columns_of_page.items():
            row[name] = values[place]
        row |= {
            "parts": dict(number_leaves(json.loads(row.pop("reward_parts") or "{}"))),
            # The end of a traceback names the error.
            "reward_error": (row["reward_error"] or "")[-_ERROR_CHARACTERS:],
            "truth": truths[data_row],
            "prompt_text": previews[prompt],
            "text": text_of(response_ids, tokens)[:_PREVIEW_CHARACTERS],
        }
    return plain_rows


def _token_means(rows: pa.Table, num_tokens: np.ndarray) -> dict[str, list[float | None]]:
    """Number of generated and of trained tokens of each row, and means over the generated tokens.

    Args:
        rows: rows with `_LIST_COLUMNS`.
        num_tokens: length of each response, [rows].

    Returns:
        A list by name, with a value for each row, None where it is not known: `generated` and
        `trained` are numbers of tokens; `advantage`, `mismatch` (absolute difference of log-probs
        between rollout and trainer), `entropy` and `staleness` are means. Means whose columns are not
        recorded are left out.
    """
    # All tokens of all rows: 1 for a generated token, 0 for one of a tool or a user.
    mask = flat_values(rows["response_mask"])
    num_generated = row_sums(rows["response_mask"])
    divisor = np.maximum(num_generated, 1)
    means = {"generated": num_generated, "trained": row_sums(trained_column(rows))}
    # With a null in a row, `flat_values` of the column would have fewer tokens than `mask`.
    if rows["advantages"].null_count == 0:
        means["advantage"] = row_sums(rows["advantages"], mask) / divisor
    # Rows that the update did not compute have no values of the trainer, so `flat_values` of such a
    # column has fewer tokens than `mask`. `is_known_token` selects the same tokens from other columns.
    is_known = ~rows["log_probs"].is_null().to_numpy()
    is_known_token = np.repeat(is_known, num_tokens)
    if is_known.any():
        sampled = flat_values(rows["rollout_log_probs"])
        if len(sampled) == len(mask):
            difference = np.abs(flat_values(rows["log_probs"]) - sampled[is_known_token])
            lengths = np.where(is_known, num_tokens, 0)
            sums = list_sums(difference * mask[is_known_token], lengths)
            means["mismatch"] = np.where(is_known, sums / divisor, np.nan)
        if rows["entropies"].null_count == rows["log_probs"].null_count:
            sums = row_sums(rows["entropies"], mask[is_known_token])
            means["entropy"] = np.where(is_known, sums / divisor, np.nan)
    if has_values(rows["token_staleness"]):
        means["staleness"] = row_sums(rows["token_staleness"]) / divisor
    return {name: round_values(values) for name, values in means.items()}


def shorten(value: Any) -> str | None:
    """The first `_PREVIEW_CHARACTERS` of a value, as text or JSON. None stays None."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text[:_PREVIEW_CHARACTERS]


def round_values(values: np.ndarray) -> list[float | None]:
    """Round numbers to six significant digits, for short JSON. NaN and infinities become None."""
    is_finite = np.isfinite(values)
    numbers = np.where(is_finite, values, 0.0).astype(np.float64)
    sizes = np.where(numbers == 0.0, 1.0, np.abs(numbers))
    # Numbers beyond 1e300 are not rounded: their factor would overflow.
    factors = 10.0 ** np.clip(5 - np.floor(np.log10(sizes)), -300, 300)
    result = (np.round(numbers * factors) / factors).astype(object)
    result[~is_finite] = None
    return result.tolist()


def matching_rows(run: ViewedRun, step: int, kind: str, text: str) -> list[int]:
    """Find the rollouts of a step that contain a text, in upper or lower case.

    Prompts, responses, messages, data rows and errors of graders are searched. Without a table of
    tokens, prompts and responses are left out.

    Args:
        run: the run.
        step: the step.
        kind: `STEP` or `VALIDATION`.
        text: the text.

    Returns:
        Numbers of the rollouts in the file of the step.

    Raises:
        DataError: the step is not recorded, or its file is damaged.
    """
    text_columns = ("messages", "row", "reward_error")
    id_columns = ("prompt_ids", "response_ids")
    rows = run.record.read(step, kind, [*id_columns, *text_columns]).rows
    tokens = run.tokens()
    text = text.casefold()
    places = []
    for place in range(len(rows)):
        # One row at a time, since the texts of a step may be large.
        texts = [rows[name][place].as_py() or "" for name in text_columns]
        if tokens is not None:
            texts += [tokens.decode(rows[name][place].as_py()) for name in id_columns]
        if any(text in candidate.casefold() for candidate in texts):
            places.append(place)
    return places


def rollout_details(run: ViewedRun, step: int, kind: str, place: int, start: int = 0) -> Answer:
    """Read a rollout with its tokens and their numbers.

    Args:
        run: the run.
        step: the step.
        kind: `STEP` or `VALIDATION`.
        place: number of the rollout in the file of the step.
        start: first token of the response to return. At most `MAX_TOKENS` are returned.

    Returns:
        `_PLAIN_COLUMNS` and `_JSON_COLUMNS`; `prompt` and `response`, see `_token_texts`, with the
        number of their first token as `prompt_start` and `start`; `length`, all tokens of the response;
        `columns`, by name the numbers of the returned response tokens; and `turns`, see `_turn_numbers`.

    Raises:
        DataError: the step is not recorded, its file is damaged, or it has no such row.
    """
    path = run.record.path(step, kind)
    stamp = stamp_of(path) if path.is_file() else None
    rows = _detail_rows(run.record, step, kind, stamp)
    if not 0 <= place < len(rows):
        raise DataError(str(path), got=f"row {place} of {len(rows)}", expected="a row of the step")
    row = rows.slice(place, 1)
    details = row.select(_PLAIN_COLUMNS).to_pylist()[0]
    details["reward_error"] = (details["reward_error"] or "")[:MAX_TEXT]
    for name in _JSON_COLUMNS:
        text = row[name][0].as_py()
        # A long text is cut and stays text. `turn_spans` is needed whole below.
        if text is not None and len(text) > MAX_TEXT and name != "turn_spans":
            details[name] = f"{text[:MAX_TEXT]}... ({len(text):,} characters)"
        else:
            details[name] = None if text is None else json.loads(text)
    prompt_ids = row["prompt_ids"][0].values
    response_ids = row["response_ids"][0].values
    tokens = run.tokens()
    # Of a long prompt the end is shown, to which the response belongs.
    prompt_start = max(0, len(prompt_ids) - MAX_TOKENS)
    columns = {}
    for name in _TOKEN_COLUMNS:
        values = row[name][0]
        if values.is_valid:
            numbers = np.asarray(values.values[start : start + MAX_TOKENS].to_numpy(False))
            columns[name] = round_values(numbers.astype(np.float64))
    details |= {
        "prompt_start": prompt_start,
        "prompt": _token_texts(prompt_ids[prompt_start:].to_pylist(), tokens),
        "start": start,
        "length": len(response_ids),
        "response": _token_texts(response_ids[start : start + MAX_TOKENS].to_pylist(), tokens),
        "columns": columns,
        "turns": _turn_numbers(row, details["turn_spans"] or []),
    }
    return details


@lru_cache(maxsize=1)
def _detail_rows(
    record: RecordFolder, step: int, kind: str, _stamp: tuple[int, int] | None
) -> pa.Table:
    """Read the rows of a step.

    People look at one rollout of a step after another, so the last step stays in memory. `_stamp`
    is part of the cache's key: the rows are read again when the file has changed.
    """
    names = [*_PLAIN_COLUMNS, *_JSON_COLUMNS, "prompt_ids", "response_ids", *_TOKEN_COLUMNS]
    return record.read(step, kind, names).rows


def _token_texts(ids: Sequence[int], tokens: TokenTable | None) -> Answer:
    """Texts of the tokens of a sequence, for a page that shows each token by itself.

    Args:
        ids: token ids.
        tokens: texts of the tokens. None: ids are shown.

    Returns:
        `ids`; `texts`, where a character of several tokens belongs to the last one of them; and
        `special`, the places of special tokens.
    """
    if tokens is None:
        return {"ids": ids, "texts": [f"⟨{number}⟩" for number in ids], "special": []}
    # A character may consist of several tokens: the decoder keeps its first bytes until the last.
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


def _turn_numbers(row: pa.Table, spans: Sequence[Sequence[int]]) -> list[Answer]:
    """Numbers of each turn of the model.

    Args:
        row: a table of one row.
        spans: begin and end of each turn in the response.

    Returns:
        For each turn `start` and `end`, and if they are recorded `score`, the sum of its token scores,
        and `advantage`, the mean of its advantages.
    """
    turns = []
    for start, end in spans:
        turn: Answer = {"start": start, "end": end}
        for name, column in (("score", "token_scores"), ("advantage", "advantages")):
            if row[column][0].is_valid and start < end:
                values = row[column][0].values[start:end].to_numpy(False)
                turn[name] = float(values.sum() if name == "score" else values.mean())
        turns.append(turn)
    return turns
