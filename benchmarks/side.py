# SPDX-License-Identifier: Apache-2.0
"""How a side of the benchmark talks with the driver: lines of JSON over its standard input and output.

    driver -> side          side -> driver
    (starts the process)    {"event": "ready", "package": "trl 1.16.0", "setup_s": 9.1, "threads": 2, ...}
    {"do": "step"}          {"event": "step", "gen_s": 8.0, "train_s": 21.3, "total_s": 29.9, "cpu_s": 57.0,
                             "response_tokens": 2048, "prompt_tokens": 6800, "reward": 0.13}
    {"do": "stop"}          (ends with status 0)

Between a line and the next order the side waits in a read and uses no processor. `gen_s` is the time inside
generation, `train_s` everything from the end of scoring to the end of the optimizer step, `total_s` the whole step
from the order to the answer; what is left of it is tokenizing, decoding and reward. `prompt_tokens` counts every
sequence's prompt once, computed or not. What libraries print to standard output is sent to standard
error; the driver passes over lines that are not JSON.
"""

import json
import os
import sys
import time
from argparse import ArgumentParser
from typing import Any

from workload import NUM_NEW_TOKENS, SCORES

DTYPES = ("float32", "bfloat16")


class Driver:
    """The other end of the pipe. From its making on, only its own lines reach standard output."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def send(self, event: str, **fields: Any) -> None:
        """Answer with one line."""
        print(json.dumps({"event": event, **fields}), file=self._out, flush=True)

    def wants_step(self) -> bool:
        """Wait for the next order; False when the driver says stop or is gone."""
        line = sys.stdin.readline()
        return bool(line) and json.loads(line)["do"] == "step"


class Stopwatch:
    """Wall and processor seconds since it was made; the processor's are those of all threads of this process."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """`total_s` and `cpu_s`."""
        return {
            "total_s": time.perf_counter() - self._wall,
            "cpu_s": time.process_time() - self._cpu,
        }


def arguments(description: str) -> ArgumentParser:
    """The arguments that every side takes."""
    parser = ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--dtype", choices=DTYPES, required=True, help="of the computation")
    parser.add_argument("--reward", choices=sorted(SCORES), required=True)
    parser.add_argument(
        "--steps", type=int, required=True, help="how many steps will be asked for at most"
    )
    parser.add_argument("--new-tokens", type=int, default=NUM_NEW_TOKENS, help="of each completion")
    parser.add_argument(
        "--scratch", required=True, help="an empty folder for whatever must be written"
    )
    return parser
