# SPDX-License-Identifier: Apache-2.0
"""Seeds of calls.

The seed of a call is derived from the run's seed, the session, the prompt, and the number of earlier
calls with this prompt in the session. Therefore it does not depend on the order in which sessions or
prompts arrive. A call that was not answered gives its number back, so that the call that repeats it
has the same seed.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_PROMPTS = 100_000
"""Most prompts whose calls are counted. Beyond it, those that were used longest ago are forgotten."""


@dataclass(slots=True)
class _PromptCalls:
    """Calls with one prompt in one session.

    Attributes:
        count: number of calls so far, without repetitions.
        lost: numbers of calls that were not answered, which the next calls get.
    """

    count: int = 0
    lost: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Ask:
    """Number and seed of a call.

    Attributes:
        calls: all calls with the same prompt in the same session.
        number: number of the call among `calls`, counted from 0.
        seed: seed for the response.
    """

    calls: _PromptCalls
    number: int
    seed: int

    def give_back(self) -> None:
        """Give the number back, because the call was not answered. The call that repeats it gets it."""
        if self.number not in self.calls.lost:
            self.calls.lost.append(self.number)


class Seeds:
    """Derives the seeds of calls, and counts the calls of each prompt.

    Args:
        seed: `trainer.seed`.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        # By hash of the session and the prompt; the most recently used one is last.
        self._calls: OrderedDict[bytes, _PromptCalls] = OrderedDict()

    def ask(
        self, session: str, prompt: Sequence[int], images_key: str = "", *, is_retry: bool = False
    ) -> Ask:
        """Number a call among those with the same prompt in the same session, and derive its seed.

        Args:
            session: name of the session; "" if the client names none.
            prompt: token ids of the prompt.
            images_key: `Images.key` of the prompt's images; "" if there are none.
            is_retry: whether the client says that it repeats a call.
        """
        # Prompts are stored as hashes, which take less memory.
        source = repr((self._seed, session, images_key)).encode() + array("q", prompt).tobytes()
        digest = hashlib.blake2b(source, digest_size=16).digest()
        calls = self._calls.setdefault(digest, _PromptCalls())
        self._calls.move_to_end(digest)
        if len(self._calls) > MAX_PROMPTS:
            self._calls.popitem(last=False)
        # A call that repeats a lost one need not say so. The next call counts as its repetition.
        if calls.lost:
            number = min(calls.lost)
            calls.lost.remove(number)
        elif is_retry and calls.count:
            # The answer to the latest call was sent, but did not arrive at the client.
            number = calls.count - 1
        else:
            number = calls.count
            calls.count += 1
        seed_source = digest + number.to_bytes(8, "big")
        seed = int.from_bytes(hashlib.blake2b(seed_source, digest_size=8).digest(), "big")
        return Ask(calls, number, seed)
