# SPDX-License-Identifier: Apache-2.0
"""The process that SGLang's engine lives in.

SGLang takes its process for its own: it handles signals, kills the whole process when a part of it fails, and at its
end every child that the process has. So it gets one to itself, which is told what to do over a connection.

    (number, method, arguments) ──> a task for each ──> (number, whether it worked, result or what went wrong)

consumes: requests from the connection, the first of which is the engine's options.
waits for: the engine; each request is a task of its own, so that none waits for another.
unblocked by: None as a request, or the connection's end; either ends the engine and the process.
"""

import asyncio
import sys
from multiprocessing.connection import Client, Connection
from typing import Any

from quadriga.errors import first_line
from quadriga.rollout.sglang.library import Library, installed


def main() -> None:
    """Connects to the address in the first argument, with the key that stands on the standard input."""
    connection = Client(sys.argv[1], authkey=sys.stdin.buffer.read())
    try:
        library = Library(connection.recv())
    except Exception as error:  # whatever SGLang raises is told to whoever wanted it
        connection.send((False, first_line(error)))
        raise
    try:
        connection.send((True, installed()))
        library.engine.loop.run_until_complete(_serve(library, connection))
    finally:
        library.engine.shutdown()


async def _serve(library: Library, connection: "Connection[Any, Any]") -> None:
    running: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()
    while True:
        try:
            request = await loop.run_in_executor(None, connection.recv)
        except (EOFError, OSError):
            return
        if request is None:
            return
        task = loop.create_task(_answer(library, connection, *request))
        running.add(task)
        task.add_done_callback(running.discard)


async def _answer(
    library: Library, connection: "Connection[Any, Any]", number: int, method: str, arguments: dict[str, Any]
) -> None:
    # SGLang's failures have no class in common; each is told to whoever asked.
    [result] = await asyncio.gather(library.call(method, arguments), return_exceptions=True)
    failed = isinstance(result, BaseException)
    connection.send((number, not failed, first_line(result) if failed else result))


if __name__ == "__main__":
    main()
