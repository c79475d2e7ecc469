"""A filter of system calls for the sandbox, as the classic BPF program that seccomp takes.

It closes what namespaces and resource limits leave open: memory that belongs to no address space (memfd, System V
segments, a tmpfs that is mounted in a user namespace of one's own) and socket families that no network namespace holds
(vsock reaches the host of a virtual machine).
"""

from __future__ import annotations

import errno
import struct
from typing import NamedTuple

# include/uapi/linux/bpf_common.h and filter.h
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# include/uapi/linux/seccomp.h: struct seccomp_data and the actions
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_X32_BIT = 0x40000000
_NEW_NAMESPACES = 0x7E020000
"""The CLONE_NEW* flags of clone: mount, cgroup, uts, ipc, user, pid, net."""
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6: all that the network namespace confines."""


class _Machine(NamedTuple):
    """System call numbers of one architecture; those from 424 on are the same everywhere."""

    audit_arch: int
    has_x32: bool
    clone: int
    socket: int
    refused: tuple[int, ...]


_EVERYWHERE = (425, 428, 429, 430, 432, 433, 442, 447)
"""io_uring_setup, open_tree, move_mount, fsopen, fsmount, fspick, mount_setattr, memfd_secret."""
_CLONE3 = 435

# In both: memfd_create, shmget, msgget, semget, mq_open, unshare, setns, mount, umount2, pivot_root, bpf,
# perf_event_open, add_key, request_key, keyctl, userfaultfd, ptrace.
_MACHINES = {
    "x86_64": _Machine(
        0xC000003E,
        True,
        56,
        41,
        (319, 29, 68, 64, 240, 272, 308, 165, 166, 155, 321, 298, 248, 249, 250, 323, 101, *_EVERYWHERE),
    ),
    "aarch64": _Machine(
        0xC00000B7,
        False,
        220,
        198,
        (279, 194, 186, 190, 180, 97, 268, 40, 39, 41, 280, 241, 217, 218, 219, 282, 117, *_EVERYWHERE),
    ),
}


def program(machine: str) -> bytes:
    """The filter for a machine as `platform.machine()` names it. LookupError for one whose calls are not known here.

    clone3 has its flags in memory, which a filter cannot read: it is said not to exist, and libraries then use clone.
    """
    if machine not in _MACHINES:
        raise LookupError(f"no filter of system calls for {machine!r}; there are filters for {', '.join(_MACHINES)}")
    calls = _MACHINES[machine]
    code = [
        _op(_LOAD, _ARCH_AT),
        _op(_JUMP_EQUAL, calls.audit_arch, 1, 0),
        _op(_RETURN, _KILL_PROCESS),
        _op(_LOAD, _NUMBER_AT),
    ]
    if calls.has_x32:
        code += [_op(_JUMP_AT_LEAST, _X32_BIT, 0, 1), _refuse(errno.ENOSYS)]
    for number in calls.refused:
        code += [_op(_JUMP_EQUAL, number, 0, 1), _refuse(errno.EPERM)]
    code += [_op(_JUMP_EQUAL, _CLONE3, 0, 1), _refuse(errno.ENOSYS)]
    code += [
        _op(_JUMP_EQUAL, calls.clone, 0, 4),
        _op(_LOAD, _FIRST_ARGUMENT_AT),
        _op(_JUMP_SET, _NEW_NAMESPACES, 0, 1),
        _refuse(errno.EPERM),
        _op(_RETURN, _ALLOW),
    ]
    code += [_op(_JUMP_EQUAL, calls.socket, 0, 2 + len(_FAMILIES)), _op(_LOAD, _FIRST_ARGUMENT_AT)]
    left = len(_FAMILIES)
    for family in _FAMILIES:
        code.append(_op(_JUMP_EQUAL, family, left, 0))
        left -= 1
    code += [_refuse(errno.EAFNOSUPPORT), _op(_RETURN, _ALLOW)]
    return b"".join(code)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(error: int) -> bytes:
    return _op(_RETURN, _ERRNO | error)
