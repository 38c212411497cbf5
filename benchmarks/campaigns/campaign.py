# SPDX-License-Identifier: Apache-2.0
"""What a campaign of `benchmarks/chaos.py` is: one module of this folder with a `CAMPAIGN`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """What came of one case.

    Attributes:
        group: part of the campaign that the case belongs to, such as the phase in which a process was killed.
        failure: what was not as promised, with all that is needed to see it again; "" where everything was.
        figures: numbers worth keeping, by a name with its unit (`named_after_s`).
        count: events that the case stands for (kills, programs).
    """

    group: str
    failure: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    count: int = 1


@dataclass(frozen=True)
class Campaign:
    """Cases of one kind, each made from its number alone.

    Attributes:
        what: the row in docs/reliability.md: what is done to what.
        promise: what must hold in every case.
        wanted: events in all, by group; "" stands for all groups together.
        run: the case of a number in an empty folder that is removed afterwards. It ends all that it starts, has time
            limits of its own, and raises only where the campaign itself is broken.
        processes: cases that may run side by side; 1 where a case needs the whole machine.
        prepare: what is done once before a sitting, in a folder that stays (warm files, the run left alone).
    """

    what: str
    promise: str
    wanted: Mapping[str, int]
    run: Callable[[int, Path, Path], Outcome]
    processes: int = 1
    prepare: Callable[[Path], None] | None = None
