from __future__ import annotations

import ctypes
import sys
import threading

from jaxinfer.timer_slack import PR_GET_TIMERSLACK, wake_in_time


def test_a_thread_that_is_to_wake_in_time_is_given_no_slack():
    found: list[object] = []

    def look() -> None:  # in a thread of its own: the others of the tests keep theirs
        found.append(wake_in_time())
        if found[0]:
            found.append(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [True, 1] or (found == [False] and sys.platform != "linux")
