# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of parts of a run on Ray, on 2 and 4 ranks: a worker, the driver, a raylet, the head, everything.

A case is one run that is hit several times, at random moments of its steps and of its recoveries. While its driver
lives it must go on by itself; after the driver's end the same command is given again, once nothing is left of the
first: processes, shared memory, placement groups, the cluster's folder. Half of the cases have a cluster of their own;
the others join one of two nodes, which stays up for the case: its second node is killed, and another one comes.

Equal is what is equal in `kills`, and the fields that tell of recoveries aside.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

from campaigns import kills  # noqa: E402
from campaigns.campaign import Campaign, Outcome  # noqa: E402
from quadriga.descendants import shared_memory  # noqa: E402
from tests.e2e import conftest as tiny  # noqa: E402

NUM_STEPS, NUM_EVENTS, LIMIT_S, GONE_S = 40, 6, 240.0, 30.0
OWN = {"worker": 3, "driver": 1, "raylet": 1, "head": 4, "everything": 1}
JOINED = {"worker": 4, "driver": 2, "raylet": 2}
"""What is hit, and how often: of a run with a cluster of its own, and of one that has joined a cluster."""
TITLES = {"worker": "ray::WorkerProcess", "raylet": "raylet/raylet", "head": "gcs/gcs_server"}
QUIET = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
KEEPER = """
import sys
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
node = dict(num_cpus=8, include_dashboard=False, object_store_memory=100 * 2**20)
quick = dict(health_check_initial_delay_ms=0, health_check_period_ms=1000, prestart_worker_first_driver=False)
cluster = Cluster(initialize_head=True, head_node_args=dict(node, _system_config=quick))
# Addresses of their own: who joins here is on the head's node.
number = 2
second = cluster.add_node(**node, node_ip_address="127.0.0.2")
ray.init(address=cluster.address, log_to_driver=False)
print(cluster.address, flush=True)
for line in sys.stdin:
    if line == "raylet\\n":
        cluster.remove_node(second, allow_graceful=False)
        number += 1
        second = cluster.add_node(**node, node_ip_address=f"127.0.0.{number}")
    kept = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
    print("placement groups:", len(kept), flush=True)
"""


def titles(session: int) -> dict[int, str]:
    """The processes of a session that live."""
    found = {}
    for pid in tiny.members_of_session(session):
        try:
            found[pid] = (
                Path(f"/proc/{pid}/cmdline")
                .read_bytes()
                .partition(b"\0")[0]
                .decode(errors="replace")
            )
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


class BrokenError(Exception):
    """What was not as promised."""


class RayRun:
    """A run in `folder / "run"` that is hit, and started again where its driver has ended."""

    def __init__(
        self, folder: Path, files: Path, num_ranks: int, *overrides: str, is_joined: bool = False
    ) -> None:
        self.folder, self.sessions = folder, list[int]()
        # Ray's folder: short, for its sockets.
        self.ray_folder = Path(tempfile.mkdtemp(prefix="rk", dir="/tmp"))
        self.shared = set(os.listdir("/dev/shm"))
        self.environment = (
            os.environ | QUIET | {"RAY_TMPDIR": str(self.ray_folder), "PYTHONPATH": str(REPOSITORY)}
        )
        (folder / "tmp").mkdir(parents=True)
        # By the environment: the configuration of a run on a cluster of its own is that of one that joins.
        self.environment |= {
            "TMPDIR": str(folder / "tmp"),
            "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": "100000000",
        }
        self.keeper = self._start([sys.executable, "-c", KEEPER]) if is_joined else None
        if self.keeper and self.keeper.stdout:
            self.environment["RAY_ADDRESS"] = self.keeper.stdout.readline().strip()
        words = (
            *kills.COMMON,
            *kills.VARIANTS["grpo"],
            f"trainer.total_training_steps={NUM_STEPS}",
            *overrides,
        )
        more = (
            "trainer.backend=ray",
            f"trainer.n_gpus_per_node={num_ranks}",
            "trainer.max_ckpt_to_keep=2",
        )
        self.command = ["train", *tiny.command_line(files / "home", Path(), *words, *more)]

    def _start(self, line: list[str]) -> subprocess.Popen[str]:
        with open(self.folder / "log", "ab") as log:
            process = subprocess.Popen(
                tiny.with_the_tests(*line),
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if line[1] == "-c" else log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        return process

    def start(self) -> None:
        """Give the command."""
        self.driver = self._start([sys.executable, "-m", "quadriga.cli.main", *self.command])
        self.sessions.append(self.driver.pid)

    def ask_keeper(self, what: str) -> int:
        """Placement groups of the joined cluster that are there; with `raylet` its second node is killed before."""
        assert self.keeper and self.keeper.stdin and self.keeper.stdout
        self.keeper.stdin.write(f"{what}\n")
        self.keeper.stdin.flush()
        # Ray prints there too.
        for line in self.keeper.stdout:
            if line.startswith("placement groups: "):
                return int(line.split()[-1])
        raise BrokenError("the joined cluster's program has ended")

    def num_steps(self) -> int:
        """Lines of metrics.jsonl."""
        file = self.folder / "run" / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.is_file() else 0

    def text(self) -> str:
        """What the run has printed."""
        return (self.folder / "log").read_text(errors="replace")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until it holds, or the run has ended well; BrokenError where it ended otherwise, or after a long time."""
        deadline = time.monotonic() + LIMIT_S
        while self.driver.poll() is None and not condition():
            if time.monotonic() > deadline:
                raise BrokenError(f"no {what} within {LIMIT_S:g} s")
            time.sleep(0.01)
        if self.driver.poll() not in (None, 0):
            raise BrokenError(f"status {self.driver.returncode} while waiting for {what}")

    def hit(self, victim: str) -> None:
        """Kill it; after the end of the driver nothing may be left, and the command is given again."""
        if victim == "raylet" and self.keeper:
            self.ask_keeper("raylet")
        elif victim in TITLES:
            session = self.keeper.pid if self.keeper else self.driver.pid
            found = [
                pid for pid, title in sorted(titles(session).items()) if TITLES[victim] in title
            ]
            for pid in found[:1]:
                os.kill(pid, signal.SIGKILL)
        else:
            pids = (
                tiny.members_of_session(self.driver.pid)
                if victim == "everything"
                else [self.driver.pid]
            )
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.driver.wait()
            self.check_gone()
            self.start()

    def check_gone(self) -> None:
        """BrokenError unless all of the run is gone in time."""
        deadline = time.monotonic() + GONE_S
        while left := self.left():
            if time.monotonic() > deadline:
                raise BrokenError(f"left after {GONE_S:g} s: {left}")
            time.sleep(0.1)

    def left(self) -> list[str]:
        """What is there that a run which has ended should not leave."""
        left = [title for session in self.sessions for title in titles(session).values()]
        new = {Path("/dev/shm") / name for name in set(os.listdir("/dev/shm")) - self.shared}
        left += map(str, new - shared_memory(self.strangers()) if new else ())
        if self.keeper:
            left += [
                title for title in titles(self.keeper.pid).values() if TITLES["worker"] in title
            ]
            return [*left, "placement groups"] if self.ask_keeper("left") else left
        return [*left, *map(str, self.ray_folder.glob("ray/session_2*"))]

    def strangers(self) -> set[int]:
        """Processes of this machine that are not of this case: their environment does not name its folder."""
        mark, found = f"TMPDIR={self.folder / 'tmp'}".encode(), set[int]()
        for place in Path("/proc").glob("[0-9]*"):
            # It has ended.
            with suppress(OSError):
                if mark not in (place / "environ").read_bytes():
                    found.add(int(place.name))
        return found

    def end(self) -> None:
        """End all that was started."""
        if self.keeper:
            self.sessions.append(self.keeper.pid)
        for session in self.sessions:
            for pid in tiny.members_of_session(session):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self.driver.wait()
        if self.keeper:
            self.keeper.wait()
        shutil.rmtree(self.ray_folder, ignore_errors=True)


def prepare(files: Path) -> None:
    """Model, data, and the run left alone on 2 and on 4 ranks; again where the package has changed."""
    kills.prepare_once(files, __file__, run_alone)


def run_alone(files: Path, *overrides: str) -> None:
    """The run that nothing happens to, on 2 and on 4 ranks."""
    for num_ranks in (2, 4):
        alone = RayRun(files / f"alone_{num_ranks}", files, num_ranks, *overrides)
        try:
            alone.start()
            alone.wait(lambda: False, "end")
        finally:
            alone.end()


def run(number: int, folder: Path, files: Path) -> Outcome:
    """One run, hit `NUM_EVENTS` times."""
    draw, num_ranks, is_joined = random.Random(number), 2 + 2 * (number // 2 % 2), number % 2 == 0
    weights, events, downtimes = JOINED if is_joined else OWN, Counter[str](), list[float]()
    case, failure = RayRun(folder, files, num_ranks, is_joined=is_joined), ""
    try:
        case.start()
        for _ in range(NUM_EVENTS):
            # A step that loses workers twice is skipped, so that the next one is hit in a later step.
            wanted = case.num_steps() + draw.randint(3, 4)
            case.wait(lambda wanted=wanted: case.num_steps() >= wanted, f"step {wanted}")
            time.sleep(draw.uniform(0, 0.5))
            if case.driver.poll() is not None:
                break
            (victim,) = draw.choices(list(weights), list(weights.values()))
            start, reached = time.monotonic(), case.num_steps()
            case.hit(victim)
            events[victim] += 1
            if victim in TITLES:
                case.wait(
                    lambda reached=reached: case.num_steps() > reached, "step after a recovery"
                )
                downtimes.append(time.monotonic() - start)
        case.wait(lambda: False, "end")
        case.check_gone()
        if different := kills.difference(files / f"alone_{num_ranks}" / "run", folder / "run"):
            raise BrokenError(different)
    except BrokenError as error:
        failure = (
            f"{num_ranks} ranks, joined: {is_joined}, {dict(events)}: {error}; see {folder / 'log'}"
        )
    finally:
        case.end()
    figures = {"recovered_after_s": sum(downtimes) / len(downtimes)} if downtimes else {}
    return Outcome(dict(events), failure, figures)


CAMPAIGN = Campaign(
    what="On Ray, 2 and 4 ranks, own or joined cluster: SIGKILL of a worker, the driver, a raylet, a head, everything",
    promise="The run recovers, or resumes by the same command if the driver died, with undisturbed numbers; "
    "after 30 s no process, memory or folder is left",
    wanted={"": 40, "head": 10},
    run=run,
    cases=8,
    prepare=prepare,
)
