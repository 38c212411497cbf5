# SPDX-License-Identifier: Apache-2.0
"""Why a process is gone, told from what Ray says and what the process left; the sentences of Ray's are real ones.

That Ray says them is shown where that is cheap, by tests/e2e/ray/test_failures.py; running out of memory is not.
"""

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError, RuntimeEnvSetupError

from quadriga.errors import PeerLostError, QuadrigaError, WeightSyncError, WorkerError
from quadriga.single_controller.ray.errors import (
    CrashLog,
    Failure,
    WorkerName,
    cause_of_death,
    crash_log,
    oom_kills,
)

OUT_OF_MEMORY = """1 worker(s) were killed due to the node running low on memory. Memory on the node \
(IP: 192.0.2.2, ID: 29abddaafc22) was 2.17GB used / 23.54GB limit (0.092225)
OOM kill reason: Memory usage 2331136000B exceeded threshold of 2325438976B (9.2% of 25276510208B limit)
Ray killed 1 worker(s) based on the killing policy
Considered workers: [
Selected to kill: (Actor(76c68f37): job ID=01000000, task name=A.__init__, pid=13773, actual memory used=1.21GB)
]
"""
OUT_OF_MEMORY_OF_OLD = """Task was killed due to the node running low on memory.
Memory on the node (IP: 10.0.62.231, ID: e5d953ef) where the task was running was 27.71GB / 28.80GB (0.962273), \
which exceeds the memory usage threshold of 0.95."""
END_OF_FILE = """The actor died unexpectedly before finishing this task.
\tclass_name: WorkerProcess
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed \
by the OOM killer due to high memory usage."""
EXIT_STATUS = """The actor died unexpectedly before finishing this task.
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker exits \
unexpectedly. Worker exits with an exit code 4."""
SIGTERM = """The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: \
Worker exits unexpectedly by a signal. SystemExit is raised (sys.exit is called). Exit code: 1. The process receives a \
SIGTERM."""
NODE_LOST = """The actor died unexpectedly before finishing this task.
The actor died because its node has died. Node Id: 6e041cd8
\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"""
KILLED_BY_RAY = "The actor is dead because it was killed by `ray.kill`."
OWNER_LOST = "The actor is dead because its owner has died. Owner Id: 0100 Owner worker exit type: SYSTEM_ERROR"

FATAL = """loading the model
Fatal Python error: Segmentation fault

Thread 0x00007f99a6ebd6c0 (most recent call first):
  File "/code/kernels.py", line 16 in launch
  File "/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f9bc55efb80 (most recent call first):
  File "{current}", line 1069 in main_loop

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
:actor_name:actor[1]
"""


def died(text: str) -> RayError:
    """The error that Ray raises for a process that is gone, with its sentence."""
    error = ActorDiedError()
    error.error_msg = text
    return error


def got(error: RayError, left: CrashLog | None = None, oom_kills_before: int = 0) -> str:
    """The cause in a few words."""
    return cause_of_death(error, left or CrashLog(), oom_kills_before, 13773)[0]


def test_rays_own_out_of_memory_gives_the_sizes_of_node_and_process():
    cause, fix = cause_of_death(OutOfMemoryError(OUT_OF_MEMORY), CrashLog(), 0, 13773)

    assert cause == (
        "out of memory: 2.17GB of the node's 23.54GB were in use, 1.21GB by this process; "
        "Ray killed it to save the node"
    )
    assert "lower the micro-batches" in fix
    assert (
        "by this process"
        not in cause_of_death(OutOfMemoryError(OUT_OF_MEMORY), CrashLog(), 0, 1)[0]
    )


def test_an_older_rays_sentence_is_understood_and_a_call_after_the_death_too():
    assert got(OutOfMemoryError(OUT_OF_MEMORY_OF_OLD)).startswith(
        "out of memory: 27.71GB of the node's 28.80GB"
    )
    assert got(died(OUT_OF_MEMORY)).startswith("out of memory: 2.17GB of the node's 23.54GB")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (END_OF_FILE, "it ended without a word, as after SIGKILL or os._exit()"),
        (EXIT_STATUS, "exit status 4"),
        (SIGTERM, "SIGTERM"),
        (NODE_LOST, "its node is gone"),
        (KILLED_BY_RAY, "killed with ray.kill, as when its group is closed"),
        (OWNER_LOST, "ended because the driver, or the worker that started it, is gone"),
        ("The sky fell.\nOn its head.", "The sky fell."),
    ],
)
def test_each_of_rays_sentences_is_said_shortly(text, told):
    assert got(died(text)) == told


def test_an_environment_that_cannot_be_made_is_said():
    assert got(RuntimeEnvSetupError("pip failed")).startswith("no environment for the process: ")


def test_a_process_that_cannot_be_set_up_gives_the_last_word_of_rays_story():
    error = died("The actor died because of an error raised in its creation task, ray::WorkerProcess.__init__()\n"
                 "  At least one of the input arguments could not be computed:\n"
                 "ModuleNotFoundError: No module named 'quadriga'\n")  # fmt: skip
    error._actor_init_failed = True

    assert (
        got(error)
        == "the process could not be set up: ModuleNotFoundError: No module named 'quadriga'"
    )


def test_the_kernel_is_named_if_it_killed_something_for_memory_since_the_process_started():
    assert got(died(END_OF_FILE), CrashLog(oom_kills=3), 3).startswith("it ended without a word")
    assert (
        got(died(END_OF_FILE), CrashLog(oom_kills=4), 3)
        == "killed by the kernel while the node was out of memory"
    )


def test_the_signal_and_the_place_come_from_the_fault_handler(tmp_path):
    log = tmp_path / "worker.err"
    log.write_text(FATAL.format(current="/code/train.py"))
    here = crash_log(str(log))
    log.write_text(FATAL.format(current=pytest.__file__))
    in_library = crash_log(str(log))

    assert (
        got(died(END_OF_FILE), here)
        == "SIGSEGV (segmentation fault) at /code/train.py:1069 in main_loop"
    )
    assert (
        got(died(END_OF_FILE), in_library)
        == "SIGSEGV (segmentation fault) at /code/kernels.py:16 in launch"
    )
    assert "loading the model" in here.last_lines
    assert not [
        line for line in here.last_lines if line.startswith((":actor_name", "Extension modules"))
    ]


def test_the_last_lines_are_few_unless_the_fault_handler_wrote_more(tmp_path):
    log = tmp_path / "worker.err"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    assert crash_log(str(log)).last_lines == tuple(f"line {number}" for number in range(80, 100))

    log.write_text(
        "before\n" * 50
        + "Fatal Python error: Aborted\n"
        + '  File "/code/a.py", line 1 in f\n' * 40
    )
    lines = crash_log(str(log)).last_lines
    assert (len(lines), lines[0]) == (41, "Fatal Python error: Aborted")


def test_a_log_that_is_not_there_is_no_error(tmp_path):
    assert crash_log(str(tmp_path / "none")).last_lines == ()


def test_the_kernels_count_is_read_where_there_is_one(tmp_path):
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 12\noom_kill 7\n")

    assert oom_kills(vmstat) == 7
    assert oom_kills(tmp_path / "none") == 0


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:3: Connection reset by peer"


@pytest.mark.parametrize(
    ("error", "cause", "expected"),
    [
        (RuntimeError(GLOO), None, PeerLostError),
        (
            WeightSyncError("engine", got="it rejected the weights"),
            RuntimeError(GLOO),
            PeerLostError,
        ),
        (
            WeightSyncError("engine", got="it rejected the weights"),
            RuntimeError("mat1 and mat2"),
            WeightSyncError,
        ),
        (RuntimeError("mat1 and mat2 shapes"), None, WorkerError),
        (ConnectionResetError("Connection reset by peer"), None, WorkerError),
    ],
)
def test_a_collective_that_another_process_left(
    error: Exception, cause: Exception | None, expected: type[QuadrigaError]
) -> None:
    """Wherever it was, the death is the cause to look for, and the run can go on; a user's own error ends it."""
    error.__cause__ = cause
    raised = Failure.of(error, WorkerName("actor", 1, 2), "publish_weights", "", 0.1).as_error()
    assert type(raised) is expected
    assert "publish_weights" in str(raised)
