# SPDX-License-Identifier: Apache-2.0
"""How many tokens each prompt of a file has, measured once and remembered.

What is kept is the lengths, not the verdict, so that another `data.max_prompt_length` needs no new measurement. The
key is made of the content of the file, the tokenizer, the chat template and its arguments. An entry that cannot be read
is said to be damaged, and measured again.
"""

import hashlib
import multiprocessing
import os
import sys
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from quadriga.data.storage import written_aside
from quadriga.data.tables import RowTable
from quadriga.data.tokenizing import ChatEncoder, as_messages
from quadriga.observe.watchdog import waiting

BATCH_ROWS = 256


def prompt_lengths(
    table: RowTable, encoder: ChatEncoder, *, prompt_key: str, cache_dir: str | Path, num_workers: int = 1
) -> np.ndarray:
    """The number of tokens of every prompt in `table`, from the cache if it is there.

    Args:
        table: the file.
        encoder: renders and tokenizes.
        prompt_key: column with the prompts.
        cache_dir: entries lie in `prompt_lengths/` inside it.
        num_workers: processes that measure.

    Returns:
        [len(table)] int64.
    """
    facts = (table.digest, encoder.fingerprint(), prompt_key)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    entry = Path(cache_dir).expanduser() / "prompt_lengths" / f"{key}.npz"
    lengths = _read(entry, len(table))
    if lengths is None:
        lengths = _measure(table, encoder, prompt_key, num_workers)
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


def _measure(table: RowTable, encoder: ChatEncoder, prompt_key: str, num_workers: int) -> np.ndarray:
    jobs = _jobs(table, prompt_key)
    num_jobs = -(-len(table) // BATCH_ROWS)
    num_workers = min(num_workers, num_jobs)
    parts: list[list[int]] = []
    with waiting(f"the token counts of {table.path}", lambda: f"{len(parts)} of {num_jobs} batches are there"):
        if num_workers == 1:
            parts.extend(_measure_batch(encoder, *job) for job in jobs)
        else:
            # A forked process has the tokenizer at once; elsewhere than on Linux forking is not safe.
            context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
            with ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(encoder,)) as pool:
                parts.extend(pool.map(_measure_here, *zip(*jobs, strict=True)))
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


def _jobs(table: RowTable, prompt_key: str) -> Iterator[tuple[str, int, list[object]]]:
    for number, prompts in enumerate(table.column_batches(prompt_key, BATCH_ROWS)):
        yield str(table.path), number * BATCH_ROWS, prompts


def _measure_batch(encoder: ChatEncoder, path: str, start: int, prompts: list[object]) -> list[int]:
    texts = []
    for row, prompt in enumerate(prompts, start=start):
        where = f"{path} row {row}"
        texts.append(encoder.render(as_messages(prompt, where=where), where=where))
    return [len(ids) for ids in encoder.encode(texts)]


# The encoder of a worker process. It is handed over once, at the start: with each batch it would cost more than that.
_encoder: ChatEncoder | None = None


def _start_worker(encoder: ChatEncoder) -> None:
    global _encoder
    _encoder = encoder
    # Each process has its share of the cores; the tokenizer's own threads would only be in the way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _measure_here(path: str, start: int, prompts: list[object]) -> list[int]:
    assert _encoder is not None
    return _measure_batch(_encoder, path, start, prompts)
