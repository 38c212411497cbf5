# SPDX-License-Identifier: Apache-2.0
"""SGLang's server: what is asked of it before it is used, and what happens when it is gone."""

import os
import signal

import pytest

from quadriga.errors import RolloutError
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.sglang.connections import SGLangServer
from quadriga.rollout.sglang.engine import SGLangEngine


def test_what_the_server_says_of_itself(at_server: SGLangEngine) -> None:
    """Without an accelerator SGLang draws by no seed, and it is not pretended that it does."""
    assert not at_server.connection.has_seeds
    assert at_server.connection.num_processes == 1


def test_a_server_whose_limit_is_too_low(process) -> None:
    """It would cut answers."""
    with pytest.raises(RolloutError, match=r"--context-length 1008, expected .* more than 1008"):
        SGLangServer(process[0], max_model_len=1008)


def test_memory_is_given_back_and_taken_again(at_server: SGLangEngine) -> None:
    """The calls are the server's; how much memory they free shows on accelerators only."""
    at_server.can_sleep = True
    at_server.sleep()
    at_server.wake()
    at_server.can_sleep = False


@pytest.mark.parametrize("url", ["localhost:30000", "http://", ""])
def test_no_address(url: str) -> None:
    """An address without a scheme or a host."""
    with pytest.raises(RolloutError, match="expected an address"):
        SGLangServer(url, max_model_len=20)


def test_a_server_that_is_gone(at_server: SGLangEngine, process) -> None:
    """Its requests end with an error that names it."""
    url, running = process
    os.killpg(running.pid, signal.SIGKILL)
    running.wait(60)
    # An earlier test has put it to sleep. As if it had been given weights since:
    at_server.has_dropped_weights = False
    at_server.weight_version = 0
    with pytest.raises(RolloutError, match="does not answer") as caught:
        at_server.generate_batch([[5, 6]], [SamplingParams(max_tokens=3)])
    assert url in str(caught.value)
    with pytest.raises(RolloutError, match="does not answer"):
        SGLangServer(url, max_model_len=20)
