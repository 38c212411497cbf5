# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of one node on this machine that all tests share, and commands that join it.

A process is connected to one cluster at a time. The tests' own process stays with `ray_cluster`, and runs with
`trainer.backend=ray` in it stay there (`train`). What concerns another cluster, or takes a second driver, runs as a
program of its own (`start_on`).

Starting processes is what these tests take their time for: one is started for many assertions.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

from quadriga.single_controller.ray.cluster import OWN_CLUSTER, keeping_sigterm_handler  # noqa: E402

QUIET = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="session", autouse=True)
def _quiet_ray() -> None:
    """Ray neither reports home nor asks for a token."""
    os.environ.update(QUIET)


@pytest.fixture(scope="module", autouse=True)
def _module_travels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Classes and functions of the test's file travel by value: worker processes cannot import it."""
    ray.cloudpickle.register_pickle_by_value(request.module)
    yield
    ray.cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(scope="session")
def ray_folder() -> Iterator[Path]:
    """Where Ray keeps its logs and sockets: a short path, for those of sockets are limited to 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_cluster(ray_folder: Path) -> Iterator[str]:
    """This process is the driver of a cluster of one node with 9 logical CPUs; gives its address."""
    # A job in the background ignores SIGINT, and so would whatever the workers start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with keeping_sigterm_handler(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        context = ray.init(
            address="local",
            num_cpus=9,
            include_dashboard=False,
            object_store_memory=256 * 2**20,
            log_to_driver=False,
            _temp_dir=str(ray_folder / "one"),
            _system_config=OWN_CLUSTER,
        )
    signal.signal(signal.SIGINT, before)
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the cluster with the last test of this folder: its idle processes would take time from the others."""
    if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
        ray.shutdown()


@pytest.fixture
def start_on(
    start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.Popen[str]]:
    """`start_on(address, *overrides, run="run")`: a command with `--ray`; address "": on a cluster of its own."""

    def run_apart(address: str, *overrides: str, run: str = "run") -> subprocess.Popen[str]:
        monkeypatch.setenv("RAY_ADDRESS", address)
        return start("trainer.backend=ray", *overrides, run=run)

    return run_apart
