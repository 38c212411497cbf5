# SPDX-License-Identifier: Apache-2.0
"""The process that SGLang's engine lives in.

SGLang takes its process for its own: it handles signals, kills the whole process when a part of it fails, and at its
end every child that the process has. So it gets one to itself, which takes requests over a connection. This is also
the one file that imports SGLang.

    (number, method, arguments) ──> a task for each ──> (number, whether it worked, result or what went wrong)

consumes: requests from the pipe, the first of which is the engine's options.
waits for: the engine; each request is a task of its own, so that none waits for another.
unblocked by: None as a request, or the connection's end; either ends the engine and the process.
"""

import asyncio
import importlib
import logging
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from quadriga import streams
from quadriga.errors import RolloutError, first_line
from quadriga.observe.probe import installed
from quadriga.rollout.third_party import require_release

LEAST = "0.5.23"
WHERE = "rollout.name=sglang"
_INSTALL = (
    f"pip install 'sglang>={LEAST}'; on a machine without an accelerator: scripts/install-sglang."
)

# What SGLang reads from the environment. A variable that is set already stays as it is.
_ENVIRONMENT = {
    # A few positions more than the model's own are asked for, see `_SPARE_TOKENS`; none of them is used.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
# Each call that is about weights or memory, with the class of its request.
_REQUESTS = {
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "get_weights_by_name": "GetWeightsByNameReqInput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}


def require_version(found: str) -> None:
    """Refuse the version that is installed, or "", where it is older than `LEAST`."""
    require_release("SGLang", found, LEAST, where=WHERE, fix=_INSTALL)


class Library:
    """SGLang with one engine; a process can have one only, which must be made by its main thread.
    Raises RolloutError: SGLang is missing, too old, or lacks something that is used of it."""

    def __init__(self, options: dict[str, Any]) -> None:
        version = installed("sglang")[1]
        require_version(version)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        module = importlib.import_module("sglang")
        self._requests = importlib.import_module("sglang.srt.managers.io_struct")
        missing = [name for name in _REQUESTS.values() if not hasattr(self._requests, name)]
        self.engine: Any = module.Engine(**options)
        self._manager = self.engine.tokenizer_manager
        missing += [
            name
            for name in (*_REQUESTS, "abort_request", "flush_cache")
            if not hasattr(self._manager, name)
        ]
        if missing:
            raise RolloutError(
                WHERE, got=f"SGLang {version} without {', '.join(missing)}", fix=_INSTALL
            )

    async def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """What SGLang's server does for a request; the reply of `generate` has only the fields that are used."""
        if method == "generate":
            reply = await self.engine.async_generate(**arguments)
            meta = {
                name: reply["meta_info"].get(name)
                for name in ("finish_reason", "output_token_logprobs")
            }
            return {"output_ids": list(reply["output_ids"]), "meta_info": meta}
        if method == "is_alive":
            return True
        if method == "abort_request":
            return self._manager.abort_request(**arguments)
        if method == "flush_cache":
            done = await self._manager.flush_cache()
            return done.success, done.message
        return await getattr(self._manager, method)(
            getattr(self._requests, _REQUESTS[method])(**arguments), None
        )


def main() -> None:
    """Serve the pipe whose file descriptor is the first argument."""
    streams.install()
    logging.captureWarnings(True)  # they go to the log, of which only errors are printed
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    os.set_inheritable(
        connection.fileno(), False
    )  # SGLang's processes may outlive this one, which must be seen
    try:
        library = Library(connection.recv())
    except (
        Exception
    ) as error:  # SGLang's failures have no class in common; the parent process raises this one
        connection.send((False, first_line(error)))
        raise
    try:
        connection.send((True, installed("sglang")[1]))
        library.engine.loop.run_until_complete(_serve(library, connection))
    finally:
        library.engine.shutdown()


async def _serve(library: Library, connection: "Connection[Any, Any]") -> None:
    async def respond(number: int, method: str, arguments: dict[str, Any]) -> None:
        # SGLang's failures have no class in common; each is raised where the request was made.
        [result] = await asyncio.gather(library.call(method, arguments), return_exceptions=True)
        failed = isinstance(result, BaseException)
        connection.send((number, not failed, first_line(result) if failed else result))

    running: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()
    while True:
        try:
            request = await loop.run_in_executor(None, connection.recv)
        except (EOFError, OSError):
            return
        if request is None:
            return
        task = loop.create_task(respond(*request))
        running.add(task)
        task.add_done_callback(running.discard)


if __name__ == "__main__":
    main()
