# SPDX-License-Identifier: Apache-2.0
"""Identity of the operating system's kernel, which tells processes of one machine from others."""

import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def kernel_identity() -> str:
    """Identity of the running kernel, which the containers of a machine share."""
    if _BOOT_ID.is_file():
        return _BOOT_ID.read_text(encoding="ascii").strip()
    return socket.gethostname()
