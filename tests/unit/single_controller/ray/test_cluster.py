# SPDX-License-Identifier: Apache-2.0
"""Clusters that cannot be joined: each is one sentence, at once, with what to do."""

import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import ray
from ray._private.utils import check_version_info

from quadriga.errors import WorkerError
from quadriga.single_controller.ray.cluster import (
    _connect,
    _drop_noise,
    cluster,
    forwarded_variables,
    keeping_sigterm_handler,
)
from tests.limits import PROGRAM_S


@pytest.fixture
def dead_address() -> Iterator[str]:
    """A port of this machine at which nobody listens, and nobody else will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def refusal(**arguments: object) -> str:
    was_connected = ray.is_initialized()
    with pytest.raises(WorkerError) as caught, cluster(arguments, num_processes=1):
        pass
    assert ray.is_initialized() == was_connected
    return str(caught.value)


def test_an_address_where_nothing_is(dead_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal(address=dead_address)
    assert f"ray_kwargs.ray_init.address: got '{dead_address}', where nothing answers" in said
    monkeypatch.setenv("RAY_ADDRESS", dead_address)
    assert f"RAY_ADDRESS: got '{dead_address}', where nothing answers" in refusal()


def test_an_address_of_another_program() -> None:
    """A web server: Ray would wait for it for ten minutes."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        said = refusal(address=f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert (
        f"got '127.0.0.1:{server.server_port}', where something else answers, expected the address"
        in said
    )


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "head", "head:port"])
def test_what_is_no_address(address: str) -> None:
    assert "expected HOST:PORT, auto or local" in refusal(address=address)


REFUSED = """
from quadriga.errors import QuadrigaError
from quadriga.single_controller.ray.cluster import cluster

for arguments in (
    {"arguments": {"address": "local", "_temp_dir": "relative"}, "num_processes": 1},
    {"arguments": {}, "num_processes": 16, "num_nodes": 2},
):
    try:
        with cluster(**arguments):
            pass
    except QuadrigaError as error:
        print("refused", error)
"""


def test_clusters_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a program of its own: this one may be connected to a cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    output = subprocess.check_output(
        [sys.executable, "-c", REFUSED], text=True, timeout=PROGRAM_S, stderr=subprocess.STDOUT
    )
    folder, nodes = (line for line in output.splitlines() if line.startswith("refused "))
    assert "ray_kwargs.ray_init: got temp_dir must be absolute path or None" in folder
    assert "trainer.nnodes: got 2 machines, and no address of a cluster, expected 1:" in nodes
    assert "ray_kwargs.ray_init.address=auto (or RAY_ADDRESS=auto)" in nodes
    assert "trainer.nnodes=1" in nodes


SIGTERM_HANDLER = """
import signal, subprocess, sys
from quadriga.single_controller.ray import cluster as clusters

def handler(number, frame): ...

signal.signal(signal.SIGTERM, handler)

def is_kept():
    return signal.getsignal(signal.SIGTERM) is handler

if len(sys.argv) > 1:
    with clusters.cluster({"address": sys.argv[1]}, num_processes=1):
        print("handler joined", is_kept())
    sys.exit()
with clusters.cluster({}, num_processes=1) as address:
    print("handler started", is_kept(), flush=True)
    subprocess.run([sys.executable, __file__, address], check=True)
    [first] = clusters._OWN
    first._parts[1].kill()
    first._parts[1].wait()
    clusters.renew_own_cluster()
    assert clusters._OWN != [first]
    print("handler renewed", is_kept())
print("handler left", is_kept())
"""


def test_the_handler_of_sigterm_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a cluster is started, joined, renewed and left: a child that is forked must end at SIGTERM."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    program = tmp_path / "program.py"
    program.write_text(SIGTERM_HANDLER)
    output = subprocess.check_output([sys.executable, str(program)], text=True)
    said = [line for line in output.splitlines() if line.startswith("handler ")]
    assert said == [f"handler {state} True" for state in ("started", "joined", "renewed", "left")]


def test_in_a_thread_no_handler_is_set() -> None:
    """Only the main thread can set one."""
    before = signal.getsignal(signal.SIGTERM)
    said: list[str] = []

    def enter() -> None:
        with keeping_sigterm_handler():
            said.append("entered")

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert said == ["entered"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_cluster_of_another_version_is_said_in_rays_own_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's check of versions stands in for a cluster that runs another one."""
    theirs = {"ray_version": "2.49.1", "python_version": "3.10.4"}
    monkeypatch.setattr(ray, "init", lambda **_: check_version_info(theirs, "10.0.0.2"))
    with pytest.raises(WorkerError) as caught:
        _connect("10.0.0.2:6379", {}, "RAY_ADDRESS")
    ours = f"Ray {ray.__version__} on Python {platform.python_version()}"
    said = f"Ray cluster at 10.0.0.2:6379: got Ray 2.49.1 on Python 3.10.4, expected {ours}, as this process has."
    assert str(caught.value).startswith(said)


def test_variables_that_follow_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets stay with the driver: Ray shows the variables of a job."""
    followers = {
        "HF_HUB_OFFLINE",
        "PYTORCH_ALLOC_CONF",
        "TRITON_CACHE_DIR",
        "VLLM_USE_V1",
        "SGLANG_LOG_MS",
    }
    for name in (*followers, "HF_TOKEN", "WANDB_API_KEY", "SOMETHING_ELSE"):
        monkeypatch.setenv(name, "1")
    shown = forwarded_variables()
    assert followers <= shown.keys()
    assert not {"HF_TOKEN", "WANDB_API_KEY", "SOMETHING_ELSE"} & shown.keys()


def test_lines_of_rays_own_that_say_less_than_our_error() -> None:
    spilled = "Spilled 2 MiB"
    batch = {
        "pid": "raylet",
        "lines": ["[2026] [state-dump] NodeManager:", spilled, "A worker died or was killed while"],
    }
    _drop_noise(batch)
    assert batch["lines"] == [spilled]
