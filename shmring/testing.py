"""States of a ring that are hard to come by, on demand, for tests: ours and those of our users."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from shmring.layout import HEADER_LENGTH, MODE_DEFAULT, Kind, check_capacity
from shmring.ring import Ring
from shmring.segment import OwnedSegment

if TYPE_CHECKING:
    from shmring._fast import ProducerCore


def ring_at(name: str, capacity_bytes: int, start_position: int) -> Ring:
    """Make a ring whose positions start at `start_position`, a multiple of 8 below 2**64.

    Positions only grow; this is how to see one pass 2**32 or 2**64 without years of traffic.
    """
    if start_position % 8 or not 0 <= start_position < 2**64:
        raise ValueError(f"start_position is a multiple of 8 below 2**64: start_position={start_position}")
    capacity = check_capacity(capacity_bytes)
    return Ring(OwnedSegment(name, Kind.RING, capacity, mode=MODE_DEFAULT, start_position=start_position))


def fill(producer: ProducerCore, payload: bytes = b"x" * 57) -> int:
    """Push until the ring is full; return how many went in."""
    count = 0
    while producer.try_push(payload):
        count += 1
    return count


def damage(ring: Ring, offset: int, data: bytes) -> None:
    """Write `data` into the segment at `offset` from its start, as a faulty process would."""
    mapping = ring._segment.mapping
    limit = HEADER_LENGTH + mapping.capacity
    if not 0 <= offset <= limit - len(data):
        raise ValueError(f"outside the segment: offset={offset}, length={len(data)}, max={limit}")
    ctypes.memmove(mapping.header_address + offset, data, len(data))
