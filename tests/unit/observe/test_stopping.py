# SPDX-License-Identifier: Apache-2.0
"""What the environment says of the machine's end, and what a signal asks for. tests/e2e has the runs."""

import math
import os
import signal
import threading

import pytest

from quadriga.errors import ConfigError
from quadriga.observe.stopping import EXPIRY_VARIABLES, expiry, stop_on_sigterm, stop_requested

MLP, SAGEMAKER = EXPIRY_VARIABLES


@pytest.mark.parametrize(
    ("environment", "second"),
    [
        ({}, math.inf),
        ({MLP: ""}, math.inf),
        ({MLP: "1700000000"}, 1.7e9),
        ({SAGEMAKER: "1800000000"}, 1.8e9),
        ({MLP: "1800000000", SAGEMAKER: "1700000000"}, 1.7e9),
    ],
)
def test_end_of_the_machine(
    environment: dict[str, str], second: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in EXPIRY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert expiry() == second


def test_names_that_providers_set() -> None:
    prefixes = {
        name.removesuffix("_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP")
        for name in EXPIRY_VARIABLES
    }
    assert prefixes == {"MLP", "SAGEMAKER"}


def test_end_that_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MLP, "tomorrow")
    with pytest.raises(
        ConfigError, match=rf"{MLP}: got 'tomorrow', expected a whole number of seconds"
    ):
        expiry()


def test_sigterm_is_a_request_inside(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_sigterm():
        assert not stop_requested.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_requested.is_set()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is before
    assert not stop_requested.is_set()
    assert "the run ends after this step" in capfd.readouterr().err


def test_contexts_may_end_in_any_order() -> None:
    before = signal.getsignal(signal.SIGTERM)
    older, newer = stop_on_sigterm(), stop_on_sigterm()
    older.__enter__()
    newer.__enter__()
    handler = signal.getsignal(signal.SIGTERM)
    older.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) is handler
    os.kill(os.getpid(), signal.SIGTERM)
    with stop_on_sigterm():
        pass
    assert not stop_requested.is_set()
    newer.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_in_a_fork_is_no_request() -> None:
    with stop_on_sigterm():
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        assert not stop_requested.is_set()


def test_other_threads_leave_signals_alone() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with stop_on_sigterm():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
