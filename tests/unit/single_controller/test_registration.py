# SPDX-License-Identifier: Apache-2.0
"""`@register`: what it records, what it refuses, and what becomes of futures."""

import asyncio
import inspect

import pytest
import torch

from quadriga.errors import WorkerError
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.single_controller import Dispatch, Execute, Worker, register
from quadriga.single_controller.dispatch import registered_methods


class Reader(Worker):
    """Methods that tell what they were given."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read(self, data: DataProto, *, more: DataProto | None = None) -> list[type]:
        """Types of the arguments."""
        return [type(data), type(more)]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, materialize_futures=False, blocking=False)
    def forward(self, data: DataProto) -> type:
        """Type of the argument."""
        return type(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    async def read_async(self, data: DataProto) -> type:
        """Type of the argument."""
        return type(data)

    def plain(self) -> None:
        """Not registered."""


class Heir(Reader):
    """Inherits what is registered; an override has to say so again."""

    def forward(self, data: DataProto) -> type:
        """Overridden without a registration."""
        return type(data)


FUTURE = DataProtoFuture.concat([None], resolve=lambda handles: [DataProto.from_dict({"x": torch.ones(1)})])


def test_what_is_recorded() -> None:
    registered = registered_methods(Reader)
    forward = registered["forward"]
    assert forward.dispatch_mode is Dispatch.ONE_TO_ALL and not forward.blocking and not forward.is_rank_zero_only
    assert registered["read_async"].is_rank_zero_only
    assert {"read", "forward", "read_async"} <= set(registered) and "plain" not in registered
    assert "read" in registered_methods(Heir) and "forward" not in registered_methods(Heir)


def test_futures_are_resolved_in_the_worker() -> None:
    worker = Reader()
    assert worker.read(FUTURE, more=FUTURE) == [DataProto, DataProto]
    assert worker.forward(FUTURE) is DataProtoFuture
    assert asyncio.run(worker.read_async(FUTURE)) is DataProto


def test_the_method_keeps_its_face() -> None:
    assert Reader.read.__name__ == "read" and Reader.read.__doc__ == "Types of the arguments."
    assert list(inspect.signature(Reader.read).parameters) == ["self", "data", "more"]


def test_the_default_takes_one_entry_per_rank() -> None:
    @register()
    def method(self: Worker) -> None: ...

    registration = method._quadriga_registration
    assert registration.dispatch_mode is Dispatch.ALL_TO_ALL and not registration.is_rank_zero_only
    assert registration.blocking


def test_mistakes_are_met_where_the_class_is_written() -> None:
    for arguments in (
        {"dispatch_mode": "ONE_TO_ALL"},
        {"dispatch_mode": {"dispatch_fn": len}},
        {"execute_mode": "ALL"},
    ):
        with pytest.raises(WorkerError, match="@register"):
            register(**arguments)
