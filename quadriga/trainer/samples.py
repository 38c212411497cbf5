# SPDX-License-Identifier: Apache-2.0
"""Answers as rows that a person can read, for JSONL dumps and trackers."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from quadriga.errors import DataError
from quadriga.observe.tracking.jsonl import jsonable
from quadriga.protocol import DataProto

_OF_CONVERSATION = ("num_turns", "finish_reason")


def sample_rows(batch: DataProto, tokenizer: PreTrainedTokenizerBase, data_source_key: str) -> list[dict[str, Any]]:
    """One row per graded answer: where it comes from, prompt, answer, ground truth, score and what the grader added."""
    width = batch.batch["responses"].shape[1]
    masks = batch.batch["attention_mask"].bool()
    scores = batch.batch["token_level_scores"].sum(-1).tolist()
    told = [name for name in _OF_CONVERSATION if name in batch.non_tensor_batch]
    rows = []
    for row in range(len(batch)):
        prompt = batch.batch["prompts"][row][masks[row, :-width]]
        answer = batch.batch["responses"][row][masks[row, -width:]]
        known = {
            "uid": batch.non_tensor_batch["uid"][row],
            "data_source": batch.non_tensor_batch[data_source_key][row],
            "input": tokenizer.decode(prompt, skip_special_tokens=True),
            "output": tokenizer.decode(answer, skip_special_tokens=True),
            "ground_truth": (batch.non_tensor_batch["reward_model"][row] or {}).get("ground_truth"),
            "score": scores[row],
            **{name: batch.non_tensor_batch[name][row] for name in told},
        }
        # A grader may give what it adds any name.
        said = batch.non_tensor_batch["reward_extra"][row]
        rows.append(known | {f"reward/{name}" if name in known else name: value for name, value in said.items()})
    return rows


def write_samples(directory: str | Path, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows to `directory/STEP.jsonl`: whole or not at all.

    Raises:
        DataError: they cannot be written.
    """
    path = Path(directory).expanduser() / f"{step}.jsonl"
    lines = [json.dumps(jsonable({**row, "step": step}), ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    aside = path.with_suffix(".unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text("".join(lines), encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        if aside.is_file():
            aside.unlink()
        raise DataError(
            str(path),
            got=error.strerror or str(error),
            expected="room and permission to write the answers of a step",
            fix="Free space, or set trainer.rollout_data_dir or trainer.validation_data_dir to another directory.",
        ) from error
    return path


def first_of_each_prompt(rows: Iterable[Mapping[str, Any]], count: int) -> Iterator[dict[str, Any]]:
    """The first answer to each of the first `count` prompts."""
    seen: set[str] = set()
    for row in rows:
        if row["uid"] not in seen and len(seen) < count:
            seen.add(row["uid"])
            yield {name: row[name] for name in ("input", "output", "ground_truth", "score")}
