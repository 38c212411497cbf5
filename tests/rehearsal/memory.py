# SPDX-License-Identifier: Apache-2.0
"""Memory of the stand-in's devices: the bytes of all live storages, and their maximum.

A storage counts from the moment at which it is marked as on a device until it is freed. Memory that a kernel takes and
returns within one operator does not count, nor do the allocator's blocks and holes.
"""

import threading
import weakref

import torch


class DeviceMemory:
    """Bytes of the live storages of all devices together.

    Attributes:
        current: bytes at present.
        peak: the largest number since `reset_peak`.
    """

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        # Storages are freed in any thread, and also while this class changes its counts.
        self._lock = threading.RLock()

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage from now on, or its new size."""
        key = storage._cdata
        with self._lock:
            if key not in self._sizes:
                weakref.finalize(storage, self._drop, key).atexit = False
            self._count(key, storage.nbytes())

    def reset_peak(self) -> None:
        """Begin a new maximum."""
        self.peak = self.current

    def _count(self, key: int, num_bytes: int) -> None:
        self.current += num_bytes - self._sizes.get(key, 0)
        self._sizes[key] = num_bytes
        self.peak = max(self.peak, self.current)

    def _drop(self, key: int) -> None:
        with self._lock:
            self._count(key, 0)
            del self._sizes[key]
