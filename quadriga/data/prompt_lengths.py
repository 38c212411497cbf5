# SPDX-License-Identifier: Apache-2.0
"""Measures prompts once, in several processes if desired, and stores their numbers of tokens.

    driver                                process that counts
      | ------ meter and table ---------> |  loads the tokenizer, opens the file again
      | <------- Ready or Unusable ------ |
      | -- rows of a batch (two ahead) -> |
      | <------- Counted or Failed ------ |

driver    waits for the next answer of any process; unblocked by the answer, or by the end of a process.
process   waits for the rows of a batch; unblocked by the rows, or by the end of the driver.

A process is a separate program (`quadriga.programs.SupervisedProgram`), not a fork: a fork inherits
locks and signal handlers of the driver's threads, among them Ray's. It is not started by
`multiprocessing` either, which would run the user's script again. It does not import torch, unless
it counts the tokens of images.
"""

import hashlib
import json
import os
import pickle
import re
import traceback
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from quadriga.config import DataConfig
from quadriga.data.files import RowTable, written_aside
from quadriga.data.media import read_prompt
from quadriga.data.tokenizing import (
    ChatEncoder,
    chat_in_json,
    describe_template_check,
    require_embedded,
    role_order,
    shortened,
)
from quadriga.errors import DataError
from quadriga.observe.watchdog import waiting
from quadriga.programs import SupervisedProgram

if TYPE_CHECKING:
    from quadriga.data.vision import VisionProcessor

BATCH_ROWS = 256
"""Rows that are measured in one call."""
BAD = -1
"""Number of tokens that marks a bad row."""
# Bits of the field `notes` of a measured prompt: facts that are counted and printed at the start.
IN_JSON = 1
CONTINUED = 2
WITH_TOOLS = 4
UNWRITTEN_TOOLS = 8
UNNAMED_TOOLS = 16
NOTES = {
    IN_JSON: "prompts are texts in JSON, and read as the messages in them",
    CONTINUED: "prompts end with the assistant, whose turn is continued",
    WITH_TOOLS: "prompts are measured with the tools that their agent loop offers",
    UNWRITTEN_TOOLS: "prompts name the tools in their messages alone: the chat template does not "
    "write the tools' schemas, so the model is not told how to call them",
    UNNAMED_TOOLS: "prompts have the names of tools only within other words, and the chat template "
    "does not write the tools: the model cannot know of them",
}
MEASURED = np.dtype([("tokens", np.int64), ("notes", np.int8), ("order", np.uint32)])
"""A measured prompt: its number of tokens (`BAD` for a bad row), the sum of its `NOTES`, and the
hash of its role order (`role_order`; 0 for a bad row)."""
Measurements: TypeAlias = tuple[np.ndarray, list[DataError]]
"""`MEASURED` [rows], where bad rows have `BAD` tokens; and the errors of the bad rows."""
_WORKERS_KEY = "data.filter_overlong_prompts_workers"


@dataclass(frozen=True)
class PromptContext:
    """Settings outside the section `data` that prompts depend on.

    Attributes:
        tools: schemas of the tools that agent loops offer.
        agents: names of the agent loops that offer these tools.
        default_agent: agent loop of rows that name none.
        vocabulary_size: rows of the model's embedding, if the tokenizer has ids that are too large
            for it. None: the embedding has a row for each id.
    """

    tools: tuple[Any, ...] = ()
    agents: frozenset[str] = frozenset()
    default_agent: str = ""
    vocabulary_size: int | None = None

    def tools_of(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """The tools that the agent loop of a row offers."""
        agent = row.get("agent_name") or self.default_agent
        return self.tools if agent in self.agents else ()

    def fingerprint(self) -> str:
        """All attributes as text, which is a part of the key of stored lengths."""
        facts = [self.tools, sorted(self.agents), self.default_agent, self.vocabulary_size]
        return json.dumps(facts, default=repr)


NO_CONTEXT = PromptContext()


@dataclass(frozen=True)
class PromptMeter:
    """Counts the tokens of prompts and checks their rows.

    Attributes:
        encoder: renders prompts.
        processor: counts the tokens of images and videos. None: prompts are text.
        config: the section `data`.
        limit: a number of tokens. A count may be inexact, but is above `limit` if and only if the
            exact count is, which often saves tokenizing. None: counts are exact.
        context: tools and size of the vocabulary.
    """

    encoder: ChatEncoder
    processor: "VisionProcessor | None"
    config: DataConfig
    limit: int | None = None
    context: PromptContext = NO_CONTEXT

    def measure(self, table: RowTable, rows: range) -> Measurements:
        """Measure the prompts of some rows.

        Args:
            table: the rows of a file.
            rows: numbers of rows in the table.

        Returns:
            The measured prompts, and the errors of bad rows.
        """
        prompts = []
        errors = []
        [batch] = table.batches(self._needed_columns(table), len(rows), rows)
        for number, row in enumerate(batch, start=table.first + rows.start):
            try:
                prompt = self._render(row, f"{table.path} row {number}", table.path.parent)
            except DataError as error:
                errors.append(error)
                prompt = _RenderedPrompt(text="", num_media_tokens=BAD, notes=0, order=0)
            prompts.append(prompt)
        # Tokens of images and videos are added below, so the count of the text has to be exact.
        limit = None if self.processor else self.limit
        least, most = self.encoder.counter.bounds([prompt.text for prompt in prompts], limit).T
        # Without a limit both bounds are the exact count. With a limit, both are on the same side
        # of the limit: take the closer one.
        counts = most if limit is None else np.where(least > limit, least, most)

        media_counts = np.array([prompt.num_media_tokens for prompt in prompts], dtype=np.int64)
        measured = np.empty(len(prompts), MEASURED)
        measured["tokens"] = np.where(media_counts == BAD, BAD, counts + media_counts)
        measured["notes"] = [prompt.notes for prompt in prompts]
        measured["order"] = [prompt.order for prompt in prompts]
        return measured, errors

    def _needed_columns(self, table: RowTable) -> list[str]:
        """The columns of a file that `_render` reads, to render prompts or to check them."""
        config = self.config
        names = (
            config.prompt_key,
            config.image_key,
            config.video_key,
            "extra_info",
            "agent_name",
        )
        columns = [name for name in dict.fromkeys(names) if name in table.columns]
        if table.schema is None or "extra_info" not in columns:
            return columns
        # `_render` only checks that `extra_info` is a dictionary. Each value of a struct column is
        # one, so the column need not be read.
        if pa.types.is_struct(table.schema.field("extra_info").type):
            columns.remove("extra_info")
        return columns

    def _render(self, row: dict[str, Any], where: str, folder: Path) -> "_RenderedPrompt":
        """Check a row and render its prompt.

        Args:
            row: values by column.
            where: file and row, for errors.
            folder: folder of the data file.

        Returns:
            The rendered prompt, and the number of tokens that its images and videos add.

        Raises:
            DataError: the row is bad.
        """
        config = self.config
        processor = self.processor
        extra = row.get("extra_info")
        if extra and not isinstance(extra, Mapping):
            raise DataError(
                f"{where}, column 'extra_info'",
                got=shortened(extra),
                expected="a dictionary",
                fix="Correct the row: the column holds further facts about it, by name.",
            )
        messages, media = read_prompt(row, config, is_vision=processor is not None, where=where)
        num_media_tokens = 0
        if processor is not None:
            counts, clips = processor.media_sizes(media, config, folder=folder, where=where)
            counts += [len(processor.video_ids(clip, self.encoder.encode)) for clip in clips]
            # `counts` has the tokens of each image and video. The rendered text already has one
            # token for each.
            num_media_tokens = sum(counts) - len(counts)

        prompt_place = f"{where}, column {config.prompt_key!r}"
        tools = self.context.tools_of(row)
        text = self.encoder.render(messages, where=prompt_place, tools=tools)
        # If the template ignored the tools, the model would be trained to call unknown functions.
        tool_names = [tool["function"]["name"] for tool in tools]
        missing_names = [name for name in tool_names if name not in text]
        if missing_names:
            raise DataError(
                prompt_place,
                got=f"a prompt that does not name the tools {', '.join(missing_names)}",
                expected="one that names the tools of its agent loop",
                fix="Use a chat template that writes tools, or describe them in a system message.",
            )
        # Checked now: an id without a row in the embedding would stop the run at a later step.
        vocabulary_size = self.context.vocabulary_size
        if vocabulary_size is not None:
            (token_ids,) = self.encoder.encode([text])
            require_embedded(token_ids, vocabulary_size, self.encoder.tokenizer, where=prompt_place)

        notes = 0
        if chat_in_json(row[config.prompt_key]):
            notes |= IN_JSON
        if self.encoder.continues(messages):
            notes |= CONTINUED
        if tools:
            notes |= WITH_TOOLS
        # If the messages themselves name every tool, the check above says nothing about the
        # template. Then compare with the text without tools: if it is equal, the template ignores
        # them.
        names_all_tools = tools and all(name in str(messages) for name in tool_names)
        if names_all_tools and text == self.encoder.render(messages, where=prompt_place):
            # Is any name in the text as a word, and not only within a longer word? With `re.ASCII`,
            # letters of other scripts separate words.
            names = "|".join(map(re.escape, tool_names))
            name_as_word = re.search(rf"(?<!\w)(?:{names})(?!\w)", text, re.ASCII)
            notes |= UNWRITTEN_TOOLS if name_as_word else UNNAMED_TOOLS
        # `crc32` gives the same number in all processes, unlike `hash`. 0 marks bad rows, so it
        # becomes 1.
        order = repr(role_order(messages, has_tools=bool(tools)))
        return _RenderedPrompt(text, num_media_tokens, notes, zlib.crc32(order.encode()) or 1)


class _RenderedPrompt(NamedTuple):
    """A rendered prompt.

    Attributes:
        text: the text that the chat template writes; empty for a bad row.
        num_media_tokens: tokens of images and videos, in addition to the one token that the text
            has for each. `BAD`: the row is bad.
        notes: sum of the `NOTES` that hold for the prompt.
        order: hash of the prompt's role order; 0 for a bad row.
    """

    text: str
    num_media_tokens: int
    notes: int
    order: int


def describe_prompts(measured: np.ndarray) -> str:
    """Summarize the measured prompts, for a notice at the start of a run.

    Args:
        measured: `MEASURED` [rows].
    """
    # The order 0 of bad rows does not count.
    num_orders = np.count_nonzero(np.unique(measured["order"]))
    longest = f"the longest has {measured['tokens'].max()} tokens"
    return f"{len(measured)} prompts measured: {longest}; {describe_template_check(num_orders)}"


def prompt_lengths(
    table: RowTable, meter: PromptMeter, *, cache_dir: str | Path, num_workers: int = 1
) -> Measurements:
    """Measure every prompt of a file, or read the result of an earlier run from the cache.

    The key of an entry is a hash of everything that the result depends on: the content of the file,
    the tokenizer, the chat template and its arguments, the columns, the tools, the limit and the
    size of the vocabulary. An entry that cannot be read is reported and written again. Prompts of a
    vision-language model are measured each time, because the path of an image does not identify its
    content; only the headers of images are read.

    Args:
        table: the rows of the file.
        meter: measures the prompts.
        cache_dir: entries lie in `prompt_lengths/` inside it.
        num_workers: processes that measure.

    Returns:
        The measured prompts, and the errors of bad rows.

    Raises:
        DataError: a process has died, or counting has failed.
    """
    # The key of a cache entry could not tell whether the content of an image has changed.
    if meter.processor is not None:
        return _measure_file(table, meter, num_workers)
    keys = (meter.config.prompt_key, meter.config.image_key, meter.config.video_key)
    facts = (
        table.digest,
        len(table),
        meter.encoder.fingerprint(),
        keys,
        meter.limit,
        meter.context.fingerprint(),
        # The meaning of `notes` in an entry: other versions of this package may have other bits.
        tuple(NOTES),
    )
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    entry = Path(cache_dir).expanduser() / "prompt_lengths" / f"{key}.npz"
    if entry.is_file():
        try:
            # The archive has checksums, so a damaged byte raises an error.
            with np.load(entry, allow_pickle=False) as archive:
                measured = archive["lengths"]
            if measured.shape == (len(table),) and measured.dtype == MEASURED:
                # The cache does not hold errors. Bad rows are measured again, to get their errors.
                errors = []
                for number in np.flatnonzero(measured["tokens"] == BAD).tolist():
                    errors += meter.measure(table, range(number, number + 1))[1]
                return measured, errors
            reason = f"{measured.dtype} {measured.shape} for {len(table)} rows"
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            reason = str(error)
        print(
            f"data.cache_dir: {entry} is damaged ({reason}); the prompts are measured again.",
            flush=True,
        )
    measured, errors = _measure_file(table, meter, num_workers)
    # The cache only saves time, so a run goes on if it cannot be written.
    try:
        with written_aside(entry, where="data.cache_dir") as draft, draft.open("wb") as file:
            np.savez(file, lengths=measured)
    except DataError as error:
        print(f"{error} Until then the prompts are measured at each start.", flush=True)
    return measured, errors


def _measure_file(table: RowTable, meter: PromptMeter, num_workers: int) -> Measurements:
    """Measure every prompt of a file, batch by batch, in this process or in several others.

    Args:
        table: the rows of the file.
        meter: measures the prompts.
        num_workers: processes that measure. 1: this process does.

    Returns:
        The measured prompts, and the errors of bad rows.

    Raises:
        DataError: a process has died, or measuring has failed there.
    """
    all_rows = range(len(table))
    # Consecutive ranges of `BATCH_ROWS` row numbers; the last one may be shorter.
    batches = [all_rows[start : start + BATCH_ROWS] for start in all_rows[::BATCH_ROWS]]
    # More processes than batches would have nothing to do.
    num_workers = min(num_workers, len(batches))
    results: dict[int, Measurements] = {}  # by number of the batch

    def progress() -> str:
        return f"{len(results)} of {len(batches)} batches of {BATCH_ROWS} rows are there"

    with waiting(f"the token counts of {table.path}", progress):
        if num_workers > 1:
            _measure_in_processes(table, meter, batches, num_workers, results)
        # Measure here what other processes have not: with one worker, or if they are unusable.
        for number, rows in enumerate(batches):
            if number not in results:
                results[number] = meter.measure(table, rows)
    # Processes finish batches in any order, so the results are put into the order of the rows.
    measured_batches = []
    errors = []
    for number in range(len(batches)):
        measured, batch_errors = results[number]
        measured_batches.append(measured)
        errors += batch_errors
    return np.concatenate(measured_batches), errors


# ---- processes that count -----------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """Answer of a process that has loaded the tokenizer and the rows."""


@dataclass(frozen=True)
class Unusable:
    """Answer of a process that cannot load the tokenizer, or cannot open the rows."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """Answer for a batch in which an error was raised that is not the error of a bad row.

    Attributes:
        reason: class and beginning of the error's text.
        trace: traceback of the error.
    """

    reason: str
    trace: str


def _measure_in_processes(
    table: RowTable,
    meter: PromptMeter,
    batches: list[range],
    num_workers: int,
    results: dict[int, Measurements],
) -> None:
    """Measure batches in other processes.

    If a process cannot load the meter or the rows, print a notice and stop: `results` then lacks
    some or all batches.

    Args:
        table: the rows of a file.
        meter: measures the prompts.
        batches: the rows of each batch.
        num_workers: processes to start.
        results: gets the result of each batch, by the number of the batch.

    Raises:
        DataError: a process has died, or measuring has failed there.
    """
    try:
        # Pickled once for all processes.
        meter_and_table = pickle.dumps((meter, table), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        # A user's tokenizer may raise anything when it is pickled.
        _print_unusable(f"{type(error).__name__}: {error}")
        return
    with ExitStack() as stack:
        programs: dict[Connection, SupervisedProgram] = {}
        for _ in range(num_workers):
            program = SupervisedProgram(__name__)
            stack.callback(program.close)
            programs[program.connection] = program
        # Numbers of the batches that each process has not answered yet, oldest first.
        unanswered: dict[Connection, list[int]] = {connection: [] for connection in programs}
        for connection in programs:
            # If the process has died already, `recv` reports it below.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.send_bytes(meter_and_table)

        # Each answer brings its process the next batch, so faster processes measure more batches.
        next_batches = iter(range(len(batches)))
        while len(results) < len(batches):
            for connection in wait(list(programs)):
                assert isinstance(connection, Connection)
                try:
                    answer = connection.recv()
                except (EOFError, ConnectionResetError):
                    # The process has ended.
                    raise _early_end_error(
                        programs[connection], batches, unanswered[connection]
                    ) from None
                if isinstance(answer, Unusable):
                    _print_unusable(answer.reason)
                    return
                if isinstance(answer, Failed):
                    raise _failed_batch_error(answer, table, batches[unanswered[connection][0]])
                num_new_batches = 1
                if isinstance(answer, Ready):
                    # Two at first, so that a process has a batch to go on with while its answer
                    # travels.
                    num_new_batches = 2
                else:
                    # A process answers batches in the order in which it got them.
                    results[unanswered[connection].pop(0)] = answer
                for number in islice(next_batches, num_new_batches):
                    unanswered[connection].append(number)
                    with suppress(BrokenPipeError, ConnectionResetError):
                        connection.send(batches[number])


def _early_end_error(
    program: SupervisedProgram, batches: list[range], unanswered: list[int]
) -> DataError:
    """Make the error for a process that ended too early, and close its connection.

    Args:
        program: the process.
        batches: the rows of each batch.
        unanswered: numbers of the batches that the process has not answered, oldest first.
    """
    task = "loaded the tokenizer"
    if unanswered:
        rows = batches[unanswered[0]]
        task = f"counted the tokens of rows {rows.start} to {rows.stop - 1}"
    # `close` returns how the process ended, such as "signal SIGKILL".
    return DataError(
        _WORKERS_KEY,
        got=f"a process that ended with {program.close(patience_s=1.0)} while it {task}",
        expected="processes that count to the end",
        fix=f"Its output above may say why. With {_WORKERS_KEY}=1 this process counts, in less memory.",
    )


def _failed_batch_error(failure: Failed, table: RowTable, rows: range) -> DataError:
    """Make the error for a batch whose measuring failed in another process."""
    first = table.first + rows.start
    last = table.first + rows.stop - 1
    error = DataError(
        f"{table.path} rows {first} to {last}",
        got=failure.reason,
        expected="prompts whose tokens can be counted",
        fix="Correct the tokenizer or its chat template, where it was raised; --traceback shows the"
        " line.",
    )
    error.add_note(f"In the process that counted:\n{failure.trace}")
    return error


_printed_reasons: set[str] = set()


def _print_unusable(reason: str) -> None:
    """Print that other processes cannot be used. Each reason is printed once, not for each file."""
    if reason not in _printed_reasons:
        _printed_reasons.add(reason)
        print(
            f"{_WORKERS_KEY}: prompts are counted in this process alone,"
            f" because others cannot start ({reason}).",
            flush=True,
        )


def main(connection_fd: int) -> None:
    """Measure the batches that the driver sends, until it closes the pipe.

    Args:
        connection_fd: file descriptor of this process's end of the pipe.
    """
    # Several such processes share the cores, so threads of the tokenizer would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    connection = Connection(connection_fd)
    # These errors mean that the driver has closed the pipe: it has all counts, or has ended.
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _answer_requests(connection)


def _answer_requests(connection: Connection) -> None:
    """Answer the driver: first whether this process is usable, then each batch.

    Raises:
        EOFError: the driver has closed the pipe.
    """
    meter_and_table = connection.recv_bytes()
    try:
        meter, table = pickle.loads(meter_and_table)
    except Exception as error:
        # A class may not be importable here, or may raise anything when it is restored.
        connection.send(Unusable(f"{type(error).__name__}: {error}"))
        return
    connection.send(Ready())
    while True:
        rows = connection.recv()
        try:
            answer: Measurements | Failed = meter.measure(table, rows)
        except Exception as error:
            answer = Failed(f"{type(error).__name__}: {str(error)[:200]}", traceback.format_exc())
        connection.send(answer)
