# SPDX-License-Identifier: Apache-2.0
"""Starting a group's processes on Ray, without Ray: what is said of a node that starts none."""

from typing import NoReturn

import pytest
import ray
from ray.exceptions import GetTimeoutError, NodeDiedError, RayError

from quadriga.errors import WorkerLostError
from quadriga.single_controller.ray import group


@pytest.mark.parametrize(
    "error", [GetTimeoutError("Get timed out: some object(s) not ready."), NodeDiedError("gone")]
)
def test_node_that_starts_no_process(error: RayError, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node is named, and the run may go on elsewhere."""

    def fail(*args: object, **kwargs: object) -> NoReturn:
        raise error

    nodes = [{"NodeID": "a", "NodeManagerAddress": "10.0.0.7"}]
    monkeypatch.setattr(group, "run_on_node", fail)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    with pytest.raises(WorkerLostError, match=r"first process on node 10\.0\.0\.7: got") as raised:
        group._num_cores_of("a")
    assert type(error).__name__ in str(raised.value)
    assert "within 600 s" in str(raised.value)
