# SPDX-License-Identifier: Apache-2.0
"""What a cluster that a run started leaves behind, taken away: its processes and its session's folder.

Runs as a program of its own beside the driver, so that it also follows a SIGKILL of the driver: then Ray's own agents
would stay for a minute, and its folder for good. It imports nothing but the standard library, to be there at once.
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

LIMIT_S = 10.0


def members(session: str) -> list[int]:
    """The processes whose output goes into a session's folder, and those that Ray has named with a file open there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        # It may end meanwhile, or be another user's.
        with suppress(OSError):
            is_named = (entry / "cmdline").read_bytes().startswith(b"ray::")
            files = (entry / "fd").iterdir() if is_named else [entry / "fd" / "1", entry / "fd" / "2"]
            if any(os.readlink(file).startswith(f"{session}/") for file in files):
                found.append(int(entry.name))
    return found


def sweep(session: str) -> None:
    """Kill the processes of a session that is over, and remove its folder."""
    deadline = time.monotonic() + LIMIT_S
    while ((left := members(session)) or os.path.exists(session)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Again where what is dying still wrote into it.
        shutil.rmtree(session, ignore_errors=True)
        time.sleep(0.05)
    latest = Path(session).with_name("session_latest")
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)


if __name__ == "__main__":
    driver = int(sys.argv[1])
    while os.getppid() == driver:
        time.sleep(0.2)
    for each in sys.argv[2:]:
        sweep(each)
