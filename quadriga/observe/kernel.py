# SPDX-License-Identifier: Apache-2.0
"""Identity of the operating system's kernel: equal in all processes of one machine."""

import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def kernel_identity() -> str:
    """Identity of the running kernel, which is the same in all containers of a machine.

    On Linux it is not the host name, which differs between containers.
    """
    if _BOOT_ID.is_file():
        return _BOOT_ID.read_text(encoding="ascii").strip()
    # Systems without /proc have no containers that share a kernel.
    return socket.gethostname()
