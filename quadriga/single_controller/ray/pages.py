# SPDX-License-Identifier: Apache-2.0
"""Letting go of the pages of Ray's store that this process has mapped.

The store is one shared mapping. Each page that a process has written (`ray.put`) or read stays in its
page table and counts as its memory, although the bytes lie in the store: a driver that sends a batch and
collects the answers would seem to hold all of them. `release` drops the page-table entries and nothing
else. The bytes stay in the store and the next access finds them again.

The same advice given to private memory would wipe it. So a mapping qualifies only if it is shared and
belongs to the store, and the kernel is asked before each release whether that mapping is still there.
"""

import os
import sys

from quadriga.protocol.memory import advise

MADV_DONTNEED = 4
_STORE = "/plasma"

_mappings: list[tuple[int, int]] = []


def release() -> None:
    """Drop this process's page-table entries of the store; does nothing where there is no /proc."""
    if sys.platform != "linux":
        return
    if not _mappings or not all(_is_store(start, end) for start, end in _mappings):
        _mappings[:] = _find()
    for start, end in _mappings:
        advise(start, end - start, MADV_DONTNEED)


def _find() -> list[tuple[int, int]]:
    found = []
    with open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            # 7f8f7c000000-7f8fbc000000 rw-s 00000000 00:1b 34    /dev/shm/plasmaIbiKHf (deleted)
            addresses, permissions, _, _, _, *path = line.split(maxsplit=5)
            if path and permissions.endswith("s") and _STORE in path[0]:
                start, _, end = addresses.partition("-")
                found.append((int(start, 16), int(end, 16)))
    return found


def _is_store(start: int, end: int) -> bool:
    try:
        return _STORE in os.readlink(f"/proc/self/map_files/{start:x}-{end:x}")
    except OSError:
        return False
