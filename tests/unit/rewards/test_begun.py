# SPDX-License-Identifier: Apache-2.0
"""Work in a thread of its own: its result, its error, and its end where nobody wants it."""

import threading

import pytest

from quadriga.rewards.begun import Begun


def test_it_works_meanwhile_and_its_result_is_kept():
    goes_on = threading.Event()
    begun = Begun(lambda: goes_on.wait(20), lambda: None, name="test")
    # It would wait in vain if it were not in another thread.
    goes_on.set()
    assert begun.result() is True and begun.result() is True


def test_its_error_is_raised_where_it_is_asked_for():
    begun = Begun(lambda: 1 // 0, lambda: None, name="test")
    with pytest.raises(ZeroDivisionError):
        begun.result()


def test_cancelling_waits_for_the_end_and_tells_no_error():
    is_given_up, has_ended = threading.Event(), []

    def work():
        is_given_up.wait(20)
        has_ended.append(True)
        raise ValueError("nobody reads this")

    Begun(work, is_given_up.set, name="test").cancel()
    assert has_ended == [True]
