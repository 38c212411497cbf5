# SPDX-License-Identifier: Apache-2.0
"""What a worker answers when its method raises, and the error that the driver makes of it.

A `Failure` is an ordinary value of strings: Ray sees a call that worked, so nothing of its own stands around the error,
and an exception that cannot be pickled travels like any other.
"""

import sysconfig
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from quadriga import errors
from quadriga.errors import QuadrigaError, WorkerError
from quadriga.single_controller import registration

_PACKAGE = Path(errors.__file__).parent
_OURS = f"{_PACKAGE}/"
_PLUMBING = (str(Path(__file__).parent), registration.__file__)
# The longest first: site-packages lies in the standard library's folder.
_LIBRARIES = tuple(
    sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, key=len, reverse=True)
)


@dataclass(frozen=True)
class Seat:
    """Which worker in which process; prints as in `actor[rank 3/8 on 10.0.0.2]`.

    Attributes:
        role: the group's name.
        rank, world_size: the worker's number in its group.
        node: address of its node; "": not known yet.
        pid: its process there.
    """

    role: str
    rank: int
    world_size: int
    node: str = ""
    pid: int = 0

    def __str__(self) -> str:
        node = f" on {self.node}" if self.node else ""
        return f"{self.role}[rank {self.rank}/{self.world_size}{node}]"


@dataclass(frozen=True)
class Failure:
    """What a worker answers instead of an output if its method raised.

    Attributes:
        seat, method: what was called, and where.
        arguments: with what, data by shape.
        summary: type and message of the exception.
        location: file, line and function of the innermost frame that is no library's.
        trace: the formatted traceback, without the frames that only brought the call to the worker.
        time_s: wall clock time of the exception, in seconds.
        running_s: for how long the method ran.
        known_as: if the exception is one of Quadriga's own: its class there and its four parts.
        origin: the worker that it came from, if the method met the failure of another one.
    """

    seat: Seat
    method: str
    arguments: str
    summary: str
    location: str
    trace: str
    time_s: float
    running_s: float
    known_as: tuple[type[QuadrigaError], dict[str, str]] | None = None
    origin: str = ""

    @classmethod
    def of(cls, error: BaseException, seat: Seat, method: str, arguments: str, running_s: float) -> "Failure":
        """The failure that an exception is."""
        frames = _from_the_worker_on(error.__traceback__)
        return cls(
            seat,
            method,
            arguments,
            "".join(traceback.format_exception_only(error)).strip(),
            location_of(reversed([frame for frame, _ in traceback.walk_tb(frames)])),
            "".join(traceback.format_exception(type(error), error, frames)),
            time.time(),
            running_s,
            _parts(error) if isinstance(error, QuadrigaError) else None,
            error.worker if isinstance(error, QuadrigaError) else "",
        )

    def as_error(self) -> QuadrigaError:
        """The error to raise on the driver: of the worker's own type if that is one of ours, else a WorkerError."""
        where = f"{self.seat} failed in {self.method}"
        if self.known_as is None:
            got = f"{self.summary} (at {self.location}; after {self.running_s:.1f} s, called with {self.arguments})"
            error: QuadrigaError = WorkerError(where, got=got)
        else:
            kind, parts = self.known_as
            # A failure that came from a third worker says so itself; who passed it on is in the traceback.
            error = kind(**parts) if self.origin else kind(**(parts | {"where": f"{where}: {parts['where']}"}))
        error.worker = self.origin or str(self.seat)
        error.add_note(f"\n{self.seat}, process {self.seat.pid}, called with {self.arguments}:\n{self.trace}")
        return error

    def __str__(self) -> str:
        return f"{self.seat} failed in {self.method}: {self.summary} (at {self.location})"


def is_of_interest(filename: str) -> bool:
    """Whether a file is the user's or Quadriga's, and not what merely brings a call to a worker."""
    if filename.startswith(_OURS):
        return not filename.startswith(_PLUMBING)
    return not filename.startswith((*_LIBRARIES, "<frozen "))


def location_of(frames: Iterator[FrameType]) -> str:
    """File, line and function of the first frame that is no library's, and the library function that it waits in.

    Args:
        frames: innermost first.
    """
    innermost = next(frames, None)
    frame = innermost
    while frame is not None and not is_of_interest(frame.f_code.co_filename):
        frame = next(frames, None)
    if innermost is None or frame is None or frame is innermost:
        return _shown(frame or innermost)
    return f"{_shown(frame)}, inside {_shown(innermost)}"


def _shown(frame: FrameType | None) -> str:
    if frame is None:
        return "an unknown place"
    path, code = frame.f_code.co_filename, frame.f_code
    # The shortest form that still says which file: from site-packages on, which may lie in the checkout, or from there.
    for root in (*_LIBRARIES, str(_PACKAGE.parent)):
        path = path.removeprefix(f"{root}/")
    return f"{path}:{frame.f_lineno} in {code.co_qualname}"


def _from_the_worker_on(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without its first frames, those that only brought the call here; whole if that were all of it."""
    first = frames
    while first is not None and not is_of_interest(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return first or frames


def _parts(error: QuadrigaError) -> tuple[type[QuadrigaError], dict[str, str]]:
    # A subclass from elsewhere goes by the name of its nearest base here, which the driver certainly has.
    kind = next(cls for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    parts = {"where": error.where, "got": error.got, "expected": error.expected, "fix": error.fix}
    return kind, {name: str(part) for name, part in parts.items()}
