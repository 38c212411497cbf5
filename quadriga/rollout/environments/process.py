# SPDX-License-Identifier: Apache-2.0
"""The process of environments: the program that runs in it, and the driver's handle of it.

    driver                                     process
      | -- EnvironmentSpec ------------------> |  loads the environment's class
      | <- Description ----------------------- |  or the QuadrigaError that prevents it
      | -- (episode, "reset", (seed, row)) --> |  seeds the global random states of the episode
      | <- Step ------------------------------ |  or a traceback, a text
      | -- (episode, "step", (action,)) -----> |
      | -- (episode, "finish", ()) ----------> |  the episode's object is dropped afterwards
      | -- (episode, "drop", ()) ------------> |  no answer

A process has many episodes and works on one at a time. Each episode has its own copies of the global
random states, so that its texts do not depend on the other episodes of its process.

The process is a `quadriga.programs.SupervisedProgram`: a fresh interpreter, here with a fixed seed of
hashes. It does not load torch unless the environment does.
"""

import ctypes
import os
import random
import select
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from quadriga.errors import QuadrigaError, RolloutError, traceback_text
from quadriga.programs import SupervisedProgram
from quadriga.rewards.process import SAMPLE_BYTES, OutputPipe, OutputPrinter
from quadriga.rollout.agent_loop.tool_calls import truncate
from quadriga.rollout.environments.adapters import environment_maker
from quadriga.rollout.environments.interface import (
    Description,
    EnvironmentSpec,
    Step,
    TextEnvironment,
    finite_rewards,
    plain_value,
)

# Flags of Linux's `unshare`: a new namespace for users, and one for network interfaces.
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
# Events of Python's audit hooks by which a program reaches the network.
_NETWORK_EVENTS = frozenset({"socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"})


class EnvironmentProcess:
    """The driver's handle of a process of environments. One thread at a time uses it.

    Args:
        spec: the environment.
        printed: shows the output of environments, up to a limit.
    """

    def __init__(self, spec: EnvironmentSpec, printed: OutputPrinter) -> None:
        output_fd, program_output_fd = os.pipe()
        try:
            # A replay in another process must give the same texts. With another hash seed, a set of
            # texts would be iterated in another order.
            self._program = SupervisedProgram(__name__, program_output_fd, {"PYTHONHASHSEED": "0"})
        finally:
            os.close(program_output_fd)
        self._connection = self._program.connection
        self._output_fd = output_fd
        self._output = OutputPipe(output_fd, printed)
        # Waits for answers on the connection, and for output on the pipe.
        self._messages = select.poll()
        self._messages.register(self._connection, select.POLLIN)
        self._messages.register(output_fd, select.POLLIN)
        self.pid = self._program.process.pid
        self._connection.send(spec)

    def send(self, message: Any) -> None:
        """Send a message. If the process has ended, the next `receive` raises an EOFError."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(message)

    def receive(self, timeout_s: float) -> Any:
        """Wait for the next answer, and return it.

        Args:
            timeout_s: longest time to wait, in seconds.

        Raises:
            TimeoutError: there is no answer in time.
            EOFError: the process has ended.
        """
        # What the environment prints before each answer is shown up to this limit.
        self._output.num_bytes_left = SAMPLE_BYTES
        deadline = time.monotonic() + timeout_s
        while True:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            ready_fds = [fd for fd, _ in self._messages.poll(1000 * remaining_s)]
            # A full pipe would block the process, so its output is read while it works. `pass_on`
            # returns True at the end of the output.
            if self._output_fd in ready_fds and self._output.pass_on():
                self._messages.unregister(self._output_fd)
            if self._connection.fileno() in ready_fds:
                try:
                    return self._connection.recv()
                except OSError as error:
                    raise EOFError("the process has ended") from error

    def kill(self) -> None:
        """Kill the process, so that `receive` raises. Any thread may call this."""
        self._program.kill()

    def close(self, patience_s: float = 0.0) -> str:
        """End the process.

        Args:
            patience_s: time in which the process may end by itself before it is killed, in seconds.

        Returns:
            How the process ended, such as its exit status.
        """
        was_closed = self._connection.closed
        end = self._program.close(patience_s)
        # A second call must not close the file descriptor again: another file may have its number.
        if not was_closed:
            self._output.pass_on()
            os.close(self._output_fd)
        return end


def main(connection_fd: int) -> None:
    """Main function of the process: answer calls until the driver closes the connection."""
    connection = Connection(connection_fd)
    # These errors mean that the driver has ended, or has closed the connection.
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        spec: EnvironmentSpec = connection.recv()
        try:
            if not spec.has_network:
                leave_network()
            host = EpisodeHost(spec)
        except QuadrigaError as error:
            connection.send(error)
            return
        connection.send(host.description)
        _serve(connection, host)


def _serve(connection: Connection, host: "EpisodeHost") -> None:
    """Answer the calls of the driver, one after the other."""
    pid = os.getpid()
    while True:
        episode, method, arguments = connection.recv()
        if method == "drop":
            host.drop(episode)
            continue
        try:
            answer = host.call(episode, method, arguments)
        except (Exception, SystemExit) as error:
            answer = traceback_text(error)
        if os.getpid() != pid:
            # This is a child that the environment has forked. Only the parent answers.
            os._exit(0)
        connection.send(answer)


class EpisodeHost:
    """The episodes of this process, each with its own global random states.

    Args:
        spec: the environment.

    Raises:
        QuadrigaError: the environment cannot be loaded.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.spec = spec
        self._make = environment_maker(spec)
        # The first object serves no episode. It shows that objects can be made, and their tools.
        try:
            environment = self._make()
            self.description = Description(tuple(environment.schemas))
        except QuadrigaError:
            raise
        except (Exception, SystemExit) as error:  # users' code may raise anything
            raise RolloutError(
                f"environment {spec.name}",
                got=f"an object that cannot be made:\n{traceback_text(error)}",
                expected="a class that can be called with env.options",
            ) from error
        _discard(environment)
        # Both by number of the episode. The states are those after the last call.
        self._environments: dict[int, TextEnvironment] = {}
        self._random_states: dict[int, dict[str, Any]] = {}

    def call(self, episode: int, method: str, arguments: tuple[Any, ...]) -> Step:
        """Call a method of an episode's environment with the episode's random states.

        Args:
            episode: number of the episode; "reset" begins it, and "finish" ends it.
            method: "reset", "step", "sample" or "finish".
            arguments: arguments of the method, the seed first for "reset".

        Raises:
            Exception: whatever the environment raises, or a ValueError about what it returned.
        """
        if method == "reset":
            seed_global_states(arguments[0])
            self._environments[episode] = self._make()
        else:
            restore_global_states(self._random_states[episode])
        # The global random states are now as if this episode were alone in the process.
        step = getattr(self._environments[episode], method)(*arguments)
        self._random_states[episode] = global_states()
        if method == "finish":
            del self._environments[episode]
        return self._check_step(step)

    def drop(self, episode: int) -> None:
        """Discard an episode, which may have ended already."""
        environment = self._environments.pop(episode, None)
        if environment is not None:
            _discard(environment)
        self._random_states.pop(episode, None)

    def _check_step(self, step: Step) -> Step:
        """Check a step, shorten its texts, and convert its values to those that JSON can express.

        Raises:
            ValueError: the next agent or a reward is wrong.
        """
        num_agents = self.spec.num_agents
        if not step.is_done and step.agent not in range(num_agents):
            raise ValueError(f"agent {step.agent!r} is to act, expected one of {num_agents} agents")
        limit = self.spec.max_observation_length
        text = truncate(step.text, limit, "middle")
        info = plain_value(step.info)
        if isinstance(info.get("state"), str):
            info["state"] = truncate(info["state"], limit, "middle")
        # Half of a surrogate pair cannot be encoded in UTF-8, so it becomes a question mark.
        text = text.encode("utf-8", errors="replace").decode("utf-8")
        rewards = finite_rewards(step.rewards, num_agents)
        return replace(step, text=text, info=info, rewards=rewards)


def _discard(environment: TextEnvironment) -> None:
    """Free resources of an environment. An error is printed, because no call could raise it."""
    try:
        environment.discard()
    except Exception as error:
        print(traceback_text(error), file=sys.stderr, flush=True)


def seed_global_states(seed: int) -> None:
    """Seed the global random states of Python, and of numpy and torch if they are loaded."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def global_states() -> dict[str, Any]:
    """Global random states of Python, and of numpy and torch if loaded, by name of the module."""
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state()
    return states


def restore_global_states(states: Mapping[str, Any]) -> None:
    """Restore global random states.

    Args:
        states: states that `global_states` returned.
    """
    random.setstate(states["random"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])


def leave_network() -> None:
    """Take the network away from this process. This cannot be undone.

    Where the kernel allows it, the process gets a network namespace without interfaces. Everywhere,
    Python code that uses the network gets an error that says how to allow it.
    """
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    # Without CAP_SYS_ADMIN the process needs a new user namespace, too. A kernel that refuses both
    # leaves only the hook.
    if unshare(_CLONE_NEWNET) != 0:
        unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    sys.addaudithook(_refuse_network)


def _refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook that raises a PermissionError if code uses the network."""
    is_refused = event in _NETWORK_EVENTS
    if event in ("socket.connect", "socket.bind"):
        # Addresses of Unix sockets, which stay allowed, are texts or bytes.
        is_refused = not isinstance(arguments[1], str | bytes)
    if is_refused:
        raise PermissionError(
            f"{event}: environments have no network. Set env.network=True to allow it."
        )
