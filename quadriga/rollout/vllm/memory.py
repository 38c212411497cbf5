# SPDX-License-Identifier: Apache-2.0
"""Memory that vLLM releases while it sleeps, on accelerators."""

from dataclasses import dataclass, field

from quadriga.rollout.vllm.cores import Core


@dataclass
class VLLMMemory:
    """The parts of vLLM's memory, "weights" and "kv_cache", and whether they are released."""

    core: Core  # vLLM's engine
    can_sleep: bool  # whether vLLM can release memory; on a CPU it cannot
    has_dropped_weights: bool = False  # released without a copy on the host
    released: set[str] = field(default_factory=set)  # the released parts

    def sleep(self, *, keeps_weights: bool) -> None:
        """Release both parts.

        Args:
            keeps_weights: whether the weights move to the host; otherwise they are dropped.
        """
        if self.can_sleep and not self.released:
            self.core.ask("sleep", level=1 if keeps_weights else 2)
            self.released = {"weights", "kv_cache"}
            self.has_dropped_weights = not keeps_weights

    def wake(self, *tags: str) -> None:
        """Map released parts again. Those that are mapped must not be mapped twice."""
        released_tags = [tag for tag in tags if tag in self.released]
        if released_tags:
            self.core.ask("wake_up", tags=released_tags)
            self.released.difference_update(released_tags)
