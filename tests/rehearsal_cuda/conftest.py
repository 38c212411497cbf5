# SPDX-License-Identifier: Apache-2.0
"""The environment of scripts/install-rehearsal: a build of torch for CUDA, on a machine that needs no GPU."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quadriga.models import heads
from tests.rehearsal.devices import cuda_names
from tests.rehearsal.stand_in import StandIn

WORLD_SIZE = 64
aten = torch.ops.aten
_PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"}


class OneDtype(TorchDispatchMode):
    """Products need factors of one dtype, which fake tensors do not check."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in _PRODUCTS:
            dtypes = {one.dtype for one in tree_leaves(args) if isinstance(one, torch.Tensor)}
            assert len(dtypes) == 1, (
                f"{func._schema.name} with factors of {sorted(map(str, dtypes))}"
            )
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="session", autouse=True)
def devices() -> Iterator[None]:
    """What torch.cuda asks the driver for, devices, streams and events, is the stand-in's."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cuda_names(StandIn()).items():
            if name != "is_available":  # fake tensors then leave the driver alone
                patch.setattr(torch.cuda, name, value)
        patch.setattr(
            heads, "HAS_TRITON", False
        )  # a launch needs the driver; test_kernels.py compiles them
        yield


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    """Tensors without memory: shapes, dtypes and devices are computed, and a read by the host raises."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, OneDtype():
        yield mode


@pytest.fixture(scope="session")
def ranks() -> Iterator[None]:
    """This process is rank 0 of 64, which send nothing."""
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
    yield
    dist.destroy_process_group()
