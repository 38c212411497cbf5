# SPDX-License-Identifier: Apache-2.0
"""Several engines of one process, each in processes of its own, started together and asked as one."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from quadriga.rollout import Balancer, RolloutEngine

E = TypeVar("E", bound=RolloutEngine)
_THREADS = "OMP_NUM_THREADS"


def started(makers: Sequence[Callable[[], E]]) -> list[E]:
    """The engines, made one after the other; where one does not start, those before it are closed.

    Several divide the threads that this process has: their processes find their share in the environment.
    """
    engines: list[E] = []
    with _threads_for_each(len(makers)):
        try:
            for make in makers:
                engines.append(make())
        except BaseException:
            for engine in engines:
                engine.close()
            raise
    return engines


def as_one(engines: Sequence[RolloutEngine]) -> RolloutEngine:
    """The engine, or what balances requests over several."""
    return engines[0] if len(engines) == 1 else Balancer(engines)


@contextmanager
def _threads_for_each(count: int) -> Iterator[None]:
    before = os.environ.get(_THREADS)
    if count > 1:
        threads = int(before) if before and before.isdecimal() else torch.get_num_threads()
        os.environ[_THREADS] = str(max(1, threads // count))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_THREADS, None)
        else:
            os.environ[_THREADS] = before
