# SPDX-License-Identifier: Apache-2.0
"""Writes the folder of a run as training leaves it, without training."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from quadriga.observe.records import SCHEMA, STEP, RecordFolder, TokenTable

EVIL = "</script><script>window.attacked=1</script><img src=x onerror=window.attacked=1>"
PIECES = [b"<bos>", b"<eos>", b"1", b"2", b"+", b"=", b"\xe2\x82", b"\xac", EVIL.encode()]
"""Texts of the tokens by id; 6 and 7 are halves of a character."""
NUM_PROMPTS = 2
NUM_RESPONSES = 2


def rollout(step: int, prompt: int, number: int, **columns: Any) -> dict[str, Any]:
    """Columns of a rollout. Prompt 0 improves with the steps; the responses to prompt 1 fail alike."""
    score = float(step - 1) if prompt == 0 and number == 0 else 0.0
    response = [2, 6, 7, 1]
    is_computed = prompt == 0
    row = {
        "rollout_id": f"{step}-{prompt}/{number}",
        "uid": f"{step}-{prompt}",
        "source_row": f"train.parquet row {prompt}",
        "data_source": "sums",
        "score": score,
        "reward": score,
        "prompt_ids": [0, 2, 4, 3, 5],
        "response_ids": response,
        "response_mask": [True] * 4,
        "rollout_log_probs": [-1.0, -0.5, -0.25, -0.125],
        "log_probs": [-1.0, -0.5, -0.25, -0.625] if is_computed else None,
        "entropies": [1.0, 1.0, 0.0, 0.0] if is_computed else None,
        "not_computed": None if is_computed else "its advantages are 0",
        "advantages": [0.5 if is_computed else 0.0] * 4,
        "reward_parts": json.dumps({"format": 0.5}),
        "row": json.dumps({"level": 3, "reward_model": {"ground_truth": "3"}}),
    }
    return row | columns


def write_step(directory: Path, step: int, rows: list[dict[str, Any]], **facts: Any) -> None:
    """Write the rows of a step and its facts into the record of a run."""
    for number, row in enumerate(rows):
        row |= {"row_index": number, "position": number}
    RecordFolder(directory).write(step, STEP, pa.Table.from_pylist(rows, schema=SCHEMA), facts)


def write_run(
    directory: Path, num_steps: int = 3, calls: dict[str, Any] | None = None, **columns: Any
) -> Path:
    """Write a run of some steps, two prompts a step with two responses each.

    Args:
        directory: the run's directory.
        num_steps: number of steps.
        calls: calls of the ranks in each step.
        columns: columns that differ from those of `rollout`, for all rows.

    Returns:
        The directory.
    """
    folder = RecordFolder(directory).folder
    folder.mkdir(parents=True)
    TokenTable(PIECES, {0, 1}).write(folder / "tokens.parquet")
    lines = []
    for step in range(1, num_steps + 1):
        rows = [
            rollout(step, prompt, number, **columns)
            for prompt in range(NUM_PROMPTS)
            for number in range(NUM_RESPONSES)
        ]
        write_step(directory, step, rows, calls=calls or {})
        metrics = {
            "critic/score/mean": sum(row["score"] or 0.0 for row in rows) / len(rows),
            "actor/entropy": 2.0 / step**3,
            "reward/error_rate": 0.0,
            "rollout/num_response_tokens": 32.0,
            "timing_s/gen": 1.0,
            "timing_s/update_actor": 2.0,
            "timing_s/step": 3.5,
            EVIL: 1.0,
        }
        lines.append(json.dumps({"step": step, **metrics}) + "\n")
    (directory / "metrics.jsonl").write_text("".join(lines))
    configuration = (
        f"data:\n  max_response_length: 4\ntrainer:\n  project_name: p\n# steps 1 to {num_steps}\n"
    )
    (directory / "config.yaml").write_text(configuration)
    return directory
