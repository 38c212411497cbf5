# SPDX-License-Identifier: Apache-2.0
"""How many tokens each prompt of a file has, measured once and remembered.

What is kept is the lengths, not the verdict, so that another `data.max_prompt_length` needs no new measurement. The
key is made of the content of the file, the tokenizer, the chat template and its arguments. An entry that cannot be read
is said to be damaged, and measured again. Prompts with images are measured each time: a path says nothing of the file
that lies there. Of an image only the head is read.
"""

import hashlib
import multiprocessing
import os
import sys
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quadriga.data.pictures import as_list, picture_size
from quadriga.data.storage import written_aside
from quadriga.data.tables import RowTable
from quadriga.data.tokenizing import ChatEncoder, as_messages
from quadriga.data.vision import VisionProcessor, with_parts
from quadriga.observe.watchdog import waiting

BATCH_ROWS = 256


@dataclass(frozen=True)
class PromptMeter:
    """Counts the tokens of prompts.

    Attributes:
        encoder: renders and tokenizes.
        processor: of a model that sees; None: prompts are text.
        prompt_key, image_key: columns with the prompts and with their images.
    """

    encoder: ChatEncoder
    processor: VisionProcessor | None = None
    prompt_key: str = "prompt"
    image_key: str | None = None

    def image_column(self, table: RowTable) -> str | None:
        """The column of images that counts, if the file has one."""
        return self.image_key if self.processor is not None and self.image_key in table.columns else None

    def measure(self, path: str, start: int, prompts: list[Any], images: list[Any]) -> list[int]:
        """Tokens of each prompt; the first is row `start` of the file."""
        texts, extra = [], []
        for row, (prompt, values) in enumerate(zip(prompts, images, strict=True), start=start):
            where = f"{path} row {row}"
            messages, given = as_messages(prompt, where=where), as_list(values)
            if self.processor is not None:
                messages = with_parts(messages, len(given), where=where)
            texts.append(self.encoder.render(messages, where=where))
            extra.append(sum(self._beyond_one(value, Path(path).parent, where) for value in given))
        return [len(ids) + more for ids, more in zip(self.encoder.encode(texts), extra, strict=True)]

    def _beyond_one(self, image: Any, folder: Path, where: str) -> int:
        assert self.processor is not None
        return self.processor.num_tokens(*picture_size(image, folder=folder, where=where), where=where) - 1


def prompt_lengths(table: RowTable, meter: PromptMeter, *, cache_dir: str | Path, num_workers: int = 1) -> np.ndarray:
    """The number of tokens of every prompt in `table`, from the cache if it is there.

    Args:
        table: the file.
        meter: counts.
        cache_dir: entries lie in `prompt_lengths/` inside it.
        num_workers: processes that measure.

    Returns:
        [len(table)] int64.
    """
    if meter.image_column(table) is not None:
        return _measure(table, meter, num_workers)
    facts = (table.digest, meter.encoder.fingerprint(), meter.prompt_key)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    entry = Path(cache_dir).expanduser() / "prompt_lengths" / f"{key}.npz"
    lengths = _read(entry, len(table))
    if lengths is None:
        lengths = _measure(table, meter, num_workers)
        with written_aside(entry, where="data.cache_dir") as draft, draft.open("wb") as file:
            np.savez(file, lengths=lengths)
    return lengths


def _read(entry: Path, num_rows: int) -> np.ndarray | None:
    if not entry.is_file():
        return None
    try:
        # The archive's own checksum finds a damaged byte anywhere in it.
        with np.load(entry, allow_pickle=False) as archive:
            lengths = archive["lengths"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        return _distrust(entry, str(error))
    if lengths.shape != (num_rows,) or lengths.dtype != np.int64:
        return _distrust(entry, f"{lengths.dtype} {lengths.shape} for {num_rows} rows")
    return lengths


def _distrust(entry: Path, reason: str) -> None:
    print(f"data.cache_dir: {entry} is damaged ({reason}); the prompts are measured again.", flush=True)


def _measure(table: RowTable, meter: PromptMeter, num_workers: int) -> np.ndarray:
    jobs = _jobs(table, meter)
    num_jobs = -(-len(table) // BATCH_ROWS)
    num_workers = min(num_workers, num_jobs)
    parts: list[list[int]] = []
    with waiting(f"the token counts of {table.path}", lambda: f"{len(parts)} of {num_jobs} batches are there"):
        if num_workers == 1:
            parts.extend(meter.measure(*job) for job in jobs)
        else:
            # A forked process has the tokenizer at once; elsewhere than on Linux forking is not safe.
            context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
            with ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(meter,)) as pool:
                parts.extend(pool.map(_measure_here, *zip(*jobs, strict=True)))
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


def _jobs(table: RowTable, meter: PromptMeter) -> Iterator[tuple[str, int, list[Any], list[Any]]]:
    column = meter.image_column(table)
    images = None if column is None else table.column_batches(column, BATCH_ROWS)
    for number, prompts in enumerate(table.column_batches(meter.prompt_key, BATCH_ROWS)):
        own = [None] * len(prompts) if images is None else next(images)
        yield str(table.path), number * BATCH_ROWS, prompts, own


# The meter of a worker process. It is handed over once, at the start: with each batch it would cost more than that.
_meter: PromptMeter | None = None


def _start_worker(meter: PromptMeter) -> None:
    global _meter
    _meter = meter
    # Each process has its share of the cores; the tokenizer's own threads would only be in the way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _measure_here(path: str, start: int, prompts: list[Any], images: list[Any]) -> list[int]:
    assert _meter is not None
    return _meter.measure(path, start, prompts, images)
