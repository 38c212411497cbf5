# SPDX-License-Identifier: Apache-2.0
"""The number of tokens of each prompt in a file, measured once and cached on disk.

The cache holds lengths, not the verdict, so that another `data.max_prompt_length` needs no new measurement. Its key is
made of the content of the file, the tokenizer, the chat template and its arguments. An entry that cannot be read is
reported as damaged and measured again. Prompts of a vision-language model are measured each time: a path says nothing
of the file that lies there. Of an image only the header is read.
"""

import hashlib
import multiprocessing
import os
import sys
import zipfile
import zlib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from quadriga.data.files import RowTable, written_aside
from quadriga.data.pictures import as_list, picture_size
from quadriga.data.tokenizing import ChatEncoder, as_messages
from quadriga.data.vision import VisionProcessor, refuse_images, with_parts
from quadriga.errors import DataError
from quadriga.observe.watchdog import waiting

BATCH_ROWS = 256


@dataclass(frozen=True)
class PromptMeter:
    """Counts the tokens of prompts, those of images included where there is a processor."""

    encoder: ChatEncoder
    processor: VisionProcessor | None = None
    prompt_key: str = "prompt"
    image_key: str | None = None

    def measure(self, path: str, start: int, prompts: list[Any], images: list[Any]) -> list[int]:
        """Tokens of each prompt; the first is row `start` of the file."""
        texts, beyond = [], []
        for row, (prompt, values) in enumerate(zip(prompts, images, strict=True), start=start):
            where = f"{path} row {row}"
            at_prompt = f"{where}, column {self.prompt_key!r}"
            messages, num_beyond = as_messages(prompt, where=at_prompt), 0
            if self.processor is not None:
                messages, given = with_parts(messages, as_list(values), where=where)
                for number, image in enumerate(given):  # each stands as one token in the rendered text
                    size = picture_size(image, folder=Path(path).parent, where=f"{where}, image {number}")
                    num_beyond += self.processor.num_tokens(*size, where=where) - 1
            else:
                refuse_images(messages, [], where=where)
            texts.append(self.encoder.render(messages, where=at_prompt))
            beyond.append(num_beyond)
        return [len(ids) + more for ids, more in zip(self.encoder.encode(texts), beyond, strict=True)]


def prompt_lengths(table: RowTable, meter: PromptMeter, *, cache_dir: str | Path, num_workers: int = 1) -> np.ndarray:
    """The number of tokens of every prompt in `table`, int64 [rows], from the cache if it is there.

    Entries lie in `prompt_lengths/` inside `cache_dir`; `num_workers` processes measure.
    """
    if meter.processor is not None:
        return _measure(table, meter, num_workers, meter.image_key if meter.image_key in table.columns else None)
    facts = (table.digest, meter.encoder.fingerprint(), meter.prompt_key)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    entry = Path(cache_dir).expanduser() / "prompt_lengths" / f"{key}.npz"
    if entry.is_file():
        try:
            # The archive's own checksum finds a damaged byte anywhere in it.
            with np.load(entry, allow_pickle=False) as archive:
                lengths = archive["lengths"]
            if lengths.shape == (len(table),) and lengths.dtype == np.int64:
                return lengths
            reason = f"{lengths.dtype} {lengths.shape} for {len(table)} rows"
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            reason = str(error)
        print(f"data.cache_dir: {entry} is damaged ({reason}); the prompts are measured again.", flush=True)
    lengths = _measure(table, meter, num_workers, None)
    try:
        with written_aside(entry, where="data.cache_dir") as draft, draft.open("wb") as file:
            np.savez(file, lengths=lengths)
    except DataError as error:
        print(f"{error} Until then the prompts are measured at each start.", flush=True)
    return lengths


def _measure(table: RowTable, meter: PromptMeter, num_workers: int, image_key: str | None) -> np.ndarray:
    starts = range(0, len(table), BATCH_ROWS)
    prompts = table.column_batches(meter.prompt_key, BATCH_ROWS)
    empty = ([None] * min(BATCH_ROWS, len(table) - start) for start in starts)
    images = empty if image_key is None else table.column_batches(image_key, BATCH_ROWS)
    jobs = (repeat(str(table.path), len(starts)), starts, prompts, images)
    num_workers = min(num_workers, len(starts))
    parts: list[list[int]] = []
    with waiting(f"the token counts of {table.path}", lambda: f"{len(parts)} of {len(starts)} batches are there"):
        if num_workers == 1:
            parts.extend(map(meter.measure, *jobs))
        else:
            # A forked process has the tokenizer at once; elsewhere than on Linux forking is not safe.
            context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
            with ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(meter,)) as pool:
                parts.extend(pool.map(_measure_in_worker, *jobs))
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


# The meter of a worker process. It is handed over once, at the start: with each batch it would cost more than that.
_meter: PromptMeter | None = None


def _start_worker(meter: PromptMeter) -> None:
    global _meter
    _meter = meter
    # Each process has its share of the cores; the tokenizer's own threads would only be in the way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _measure_in_worker(path: str, start: int, prompts: list[Any], images: list[Any]) -> list[int]:
    assert _meter is not None
    return _meter.measure(path, start, prompts, images)
