# SPDX-License-Identifier: Apache-2.0
"""Files of the record of a run's rollouts.

    RUN/rollouts/
      step_000012.parquet         rollouts of a training step
      validation_000012.parquet   rollouts of the validation after a step
      tokens.parquet              bytes of each token of the vocabulary
      superseded_1/               record of an earlier run in the same directory

A file gets its name only after its last byte was written. Its metadata has the entry `quadriga`: a
JSON object with the version of the format and facts about the step, see `StepRecord.facts`.
"""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from quadriga.errors import DataError
from quadriga.observe.records.schema import SCHEMA, TEXT_COLUMNS, VERSION
from quadriga.observe.records.tokens import TokenTable, token_bytes

FOLDER = "rollouts"
STEP = "step"
VALIDATION = "validation"
_TOKENS = "tokens.parquet"
_NAME = re.compile(r"(step|validation)_(\d{6,})\.parquet")
_DRAFT = ".unfinished_"  # prefix of a file that is being written
_METADATA = b"quadriga"  # key of the facts in a file's metadata
_SUPERSEDED = "superseded"


@dataclass(frozen=True)
class StepRecord:
    """Rollouts of a step or a validation.

    Attributes:
        rows: the rollouts, with the requested columns of the schema.
        facts: the entry `quadriga` of the file: `version` of the format, `step`, `widths` (padded
            lengths of prompts and responses), `total_training_steps`, `metrics`, `machine` (see
            `describe_numerics`), `route_shape` (number of layers, experts of a token),
            `is_thinned`; with several processes `calls`, see `call_times.step_calls`.
    """

    rows: pa.Table
    facts: dict[str, Any]


class RecordFolder:
    """The record in a run's directory.

    Args:
        directory: the run's directory.
    """

    def __init__(self, directory: Path) -> None:
        self.folder = directory / FOLDER

    def path(self, step: int, kind: str = STEP) -> Path:
        """File of a step, whether it exists or not."""
        return self.folder / f"{kind}_{step:06d}.parquet"

    def steps(self, kind: str = STEP) -> list[int]:
        """Steps whose rollouts are recorded, in ascending order."""
        return [step for step, _ in self._files(kind)]

    def _files(self, kind: str) -> list[tuple[int, Path]]:
        """Steps and files of a kind, in ascending order."""
        files = []
        for path in self.folder.glob(f"{kind}_*.parquet"):
            match = _NAME.fullmatch(path.name)
            if match:
                files.append((int(match[2]), path))
        return sorted(files)

    # Writing

    def begin(self, after_step: float, *, is_continued: bool) -> None:
        """Prepare the folder for a run that records the steps after `after_step`.

        Args:
            after_step: the step that the run resumes from, or 0. Infinity keeps all steps of a
                continued run.
            is_continued: whether an existing record belongs to this run. If so, its steps after
                `after_step` are removed, because the run computes them again. If not, it is moved
                to a folder `superseded_N`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        # A killed process leaves drafts.
        for leftover in self.folder.glob(f"{_DRAFT}*"):
            leftover.unlink(missing_ok=True)
        recorded_files = [*self._files(STEP), *self._files(VALIDATION)]
        if is_continued:
            for step, path in recorded_files:
                if step > after_step:
                    path.unlink(missing_ok=True)
        elif recorded_files:
            places = (self.folder / f"{_SUPERSEDED}_{number}" for number in count(1))
            aside = next(place for place in places if not place.exists())
            aside.mkdir()
            paths = [path for _, path in recorded_files]
            # `glob` returns the file of tokens only if it exists.
            for path in [*paths, *self.folder.glob(_TOKENS)]:
                path.rename(aside / path.name)

    def write(self, step: int, kind: str, rows: pa.Table, facts: dict[str, Any]) -> int:
        """Write the rollouts of a step.

        Args:
            step: number of the step.
            kind: `STEP` or `VALIDATION`.
            rows: the rollouts, with the columns of the schema.
            facts: facts for the metadata, besides `version` and `step`.

        Returns:
            The size of the file, in bytes.

        Raises:
            OSError: the file cannot be written. An earlier file of the step stays as it was.
        """
        path = self.path(step, kind)
        self._write_rows(path, rows, {"version": VERSION, "step": step, **facts})
        return path.stat().st_size

    def write_tokens_once(self, tokenizer: Any) -> None:
        """Write the token texts of a tokenizer, unless the record has them."""
        path = self.folder / _TOKENS
        if not path.is_file():
            texts, special_ids = token_bytes(tokenizer)
            self._write(path, TokenTable(texts, special_ids).write)

    def _write_rows(self, path: Path, rows: pa.Table, facts: dict[str, Any]) -> None:
        """Write the file of a step, with `facts` in its metadata."""
        metadata = {_METADATA: json.dumps(facts, allow_nan=True).encode()}
        rows = rows.replace_schema_metadata(metadata)
        # Dictionary encoding is for columns of texts, many of which the rows of a prompt share.
        # Lists of numbers hardly repeat.
        dictionaries = [field.name for field in SCHEMA if pa.types.is_string(field.type)]

        def write(draft: Path) -> None:
            pq.write_table(
                rows,
                draft,
                compression="zstd",
                compression_level=1,
                use_dictionary=dictionaries,
                write_statistics=False,
            )

        self._write(path, write)

    def _write(self, path: Path, write: Callable[[Path], None]) -> None:
        """Write a file under another name, and rename it when it is complete.

        Args:
            path: the file.
            write: writes the content to the path that it is called with.
        """
        draft = path.with_name(f"{_DRAFT}{path.name}")
        try:
            write(draft)
            draft.replace(path)
        except BaseException:
            # An error in the removal must not replace the first error, such as a full disk.
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise

    # Thinning

    def num_bytes(self) -> int:
        """Size of the files of all steps, in bytes."""
        files = [*self._files(STEP), *self._files(VALIDATION)]
        return sum(path.stat().st_size for _, path in files)

    def thin(self, max_bytes: float, max_steps: float, *, first_needed_step: float) -> int:
        """Shrink the record. Texts are removed first, from the oldest step on, then whole steps.

        The newest step stays as it is.

        Args:
            max_bytes: size above which the record shrinks, to 90 % of `max_bytes`.
            max_steps: number of newest steps to keep; at least 1, infinity for all. Older steps are
                removed; those that a replay needs only lose their texts.
            first_needed_step: oldest step that a replay needs. This step and later training steps
                may lose their texts, but nothing else.

        Returns:
            The size afterwards, in bytes; above `max_bytes` if the needed steps take more.
        """
        entries = [(step, STEP, path) for step, path in self._files(STEP)]
        entries += [(step, VALIDATION, path) for step, path in self._files(VALIDATION)]
        entries.sort(key=itemgetter(0))
        steps = sorted({step for step, _, _ in entries})
        first_kept_step = steps[-int(max_steps)] if max_steps < len(steps) else 0
        num_bytes = self.num_bytes()
        # Below the limit, so that not every later step rewrites files again.
        limit = 0.9 * max_bytes if num_bytes > max_bytes else max_bytes

        # First pass: remove steps beyond `max_steps`, and texts.
        removable_paths = []
        for step, kind, path in entries:
            if step == steps[-1]:
                break
            is_old = step < first_kept_step
            is_needed = kind == STEP and step >= first_needed_step
            if is_old and not is_needed:
                num_bytes -= _remove(path)
                continue
            if is_old or num_bytes > limit:
                num_bytes += self._remove_texts(path)
            if not is_needed:
                removable_paths.append(path)
        # Second pass: if that is not enough, remove whole steps.
        for path in removable_paths:
            if num_bytes > limit:
                num_bytes -= _remove(path)
        return num_bytes

    def _remove_texts(self, path: Path) -> int:
        """Remove the texts of a step, unless that has been done before.

        Returns:
            The change of the file's size in bytes, negative or 0.
        """
        if read_facts(path).get("is_thinned"):
            return 0
        record = read_record(path)
        old_size = path.stat().st_size
        rows = record.rows
        for name in TEXT_COLUMNS:
            nulls = pa.nulls(len(rows), SCHEMA.field(name).type)
            rows = rows.set_column(rows.column_names.index(name), name, nulls)
        self._write_rows(path, rows, {**record.facts, "is_thinned": True})
        return path.stat().st_size - old_size

    # Reading

    def read(self, step: int, kind: str = STEP, columns: Sequence[str] | None = None) -> StepRecord:
        """Read the rollouts of a step.

        Args:
            step: number of the step.
            kind: `STEP` or `VALIDATION`.
            columns: names of the columns; None: all.

        Raises:
            DataError: the step is not recorded, or its file is damaged.
        """
        path = self.path(step, kind)
        if not path.is_file():
            steps = self.steps(kind)
            expected = "a run that records its rollouts (trainer.rollout_record)"
            if steps:
                expected = f"one of {len(steps)} recorded steps, {steps[0]} to {steps[-1]}"
            raise DataError(str(path), got=f"no record of step {step}", expected=expected)
        return read_record(path, columns)

    @cached_property
    def tokens(self) -> TokenTable | None:
        """Token texts, read on first use; None if the record has none.

        Raises:
            DataError: the file is damaged.
        """
        path = self.folder / _TOKENS
        if not path.is_file():
            return None
        try:
            return TokenTable.read(path)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise _damaged_error(path, error) from error


def read_record(path: Path, columns: Sequence[str] | None = None) -> StepRecord:
    """Read a file of the record.

    Args:
        path: the file.
        columns: names of the columns; None: all.

    Raises:
        DataError: the file is damaged, no record, or of a newer version.
    """
    facts = read_facts(path)
    names = SCHEMA.names if columns is None else columns
    try:
        written_names = set(pq.read_schema(path).names)
        rows = pq.read_table(path, columns=[name for name in names if name in written_names])
        # Add the columns that an older version did not write, with nulls.
        for name in names:
            if name not in written_names:
                field = SCHEMA.field(name)
                rows = rows.append_column(field, pa.nulls(len(rows), field.type))
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise _damaged_error(path, error) from error
    return StepRecord(rows, facts)


def read_facts(path: Path) -> dict[str, Any]:
    """Read the facts in the metadata of a file of the record, without its rows.

    Raises:
        DataError: the file is damaged, no record, or of a newer version.
    """
    try:
        facts = json.loads(pq.read_schema(path).metadata[_METADATA])
        version = int(facts["version"])
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise _damaged_error(path, error) from error
    if version > VERSION:
        raise DataError(
            str(path),
            got=f"version {version} of the record",
            expected=f"at most version {VERSION}",
            fix="Read it with the version of Quadriga that wrote it.",
        )
    return facts


def _remove(path: Path) -> int:
    """Remove a file. Return its size in bytes."""
    num_bytes = path.stat().st_size
    path.unlink()
    return num_bytes


def _damaged_error(path: Path, error: Exception) -> DataError:
    """Error for a file that cannot be read."""
    # Only the first line: messages of Arrow may have many.
    reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
    return DataError(
        str(path),
        got=f"a damaged file ({reason})",
        expected="a file of the record of rollouts",
        fix="Delete it, or put it back from a copy. Other steps are not affected.",
    )
