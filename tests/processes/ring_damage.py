"""Run by test_ring_damage in a process of its own: damages a ring byte by byte and uses it.

Arguments: the ring's name, what to damage, and a file that always holds the case being tried.
Ends with 0 if every use gave an error of ours or what it would have given anyway.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
from typing import TYPE_CHECKING

import shmring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEADER_USED = 0x700
DATA = 4096
SENT = [b"first", b"second record", b"", b"4" * 100]
PUBLISHED = sum((len(p) + 15) & ~7 for p in SENT)
VALUES = (0x00, 0x01, 0x07, 0x7F, 0x80, 0xFF)


class Damage:
    """A ring, its bytes as they were, and the case at hand."""

    def __init__(self, name: str, log: int) -> None:
        self.log = log
        self.ring = shmring.create(name, 4096)
        self.address = self.ring._segment.mapping.header_address
        self.fresh = ctypes.string_at(self.address, DATA + 512)

    def restore(self) -> None:
        ctypes.memmove(self.address, self.fresh, len(self.fresh))

    def set(self, offset: int, value: int) -> None:
        os.pwrite(self.log, f"offset={offset:#06x} value={value:#04x}\n".encode(), 0)
        ctypes.memset(self.address + offset, value, 1)

    def get(self, offset: int) -> int:
        return ctypes.string_at(self.address + offset, 1)[0]


def allowed(act: Callable[[], object]) -> object:
    """What it returned, or None for an error of ours: anything else ends this process."""
    try:
        return act()
    except shmring.ShmringError:
        return None


def use(
    producer: shmring.Producer, consumer: shmring.Consumer, expected: list[bytes], *, is_true: bool
) -> None:
    """Everything that a program does with a ring. What is read is what was sent, and in order.

    A record whose own header was damaged may be another record now, but never more than was
    published: then `is_true` is false.
    """
    allowed(producer.free_bytes)
    allowed(consumer.backlog_bytes)
    allowed(consumer.snapshot_tail)
    for end in (producer, consumer):
        allowed(end.peer_state)
        allowed(end.statistics)
    allowed(lambda: producer.try_push(b"5 pushed after the damage"))
    expected = [*expected, b"5 pushed after the damage"]
    records = allowed(lambda: consumer.drain(3)) or []
    assert sum(len(bytes(r)) for r in records) <= PUBLISHED + 40
    assert not is_true or [bytes(r) for r in records] == expected[: len(records)]
    allowed(consumer.release)
    got = allowed(consumer.try_pop)
    assert not is_true or got is None or got == expected[len(records)]
    with contextlib.suppress(shmring.ShmringError):
        while consumer.try_pop() is not None:
            pass
    allowed(lambda: shmring.wait_any([consumer], 0))
    allowed(lambda: producer.wait_until_writable(4088, 0))
    allowed(lambda: consumer.pop(0))
    allowed(lambda: producer.push(b"x" * 4000, 0))
    with contextlib.suppress(shmring.ShmringError):
        for _ in range(600):
            if not producer.try_push(b"x"):
                break


def attached(damage: Damage, offsets: Iterator[int], values: tuple[int, ...]) -> int:
    """Damage comes while both ends are at work."""
    count = 0
    for offset in offsets:
        for value in values:
            damage.restore()
            with damage.ring.producer() as producer, damage.ring.consumer() as consumer:
                for payload in SENT:
                    producer.try_push(payload)
                assert consumer.try_pop() == SENT[0]
                if value == damage.get(offset):
                    continue
                damage.set(offset, value)
                use(producer, consumer, SENT[1:], is_true=offset < DATA)
                count += 1
    return count


def before_attach(damage: Damage, offsets: Iterator[int], values: tuple[int, ...]) -> int:
    """Damage was there when the ends came."""
    count = 0
    for offset in offsets:
        for value in values:
            damage.restore()
            with damage.ring.producer() as producer:
                for payload in SENT:
                    producer.try_push(payload)
            if value == damage.get(offset):
                continue
            damage.set(offset, value)
            allowed(lambda: shmring.read_statistics(damage.ring.name))
            if offset % 16 == 0:  # it looks at everybody's rings, and takes its time
                assert [i for i in shmring.list_rings() if i.name == damage.ring.name]
            producer = allowed(lambda: shmring.Producer.attach(damage.ring.name))
            consumer = allowed(lambda: shmring.Consumer.attach(damage.ring.name))
            if producer and consumer and consumer.position == 0 and producer.position == PUBLISHED:
                use(producer, consumer, SENT, is_true=offset < DATA)
            for end in (producer, consumer):
                if end:
                    end.close()
            count += 1
    return count


def main() -> None:
    name, what, log = sys.argv[1:]
    damage = Damage(name, os.open(log, os.O_RDWR | os.O_CREAT))
    mode = before_attach if what.endswith("before attach") else attached
    if what.startswith("records"):
        # payloads may be anything: only what the ring itself reads is damaged, with every value
        starts = itertools.accumulate(((len(p) + 15) & ~7 for p in SENT[:-1]), initial=DATA)
        count = mode(damage, (start + n for start in starts for n in range(8)), tuple(range(256)))
    else:
        count = mode(damage, iter(range(HEADER_USED)), VALUES)
    damage.restore()
    damage.ring.close()
    print(count)


if __name__ == "__main__":
    main()
