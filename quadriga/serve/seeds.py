# SPDX-License-Identifier: Apache-2.0
"""Seeds of calls.

The seed of a call comes from the run's seed, the session, the tokens of the prompt, and the number
of calls with these tokens before it in the session. So it does not depend on the order in which
sessions or prompts arrive. A call that was never answered gives its number back: the call that
repeats it has the same seed.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_PROMPTS = 100_000
"""Prompts whose number of calls is known. The ones that were asked longest ago are forgotten."""


@dataclass(slots=True)
class _Asked:
    """Calls of a prompt in a session."""

    count: int = 0  # calls so far
    lost: list[int] = field(default_factory=list)  # numbers of calls that were not answered


class Ask:
    """A call with its seed.

    Args:
        asked: calls of its prompt.
        number: calls of its prompt before it.
        seed: its seed.
    """

    def __init__(self, asked: _Asked, number: int, seed: int) -> None:
        self._asked = asked
        self.number = number
        self.seed = seed

    def lose(self) -> None:
        """Give the number back: the call was not answered."""
        if self.number not in self._asked.lost:
            self._asked.lost.append(self.number)


class Seeds:
    """Gives each call its seed.

    Args:
        seed: `trainer.seed`.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._asked: OrderedDict[bytes, _Asked] = OrderedDict()

    def ask(
        self, session: str, prompt: Sequence[int], images_key: str = "", *, is_retry: bool = False
    ) -> Ask:
        """Number a call, and derive its seed.

        Args:
            session: name of the session; "" if the client names none.
            prompt: token ids.
            images_key: `Images.key` of its images; "" if there are none.
            is_retry: whether the client says that it repeats a call.
        """
        source = repr((self._seed, session, images_key)).encode() + array("q", prompt).tobytes()
        digest = hashlib.blake2b(source, digest_size=16).digest()
        asked = self._asked.setdefault(digest, _Asked())
        self._asked.move_to_end(digest)
        if len(self._asked) > MAX_PROMPTS:
            self._asked.popitem(last=False)
        if asked.lost:
            number = min(asked.lost)
            asked.lost.remove(number)
        elif is_retry and asked.count:
            # The answer was sent, but did not arrive.
            number = asked.count - 1
        else:
            number = asked.count
            asked.count += 1
        seed_source = digest + number.to_bytes(8, "big")
        seed = int.from_bytes(hashlib.blake2b(seed_source, digest_size=8).digest(), "big")
        return Ask(asked, number, seed)
