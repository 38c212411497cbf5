# SPDX-License-Identifier: Apache-2.0
"""Recorded rollouts as people read them: with texts for token ids, and JSON parsed."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from quadriga.observe.records.files import STEP, RecordFolder
from quadriga.observe.records.schema import COLUMNS
from quadriga.observe.records.tokens import TokenTable

_JSON_COLUMNS = (
    "turn_spans",
    "turn_rewards",
    "turn_states",
    "tool_rewards",
    "turn_scores",
    "messages",
    "reward_parts",
    "row",
)
"""Columns whose values are JSON, as text."""
_SAMPLE_COLUMNS = (
    *("uid", "data_source", "score", "num_turns", "finish_reason", "reward_error"),
    *("prompt_ids", "response_ids", "messages", "reward_parts", "row"),
)
ANSWER_LEFT_OUT = "answer_left_out"
"""Entry of a sample, True where a tool's answer left no room for another turn; else missing."""


def samples_of(record: RecordFolder, step: int, kind: str = STEP) -> list[dict[str, Any]]:
    """Read the rollouts of a step as texts, in the form of the files of `trainer.rollout_data_dir`.

    Args:
        record: the record of a run.
        step: the step.
        kind: `STEP` or `VALIDATION`.

    Raises:
        DataError: the step is not recorded, or its file is damaged.
    """
    rows = _parse_rows(record.read(step, kind, _SAMPLE_COLUMNS).rows)
    return [{**sample_of(row, record.tokens), "step": step} for row in rows]


def sample_of(row: Mapping[str, Any], tokens: TokenTable | None) -> dict[str, Any]:
    """Convert a recorded rollout to a sample, with texts in the place of token ids.

    Args:
        row: `_SAMPLE_COLUMNS` of the record, with JSON parsed.
        tokens: texts of the tokens. None: a text says only how many tokens there are.

    Returns:
        The sample: an entry for each text and number, and one for each value that the grader
        returned beside the score, as `reward/NAME` if the sample already has an entry NAME.
    """
    data_row = dict(row["row"] or {})
    reward_model = data_row.pop("reward_model", None) or {}
    sample = {
        "uid": row["uid"],
        "data_source": row["data_source"],
        "input": _decode(row["prompt_ids"], tokens, skips_special=True),
        "output": _decode(row["response_ids"], tokens, skips_special=True),
        "output_with_special_tokens": _decode(row["response_ids"], tokens, skips_special=False),
        "ground_truth": reward_model.get("ground_truth"),
        "score": row["score"],
    }
    for name in ("num_turns", "finish_reason"):
        if row[name] is not None:
            sample[name] = row[name]
    # A tool's answer that left no room for another turn is not among the messages, so they end with
    # the call of the tool.
    messages = row.get("messages")
    if row["finish_reason"] == "length" and messages and messages[-1].get("tool_calls"):
        sample[ANSWER_LEFT_OUT] = True
    if data_row:
        sample["row"] = data_row
    parts = dict(row["reward_parts"] or {})
    parts["reward_error"] = row["reward_error"] or ""
    # The grader chooses the names of its values, which may be those of entries of the sample.
    taken_names = set(sample)
    for name, value in parts.items():
        sample[f"reward/{name}" if name in taken_names else name] = value
    return sample


def _decode(ids: Any, tokens: TokenTable | None, *, skips_special: bool) -> str:
    """Text of token ids, or a note on the missing table of tokens."""
    if tokens is None:
        return f"[{len(ids)} tokens; tokens.parquet is missing]"
    return tokens.decode(ids, skips_special=skips_special)


def table_for_people(record: RecordFolder, step: int, kind: str = STEP) -> pd.DataFrame:
    """Read the rollouts of a step as a table.

    Args:
        record: the record of a run.
        step: the step.
        kind: `STEP` or `VALIDATION`.

    Returns:
        One row for each rollout, with the texts `prompt` and `response`, all columns of the record,
        `ratio`, and `length`, the number of tokens of the response. Columns of tokens have arrays.
        `ratio` [tokens] is the probability under the trainer over that under the rollout. Without
        rollouts the table is empty.

    Raises:
        DataError: the step is not recorded, or its file is damaged.
    """
    table = pd.DataFrame(list(_parse_rows(record.read(step, kind).rows)))
    if table.empty:
        return table
    for name in table.columns:
        column = COLUMNS.get(name)
        if column is not None and column.group == "token":
            dtype = column.type.value_type.to_pandas_dtype()
            table[name] = [
                None if values is None else np.array(values, dtype) for values in table[name]
            ]
    ratios = []
    for sampled, trained in zip(table["rollout_log_probs"], table["log_probs"], strict=True):
        has_both = sampled is not None and trained is not None
        ratios.append(np.exp(trained - sampled) if has_both else None)
    table["ratio"] = ratios
    table["length"] = [len(ids) for ids in table["response_ids"]]
    for place, name in enumerate(("prompt", "response")):
        ids_of_rows = table[f"{name}_ids"]
        texts = [_decode(ids, record.tokens, skips_special=False) for ids in ids_of_rows]
        table.insert(place, name, texts)
    return table


def _parse_rows(rows: pa.Table) -> Iterator[dict[str, Any]]:
    """Convert rows to dictionaries, and parse their columns of JSON."""
    for row in rows.to_pylist():
        for name in _JSON_COLUMNS:
            if row.get(name) is not None:
                row[name] = json.loads(row[name])
        yield row
