# SPDX-License-Identifier: Apache-2.0
"""What every dispatch mode that takes a DataProto promises, for any number of rows and ranks.

A mode that is registered before the tests are collected and that honours auto padding (`mesh`)
is tested with the others.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.protocol import DataProto, deep_equal
from quadriga.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalWorkerGroup,
    ResourcePool,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

WITH_FUNCTION = Dispatch.DP_COMPUTE_PROTO_WITH_FUNC
ROW_MODES = [mode for mode in Dispatch if mode.mesh is not None]
MODES = [*ROW_MODES, make_nd_compute_dataproto_dispatch_fn("mesh")]


def label(data: DataProto) -> DataProto:
    """Two answers to each row, which tell its number; a metric that counts rows."""
    answers = data.select(["row"]).repeat(2)
    answers.batch["square"] = answers.batch["row"] ** 2
    answers.meta_info["metrics"] = {"rows": len(data)}
    return answers


def make_worker(mode: Dispatch, model_parallel: int) -> type[Worker]:
    class Labeller(Worker):
        def __init__(self) -> None:
            self.register_mesh("mesh", self.rank // model_parallel, self.rank % model_parallel == 0)

        @register(dispatch_mode=mode)
        def label(self, *args: object) -> DataProto:
            """Label the rows."""
            return args[0](args[1]) if mode is WITH_FUNCTION else label(args[0])

        @register(dispatch_mode=mode, blocking=False)
        def label_later(self, *args: object) -> DataProto:
            """Label the rows, as a future."""
            return self.label(*args)

    return Labeller


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name or "nd")
@settings(deadline=None, max_examples=20)
@given(
    rows=st.integers(0, 9),
    dp_size=st.integers(1, 4),
    model_parallel=st.integers(1, 2),
    auto_padding=st.booleans(),
    is_blocking=st.booleans(),
)
def test_the_result_does_not_depend_on_the_ranks(
    mode, rows, dp_size, model_parallel, auto_padding, is_blocking
) -> None:
    """Rows, their order and their number are those of one worker; shows nothing about real collectives."""
    worker_class = make_worker(mode, model_parallel)
    group = LocalWorkerGroup(
        ClassWithInitArgs(worker_class), ResourcePool([dp_size * model_parallel])
    )
    data = DataProto.from_dict(
        {"row": torch.arange(rows)},
        {"uid": list(range(rows))},
        {"step": 1},
        auto_padding=auto_padding,
    )
    args = (label, data) if mode is WITH_FUNCTION else (data,)
    result = group.label(*args) if is_blocking else group.label_later(*args).get()
    expected = label(data)
    assert deep_equal(dict(result.batch.items()), dict(expected.batch.items()))
    assert result.non_tensor_batch["uid"].tolist() == expected.non_tensor_batch["uid"].tolist()
    counted = sum(result.meta_info["metrics"]["rows"])
    assert counted >= rows and (auto_padding or counted == rows), (
        "without padding no row is seen twice"
    )
    assert len(data) == rows, "the caller's data stays as it was"
