"""Short time slices for the threads that pass tokens on. An engine that computes on every core may finish its slice, of
some milliseconds, when another thread wakes; one with a shorter slice runs at once. It gets no more of the processor by
that. Linux 6.12 and later know such slices; to all others this changes nothing."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

SLICE_NS = 100_000  # the least that the kernel takes
_NUMBER = {"x86_64": 314, "aarch64": 274, "riscv64": 274}  # of sched_setattr(2), which C libraries have only lately
_RESET_ON_FORK = 1  # nothing of this for the engine, should this thread start it


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def shorten() -> bool:
    """For the calling thread. Whether the kernel took it."""
    number = _NUMBER.get(platform.machine()) if sys.platform == "linux" else None
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _Attributes(ctypes.sizeof(_Attributes), os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, SLICE_NS, 0, 0)
    try:
        return int(ctypes.CDLL(None).syscall(number, 0, ctypes.byref(wanted), 0)) == 0
    except OSError:
        return False
