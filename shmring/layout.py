"""The layout of a segment as Python needs it: names, sizes, roles. C's `layout.h` is the norm.

Names live in one flat folder that every program shares, so ours start with a prefix, and a
fresh segment is built under a temporary name until it is whole.
"""

from __future__ import annotations

import re
from enum import IntEnum

from shmring.errors import BadCapacityError, BadNameError

NAME_PREFIX = "shmring."
TEMPORARY_PREFIX = "shmring.~"
#: Bytes; NAME_MAX is 255 on Linux, less our prefix, less room for a suffix of a deployment's rings.
NAME_LENGTH_MAX = 200
PAGE_LENGTH = 4096
HEADER_LENGTH = 4096
CAPACITY_MAX = 1 << 40
MODE_DEFAULT = 0o600

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")


class Role(IntEnum):
    """What a process can be to a segment; the value is the byte whose lock says so."""

    OWNER = 0
    """Made it and will remove it. Taken before the segment has a name, never by anybody else after."""
    PRODUCER = 1
    CONSUMER = 2
    REMOVER = 3
    """Is taking a dead owner's leftover away: one at a time, and never in the owner's guise."""


class Kind(IntEnum):
    """What a segment holds."""

    RING = 1
    BLOB = 2


def check_name(name: str) -> str:
    """Return `name`, or raise BadNameError that says what is wrong with it."""
    if not isinstance(name, str):
        raise BadNameError(f"name is a str: name={name!r}")
    if len(name.encode("utf-8", "surrogatepass")) > NAME_LENGTH_MAX:
        raise BadNameError(f"name is too long: length={len(name)}, max={NAME_LENGTH_MAX}")
    if not _NAME.match(name):
        raise BadNameError(
            f"name may hold letters, digits, '_', '-', '.' and starts with none of '-.': name={name!r}"
        )
    return name


def check_capacity(capacity_bytes: int) -> int:
    """Return `capacity_bytes`, or raise: it is a power of two from one page to 2**40."""
    if isinstance(capacity_bytes, bool) or not isinstance(capacity_bytes, int):
        raise TypeError(f"capacity_bytes is an int: capacity_bytes={capacity_bytes!r}")
    if not PAGE_LENGTH <= capacity_bytes <= CAPACITY_MAX:
        raise BadCapacityError(
            f"capacity is out of range: capacity_bytes={capacity_bytes}, "
            f"min={PAGE_LENGTH}, max={CAPACITY_MAX}"
        )
    if capacity_bytes & (capacity_bytes - 1):
        raise BadCapacityError(
            f"capacity is a power of two: capacity_bytes={capacity_bytes}, "
            f"next={1 << capacity_bytes.bit_length()}"
        )
    return capacity_bytes


def check_mode(mode: int) -> int:
    """Return `mode`, or raise: permission bits only."""
    if isinstance(mode, bool) or not isinstance(mode, int):
        raise TypeError(f"mode is an int: mode={mode!r}")
    if not 0 <= mode <= 0o777:
        raise ValueError(f"mode is permission bits: mode={mode:#o}, max=0o777")
    return mode
