# SPDX-License-Identifier: Apache-2.0
"""What a process records, such that it can stand beside what others record.

What it does not prove: snapshots of a GPU's memory and ranges for Nsight Systems, which take a CUDA device.
"""

import json
import threading
import time
import zlib

import pytest
import torch

from quadriga.errors import ConfigError
from quadriga.observe.profiler import Recording, check_tool
from quadriga.observe.timing import PhaseTimer


def events_of(part: bytes) -> list[dict]:
    return json.loads(f"[{zlib.decompress(part).decode()}]")


def test_operators_of_all_threads_and_the_phases_around_them() -> None:
    before = time.time_ns()
    recording = Recording("torch", "actor[1]", 7, before)
    assert Recording.current is recording
    thread = threading.Thread(target=torch.mm, args=(torch.ones(8, 8), torch.ones(8, 8)))
    with PhaseTimer().phase("update"):
        torch.ones(4, 4).cumsum(0)
        thread.start()
        thread.join()
    events = events_of(recording.finish())
    assert Recording.current is None
    named = {event["name"]: event for event in events}
    assert {"aten::cumsum", "aten::mm", "update"} <= named.keys()
    update, inside = named["update"], named["aten::cumsum"]
    # Microseconds since the origin; the thread has a row of its own.
    assert (
        0
        <= update["ts"]
        <= inside["ts"]
        <= update["ts"] + update["dur"]
        <= (time.time_ns() - before) / 1000
    )
    assert named["aten::mm"]["tid"] != inside["tid"]
    assert {event["pid"] for event in events} == {7000}
    assert named["process_name"]["args"] == {"name": "actor[1]"}


def test_arrows_between_operators_stay_in_their_process() -> None:
    ids = []
    for number in (1, 2):
        recording = Recording("torch", "actor", number, time.time_ns())
        torch.ones(2, requires_grad=True).exp().sum().backward()
        ids.append({event["id"] for event in events_of(recording.finish()) if "id" in event})
    assert ids[0] and ids[1] and not ids[0] & ids[1]


def test_nothing_is_marked_without_a_recording() -> None:
    with (
        PhaseTimer().phase("update"),
        torch.profiler.profile() as profile,
        PhaseTimer().phase("inner"),
    ):
        torch.ones(1)
    assert "inner" not in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("tool", ["torch_memory", "nsys"])
def test_what_needs_cuda_is_refused_without_it(tool: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"global_profiler\.tool: got {tool} in a process on cpu, expected a CUDA",
    ):
        check_tool(tool, torch.device("cpu"))
    check_tool(tool, torch.device("cuda"))
    check_tool("torch", torch.device("cpu"))
