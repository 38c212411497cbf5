# SPDX-License-Identifier: Apache-2.0
"""Calls wait for engines in the order in which they came."""

import asyncio
import threading
from collections.abc import Collection, Sequence

from quadriga.rollout.call_queue import QueueReply, ServedCall
from quadriga.rollout.interface import Completion, SamplingParams
from quadriga.serve.engines import Engines

NUM_CALLS = 5


def test_calls_that_an_engine_gives_back_keep_their_order() -> None:
    received: list[list[int]] = []
    all_wait = threading.Event()

    def exchange(calls: Sequence[ServedCall], cancelled: Collection[int]) -> QueueReply:
        """Open the queue once all calls wait. Give the first ones back, and complete the others."""
        numbers = [call.number for call in calls]
        if numbers:
            received.append(numbers)
        outcome = None if len(received) == 1 else Completion([1], [0.0], "stop", 0)
        return QueueReply(all_wait.is_set(), [(number, outcome) for number in numbers])

    async def call_all(engines: Engines) -> None:
        calls = [
            asyncio.create_task(engines.generate([number], SamplingParams(1)))
            for number in range(NUM_CALLS)
        ]
        await asyncio.sleep(0)
        all_wait.set()
        await asyncio.gather(*calls)

    engines = Engines([exchange])
    try:
        asyncio.run(call_all(engines))
    finally:
        engines.close()
    assert received == [list(range(NUM_CALLS))] * 2
