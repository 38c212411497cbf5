# SPDX-License-Identifier: Apache-2.0
"""The process of SGLang's engine. This is the only file that imports SGLang.

SGLang assumes that it owns its process: it handles signals, kills the process when a part of it
fails, and at its end all children. Therefore it gets a process of its own, with a connection.

    (number, method, arguments) -> a task for each request -> (number, success, result or message)

consumes: requests from the pipe; the first message has the options of the engine.
waits for: the engine. Each request is a task, so that none waits for another.
unblocked by: None as a request, or the end of the connection. Either ends engine and process.
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

LEAST = "0.5.23"  # oldest version of SGLang that works
WHERE = "rollout.name=sglang"
_INSTALL = (
    f"pip install 'sglang>={LEAST}'; on a machine without an accelerator: scripts/install-sglang."
)

# Read by SGLang. Variables that are already set are not changed.
_ENVIRONMENT = {
    # `context_length` may exceed the model's positions by `_SPARE_TOKENS`, which are never used.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
# Fields of SGLang's reply that `SGLangEngine` reads. Only they are sent over the pipe.
_REPLY_FIELDS = ("finish_reason", "output_token_logprobs", "prompt_tokens")
# Requests about weights and memory, and SGLang's classes for them.
_REQUESTS = {
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "get_weights_by_name": "GetWeightsByNameReqInput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}


def require_version(version: str) -> None:
    """Raise a RolloutError if SGLang is missing ("") or older than `LEAST`."""
    require_release("SGLang", version, LEAST, where=WHERE, fix=_INSTALL)


class SGLangLibrary:
    """The imported SGLang with its engine. A process can have one engine, made by its main thread.

    Args:
        options: arguments of the engine.

    Raises:
        RolloutError: SGLang is missing, too old, or lacks a part that is used.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        _, version = installed("sglang")
        require_version(version)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        module = importlib.import_module("sglang")
        self._requests = importlib.import_module("sglang.srt.managers.io_struct")
        missing = [name for name in _REQUESTS.values() if not hasattr(self._requests, name)]
        self.engine: Any = module.Engine(**options)
        self._manager = self.engine.tokenizer_manager
        # Private parts of SGLang, which another version may not have.
        for name in (*_REQUESTS, "abort_request", "flush_cache"):
            if not hasattr(self._manager, name):
                missing.append(name)
        if missing:
            raise RolloutError(
                WHERE, got=f"SGLang {version} without {', '.join(missing)}", fix=_INSTALL
            )

    async def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """Answer a request as SGLang's server does.

        Args:
            method: name of the request.
            arguments: fields of the request.

        Returns:
            SGLang's result. That of `generate` has only the fields that are used.
        """
        if method == "generate":
            # A reply has many fields, and pickling all of them takes time.
            reply = await self.engine.async_generate(**arguments)
            meta = reply["meta_info"]
            used = {name: meta[name] for name in _REPLY_FIELDS if name in meta}
            return {"output_ids": list(reply["output_ids"]), "meta_info": used}
        if method == "is_alive":
            return True
        if method == "abort_request":
            return self._manager.abort_request(**arguments)
        if method == "flush_cache":
            # A pair of success and message, as for requests about weights.
            done = await self._manager.flush_cache()
            return done.success, done.message
        # Each other request has a class, and the manager has a method with the request's name.
        request = getattr(self._requests, _REQUESTS[method])(**arguments)
        return await getattr(self._manager, method)(request, None)


def main() -> None:
    """Serve the pipe whose file descriptor is the first argument of the program."""
    streams.install()
    # Warnings go to the log, which prints only errors.
    logging.captureWarnings(True)
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    # Not inherited by SGLang's processes: they may outlive this process, whose end must end the
    # connection.
    os.set_inheritable(connection.fileno(), False)
    try:
        library = SGLangLibrary(connection.recv())
    except Exception as error:  # SGLang's failures have no class in common
        # The parent process raises the error.
        connection.send((False, first_line(error)))
        raise
    try:
        connection.send((True, installed("sglang")[1]))
        library.engine.loop.run_until_complete(_serve(library, connection))
    finally:
        library.engine.shutdown()


async def _serve(library: SGLangLibrary, connection: "Connection[Any, Any]") -> None:
    """Run a task for each request until None arrives or the connection ends."""

    async def respond(number: int, method: str, arguments: dict[str, Any]) -> None:
        # An error is caught whatever its class. It is sent as the result, for the caller to raise.
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
