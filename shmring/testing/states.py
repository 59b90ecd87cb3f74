"""States of a ring that are hard to come by, made on demand."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import TYPE_CHECKING

from shmring.consumer import Consumer
from shmring.layout import HEADER_LENGTH, MODE_DEFAULT, Kind, check_capacity
from shmring.producer import Producer
from shmring.ring import Ring
from shmring.segment import OwnedSegment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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


def lose_producer(name: str, payloads: Sequence[bytes] = (), unpublished: Sequence[bytes] = ()) -> int:
    """Have a process take the producing end, publish `payloads`, write `unpublished`, and be killed.

    Returns its pid once it is gone. Forks: call it while this process has one thread.
    """

    def live() -> None:
        producer = Producer.attach(name)
        for payload in payloads:
            producer.push(payload)
        for payload in unpublished:
            producer.try_append(payload)
        _ends.append(producer)

    with _process(live) as pid:
        return pid


def lose_consumer(name: str, released: int = 0, drained: int = 0) -> int:
    """Have a process take the consuming end, pop `released` records, drain `drained`, and be killed.

    Waits for records that are not there yet. Returns its pid once it is gone. Forks, as above.
    """

    def live() -> None:
        consumer = Consumer.attach(name)
        for _ in range(released):
            consumer.pop()
        left = drained
        while left > 0:
            left -= len(consumer.drain_wait(left))
        _ends.append(consumer)

    with _process(live) as pid:
        return pid


@contextlib.contextmanager
def stuck_consumer(name: str) -> Iterator[int]:
    """Have a living process hold the consuming end and never read, while the block lasts.

    It is stopped (SIGSTOP), so nothing wakes it; it is killed at the end. Yields its pid. Forks,
    as above.
    """
    with _process(lambda: _ends.append(Consumer.attach(name))) as pid:
        os.kill(pid, signal.SIGSTOP)
        yield pid


_ends: list[Consumer | Producer] = []
"""What a child of ours holds until it is killed."""


@contextlib.contextmanager
def _process(live: Callable[[], None]) -> Iterator[int]:
    """Fork a child that does `live` and then holds still; it is killed at the end of the block."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            live()
            os.write(writer, b"+")
            while True:
                signal.pause()
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            os.write(writer, repr(error).encode()[:4000])
        finally:
            os._exit(1)
    os.close(writer)
    try:
        said = os.read(reader, 4096)
        if said != b"+":
            raise RuntimeError(f"the process could not do its part: error={said.decode()}")
        yield pid
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
