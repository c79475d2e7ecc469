"""What the C library does with memory that Python frees."""

from __future__ import annotations

import ctypes

# Parameters of glibc's mallopt, from its malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 256 * 2**20
"""Most freed memory at the end of a heap that stays with the process."""
MAX_KEPT_BLOCK_BYTES = 32 * 2**20
"""Blocks above this are the system's own again once they are freed. The most that glibc allows."""


def keep_freed_memory() -> bool:
    """Has freed memory stay with this process, for what is allocated next; whether the C library can do so.

    A prompt of 32,768 tokens is a body of 220 kB and arrays of 130 to 260 kB. glibc maps blocks of that size anew each
    time, or gives them back when several are freed together, and every 4 kB are a page fault at their first use: 1.7 us
    on a virtual machine, so that ten numpy operations on such arrays take 1.9 ms instead of 0.5.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAX_KEPT_BLOCK_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
