# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in worker processes, on real Ray: one error on the driver that says it all, and nothing left over."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

import torch  # noqa: E402

import clumsy  # noqa: E402
from clumsy import Clumsy, error_of, is_gone, notes  # noqa: E402
from quadriga.descendants import start_time_of  # noqa: E402
from quadriga.errors import DataError, WorkerError  # noqa: E402
from quadriga.protocol import DataProto  # noqa: E402
from quadriga.single_controller.ray import (  # noqa: E402
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    calls,
    create_colocated_worker_cls,
)
from tests.e2e.conftest import with_the_tests  # noqa: E402
from tests.limits import NODES_LOST_S  # noqa: E402

pytestmark = pytest.mark.usefixtures("ray_cluster")


BREAKING = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
import ray
from ray.cluster_utils import Cluster
import clumsy
from quadriga.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, calls
from quadriga.single_controller.resource_pool import address_order

ray.cloudpickle.register_pickle_by_value(clumsy)
calls.LOOK_AT_NODES_S = 1.0
node = dict(num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20)
quick = dict(health_check_initial_delay_ms=0, health_check_period_ms=1000, prestart_worker_first_driver=False)
cluster = Cluster(initialize_head=True, head_node_args=dict(node, temp_dir={folder!r}, _system_config=quick))
second = cluster.add_node(**node, node_ip_address="127.0.0.2")
ray.init(address=cluster.address, log_to_driver=False)


def start(pool):
    group = RayWorkerGroup(pool, RayClassWithInitArgs(clumsy.Clumsy), name="actor")
    for address in group.processes.addresses:
        print("process", address.pid, int(address.started))
    return group


print("big", clumsy.error_of(lambda: RayResourcePool([5], name_prefix="big").bundles()))
three = RayResourcePool([1, 1, 1], name_prefix="three")
three.bundles()
three.close()
# The node of more free places would get two processes.
while ray.available_resources().get("CPU") != 8:
    time.sleep(0.05)
pool = RayResourcePool([2, 1])
group = start(pool)
places = group.execute_all("where")
nodes = sorted({{node["NodeManagerAddress"] for node in ray.nodes()}}, key=address_order)
print("pool", pool.process_on_nodes, "over", len({{node for _, node in places}}), "nodes")
seats = []
for place, node in places:
    rank = f"{{place.rank}}/{{place.world_size}}:{{place.local_rank}}/{{place.local_world_size}}"
    seats.append(f"{{rank}}@{{nodes.index(node) + 1}}")
print("seats", *seats)
print("master", group.processes.addresses[0].node == places[0][1] == places[2][0].master_addr)

started = group.start_all("sleep", [((600.0,), {{}})] * 3)
cluster.remove_node(second, allow_graceful=False)
print("first", clumsy.error_of(lambda: calls.resolve(started)))
group.shutdown()
group = start(RayResourcePool([1]))
started = group.start_all("sleep", [((600.0,), {{}})])
os.kill(cluster.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)
try:
    calls.resolve(started)
except clumsy.QuadrigaError as error:
    print("then", error, flush=True)
    group.shutdown()
    sys.exit(1)
"""


@pytest.fixture(scope="module", autouse=True)
def breaking_cluster(ray_folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The driver of a cluster of two nodes, with a group on both, that loses its second node, then its head.

    Most of its half minute is Ray's waiting, so it runs beside the other tests.
    """
    program = BREAKING.format(tests=str(Path(__file__).parent), folder=str(ray_folder / "lost"))
    command = with_the_tests(sys.executable, "-c", program)
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    yield driver
    if driver.poll() is None:
        driver.kill()
        driver.communicate()


@pytest.fixture(scope="module")
def told(breaking_cluster: subprocess.Popen[str]) -> list[str]:
    """The lines that it printed."""
    return breaking_cluster.communicate(timeout=NODES_LOST_S)[0].splitlines()


@pytest.fixture(scope="module", autouse=True)
def _workers_travel() -> Iterator[None]:
    """The worker's class travels by value: its module is not where the processes look for any."""
    ray.cloudpickle.register_pickle_by_value(clumsy)
    yield
    ray.cloudpickle.unregister_pickle_by_value(clumsy)


@pytest.fixture(scope="module")
def roles(ray_cluster: str) -> Iterator[dict[str, RayWorkerGroup[Clumsy]]]:
    """Three processes with an actor and a critic each; the critic of rank 1 cannot be built.

    No process is left afterwards.
    """
    pool = RayResourcePool([3])
    entries = {"actor": RayClassWithInitArgs(Clumsy), "critic": RayClassWithInitArgs(Clumsy, 1)}
    both = RayWorkerGroup(pool, create_colocated_worker_cls(entries))
    addresses = both.processes.addresses
    yield both.spawn({"actor", "critic"})
    both.shutdown()
    assert [
        address.pid for address in addresses if start_time_of(address.pid) == address.started
    ] == []
    pool.close()


@pytest.fixture
def group(roles: dict[str, RayWorkerGroup[Clumsy]]) -> RayWorkerGroup[Clumsy]:
    """The actors, which live on after each failure but those of the last tests."""
    return roles["actor"]


# ---- a worker raises ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("value", "ValueError: of rank 1"),
        ("unpicklable", "UnpicklableError: cannot be pickled"),
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt"),
    ],
)
def test_whatever_a_worker_raises_is_one_error_that_names_place_method_and_line(group, what, told):
    error = error_of(lambda: group.execute_all("raise_on_one", what))

    assert type(error) is WorkerError
    assert str(error).startswith("actor[rank 1/3 on ")
    assert " failed in raise_on_one: got " in str(error)
    assert told in str(error)
    assert "clumsy.py:" in str(error)
    assert "in Clumsy._raise" in str(error)
    assert error.worker.startswith("actor[rank 1/3 on ")
    assert len(group.execute_all("process")) == 3


def test_the_traceback_is_the_workers_own_from_its_method_on(group):
    trace = notes(error_of(lambda: group.execute_all("raise_on_one", "value")))

    files = [line for line in trace.splitlines() if line.startswith("  File ")]
    assert [line.rpartition(" ")[2] for line in files] == ["raise_on_one", "_raise"]
    assert trace.strip().endswith("ValueError: of rank 1")
    assert "ray" not in "".join(files).replace(str(Path(__file__).parent), "")


def test_an_error_of_ours_comes_as_its_own_type_with_the_place_in_front(group):
    error = error_of(lambda: group.execute_all("raise_on_one", "ours"))

    assert type(error) is DataError
    assert error.where.endswith("failed in raise_on_one: data/x.parquet")
    assert (error.got, error.expected, error.fix) == ("no rows", "some", "Add rows.")
    assert "in raise_on_one" in notes(error)


def test_a_coroutine_fails_like_any_method(group):
    error = error_of(lambda: group.execute_all("raise_in_coroutine"))

    assert "failed in raise_in_coroutine: got ValueError: of rank 1" in str(error)
    assert "asyncio" not in notes(error)


def test_the_error_has_the_shapes_of_the_ranks_own_arguments(group):
    data = DataProto.from_dict({"input_ids": torch.zeros(3, 5, dtype=torch.int64)})

    error = error_of(lambda: group.update(data))

    assert "loss is not finite" in str(error)
    assert "input_ids (1, 5) int64" in str(error) or "(1, 5)" in str(error)


def test_a_failure_that_travels_inside_a_future_still_names_the_worker_that_raised(group):
    error = error_of(lambda: group.consume(group.later()))

    assert str(error).startswith("actor[rank 1/3 on ")
    assert " failed in later: got ValueError: of rank 1" in str(error)


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (
            "lock",
            "output of actor.lock: got TypeError: cannot pickle '_thread.lock' object, expected a result that can be",
        ),
        ("numbers", "got a generator, expected an output. Return a list."),
    ],
)
def test_an_output_that_cannot_travel_is_said(group, method, told):
    error = error_of(lambda: group.execute_all(method))

    assert str(error).startswith("actor[rank ")
    assert told in str(error)


def test_a_worker_that_cannot_be_built_says_why_and_the_other_roles_of_the_processes_live_on(roles):
    critic = roles["critic"]
    for error in (
        error_of(lambda: critic.execute_all("process")),
        error_of(lambda: critic.later().get()),
    ):
        assert "critic[rank 1/3 on " in str(error)
        assert "failed in __init__: got FileNotFoundError: no model here" in str(error)
        assert "called with 1" in str(error)
    assert roles["actor"].execute_all("raise_on_one", "") == [
        f"rank {rank} is well" for rank in range(3)
    ]


# ---- a worker hangs -----------------------------------------------------------------------------


def until(sign: Path, is_told: Callable[[str], bool]) -> tuple[list[str], Callable[[str], None]]:
    """The reports of a wait, and where they go to; the first one that tells what it should gives the sign."""
    said: list[str] = []

    def emit(report: str) -> None:
        said.append(report)
        if is_told(report):
            sign.touch()

    return said, emit


def test_a_coroutine_that_waits_is_found_where_it_waits(group, tmp_path):
    said, emit = until(tmp_path / "sign", lambda report: "_wait_for" in report)

    calls.resolve(
        group.start_all("wait_for", [((str(tmp_path / "sign"),), {})] * 3),
        report_every_s=0.5,
        emit=emit,
    )

    assert "in Clumsy._wait_for" in said[-1]


def test_a_call_behind_another_one_says_so(group, tmp_path):
    said, emit = until(tmp_path / "sign", lambda report: "still in" in report)

    before = group.start_all("wait_for", [((str(tmp_path / "sign"),), {})] * 3)
    behind = group.start_all("process", [((), {})] * 3)
    calls.resolve(behind, report_every_s=0.5, emit=emit)

    assert "still in actor.wait_for for " in said[-1]
    calls.resolve(before)


def test_a_child_of_a_worker_can_be_interrupted(group):
    assert group.execute_all("interruptible_child") == [-signal.SIGINT] * 3


def test_processes_end_with_the_driver_that_started_them(ray_cluster):
    program = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import ray
ray.init(address={ray_cluster!r}, log_to_driver=False)
import clumsy
from quadriga.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
ray.cloudpickle.register_pickle_by_value(clumsy)
group = RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(clumsy.Clumsy), name="actor")
(worker,), (child,) = group.execute_all("process"), group.execute_all("start_child")
print("processes", *worker, child, flush=True)
time.sleep(600)
"""
    driver = subprocess.Popen(
        with_the_tests(sys.executable, "-c", program), stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    line = next(line for line in driver.stdout if line.startswith("processes "))
    worker, worker_start, child = map(int, line.split()[1:])

    driver.kill()
    driver.wait()

    assert is_gone(worker, worker_start)
    assert is_gone(child)


# ---- a node goes, the cluster goes --------------------------------------------------------------


def test_two_nodes(told):
    """Ranks stand in the order of the nodes' addresses; local ranks count on each node; rank 0's node is the master.

    Without places for all, it is said what each node has, or that fewer nodes are used than were wanted."""
    lines = dict(line.partition(" ")[::2] for line in told)
    assert lines["pool"] == "[2, 1] over 2 nodes", told
    assert lines["seats"].split() == ["0/3:0/2@1", "1/3:1/2@1", "2/3:0/1@2"]
    assert lines["master"] == "True"
    assert "pool big [5]" in lines["big"] and lines["big"].count("of 4 CPU free") == 2
    assert "1 CPU missing" in lines["big"]
    assert lines["notice:"].startswith(
        "resource pool three [1, 1, 1]: 3 nodes wanted (trainer.nnodes), 2 used, with [2"
    )


def test_a_lost_node_and_a_lost_head_are_each_one_sentence_and_the_end_of_all_processes(
    told, breaking_cluster
):
    lines = dict(line.partition(" ")[::2] for line in told)
    processes = [tuple(map(int, line.split()[1:])) for line in told if line.startswith("process")]

    assert {"first", "then"} <= lines.keys(), told
    assert re.match(
        r"actor\[rank \d/3 on 127\.0\.0\.2\] died in sleep: got its node is gone \(called with 600\.0\)",
        lines["first"],
    )
    assert lines["then"].startswith("Ray cluster at ")
    assert (
        "got no answer from its head while waiting for actor.sleep on 1 rank, expected"
        in lines["then"]
    )
    assert breaking_cluster.returncode == 1
    assert len(processes) == 4
    assert all(is_gone(pid, started) for pid, started in processes)


# ---- the end of the group of this file, in this order: no other test may use it behind these ---------


@pytest.fixture(scope="module")
def children(roles: dict[str, RayWorkerGroup[Clumsy]]) -> list[int]:
    """Processes that the workers, which meet first, have started."""
    roles["actor"].execute_all("join")
    return roles["actor"].execute_all("start_child")


def test_a_long_wait_says_who_has_answered_and_where_the_others_stand_and_an_error_ends_it_at_once(
    group, children, tmp_path
):
    """Ranks 0 and 2 hang in a collective for which rank 1 comes late, and then not at all."""
    said, emit = until(
        tmp_path / "sign", lambda report: "rank 1 at" in report and "in all_reduce" in report
    )

    started = group.start_all("add_up", [((str(tmp_path / "sign"), "value"), {})] * 3)
    error = error_of(lambda: calls.resolve(started, report_every_s=0.5, emit=emit))

    assert str(error).startswith("actor[rank 1/3 on ")
    assert "ValueError: of rank 1" in str(error)
    assert re.match(
        r"waiting \d+ s for actor.add_up on 3 ranks: no rank answered; not yet: ranks 0, 2 at ",
        said[-1],
    )
    assert "in Clumsy.add_up, inside torch/distributed/distributed_c10d.py:" in said[-1]
    assert re.search(r"; rank 1 at \S*clumsy\.py:\d+ in Clumsy\.add_up", said[-1])
    states = calls.ask_status(group.processes.actors, 5.0)
    assert [state.method if state else None for state in states] == ["add_up", "", "add_up"]


def test_a_process_that_ends_in_a_call_is_named_and_not_its_peers_in_the_collective(
    group, children, tmp_path
):
    """Its peers wait for it in this collective, and in the one of the test before."""
    error = error_of(lambda: group.execute_all("add_up", str(tmp_path), "signal"))

    assert str(error).startswith("actor[rank 1/3 on ")
    assert "died in add_up: got SIGSEGV (segmentation fault) at " in str(error)
    assert "in _raise" in str(error)
    assert "Fatal Python error: Segmentation fault" in notes(error)
    assert "actor[rank 0/3 on " in notes(error)
    assert "PeerLostError" in notes(error)
    assert is_gone(children[1])


def test_a_process_that_ends_without_a_word_or_between_calls_is_named(group):
    """One ends itself in a call; another is killed between calls, and found by the next one."""
    ends = [(("exit status",), {}), *[(("",), {})] * 2]
    # Rank 1 has died in the test before.
    error = error_of(lambda: calls.resolve(group.start_all("end", ends)[:1]))

    assert str(error).startswith("actor[rank 0/3 on ")
    word = "died in end: got it ended without a word, as after SIGKILL or os._exit() (called with "
    assert word in str(error)

    os.kill(group.processes.addresses[2].pid, signal.SIGKILL)
    error = error_of(lambda: calls.resolve(group.start_all("end", [(("",), {})] * 3)[2:]))

    assert str(error).startswith("actor[rank 2/3 on ")
    assert "SIGKILL" in str(error)
    assert "called with str" in str(error)
