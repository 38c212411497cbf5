# SPDX-License-Identifier: Apache-2.0
"""The result of a replay as text."""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from quadriga.replay.compare import COMPUTED, TOLERANCE, Difference
from quadriga.replay.run import ReplayResult, uid_of
from quadriga.replay.trainer import REWARDS, UPDATE

MAX_ROWS = 20
"""Largest number of changed rows that are printed. More are counted."""
_MAX_CHARS = 100  # largest length of a printed text


def describe_replay(replayed: ReplayResult, uid: str = "") -> Iterator[str]:
    """Describe the result of a replay.

    Args:
        replayed: the result.
        uid: `uid` of the prompt whose rows are shown, or `rollout_id` of one of its rollouts. "":
            changed rows are shown if the step was edited, or if the replay ended with the rewards.

    Yields:
        Lines of text.
    """
    yield ""
    if uid:
        yield from _describe_prompt(replayed, uid_of(replayed.recorded.rows, uid))
    elif replayed.is_edited or replayed.until == REWARDS:
        yield from _describe_changed_rows(replayed)
    # An edited step is meant to differ.
    if not replayed.is_edited:
        yield from _describe_columns(replayed)
    yield from _describe_metrics(replayed)
    if replayed.earlier:
        yield f"on the way: {replayed.earlier}"
    yield _describe_verdict(replayed)


def _describe_columns(replayed: ReplayResult) -> Iterator[str]:
    """Yield a line or two for each column that was computed or differs, then a count of the others.

    The others are copied from the record, and equal.
    """
    shown_columns = []
    num_equal_inputs = 0
    for entry in replayed.columns:
        if entry.name in COMPUTED or not entry.is_equal:
            shown_columns.append(entry)
        else:
            num_equal_inputs += 1
    width = max((len(entry.name) for entry in shown_columns), default=0)
    for entry in shown_columns:
        state = f"equal      {entry.num_values} values"
        if not entry.is_equal:
            count = f"{entry.num_different} of {entry.num_values} values"
            state = f"DIFFERENT  {count}, by up to {entry.largest:.3g}"
        yield f"  {entry.name:<{width}}  {state}"
        if entry.first is not None:
            yield f"  {'':<{width}}  first: {_describe_difference(entry.first)}"
    yield f"  from the record: {num_equal_inputs} columns, equal"


def _describe_difference(first: Difference) -> str:
    """Describe the place of a difference, with both values."""
    place = ""
    if first.row is not None:
        place = f"row {first.row} ({first.rollout_id})"
        if first.token is not None:
            place += f", token {first.token}"
        place += ": "
    return f"{place}recorded {_value_text(first.recorded)}, replayed {_value_text(first.replayed)}"


def _value_text(value: Any) -> str:
    """A value as text. Nine digits distinguish all float32 numbers."""
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _describe_metrics(replayed: ReplayResult) -> Iterator[str]:
    """Yield a line on the metrics, and one for each that differs."""
    if not replayed.metrics:
        return
    different = [entry for entry in replayed.metrics if not entry.is_equal]
    num_equal = len(replayed.metrics) - len(different)
    yield f"metrics: {num_equal} equal, {len(different)} different"
    width = max((len(entry.name) for entry in different), default=0)
    for entry in different:
        if entry.first is not None:
            yield f"  {entry.name:<{width}}  {_describe_difference(entry.first)}"
    if replayed.recorded_alone:
        num_alone = len(replayed.recorded_alone)
        yield f"  not computed by this replay: {num_alone}, such as {replayed.recorded_alone[0]}"


def _describe_verdict(replayed: ReplayResult) -> str:
    """The last line: whether the step is equal, and how equal it can be expected to be."""
    step = f"step {replayed.start.step}"
    if replayed.until != UPDATE:
        step += f" up to its {replayed.until}"
    if replayed.is_edited:
        return f"{step}: with the edits, as above; the run is unchanged"
    # Without an obstacle every bit must be equal; with one, differences of rounding are expected.
    is_identical = all(entry.is_equal for entry in (*replayed.columns, *replayed.metrics))
    if is_identical:
        return f"{step}: equal bit for bit"
    if not replayed.obstacle:
        return f"{step}: DIFFERENT"
    reason = f"not expected to be equal bit for bit: {replayed.obstacle}"
    largest = f"by up to {replayed.largest:.3g}"
    if not replayed.start.is_first:
        return (
            f"{step}: differs {largest}, which grows with each step from the checkpoint; {reason}"
        )
    if replayed.is_equal:
        return f"{step}: differs {largest}, within {TOLERANCE:g}; {reason}"
    return f"{step}: DIFFERENT {largest}, above {TOLERANCE:g}; {reason}"


# Rows


def _row_numbers(table: pa.Table) -> list[tuple[float | None, float | None, float | None]]:
    """Score, reward and mean advantage of each row, in this order. A missing number is None."""
    numbers = []
    for row in table.select(["score", "reward", "response_mask", "advantages"]).to_pylist():
        mean_advantage = None
        if row["advantages"] is not None:
            # Only the advantages of tokens that the model generated are averaged.
            pairs = zip(row["advantages"], row["response_mask"], strict=True)
            advantages = [advantage for advantage, is_generated in pairs if is_generated]
            mean_advantage = sum(advantages) / len(advantages) if advantages else 0.0
        numbers.append((row["score"], row["reward"], mean_advantage))
    return numbers


def _describe_changed_rows(replayed: ReplayResult) -> Iterator[str]:
    """Yield lines on the rows whose score or advantage differs from the record."""
    old_numbers = _row_numbers(replayed.recorded.rows)
    new_numbers = _row_numbers(replayed.rows)
    changed = []
    for row, (old, new) in enumerate(zip(old_numbers, new_numbers, strict=True)):
        old_score, _, old_advantage = old
        new_score, _, new_advantage = new
        # A replay that ends with the rewards has no advantages.
        is_other_advantage = new_advantage is not None and old_advantage != new_advantage
        if old_score != new_score or is_other_advantage:
            changed.append(row)
    yield f"{len(changed)} of {len(old_numbers)} rows change"
    if changed:
        yield from _format_rows(replayed, changed[:MAX_ROWS])
    if len(changed) > MAX_ROWS:
        yield f"  and {len(changed) - MAX_ROWS} other changed rows"


def _describe_prompt(replayed: ReplayResult, uid: str) -> Iterator[str]:
    """Yield lines on the rows of a prompt, with rewards and advantages of record and replay."""
    uids = replayed.recorded.rows.column("uid").to_pylist()
    rows = [row for row, uid_of_row in enumerate(uids) if uid_of_row == uid]
    yield f"prompt {uid}: {len(rows)} rows"
    yield from _format_rows(replayed, rows)


def _format_rows(replayed: ReplayResult, rows: list[int]) -> Iterator[str]:
    """Yield lines on some rows, with their numbers and texts."""
    # In the order of `_row_numbers`. A replay that ends with the rewards has only the scores.
    names = ("score", "reward", "advantage")
    if replayed.until == REWARDS:
        names = ("score",)
    old_numbers = _row_numbers(replayed.recorded.rows)
    new_numbers = _row_numbers(replayed.rows)
    rollout_ids = replayed.recorded.rows.column("rollout_id").to_pylist()
    yield "  row  rollout     " + "  ".join(f"{name:<25}" for name in names)
    for row in rows:
        cells = []
        for place in range(len(names)):
            # A dictionary, in which a value that did not change stands once.
            values = dict.fromkeys((old_numbers[row][place], new_numbers[row][place]))
            texts = ["none" if value is None else f"{value:.6g}" for value in values]
            cells.append(" -> ".join(texts))
        yield f"  {row:>3}  {rollout_ids[row]:<10}  " + "  ".join(f"{cell:<25}" for cell in cells)
        for name, text in _row_texts(replayed, row):
            yield f"       {name:<12}  {text}"


def _row_texts(replayed: ReplayResult, row: int) -> Iterator[tuple[str, str]]:
    """Yield the end of the prompt, the response, and the ground truth of a row.

    Yields:
        A name, and a text without line breaks.
    """
    rows = replayed.rows
    texts = []
    for name in ("prompt_ids", "response_ids"):
        token_ids = rows.column(name)[row].as_py()
        texts.append(_single_line(replayed.tokenizer.decode(token_ids, skip_special_tokens=True)))
    prompt, response = texts
    yield "prompt", f"...{prompt[-_MAX_CHARS:]}" if len(prompt) > _MAX_CHARS else prompt
    if len(response) > _MAX_CHARS:
        # The answer of a response usually stands at its end.
        response = f"{response[: _MAX_CHARS // 2]} ... {response[-_MAX_CHARS // 2 :]}"
    yield "response", response
    # The column `row` has the row of the data as JSON.
    reward_model = json.loads(rows.column("row")[row].as_py() or "{}").get("reward_model")
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        yield "ground truth", _single_line(str(reward_model["ground_truth"]))[:_MAX_CHARS]


def _single_line(text: str) -> str:
    """A text on one line."""
    return " ".join(text.split())
