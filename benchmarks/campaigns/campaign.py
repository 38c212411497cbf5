# SPDX-License-Identifier: Apache-2.0
"""What a campaign of `benchmarks/chaos.py` is: one module of this folder with a `CAMPAIGN`."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """What came of one case.

    Attributes:
        group: part of the campaign that the case belongs to; or, where a case stands for several events, how many of
            each group they were: {"generation": 2, "update": 1}.
        failure: what was not as promised, with all that is needed to see it again; "" where everything was.
        figures: numbers worth keeping, by a name with its unit (`named_after_s`).
    """

    group: str | Mapping[str, int]
    failure: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def events(self) -> Counter[str]:
        """How many events of each group the case stands for."""
        return Counter({self.group: 1} if isinstance(self.group, str) else self.group)


@dataclass(frozen=True)
class Campaign:
    """Cases of one kind, each made from its number alone.

    Attributes:
        what: the row in docs/reliability.md: what is done to what.
        promise: what must hold in every case.
        wanted: events in all, by group; "" stands for all groups together.
        run: the case of a number in an empty folder that is removed afterwards. It ends all that it starts, has time
            limits of its own, and raises only where the campaign itself is broken.
        cases: how many a full sitting has.
        processes: cases that may run side by side; 1 where a case needs the whole machine.
        prepare: what is done once before a sitting, in a folder that stays (warm files, the run left alone).
    """

    what: str
    promise: str
    wanted: Mapping[str, int]
    run: Callable[[int, Path, Path], Outcome]
    cases: int
    processes: int = 1
    prepare: Callable[[Path], None] | None = None
