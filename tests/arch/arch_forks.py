# SPDX-License-Identifier: Apache-2.0
"""A rule about processes: where one is forked, or may be, there is a reason.

A forked child has the locks, the signal handlers and the memory of a process whose threads it does not have: it may
wait for a lock that nobody frees, or not notice SIGTERM. A process is started as a program of its own
(`quadriga.programs`), or by a context of `multiprocessing` that is chosen by name.
"""

import ast
from collections.abc import Iterator

from arch_tree import Source

# The places that may fork, "file:function", or the file where it is outside of functions, each with the reason.
MAY_FORK: dict[str, str] = {
    "quadriga/descendants.py:supervise": "a supervisor and its child: a new program with one thread splits in two",
    "quadriga/rewards/code/supervisor.py:Supervisor._start": "a new program with one thread; a copy runs each program",
    "tests/numerics/launching.py:lead_ranks": "ranks share the imports of a process that has one thread",
    "tests/rehearsal/faults/run.py:run_tests": "checks share the imports of a process that has one thread",
    "tests/unit/observe/test_stopping.py:test_sigterm_in_a_fork_is_no_request": "asks what a user's fork does",
    "tests/unit/observe/test_watchdog.py:test_waits_in_a_fork_are_reported": "asks what a user's fork does",
    "tests/unit/rewards/code/test_system_calls.py:attempt": "a filter of system calls stays with its process",
    "tests/unit/rewards/code/test_system_calls.py:test_where_another_listens_already_the_kernel_refuses_by_itself": (
        "a filter of system calls stays with its process"
    ),
    "tests/unit/trainer/test_checkpoint.py:test_a_file_that_may_not_be_read_is_damage": "it becomes another user",
    "tests/unit/trainer/test_run_lock.py:test_a_fork_that_leaves_by_an_error_takes_nothing_away": "asks about forks",
    "benchmarks/campaigns/damage.py:forked": "thousands of runs, which share the imports of this process",
    "benchmarks/campaigns/kills.py:Attempt.__init__": "thousands of runs, which share the imports of this process",
    "benchmarks/campaigns/user_code.py:_run": "hundreds of runs, which share the imports of this process",
}
_CLASSES = frozenset({"Process", "Pool", "ProcessPoolExecutor"})
_MODULES = frozenset({"multiprocessing", "torch.multiprocessing", "concurrent.futures"})


def fork_without_a_reason(source: Source) -> Iterator[str]:
    """A fork, or a start of processes that leaves it to the system whether it forks."""
    for name, line, what in forks(source):
        if name not in MAY_FORK:
            yield source.at(
                line, f"{what}; start a program (quadriga.programs), or give a reason in MAY_FORK"
            )


def forks(source: Source) -> Iterator[tuple[str, int, str]]:
    """Each place that forks or may: "file:function", the line, and what stands there."""
    owners = {}
    for name, function in source.functions():
        # An inner function comes after the one around it, so that the innermost owner stays.
        owners.update({id(node): f"{source.name}:{name}" for node in ast.walk(function)})
    origins = _origins(source.tree)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and (what := _fork_of(node, origins)):
            yield owners.get(id(node), source.name), node.lineno, what


def _origins(tree: ast.Module) -> dict[str, str]:
    """What the names of a file are that an import has made: `mp` is multiprocessing, `Pool` multiprocessing.Pool."""
    origins: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                origins[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                origins[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return origins


def _fork_of(call: ast.Call, origins: dict[str, str]) -> str:
    """What forks in a call, in words; empty where nothing does."""
    first, _, rest = ast.unparse(call.func).partition(".")
    called = ".".join(filter(None, (origins.get(first, first), rest)))
    module, _, name = called.rpartition(".")
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if called in ("os.fork", "os.forkpty"):
        return called
    if "preexec_fn" in keywords:
        return "preexec_fn, which runs in a fork"
    if module in _MODULES and name == "set_start_method":
        return "set_start_method, which decides for all users' code too"
    if module in _MODULES and name == "get_context":
        method = call.args[0] if call.args else keywords.get("method", ast.Constant(None))
        if isinstance(method, ast.Constant) and method.value in (None, "fork"):
            return f"get_context({method.value!r}), which forks on Linux"
    if module in _MODULES | {"concurrent.futures.process"} and name in _CLASSES:
        has_context = name == "ProcessPoolExecutor" and (
            len(call.args) > 1 or "mp_context" in keywords
        )
        return "" if has_context else f"{name} without a context by name"
    if name.endswith("DataLoader") and "multiprocessing_context" not in keywords:
        workers = keywords.get("num_workers", ast.Constant(0))
        has_workers = not isinstance(workers, ast.Constant) or workers.value != 0
        return f"{name} with workers and without multiprocessing_context" if has_workers else ""
    return ""
