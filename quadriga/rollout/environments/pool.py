# SPDX-License-Identifier: Apache-2.0
"""A pool of environments: processes with time limits, whose loss costs no episode.

    conversation    await episode.step(reply) ──> Step
    a thread            └── leads one process: sends a call, waits for its answer, restarts it
    a process               └── works on the calls of its episodes in turn (process.py)

`episode.step` waits for earlier calls in the same process, and then at most `timeout_s` for its answer.

A process that dies is started again, and its episodes are replayed there: reset with the same seed,
then the same actions. If a call exceeds its time limit, its episode ends, the process is killed, and
the other episodes of the process are replayed. An episode also ends if the process dies three times
in the same call.
"""

import asyncio
import hashlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from quadriga.config.environment import EnvironmentConfig
from quadriga.errors import QuadrigaError, RolloutError
from quadriga.observe.metrics import Metric
from quadriga.rewards.outcome import Kind
from quadriga.rewards.process import LOADING_LIMIT_S, OutputPrinter
from quadriga.rollout.agent_loop.tool_calls import ToolFailedError
from quadriga.rollout.environments.interface import Action, Description, EnvironmentSpec, Step
from quadriga.rollout.environments.process import EnvironmentProcess

# Time for a process that has closed its connection to end by itself, so that it has an exit status.
_ENDING_S = 1.0
_MAX_DEATHS = 3  # deaths of processes in the same call, or before they have loaded the environment
# Events that are counted; they become metrics.
_COUNTS = ("restarts", "replayed_episodes", "raised", "timeouts", "died", "irreproducible")


class EnvironmentFailedError(ToolFailedError):
    """An environment failed; its episode ends.

    Attributes:
        kind: kind of the failure, as in `Outcome`.
    """

    reason = "environment_error"
    kind: Kind = "raised"


class EnvironmentPool:
    """Pool of processes that run environments.

    Args:
        config: the section `env`.
        num_shares: number of pools among which `env.num_processes` and
            `env.max_concurrent_episodes` are divided.
        is_graded_elsewhere: whether a score function or a reward model grades episodes that the
            environment does not reward.

    Attributes:
        config: the section `env`.
        is_graded_elsewhere: as in the arguments.
        description: what all episodes of the environment have in common.

    Raises:
        QuadrigaError: the environment cannot be loaded.
    """

    def __init__(
        self, config: EnvironmentConfig, num_shares: int = 1, *, is_graded_elsewhere: bool = False
    ) -> None:
        self.config = config
        self.is_graded_elsewhere = is_graded_elsewhere
        num_processes = config.num_processes or len(os.sched_getaffinity(0))
        self._counts = Counter[str]()
        self._printed = OutputPrinter("environments")
        self._numbers = count()  # of the episodes
        self._episode_slots: asyncio.Semaphore | None = None
        if config.max_concurrent_episodes is not None:
            self._episode_slots = asyncio.Semaphore(
                max(1, config.max_concurrent_episodes // num_shares)
            )
        spec = EnvironmentSpec(
            name=str(config.name),
            options=config.options,
            num_agents=config.num_agents,
            has_network=config.network or config.is_remote,
            max_observation_length=config.max_observation_length,
        )
        self._hosts = [
            _Host(spec, config.timeout_s, self._printed, self._counts)
            for _ in range(max(1, num_processes // num_shares))
        ]
        # All processes start now, but only the first one is awaited. If another one fails, its
        # first call raises the error.
        starts = [host.thread.submit(host.start) for host in self._hosts]
        try:
            self.description: Description = starts[0].result()
        except BaseException:
            self.close()
            raise

    @asynccontextmanager
    async def open(self, seed: int, row: Mapping[str, Any]) -> "AsyncIterator[Episode]":
        """Async context manager for an episode, in the process that has the fewest episodes.

        Args:
            seed: seed of `reset`.
            row: columns of the data row for `reset`.
        """
        async with self._episode_slots or nullcontext():
            host = min(self._hosts, key=lambda candidate: len(candidate.episodes))
            episode = Episode(host, next(self._numbers), seed, row)
            host.episodes.add(episode)
            try:
                yield episode
            finally:
                host.episodes.discard(episode)
                # Submitted to the host's thread, so that it runs after a call that is in progress.
                host.thread.submit(host.drop, episode)

    def take_metrics(self) -> dict[str, Metric]:
        """Failures and restarts since the last call, as metrics."""
        metrics = {}
        for name in _COUNTS:
            # `pop` reads and resets at once, because the threads of the hosts go on counting.
            metrics[f"env/{name}"] = Metric(self._counts.pop(name, 0), "sum")
        return metrics

    def close(self) -> None:
        """End all processes. A call in progress fails."""
        for host in self._hosts:
            host.close()
        self._printed.close()


@dataclass(eq=False)
class Episode:
    """An episode of an environment. Only one task at a time may use it."""

    host: "_Host"  # leads the process in which the episode runs
    number: int  # of the episode in the pool
    seed: int  # argument of `reset`
    row: Mapping[str, Any]  # argument of `reset`
    # Each call so far, for a replay: method, arguments, and hash of the answer.
    calls: list[tuple[str, tuple[Any, ...], str]] = field(default_factory=list)
    # Which of the host's processes has the episode: `_Host._num_starts` when it started. -1: none.
    generation: int = -1

    async def reset(self) -> Step:
        """Begin the episode. Errors are those of `step`."""
        return await self._call("reset", (self.seed, dict(self.row)))

    async def step(self, action: Action) -> Step:
        """Take an action.

        Raises:
            EnvironmentFailedError: the environment raised or was too late, its process died three
                times, or a replay gave other answers.
            QuadrigaError: the environment cannot be loaded.
        """
        return await self._call("step", (action,))

    async def sample(self, text: str, seed: int, reference: str) -> str:
        """Choose an action for an agent that is not a model. Errors are those of `step`.

        Args:
            text: observation of the agent.
            seed: seed of this action.
            reference: "random", or a function of the user.

        Returns:
            The action as text; see `TextEnvironment.sample`.
        """
        return (await self._call("sample", (text, seed, reference))).text

    async def finish(self) -> Step:
        """End the episode. No other call may follow. Errors are those of `step`."""
        return await self._call("finish", ())

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> Step:
        """Make a call in the thread of the host, and wait for its answer."""
        host = self.host
        return await asyncio.wrap_future(host.thread.submit(host.call, self, method, arguments))


class _Host:
    """A process of environments, and the thread of this process that sends it calls.

    All methods except `close` run in this thread.

    Args:
        spec: the environment.
        timeout_s: time limit of a call, in seconds.
        printed: shows the output of environments, up to a limit.
        counts: numbers of failures and restarts by name, shared by the hosts of a pool.

    Attributes:
        thread: the thread.
        episodes: open episodes of this host.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        timeout_s: float,
        printed: OutputPrinter,
        counts: Counter[str],
    ) -> None:
        self._spec = spec
        self._timeout_s = timeout_s
        self._printed = printed
        self._counts = counts
        # One thread, so that the process gets one call at a time.
        self.thread = ThreadPoolExecutor(1, "quadriga-environment")
        self._process: EnvironmentProcess | None = None
        self._description = Description()
        self._num_starts = 0  # processes started so far
        self._is_closed = False
        self.episodes: set[Episode] = set()

    def start(self) -> Description:
        """Start the process, unless it runs already.

        Returns:
            The description of the environment.

        Raises:
            RolloutError: the process ends, or does not answer, while it loads the environment.
            QuadrigaError: the environment cannot be loaded.
        """
        if self._process is not None:
            return self._description
        if self._is_closed:
            raise self._load_error("the pool is closed")
        end = ""  # how the process has ended
        for _ in range(_MAX_DEATHS):
            # The first start of the host is no restart.
            if self._num_starts > 0:
                self._counts["restarts"] += 1
            self._num_starts += 1
            self._process = EnvironmentProcess(self._spec, self._printed)
            try:
                answer = self._process.receive(LOADING_LIMIT_S)
            except TimeoutError as error:
                self._stop()
                raise self._load_error(str(error)) from error
            except EOFError:
                end = self._stop(_ENDING_S)
                continue
            if isinstance(answer, QuadrigaError):
                self._stop()
                raise answer
            self._description = answer
            return answer
        raise self._load_error(f"{end}, {_MAX_DEATHS} times")

    def _load_error(self, got: str) -> RolloutError:
        """Make the error of a process that has not loaded the environment.

        Args:
            got: what happened to the process.
        """
        return RolloutError(
            f"environment {self._spec.name}",
            got=f"a process that did not load it: {got}",
            expected="a process that starts",
            fix="Its output above may say why.",
        )

    def call(self, episode: Episode, method: str, arguments: tuple[Any, ...]) -> Step:
        """Make a call of an episode, after a replay if the process does not know the episode.

        Args:
            episode: the episode.
            method: name of the method of the environment.
            arguments: arguments of the method.

        Raises:
            EnvironmentFailedError: the environment raised or was too late, its process died three
                times, or a replay gave other answers.
            QuadrigaError: the environment cannot be loaded.
        """
        num_steps = [name for name, *_ in episode.calls].count("step")
        where = f"environment {self._spec.name}, {method} after {num_steps} steps"
        end = ""  # how the process has ended
        for _ in range(_MAX_DEATHS):
            self.start()
            try:
                if episode.generation != self._num_starts and episode.calls:
                    self._replay(episode)
                episode.generation = self._num_starts
                step = self._ask(episode, method, arguments, where)
            except EOFError:
                # The next round starts another process.
                end = self._stop(_ENDING_S)
                continue
            episode.calls.append((method, arguments, _digest(step)))
            return step
        got = f"a process that ended with {end}, {_MAX_DEATHS} times"
        raise self._count_failure("died", where, got, kind="died")

    def drop(self, episode: Episode) -> None:
        """Make the process forget an episode, unless the process has been replaced."""
        if self._process is not None and episode.generation == self._num_starts:
            self._process.send((episode.number, "drop", ()))

    def close(self) -> None:
        """End the process and the thread. Any thread may call this."""
        self._is_closed = True
        # `kill` ends the call in progress at once. The thread then runs `_stop`.
        if self._process is not None:
            self._process.kill()
        self.thread.submit(self._stop)
        self.thread.shutdown()

    def _replay(self, episode: Episode) -> None:
        """Repeat the calls of an episode in a new process.

        Raises:
            EnvironmentFailedError: a call failed, or its answer differs from the first time.
            EOFError: the process has ended.
        """
        self._counts["replayed_episodes"] += 1
        where = f"environment {self._spec.name}, replay after its process was lost"
        for method, arguments, digest in episode.calls:
            if _digest(self._ask(episode, method, arguments, where)) != digest:
                raise self._count_failure(
                    "irreproducible",
                    where,
                    f"another answer to {method} than before",
                    fix="Take randomness from the seed of `reset`, or from the global generators of"
                    " random, numpy and torch.",
                )

    def _ask(self, episode: Episode, method: str, arguments: tuple[Any, ...], where: str) -> Step:
        """Send a call to the process, and return its answer.

        Args:
            episode: the episode.
            method: name of the method of the environment.
            arguments: arguments of the method.
            where: the call, for errors.

        Raises:
            EnvironmentFailedError: the environment raised, or was too late.
            EOFError: the process has ended.
        """
        assert self._process is not None, "a host starts its process before a call"
        self._process.send((episode.number, method, arguments))
        try:
            answer = self._process.receive(self._timeout_s)
        except TimeoutError:
            # The next call starts another process, which replays its episode.
            self._stop()
            got = f"no answer within {self._timeout_s:g} s (env.timeout_s); its process was killed"
            raise self._count_failure("timeouts", where, got, kind="timeout") from None
        if isinstance(answer, str):  # the traceback of an error
            failure = self._count_failure("raised", where, answer.strip().splitlines()[-1])
            failure.details = f"{where}:\n{answer}"
            raise failure
        return answer

    def _count_failure(
        self, count_name: str, where: str, got: str, *, kind: Kind = "raised", fix: str = ""
    ) -> EnvironmentFailedError:
        """Count a failure, and make its error.

        Args:
            count_name: name of the count to increase, one of `_COUNTS`.
            where: the call.
            got: what happened instead of a step.
            kind: kind of the failure in `Outcome`.
            fix: advice. "": none.
        """
        self._counts[count_name] += 1
        failure = EnvironmentFailedError(where, got, expected="a step", fix=fix)
        failure.kind = kind
        return failure

    def _stop(self, patience_s: float = 0.0) -> str:
        """End the process.

        Args:
            patience_s: time in which the process may end by itself before it is killed, in seconds.

        Returns:
            How the process ended, such as "exit status 1"; "" if there was no process.
        """
        process = self._process
        self._process = None
        return "" if process is None else process.close(patience_s)


def _digest(step: Step) -> str:
    """Hash of a step, to compare answers of two processes."""
    return hashlib.blake2b(repr(step).encode(), digest_size=16).hexdigest()
