# SPDX-License-Identifier: Apache-2.0
"""Memory that vLLM releases while it sleeps, on accelerators."""

from quadriga.rollout.vllm.cores import Core


class VLLMMemory:
    """The parts of vLLM's memory, "weights" and "kv_cache", and whether they are released.

    Args:
        core: vLLM's engine.
        can_sleep: whether vLLM can release memory; on a CPU it cannot.

    Attributes:
        released: the released parts.
        has_dropped_weights: whether the weights were released without a copy on the host.
    """

    def __init__(self, core: Core, *, can_sleep: bool) -> None:
        self.can_sleep = can_sleep
        self.has_dropped_weights = False
        self.released: set[str] = set()
        self._core = core

    def sleep(self, *, keeps_weights: bool) -> None:
        """Release both parts.

        Args:
            keeps_weights: whether the weights move to the host; otherwise they are dropped.
        """
        if self.can_sleep and not self.released:
            self._core.ask("sleep", level=1 if keeps_weights else 2)
            self.released = {"weights", "kv_cache"}
            self.has_dropped_weights = not keeps_weights

    def wake(self, *tags: str) -> None:
        """Map released parts again. Those that are mapped must not be mapped twice."""
        released_tags = [tag for tag in tags if tag in self.released]
        if released_tags:
            self._core.ask("wake_up", tags=released_tags)
            self.released.difference_update(released_tags)
