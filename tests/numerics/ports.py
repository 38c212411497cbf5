# SPDX-License-Identifier: Apache-2.0
"""Ports for processes that a test starts to meet at."""

import random
import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses, and that the system gives to nobody: its own choices, which the connections of the
    processes take, begin at 32768. All are held until the last is found, so that they differ."""
    ports: list[int] = []
    with ExitStack() as held:
        while len(ports) < count:
            port = random.randint(15_000, 32_000)
            try:
                held.enter_context(socket.create_server(("localhost", port)))
            except OSError:
                continue
            ports.append(port)
    return ports
