# SPDX-License-Identifier: Apache-2.0
"""Index of a run's record: numbers of each step, and a row for each rollout without its tokens.

    request                         thread "view index"
      start the thread, and use       read files that are new or have changed, the newest step
      the steps indexed so far        first; write the index into the cache folder at the end

The thread consumes: files of the record, which are always complete. Waits for: the end of requests
in progress, before each file, since they share the interpreter. Unblocked by: their end, or
`_PATIENCE_S`.

The cache folder is $XDG_CACHE_HOME/quadriga/view, by default ~/.cache/quadriga/view. If it cannot be
written, the index is only in memory.
"""

import hashlib
import json
import os
import threading
from collections import Counter, defaultdict
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from quadriga.background import in_background
from quadriga.data.files import written_aside
from quadriga.errors import DataError
from quadriga.observe.records import STEP, VALIDATION, TokenTable
from quadriga.view.ranks import computed_seconds
from quadriga.view.runs import ViewedRun, describe_error, nested_values, stamp_of

_VERSION = 3
"""Version of the files in the cache. Files of another version are not read."""
_METADATA = b"quadriga_view"
"""Key of the schema's metadata in such a file: JSON with `version` and `steps`, see `_save`."""
_READ_COLUMNS = (
    *("uid", "source_row", "agent", "data_source", "score", "reward", "finish_reason"),
    *("reward_error", "not_computed", "response_mask", "trained_mask", "token_staleness"),
    *("reward_parts", "row", "prompt_ids"),
)
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("prompt", pa.string()),  # see `prompt_names`
        ("score", pa.float32()),
        ("text", pa.string()),  # end of the prompt; null but in the first row of a prompt
    ]
)
"""Columns of the index, a row for each rollout."""
_PREVIEW_TOKENS = 48
_PREVIEW_CHARACTERS = 160
_MAX_JSON_CHARACTERS = 20_000
"""Longest text of a row's own columns that is searched for numbers."""
_PATIENCE_S = 2.0
"""Seconds that the thread waits for requests in progress."""


@dataclass
class IndexedStep:
    """Numbers and rows of a step of the record.

    Attributes:
        stamp: `stamp_of` the file when it was read.
        numbers: means and counts over the rows of the step, and `rank_s/ROLE/RANK`, by name.
        reasons: number of rows that the update did not compute, by the reason.
        problem: why the file could not be read; "" if it was.
        rows: a row for each rollout.
    """

    stamp: tuple[int, int]
    numbers: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    problem: str = ""
    rows: pa.Table = field(default_factory=SCHEMA.empty_table)


class RunIndex:
    """The index of a run, which a thread fills.

    Args:
        run: the run.
        cache: folder of the indexes. None: `cache_folder()`.
        is_quiet: set while no request is in progress.

    Attributes:
        run: the run.
        steps: indexed steps by kind and step. The dictionary is replaced, never changed.
        total: number of files that are or will be indexed.
    """

    def __init__(self, run: ViewedRun, cache: Path | None, is_quiet: threading.Event) -> None:
        self.run = run
        self._is_quiet = is_quiet
        self.steps: dict[tuple[str, int], IndexedStep] = {}
        self.total = 0
        # The file in the cache is named by a hash of the run's directory.
        folder = cache or cache_folder()
        digest = hashlib.sha256(str(run.directory.resolve()).encode()).hexdigest()[:24]
        self._path = folder / f"{digest}.parquet"
        self._is_loaded = False
        self._pending: Future[None] | None = None

    def refresh(self) -> None:
        """Start a thread that reads new and changed files, if there are any and no thread runs yet.

        An error of the previous thread is raised here.
        """
        if self._pending is not None:
            if not self._pending.done():
                return
            ended = self._pending
            # If the thread failed, `result` raises its error, and the next call starts another one.
            self._pending = None
            ended.result()
        stamps = self._file_stamps()
        self.total = len(stamps)
        indexed = {key: entry.stamp for key, entry in self.steps.items()}
        if self._is_loaded and stamps == indexed:
            return
        self._pending = in_background(lambda: self._build(stamps), "view index")

    def wait(self) -> None:
        """Wait until the files that the last `refresh` found are indexed."""
        if self._pending is not None:
            self._pending.result()

    def _file_stamps(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Stamps of the files of the record, by kind and step."""
        stamps = {}
        record = self.run.record
        for kind in (STEP, VALIDATION):
            for step in record.steps(kind):
                try:
                    stamps[kind, step] = stamp_of(record.path(step, kind))
                except FileNotFoundError:
                    # The run has thinned its record meanwhile.
                    continue
        return stamps

    def _build(self, stamps: dict[tuple[str, int], tuple[int, int]]) -> None:
        """Bring the index up to date. Runs in a thread.

        Args:
            stamps: stamps of the files to index, by kind and step.
        """
        if not self._is_loaded:
            self.steps = _load(self._path)
            self._is_loaded = True
        # Drop entries whose file no longer exists. A changed file keeps its old entry until it is read.
        self.steps = {key: self.steps[key] for key in stamps if key in self.steps}
        indexed = {key: entry.stamp for key, entry in self.steps.items()}
        outdated_keys = [key for key in stamps if indexed.get(key) != stamps[key]]
        limit = self.run.response_limit()
        tokens = self.run.tokens()
        # People look at the newest steps first.
        for kind, step in sorted(outdated_keys, key=lambda key: -key[1]):
            # Requests in progress go first, but not for ever.
            self._is_quiet.wait(_PATIENCE_S)
            entry = IndexedStep(stamps[kind, step])
            try:
                record = self.run.record.read(step, kind, _READ_COLUMNS)
                entry.rows = _index_rows(record.rows, step, tokens)
                reasons = record.rows["not_computed"].drop_null().to_pylist()
                entry.reasons = dict(Counter(reasons))
                entry.numbers = _step_numbers(record.rows, limit)
                entry.numbers |= computed_seconds(record.facts)
            except (DataError, ValueError, KeyError) as error:
                entry.problem = describe_error(error)
            self.steps = {**self.steps, (kind, step): entry}
        if outdated_keys:
            _save(self._path, self.steps)


def cache_folder() -> Path:
    """The user's folder of indexes."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "quadriga" / "view"


def row_lengths(column: pa.ChunkedArray) -> np.ndarray:
    """Number of values in each list of a column; 0 for a null."""
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    return lengths.to_numpy().astype(np.int64)


def row_sums(column: pa.ChunkedArray, weights: np.ndarray | None = None) -> np.ndarray:
    """Sum of the values in each list of a column, in float64; 0 for a null.

    Args:
        column: lists of numbers or booleans.
        weights: factors of the values, in the order of `flat_values(column)`. None: 1.
    """
    values = flat_values(column)
    if weights is not None:
        values = values * weights
    return list_sums(values, row_lengths(column))


def list_sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sum of the values in each list.

    Args:
        values: concatenated values of all lists.
        lengths: number of values in each list.
    """
    # Differences of a running total: numpy's `reduceat` is wrong for empty lists.
    totals = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.cumsum(lengths)
    return totals[ends] - totals[ends - lengths]


def flat_values(column: pa.ChunkedArray) -> np.ndarray:
    """Concatenated values of all lists of a column, in float64."""
    values = column.combine_chunks().flatten()
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.float64)


def has_values(column: pa.ChunkedArray) -> bool:
    """Whether a column has a value in at least one row."""
    return column.null_count < len(column)


def trained_column(rows: pa.Table) -> pa.ChunkedArray:
    """Column with 1 for tokens of the response from which the update learned.

    Without `trained_mask`, which has the tokens that were not rejected, these are all generated tokens.
    """
    trained = rows["trained_mask"]
    return trained if has_values(trained) else rows["response_mask"]


def prompt_names(rows: pa.Table) -> list[str]:
    """Name of each row's prompt: its data row, by which it is the same in all steps, or else the uid."""
    return pc.coalesce(rows["source_row"], rows["uid"]).to_pylist()


def truncated_rows(rows: pa.Table, limit: int) -> np.ndarray:
    """Whether each response was cut at the length limit, [rows].

    Args:
        rows: rows with `response_mask` and `finish_reason`.
        limit: longest response in tokens; 0 if it is not known.
    """
    is_at_limit = row_lengths(rows["response_mask"]) >= (limit or np.inf)
    reasons = rows["finish_reason"]
    has_length_reason = pc.fill_null(pc.equal(reasons, "length"), False).to_numpy()
    # Some engines give no reason. There the length decides.
    return has_length_reason | (is_at_limit & reasons.is_null().to_numpy())


def _index_rows(rows: pa.Table, step: int, tokens: TokenTable | None) -> pa.Table:
    """Make the rows of the index, with the columns of `SCHEMA`, from the rows of a step."""
    prompts = prompt_names(rows)
    texts = [None] * len(rows)
    seen_prompts = set()
    for place, prompt in enumerate(prompts):
        if prompt in seen_prompts:
            continue
        seen_prompts.add(prompt)
        # Only the slice of the list becomes Python numbers.
        ids = rows["prompt_ids"][place].values[-_PREVIEW_TOKENS:].to_pylist()
        texts[place] = preview(ids, tokens)
    return pa.table(
        {
            "step": [step] * len(rows),
            "prompt": prompts,
            "score": rows["score"],
            "text": texts,
        },
        schema=SCHEMA,
    )


def _step_numbers(rows: pa.Table, limit: int) -> dict[str, float]:
    """Counts and means over the rows of a step, by name.

    Args:
        rows: rows with `_READ_COLUMNS`.
        limit: longest response in tokens; 0 if it is not known.
    """
    num_rows = len(rows)
    groups = defaultdict(list)  # scores by the uid of the prompt
    for uid, score in zip(rows["uid"].to_pylist(), rows["score"].to_numpy(), strict=True):
        groups[uid].append(score)
    # Groups of several responses with the same score give no gradient.
    has_no_spread = [len(scores) > 1 and len(set(scores)) == 1 for scores in groups.values()]
    lengths = row_lengths(rows["response_mask"])
    num_generated = float(row_sums(rows["response_mask"]).sum())
    numbers = {
        "rollouts": num_rows,
        "groups": len(groups),
        "groups_without_spread": sum(has_no_spread),
        "graded": num_rows - rows["score"].null_count,
        "grader_errors": num_rows - rows["reward_error"].null_count,
        "truncated": int(truncated_rows(rows, limit).sum()),
        "not_computed": num_rows - rows["not_computed"].null_count,
        "generated_tokens": num_generated,
        "rejected_tokens": num_generated - float(row_sums(trained_column(rows)).sum()),
        "length": float(lengths.mean()) if num_rows else 0.0,
    }
    staleness = flat_values(rows["token_staleness"])
    if len(staleness):
        numbers["stale_tokens"] = int((staleness > 0).sum())
    _add_means(numbers, rows)
    return numbers


def preview(ids: list[int], tokens: TokenTable | None) -> str:
    """Text of the last tokens of a prompt, where the question usually is, without special tokens."""
    return text_of(ids, tokens, skips_special=True)[-_PREVIEW_CHARACTERS:]


def text_of(ids: list[int], tokens: TokenTable | None, *, skips_special: bool = False) -> str:
    """Text of some tokens; their ids with blanks between them if there is no table of tokens."""
    if tokens is None:
        return " ".join(map(str, ids))
    return tokens.decode(ids, skips_special=skips_special)


def _add_means(numbers: dict[str, float], rows: pa.Table) -> None:
    """Add means over the rows of a step to `numbers`.

    The names are `score`, `score/DATA_SOURCE`, `reward`, `part/NAME` for numbers of graders, and
    `row/NAME` for numbers in the data rows.

    Args:
        numbers: numbers of the step, to which the means are added.
        rows: rows with `_READ_COLUMNS`.
    """
    values = defaultdict(list)
    scores = rows["score"].to_pylist()
    rewards = rows["reward"].to_pylist()
    for source, score, reward in zip(rows["data_source"].to_pylist(), scores, rewards, strict=True):
        if score is not None:
            values["score"].append(score)
            values[f"score/{source}"].append(score)
        if reward is not None:
            values["reward"].append(reward)
    for column, prefix in (("reward_parts", "part"), ("row", "row")):
        # Responses to a prompt share their data row, so each text is parsed once and counts for all of
        # them.
        for entry in rows[column].value_counts().to_pylist():
            text = entry["values"]
            if text is None or len(text) > _MAX_JSON_CHARACTERS:
                continue
            for name, value in number_leaves(json.loads(text)):
                values[f"{prefix}/{name}"] += [value] * entry["counts"]
    for name, entries in values.items():
        numbers[name] = float(np.mean(entries))


def number_leaves(value: Any) -> list[tuple[str, float]]:
    """Numbers and booleans in nested dictionaries, with dotted names. Lists are left out."""
    leaves = []
    for name, leaf in nested_values(value):
        if name and isinstance(leaf, bool | int | float):
            leaves.append((name, float(leaf)))
    return leaves


def _load(path: Path) -> dict[tuple[str, int], IndexedStep]:
    """Read an index from the cache; empty if there is none that can be used."""
    try:
        table = pq.read_table(path)
        facts = json.loads(table.schema.metadata[_METADATA])
        if facts["version"] != _VERSION:
            return {}
        steps = {}
        start = 0
        # In the order in which `_save` writes them.
        for kind, step, stamp, numbers, reasons, problem, num_rows in facts["steps"]:
            entry = IndexedStep(tuple(stamp), numbers, reasons, problem)
            entry.rows = table.slice(start, num_rows).replace_schema_metadata()
            start += num_rows
            steps[kind, step] = entry
        return steps
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError):
        # The index is built from the record instead.
        return {}


def _save(path: Path, steps: dict[tuple[str, int], IndexedStep]) -> None:
    """Write an index into the cache, if possible."""
    facts = []
    for (kind, step), entry in steps.items():
        num_rows = len(entry.rows)
        facts.append(
            [kind, step, entry.stamp, entry.numbers, entry.reasons, entry.problem, num_rows]
        )
    table = pa.concat_tables([SCHEMA.empty_table(), *(entry.rows for entry in steps.values())])
    metadata = {_METADATA: json.dumps({"version": _VERSION, "steps": facts}).encode()}
    # If it cannot be written, the index is only in memory, and the next start builds it again.
    with suppress(DataError), written_aside(path, where="cache of the indexes") as draft:
        pq.write_table(table.replace_schema_metadata(metadata), draft, compression="zstd")
