"""How late the system may wake a thread that sleeps."""

from __future__ import annotations

import ctypes

PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30
"""Of Linux's prctl, from its prctl.h."""


def wake_in_time() -> bool:
    """Has this thread woken when its sleeps end; whether the system can do so. Threads that it starts inherit that.

    Linux may add 50 us to each, so as to wake the processor less often: a sleep of 20 us took 85 us, and so 34 (a
    virtual machine). The engine sleeps between two looks at the step that it waits for.
    """
    try:
        prctl = ctypes.CDLL(None).prctl
    except (AttributeError, OSError):  # another system
        return False
    return prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0) == 0
