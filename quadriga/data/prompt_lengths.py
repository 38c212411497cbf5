# SPDX-License-Identifier: Apache-2.0
"""How many tokens the prompts of a file have: counted once, in several processes if asked for, and kept on disk.

    driver                                process that counts
      | -- what counts, and the table --> |  loads the tokenizer, opens the file again
      | <------- Ready or Unusable ------ |
      | -- rows of a batch (two ahead) -> |
      | <------- Counted or Failed ------ |

driver    waits for the next answer of any process; unblocked by the answer, or by the end of a process.
process   waits for the rows of a batch; unblocked by them, or by the end of the driver.

A process is a program of its own (`quadriga.programs.SupervisedProgram`), not a fork: a fork inherits locks and
signal handlers of the driver's threads, among them Ray's. It is not started by `multiprocessing` either, which would
run the user's script again. It does not import torch, unless it counts the tokens of images.
"""

import hashlib
import json
import os
import pickle
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
    require_embedded,
    role_order,
    shortened,
    told_orders,
)
from quadriga.errors import DataError
from quadriga.observe.watchdog import waiting
from quadriga.programs import SupervisedProgram

if TYPE_CHECKING:
    from quadriga.data.vision import VisionProcessor

BATCH_ROWS = 256
BAD = -1
"""Where the tokens of a bad row would be counted."""
IN_JSON = 1
CONTINUED = 2
WITH_TOOLS = 4
NOTES = {
    IN_JSON: "prompts are texts in JSON, and read as the messages in them",
    CONTINUED: "prompts end with the assistant, whose turn is continued",
    WITH_TOOLS: "prompts are measured with the tools that their agent loop offers",
}
MEASURED = np.dtype([("tokens", np.int64), ("notes", np.int8), ("order", np.uint32)])
"""What is kept of a prompt: its number of tokens, the sum of its `NOTES`, a hash of its role order.

The hash is 0 for a bad row."""
Counts: TypeAlias = tuple[np.ndarray, list[DataError]]
"""Some rows as `MEASURED` [rows], with `BAD` tokens where a row is bad; and what is wrong with the bad ones."""
_WORKERS = "data.filter_overlong_prompts_workers"


@dataclass(frozen=True)
class PromptContext:
    """What decides about prompts beside the section `data`: the rollout's tools, the model's size.

    Attributes:
        tools: schemas that agent loops offer.
        agents: names of the agent loops that offer them.
        default_agent: agent loop of rows that name none.
        vocabulary_size: rows of the model's embedding, where the tokenizer has ids beyond them.
            None: each id has a row.
    """

    tools: tuple[Any, ...] = ()
    agents: frozenset[str] = frozenset()
    default_agent: str = ""
    vocabulary_size: int | None = None

    def tools_of(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """The tools that the agent loop of a row offers."""
        return self.tools if (row.get("agent_name") or self.default_agent) in self.agents else ()

    def fingerprint(self) -> str:
        """Changes whenever the length of some prompt, or what is refused, could."""
        facts = [self.tools, sorted(self.agents), self.default_agent, self.vocabulary_size]
        return json.dumps(facts, default=repr)


NO_CONTEXT = PromptContext()


@dataclass(frozen=True)
class PromptMeter:
    """Counts the tokens of prompts, those of images and videos included where there is a processor, and checks rows.

    With a `limit` a number only has to tell on which side of it the prompt is: where that takes no tokenizer it is a
    bound."""

    encoder: ChatEncoder
    processor: "VisionProcessor | None"
    config: DataConfig
    limit: int | None = None
    context: PromptContext = NO_CONTEXT

    def measure(self, table: RowTable, rows: range) -> Counts:
        """Measure the prompt of each of these rows."""
        config = self.config
        keys = (config.prompt_key, config.image_key, config.video_key)
        names = dict.fromkeys((*keys, "extra_info", "agent_name"))
        columns, schema = [name for name in names if name in table.columns], table.schema
        if (
            schema is not None
            and "extra_info" in columns
            and pa.types.is_struct(schema.field("extra_info").type)
        ):
            columns.remove("extra_info")  # what is checked
        prompts: list[_Rendered] = []
        errors: list[DataError] = []
        for number, row in enumerate(
            next(table.batches(columns, len(rows), rows)), start=table.first + rows.start
        ):
            try:
                prompt = self._rendered(row, f"{table.path} row {number}", table.path.parent)
            except DataError as error:
                errors.append(error)
                prompt = _Rendered("", BAD, 0, 0)
            prompts.append(prompt)
        more = np.array([prompt.num_further_tokens for prompt in prompts], dtype=np.int64)
        limit = None if self.processor else self.limit
        least, most = self.encoder.counter.bounds([prompt.text for prompt in prompts], limit).T
        counts = most if limit is None else np.where(least > limit, least, most)
        measured = np.empty(len(prompts), MEASURED)
        measured["tokens"] = np.where(more == BAD, BAD, counts + more)
        measured["notes"] = [prompt.notes for prompt in prompts]
        measured["order"] = [prompt.order for prompt in prompts]
        return measured, errors

    def _rendered(self, row: dict[str, Any], where: str, folder: Path) -> "_Rendered":
        """Check a row and render its prompt."""
        if (extra := row.get("extra_info")) and not isinstance(extra, Mapping):
            got, fix = (
                shortened(extra),
                "Correct the row: other facts about it stand there, by name.",
            )
            raise DataError(
                f"{where}, column 'extra_info'", got=got, expected="a dictionary", fix=fix
            )
        config, processor, context = self.config, self.processor, self.context
        num_further_tokens = 0
        messages, media = read_prompt(row, config, is_vision=processor is not None, where=where)
        if processor is not None:
            counts, clips = processor.media_sizes(media, config, folder=folder, where=where)
            counts += [len(processor.video_ids(clip, self.encoder.encode)) for clip in clips]
            num_further_tokens = sum(counts) - len(counts)
        tools = context.tools_of(row)
        options: dict[str, Any] = {"tools": tools} if tools else {}
        at_prompt = f"{where}, column {config.prompt_key!r}"
        text = self.encoder.render(messages, where=at_prompt, **options)
        if missing := [name for tool in tools if (name := tool["function"]["name"]) not in text]:
            got = f"a prompt that does not name the tools {', '.join(missing)}"
            fix = "Take a chat template that writes tools, or describe them in the row's system message."
            raise DataError(
                at_prompt, got=got, expected="one that names the tools of its agent loop", fix=fix
            )
        if context.vocabulary_size is not None:
            (token_ids,) = self.encoder.encode([text])
            require_embedded(
                token_ids, context.vocabulary_size, self.encoder.tokenizer, where=at_prompt
            )
        notes = IN_JSON * bool(chat_in_json(row[config.prompt_key]))
        notes += CONTINUED * self.encoder.continues(messages)
        notes += WITH_TOOLS * bool(tools)
        order = repr(role_order(messages, has_tools=bool(tools)))
        return _Rendered(text, num_further_tokens, notes, zlib.crc32(order.encode()) or 1)


class _Rendered(NamedTuple):
    """The text of a prompt, and what is known of it besides.

    Attributes:
        text: as the chat template writes it.
        num_further_tokens: tokens of its images and videos beyond the one of each that is in the
            text. `BAD`: the row is bad.
        notes: the sum of its `NOTES`.
        order: the hash of its role order.
    """

    text: str
    num_further_tokens: int
    notes: int
    order: int


def told_prompts(measured: np.ndarray) -> str:
    """What was looked at in prompts, for the line that a start prints.

    `measured`: `MEASURED` [rows].
    """
    orders = np.unique(measured["order"])
    return f"{len(measured)} prompts measured; {told_orders(np.count_nonzero(orders))}"


def prompt_lengths(
    table: RowTable, meter: PromptMeter, *, cache_dir: str | Path, num_workers: int = 1
) -> Counts:
    """Measure every prompt in `table` once; the result is cached on disk.

    The key is made of the content of the file, the tokenizer, the chat template and its arguments, the tools, the
    limit and the size of a smaller embedding; entries lie in `prompt_lengths/` inside `cache_dir`. One that cannot be
    read is reported as damaged and measured again. Prompts of a vision-language model are measured each time: a path
    says nothing of the file that lies there. Of an image only the header is read. `num_workers` processes measure."""
    if meter.processor is not None:
        return _measure(table, meter, num_workers)
    keys = (meter.config.prompt_key, meter.config.image_key, meter.config.video_key)
    facts = (
        table.digest,
        len(table),
        meter.encoder.fingerprint(),
        keys,
        meter.limit,
        meter.context.fingerprint(),
    )
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    entry = Path(cache_dir).expanduser() / "prompt_lengths" / f"{key}.npz"
    if entry.is_file():
        try:
            # The archive's own checksum finds a damaged byte anywhere in it.
            with np.load(entry, allow_pickle=False) as archive:
                lengths = archive["lengths"]
            if lengths.shape == (len(table),) and lengths.dtype == MEASURED:
                bad = np.flatnonzero(lengths["tokens"] == BAD).tolist()
                return lengths, [
                    error for row in bad for error in meter.measure(table, range(row, row + 1))[1]
                ]
            reason = f"{lengths.dtype} {lengths.shape} for {len(table)} rows"
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            reason = str(error)
        print(
            f"data.cache_dir: {entry} is damaged ({reason}); the prompts are measured again.",
            flush=True,
        )
    lengths, errors = _measure(table, meter, num_workers)
    try:
        with written_aside(entry, where="data.cache_dir") as draft, draft.open("wb") as file:
            np.savez(file, lengths=lengths)
    except DataError as error:
        print(f"{error} Until then the prompts are measured at each start.", flush=True)
    return lengths, errors


def _measure(table: RowTable, meter: PromptMeter, num_workers: int) -> Counts:
    batches = [
        range(start, min(start + BATCH_ROWS, len(table)))
        for start in range(0, len(table), BATCH_ROWS)
    ]
    num_workers = min(num_workers, len(batches))
    counted: dict[int, Counts] = {}  # by number of the batch

    def told() -> str:
        return f"{len(counted)} of {len(batches)} batches of {BATCH_ROWS} rows are there"

    with waiting(f"the token counts of {table.path}", told):
        if num_workers > 1:
            _measure_elsewhere(table, meter, batches, num_workers, counted)
        # All of them with one worker, and what other processes could not be given.
        for number, rows in enumerate(batches):
            if number not in counted:
                counted[number] = meter.measure(table, rows)
    lengths = [counted[number][0] for number in range(len(batches))]
    errors = [error for number in range(len(batches)) for error in counted[number][1]]
    return np.concatenate(lengths), errors


# ---- processes that count -----------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """A process has the tokenizer and the rows."""


@dataclass(frozen=True)
class Unusable:
    """A process cannot load the tokenizer, or open the rows."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """Counting has raised an error that is not a bad row's."""

    reason: str
    trace: str


def _measure_elsewhere(
    table: RowTable,
    meter: PromptMeter,
    batches: list[range],
    num_workers: int,
    counted: dict[int, Counts],
) -> None:
    """Count in other processes, and put the results into `counted`. Nothing, and a notice, where the tokenizer or
    the rows cannot be sent.

    Raises DataError: a process has died, or counting has failed there."""
    try:
        work = pickle.dumps((meter, table), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        # Classes decide themselves what they raise when they are pickled.
        _tell_unusable(f"{type(error).__name__}: {error}")
        return
    with ExitStack() as stack:
        programs: dict[Connection, SupervisedProgram] = {}
        for _ in range(num_workers):
            program = SupervisedProgram(__name__)
            stack.callback(program.close)
            programs[program.connection] = program
        sent: dict[Connection, list[int]] = {connection: [] for connection in programs}
        for connection in programs:
            with suppress(
                BrokenPipeError, ConnectionResetError
            ):  # it has died, which its end of the pipe tells below
                connection.send_bytes(work)
        numbers = iter(range(len(batches)))
        while len(counted) < len(batches):
            for connection in wait(list(programs)):
                assert isinstance(connection, Connection)
                try:
                    answer = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise _died(programs[connection], batches, sent[connection]) from None
                if isinstance(answer, Unusable):
                    _tell_unusable(answer.reason)
                    return
                num_batches = 1
                if isinstance(answer, Failed):
                    raise _failed(answer, table, batches[sent[connection][0]])
                if isinstance(answer, Ready):
                    num_batches = 2  # the second lies ready while the first is counted
                else:
                    counted[sent[connection].pop(0)] = answer
                for number in islice(numbers, num_batches):
                    sent[connection].append(number)
                    with suppress(BrokenPipeError, ConnectionResetError):
                        connection.send(batches[number])


def _died(program: SupervisedProgram, batches: list[range], sent: list[int]) -> DataError:
    task = "loaded the tokenizer"
    if sent:
        rows = batches[sent[0]]
        task = f"counted the tokens of rows {rows.start} to {rows.stop - 1}"
    got = f"a process that ended with {program.close(patience_s=1.0)} while it {task}"
    fix = f"Its output above may say why. With {_WORKERS}=1 this process counts, and needs less memory in all."
    return DataError(_WORKERS, got=got, expected="processes that count to the end", fix=fix)


def _failed(failure: Failed, table: RowTable, rows: range) -> DataError:
    where = f"{table.path} rows {table.first + rows.start} to {table.first + rows.stop - 1}"
    fix = "The tokenizer or its chat template raised it; --traceback shows where."
    error = DataError(
        where, got=failure.reason, expected="prompts whose tokens can be counted", fix=fix
    )
    error.add_note(f"In the process that counted:\n{failure.trace}")
    return error


_told_reasons: set[str] = set()


def _tell_unusable(reason: str) -> None:
    if reason not in _told_reasons:
        _told_reasons.add(reason)
        print(
            f"{_WORKERS}: prompts are counted in this process alone: others cannot load {reason}.",
            flush=True,
        )


def main(connection_fd: int) -> None:
    """Count what the driver asks for, until it closes the pipe."""
    # Each process has its share of the cores; the tokenizer's own threads would only be in the way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    connection = Connection(connection_fd)
    with suppress(
        EOFError, BrokenPipeError, ConnectionResetError
    ):  # the driver has what it wanted, or is gone
        _serve(connection)


def _serve(connection: Connection) -> None:
    work = connection.recv_bytes()
    try:
        meter, table = pickle.loads(work)
    except Exception as error:
        # Classes that this process cannot import, and whatever theirs raise.
        connection.send(Unusable(f"{type(error).__name__}: {error}"))
        return
    connection.send(Ready())
    while True:
        rows = connection.recv()
        try:
            answer: Counts | Failed = meter.measure(table, rows)
        except Exception as error:
            answer = Failed(f"{type(error).__name__}: {str(error)[:200]}", traceback.format_exc())
        connection.send(answer)
