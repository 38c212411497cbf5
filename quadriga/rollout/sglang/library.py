# SPDX-License-Identifier: Apache-2.0
"""The one file that knows SGLang: its version, and the names that are used of it."""

import importlib
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from quadriga.errors import RolloutError
from quadriga.rollout.loaded import require_release

LEAST = "0.5.23"
WHERE = "rollout.name=sglang"
_INSTALL = f"pip install 'sglang>={LEAST}'; on a machine without an accelerator: scripts/install-sglang."

# What SGLang reads from the environment. A variable that is set already stays as it is.
_ENVIRONMENT = {
    # A few positions more than the model's own are asked for, see `SGLangOptions`; none of them is used.
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


def installed() -> str:
    """The version of SGLang that is installed; empty where there is none. Nothing is imported."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return ""


def require_version(found: str) -> None:
    """Refuses the version that is installed, or "", where it is older than `LEAST`; see `require_release`."""
    require_release("SGLang", found, LEAST, where=WHERE, fix=_INSTALL)


class Library:
    """SGLang with one engine; a process can have one only, which must be made by its main thread.

    Args:
        options: the arguments of its engine.

    Raises:
        RolloutError: SGLang is missing, too old, or lacks something that is used of it.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        require_version(installed())
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        module = importlib.import_module("sglang")
        self._requests = importlib.import_module("sglang.srt.managers.io_struct")
        missing = [name for name in _REQUESTS.values() if not hasattr(self._requests, name)]
        self.engine: Any = module.Engine(**options)
        self._manager = self.engine.tokenizer_manager
        missing += [name for name in (*_REQUESTS, "abort_request", "flush_cache") if not hasattr(self._manager, name)]
        if missing:
            raise RolloutError(WHERE, got=f"SGLang {installed()} without {', '.join(missing)}", fix=_INSTALL)

    async def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """What the server does for the request of this name, with the engine in this process.

        Returns:
            For `generate` the answer as the server gives it, as far as it is used; for the others (whether it was
            done, what is said of it), nothing, or what was asked for.
        """
        if method == "generate":
            answer = await self.engine.async_generate(**arguments)
            names = ("finish_reason", "output_token_logprobs")
            return {
                "output_ids": list(answer["output_ids"]),
                "meta_info": {name: answer["meta_info"].get(name) for name in names},
            }
        if method == "abort_request":
            return self._manager.abort_request(**arguments)
        if method == "flush_cache":
            done = await self._manager.flush_cache()
            return done.success, done.message
        return await getattr(self._manager, method)(getattr(self._requests, _REQUESTS[method])(**arguments), None)
