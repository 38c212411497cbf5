# SPDX-License-Identifier: Apache-2.0
"""Messages by which all ranks of a rollout group make the same steps.

Before each step the leader sends a message: `StepMessage` with the requests that are added or
aborted, or `NewWeights` before the first step with newer weights. All ranks number the requests in
the same way. The ranks compare a checksum of their tokens at each change of weights, and when the
batch is over.
"""

import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from quadriga.rollout.group import RolloutGroup, require_same_tokens
from quadriga.rollout.interface import Completion, Images, SamplingParams
from quadriga.rollout.native.generation import GenerationRequest


class NewRequest(NamedTuple):
    """A request as it is sent to members, which make a `GenerationRequest` of it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    images: Images | None
    earlier: Completion | None  # aborted response that the request continues


class StepMessage(NamedTuple):
    """Message: make a step, after adding some requests and ending others.

    A step that changes no requests is sent as None, the shortest message.

    Attributes:
        added: new requests.
        aborted: numbers of aborted requests.
        max_cache_tokens: the leader's limit of the KV cache; None: any number.
    """

    added: Sequence[NewRequest] = ()
    aborted: Sequence[int] = ()
    max_cache_tokens: int | None = None


class NewWeights(NamedTuple):
    """Message: go on with weights of this version, or with the same ones and a new KV cache.

    Attributes:
        checksum: the leader's checksum of tokens.
        version: version of the weights.
        keeps_cache: whether running requests keep the KV cache of the older weights.
    """

    checksum: int
    version: int
    keeps_cache: bool


class BatchEnd(NamedTuple):
    """Message: the batch is over. `checksum` is the leader's checksum of tokens."""

    checksum: int


class GroupSteps:
    """The requests of a batch on one rank of the group, and the checksum of their tokens.

    Args:
        group: the rank's group.

    Attributes:
        requests: requests by number; finished ones until `add_finished_to_checksum`.
        checksum: checksum of the tokens of finished requests.
        has_failed: on the leader, whether a step failed. A step fails on all ranks, so the members
            do not wait for messages any more.
    """

    def __init__(self, group: RolloutGroup) -> None:
        self.group = group
        self.reset()

    def reset(self) -> None:
        """Begin a batch."""
        self.requests: dict[int, GenerationRequest] = {}
        self.checksum = 0
        self.has_failed = False
        self._num_requests = 0

    def add(self, requests: Collection[GenerationRequest]) -> None:
        """Give the next numbers to new requests."""
        self.requests |= enumerate(requests, start=self._num_requests)
        self._num_requests += len(requests)

    def add_finished_to_checksum(self, unfinished: Iterable[GenerationRequest] = ()) -> None:
        """Add the tokens of all finished requests to the checksum, and forget these requests.

        Args:
            unfinished: the requests that are not finished; all others are.
        """
        unfinished_ids = {id(request) for request in unfinished}
        # In the order of the numbers, which is the same on all ranks.
        for number, request in list(self.requests.items()):
            if id(request) not in unfinished_ids:
                del self.requests[number]
                tokens = repr(request.token_ids).encode()
                self.checksum = zlib.crc32(tokens, self.checksum)

    def send_step(
        self,
        added: Sequence[GenerationRequest],
        aborted: Sequence[GenerationRequest],
        max_cache_tokens: int | None,
        weight_version: int,
    ) -> None:
        """Send the leader's next step to the members, which make the same step.

        Args:
            added: new requests.
            aborted: aborted requests.
            max_cache_tokens: the leader's limit of the KV cache. With the same limit, members
                preempt the same requests as the leader, however much memory each of them has.
            weight_version: version of the weights.
        """
        self.add(added)
        if not (added or aborted):
            # The most frequent case.
            self.group.broadcast(None)
            return
        new_requests = []
        for request in added:
            earlier = request.completion(weight_version) if request.token_ids else None
            new_requests.append(
                NewRequest(request.prompt, request.sampling, request.images, earlier)
            )
        # Members know requests only by their numbers.
        numbers = {id(request): number for number, request in self.requests.items()}
        aborted_numbers = [numbers[id(request)] for request in aborted]
        self.group.broadcast(StepMessage(new_requests, aborted_numbers, max_cache_tokens))

    def require_same(self, checksum: int) -> None:
        """Check that this rank generated the same tokens as the leader.

        Args:
            checksum: checksum of the leader's tokens.

        Raises:
            EngineError: the tokens differ.
        """
        require_same_tokens(self.group, "native", checksum=self.checksum, leader_checksum=checksum)
