# SPDX-License-Identifier: Apache-2.0
"""Memory of the native engine's KV cache, in tokens."""

import torch

from quadriga.errors import RolloutError

_GIBIBYTE = 2**30
# Share of a GPU's free memory for the KV cache. The rest is for activations, for logits, and for a
# second copy of one layer while the cache grows.
_FREE_SHARE = 0.7


class CacheMemory:
    """Limit of the KV cache of one rank.

    Args:
        token_bytes: bytes that the cache takes for a token.
        gigabytes: memory of the cache in GiB; None: as much as the responses need, within a GPU's
            memory.

    Attributes:
        token_bytes: bytes that the cache takes for a token.
        limit: most tokens that fit into `gigabytes`; None: no limit is configured.
    """

    def __init__(self, token_bytes: int, gigabytes: float | None) -> None:
        self.token_bytes = token_bytes
        self.limit: int | None = None
        if gigabytes is not None:
            self.limit = int(gigabytes * _GIBIBYTE / token_bytes)

    def require(self, where: str, num_prompt_tokens: int, max_tokens: int) -> None:
        """Refuse a request that the KV cache cannot hold even alone.

        Args:
            where: the request, for the error.
            num_prompt_tokens: tokens of the prompt.
            max_tokens: most tokens of the response.

        Raises:
            RolloutError: the configured memory is too small.
        """
        if self.limit is None or num_prompt_tokens + max_tokens <= self.limit:
            return
        raise RolloutError(
            where,
            got=f"{num_prompt_tokens} prompt tokens and up to {max_tokens} new ones",
            expected=f"at most {self.limit}, for which the KV cache has memory",
            fix="Raise actor_rollout_ref.rollout.cache_gigabytes;"
            f" a token takes {self.token_bytes} bytes.",
        )

    def max_tokens(self, device: torch.device) -> int | None:
        """Compute the most tokens that the KV cache may have.

        Without a configured limit, it depends on the memory of the GPU that is free now.

        Args:
            device: device of the cache.

        Returns:
            The number of tokens; None: any number. A single request may exceed it.
        """
        if self.limit is not None or device.type != "cuda":
            return self.limit
        free_bytes, _ = torch.cuda.mem_get_info(device)
        # Add memory that torch's allocator holds, but does not use.
        free_bytes += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(_FREE_SHARE * free_bytes / self.token_bytes)
