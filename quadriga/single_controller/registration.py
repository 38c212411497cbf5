# SPDX-License-Identifier: Apache-2.0
"""`@register`: a worker's method says how it is called when it is called on the whole group."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from typing import Any, TypeVar

from quadriga.errors import WorkerError
from quadriga.protocol import DataProtoFuture
from quadriga.single_controller.dispatch import Dispatch, DispatchFunctions

_ATTRIBUTE = "_quadriga_registration"
Method = TypeVar("Method", bound=Callable[..., Any])


class Execute(Enum):
    """Which ranks run the method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class Registration:
    """How a method is called on a group; the arguments of `register`."""

    dispatch_mode: Dispatch | DispatchFunctions
    execute_mode: Execute
    blocking: bool

    @property
    def mode_name(self) -> str:
        """The mode in an error message."""
        return (
            repr(self.dispatch_mode) if isinstance(self.dispatch_mode, Dispatch) else "a dispatch function of its own"
        )

    @property
    def is_rank_zero_only(self) -> bool:
        """Rank 0 alone gets the arguments, whole, and its output is the result."""
        return self.execute_mode is Execute.RANK_ZERO or self.dispatch_mode is Dispatch.RANK_ZERO


def _checked_mode(mode: Any) -> Dispatch | DispatchFunctions:
    if isinstance(mode, Mapping) and set(mode) == {"dispatch_fn", "collect_fn"}:
        return DispatchFunctions(**mode)
    if isinstance(mode, (Dispatch, DispatchFunctions)):
        return mode
    raise WorkerError(
        "@register: dispatch_mode",
        got=repr(mode),
        expected=f"one of {list(Dispatch)}, or a dictionary of dispatch_fn and collect_fn",
    )


def register(
    dispatch_mode: Dispatch | DispatchFunctions | Mapping[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Method], Method]:
    """Make a method of a worker callable on its group.

    Args:
        dispatch_mode: how arguments are split and outputs collected.
        execute_mode: with RANK_ZERO, rank 0 alone is called, with the arguments whole, and its output is
            the result; the dispatch mode has nothing to split then.
        blocking: whether the call on the group waits for the result, or returns a DataProtoFuture of it.
        materialize_futures: whether arguments that are futures are waited for before the method runs,
            in the worker; otherwise the method gets the futures.
    """
    mode = _checked_mode(dispatch_mode)
    if not isinstance(execute_mode, Execute):
        raise WorkerError("@register: execute_mode", got=repr(execute_mode), expected=f"one of {list(Execute)}")

    def decorate(method: Method) -> Method:
        registered = _with_futures_resolved(method) if materialize_futures else method
        setattr(registered, _ATTRIBUTE, Registration(mode, execute_mode, blocking))
        return registered

    return decorate


def _value(argument: Any) -> Any:
    return argument.get() if isinstance(argument, DataProtoFuture) else argument


def _with_futures_resolved(method: Any) -> Any:
    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def call_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await method(self, *map(_value, args), **{key: _value(value) for key, value in kwargs.items()})

        return call_async

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *map(_value, args), **{key: _value(value) for key, value in kwargs.items()})

    return call


def registration_of(worker_class: type, method_name: str) -> Registration | None:
    """How `method_name` was registered; None if it was not, or if there is no such method."""
    return getattr(getattr(worker_class, method_name, None), _ATTRIBUTE, None)


def registered_methods(worker_class: type) -> dict[str, Registration]:
    """All registered methods of a class, inherited ones included, by name."""
    found = {name: registration_of(worker_class, name) for name in dir(worker_class)}
    return {name: registration for name, registration in found.items() if registration is not None}
