"""Make the kernel refuse system calls of a script, as sandboxes of containers do (seccomp)."""

import ctypes
import errno
import platform
import struct

import pytest

_NUMBERS = {
    "x86_64": {"clone": 56, "fallocate": 285, "memfd_create": 319, "pidfd_open": 434, "sched_getaffinity": 204},
    "aarch64": {"clone": 220, "fallocate": 47, "memfd_create": 279, "pidfd_open": 434, "sched_getaffinity": 123},
}
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_OFFSET_OF_NUMBER = 0

may_refuse = platform.machine() in _NUMBERS
needs_seccomp = pytest.mark.skipif(not may_refuse, reason="the numbers of system calls are not known here")


def refuse(*calls, error=errno.EPERM):
    """Make system calls fail with an error in this process and its later children."""
    program = [(_LOAD, 0, 0, _OFFSET_OF_NUMBER)]
    for call in calls:
        program += [(_JUMP_IF_EQUAL, 0, 1, _NUMBERS[platform.machine()][call]), (_RETURN, 0, 0, _ERRNO | error)]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    filters = ctypes.create_string_buffer(struct.pack("HL", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filters) == 0, ctypes.get_errno()
