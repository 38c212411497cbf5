# SPDX-License-Identifier: Apache-2.0
"""A process group of one, and how tensors are put together to be sent; tests/numerics has groups of several."""

import socket

import pytest
import torch
import torch.distributed as dist

from quadriga.engines.process_group import ALONE, join, leave
from quadriga.errors import EngineError
from quadriga.single_controller import WorkerPlace


def test_a_process_alone_has_no_group() -> None:
    """And computes on its own device: models are put where the group says."""
    group = join(WorkerPlace(), torch.device("meta"))
    assert (group.size, group.device.type) == (1, "meta") and not dist.is_initialized()
    leave(group)


def test_a_process_alone_has_one_where_an_engine_needs_it() -> None:
    """Its roles share it, and the last one to leave ends it."""
    roles = [join(WorkerPlace(), torch.device("cpu"), also_alone=True) for _ in range(2)]
    for role in roles:
        assert dist.is_initialized() and role.totals(3) == [3]
        leave(role)
    assert not dist.is_initialized()


def test_a_meeting_place_that_is_taken_is_named() -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=rf"rank 0 of 2 at localhost:{port}: got .*in use"):
            join(WorkerPlace(0, 2, master_port=port), torch.device("cpu"))


def test_collectives_of_one_return_what_they_were_given() -> None:
    gradient = torch.arange(3.0)
    ALONE.add_up([gradient])
    ALONE.require_alike("weights", [gradient])
    assert gradient.tolist() == [0, 1, 2]
    assert ALONE.totals(3, 4) == [3, 4]
    assert ALONE.gather("x") == ["x"]
    assert ALONE.is_first
