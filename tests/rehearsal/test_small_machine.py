# SPDX-License-Identifier: Apache-2.0
"""Checks before a run, in a mount namespace with Docker's default of 64 MB for /dev/shm."""

import subprocess
import sys

import pytest

from tests.limits import PROGRAM_S

MOUNT = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
LIMITS = "ulimit -n 1024 && ulimit -l 64"
PROGRAM = """
from quadriga.errors import ConfigError
from quadriga.observe.gpu_machine import check_machine, warnings_of_machine
try:
    check_machine("cuda", 8, 2)
except ConfigError as error:
    print(error)
print(*warnings_of_machine(8, 2), sep="\\n")
"""


def in_namespace(command: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command in a mount namespace of its own."""
    return subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", command, sys.executable],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )


def test_limits_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little shared memory is refused; few open files and little locked memory are warnings."""
    mounted = in_namespace(MOUNT)
    if mounted.returncode:
        pytest.skip(f"this system refuses mount namespaces: {mounted.stderr.strip()}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    done = in_namespace(f"{MOUNT} && {LIMITS} && exec $0 -c '{PROGRAM}'")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "/dev/shm: got 64 MiB for 8 processes, expected at least 512 MiB" in done.stdout
    assert "/dev/shm has 0.1 GiB" in done.stdout
    assert "`ulimit -n` allows 1024 open files" in done.stdout
    assert "`ulimit -l` allows 64 KiB" in done.stdout
