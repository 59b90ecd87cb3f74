"""A ring is a deque of bytes with a bound, whatever is done to it and in whatever order."""

from __future__ import annotations

import itertools
import os
from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import shmring
from shmring import testing

CAPACITY = 4096
_numbers = itertools.count(1)

# most are small; some are around the edges; some are nearly all of the ring
LENGTHS = st.one_of(
    st.integers(0, 40),
    st.integers(0, CAPACITY - 8),
    st.sampled_from(
        [7, 8, 9, 1015, 1016, 1017, 2040, CAPACITY - 17, CAPACITY - 16, CAPACITY - 9, CAPACITY - 8]
    ),
)
STARTS = st.sampled_from(
    [0, 8, 4088, 2**32 - 8, 2**32 - 4096, 2**63 - 48, 2**64 - 8, 2**64 - 4096, 2**64 - 5000 * 8]
)
TAGS = st.integers(0, 255)


def size_of(length: int) -> int:
    """Bytes that a record of this payload takes up."""
    return (length + 15) & ~7


class RingMachine(RuleBasedStateMachine):
    """The ring beside two deques: what is published and not released, and what waits for publish()."""

    start = 0

    def __init__(self) -> None:
        super().__init__()
        self.ring = testing.ring_at(f"property-{os.getpid()}-{next(_numbers)}", CAPACITY, self.start)
        self.producer = self.ring.producer()
        self.consumer = self.ring.consumer()
        self.published: deque[tuple[bytes, int, int]] = deque()
        self.drained: list[shmring.Record] = []
        self.unpublished: list[tuple[bytes, int, int]] = []
        self.claim: shmring.Claim | None = None
        self.claimed = 0
        self.serial = 0

    def teardown(self) -> None:
        self.producer.close()
        self.consumer.close()
        self.ring.close()

    def payload(self, length: int) -> bytes:
        """Bytes that no other record has at the same places."""
        self.serial += 1
        pattern = self.serial.to_bytes(3, "little") + b"\xa5\x5a"
        return (pattern * (length // 5 + 1))[:length]

    @property
    def used(self) -> int:
        return sum(size_of(len(p)) for p, _, _ in (*self.published, *self.unpublished))

    def flush(self) -> None:
        self.published.extend(self.unpublished)
        self.unpublished.clear()

    # producing

    @precondition(lambda self: self.claim is None)
    @rule(length=LENGTHS, tag=TAGS, flags=TAGS, publish=st.booleans())
    def push(self, length: int, tag: int, flags: int, publish: bool) -> None:
        payload = self.payload(length)
        fits = self.used + size_of(length) <= CAPACITY
        act = self.producer.try_push if publish else self.producer.try_append
        assert act(payload, tag, flags) is fits
        if fits:
            self.unpublished.append((payload, tag, flags))
            if publish:
                self.flush()

    @precondition(lambda self: self.claim is None)
    @rule(length=LENGTHS)
    def take_claim(self, length: int) -> None:
        claim = self.producer.try_claim(length)
        assert (claim is not None) is (self.used + size_of(length) <= CAPACITY)
        self.claim, self.claimed = claim, length if claim else 0

    @precondition(lambda self: self.claim is not None)
    @rule(part=st.floats(0, 1), publish=st.booleans(), tag=TAGS)
    def commit(self, part: float, publish: bool, tag: int) -> None:
        length = int(self.claimed * part)
        payload = self.payload(length)
        self.claim.payload[:length] = payload
        (self.claim.commit if publish else self.claim.append)(length, tag)
        self.unpublished.append((payload, tag, 0))
        self.claim, self.claimed = None, 0
        if publish:
            self.flush()

    @precondition(lambda self: self.claim is not None)
    @rule()
    def abort(self) -> None:
        self.claim.abort()
        self.claim, self.claimed = None, 0

    @precondition(lambda self: self.claim is None)
    @rule()
    def publish(self) -> None:
        assert self.producer.publish() is bool(self.unpublished)
        self.flush()

    @rule()
    def discard(self) -> None:
        self.producer.discard()
        self.unpublished.clear()
        self.claim, self.claimed = None, 0

    @rule(length=st.integers(CAPACITY - 7, 3 * CAPACITY))
    def push_too_much(self, length: int) -> None:
        with pytest.raises((shmring.RecordTooLargeError, shmring.ClaimError)):
            self.producer.try_push(bytes(length))

    # consuming

    @rule(count=st.integers(1, 9))
    def drain(self, count: int) -> None:
        at = len(self.drained)
        expected = list(itertools.islice(self.published, at, at + count))
        records = self.consumer.drain(count)
        assert [(bytes(r), r.type, r.flags) for r in records] == expected
        self.drained += records

    @rule()
    def release(self) -> None:
        if not self.drained:
            with pytest.raises(shmring.NothingDrainedError):
                self.consumer.release()
            return
        self.consumer.release()
        assert all(r.is_released for r in self.drained)
        for _ in self.drained:
            self.published.popleft()
        self.drained = []

    @rule()
    def rewind(self) -> None:
        self.consumer.rewind()
        self.drained = []

    @precondition(lambda self: not self.drained)
    @rule()
    def pop(self) -> None:
        record = self.consumer.try_pop()
        assert record == (self.published.popleft()[0] if self.published else None)

    # succession

    @rule(orderly=st.booleans())
    def next_producer(self, orderly: bool) -> None:
        if orderly:
            self.producer.close()
        else:
            self.producer._attachment.close()  # as the kernel does for a killed process
            self.producer._disable()
        self.producer = self.ring.producer()
        self.unpublished.clear()
        self.claim, self.claimed = None, 0

    @rule(orderly=st.booleans())
    def next_consumer(self, orderly: bool) -> None:
        if orderly:
            self.consumer.close()
        else:
            self.consumer._attachment.close()
            self.consumer._disable()
        self.consumer = self.ring.consumer()
        self.drained = []

    # always

    @invariant()
    def counts_agree(self) -> None:
        claimed = size_of(self.claimed) if self.claim else 0
        assert self.producer.free_bytes() == CAPACITY - self.used - claimed
        waiting = itertools.islice(self.published, len(self.drained), None)
        backlog = sum(size_of(len(p)) for p, _, _ in waiting)
        assert self.consumer.backlog_bytes() == backlog
        assert self.consumer.is_readable() is (backlog > 0)
        statistics = self.ring.statistics()
        assert statistics.used_bytes == sum(size_of(len(p)) for p, _, _ in self.published)
        assert statistics.high_water_bytes <= CAPACITY

    @invariant()
    def what_is_in_hand_stays_as_it_was(self) -> None:
        for record, (payload, _, _) in zip(self.drained, self.published, strict=False):
            assert record.payload == payload


@pytest.mark.parametrize("start", [0, 2**32 - 4096, 2**63 - 48, 2**64 - 4096 - 8])
def test_a_ring_is_a_bounded_deque_wherever_its_positions_stand(start):
    """Any sequence of calls that a program may make, checked against the plainest model."""
    machine = type("Machine", (RingMachine,), {"start": start})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@settings(max_examples=120, deadline=None)
@given(start=STARTS, lengths=st.lists(LENGTHS, min_size=1, max_size=60), hold=st.integers(0, 5))
def test_every_record_arrives_once_in_order_and_unchanged_from_any_start(start, lengths, hold):
    """Positions pass 2**32 and 2**64 on a server that is never restarted."""
    assume(start % 8 == 0)
    name = f"property-{os.getpid()}-{next(_numbers)}"
    with testing.ring_at(name, CAPACITY, start) as ring, ring.producer() as p, ring.consumer() as c:
        flying: deque[bytes] = deque()
        for n, length in enumerate(lengths):
            payload = bytes([n % 251 + 1]) * length
            while not p.try_push(payload):
                assert c.try_pop() == flying.popleft()
            flying.append(payload)
            while len(flying) > hold:
                assert c.try_pop() == flying.popleft()
        assert [bytes(r) for r in c.drain(len(lengths))] == list(flying)
        total = sum(size_of(length) for length in lengths)
        assert p.position == (start + total) % 2**64
