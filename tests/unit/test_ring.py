"""A ring whose ends come and go, is damaged, or near the end of its positions.

What the ends promise while nothing happens to them is in tests/conformance/test_rings.py.
"""

from __future__ import annotations

import gc
import itertools
import sys

import numpy as np
import pytest
from ring_ends import take_all

import shmring
from shmring import testing

CAPACITY = 4096


@pytest.fixture
def ring(ring_name):
    with shmring.create(ring_name, CAPACITY) as ring:
        yield ring


@pytest.fixture
def producer(ring):
    with ring.producer() as producer:
        yield producer


@pytest.fixture
def consumer(ring):
    with ring.consumer() as consumer:
        yield consumer


# Reading


@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_the_environment_turns_poison_on_for_every_consumer(ring, producer, monkeypatch, value, is_on):
    """To look for a use after release in a whole deployment nobody wants to change its code."""
    monkeypatch.setenv("SHMRING_POISON", value)
    with ring.consumer() as consumer:
        producer.push(b"secret")
        view = consumer.drain(1)[0].payload
        consumer.release()
        assert bytes(view) == (b"\xdb" * 6 if is_on else b"secret")


def test_poison_overwrites_what_was_released_and_nothing_else(ring, producer):
    """A use after release must show in the test run, not in production."""
    with ring.consumer(poison=True) as consumer:
        for turn in range(CAPACITY // 8 + 3):
            keep = bytes([turn % 200]) * 1000
            producer.try_push(b"a" * 1001)
            producer.try_push(keep)
            (record,) = consumer.drain(1)
            view = record.payload
            consumer.release()
            assert bytes(view) == b"\xdb" * 1001
            assert consumer.try_pop() == keep


# Views and lifetimes


def test_views_outlive_the_consumer_the_ring_and_the_name(ring_name):
    """An array over unmapped memory is a crash somewhere else, later."""
    ring = shmring.create(ring_name, CAPACITY)
    producer, consumer = ring.producer(), ring.consumer()
    producer.try_push(bytes(range(80)))
    (record,) = consumer.drain(1)
    view, array = record.payload, np.frombuffer(record, np.int64)
    consumer.close()
    producer.close()
    ring.close()
    del ring, producer, consumer, record
    gc.collect()
    assert bytes(view) == bytes(range(80))
    assert array.sum() == np.frombuffer(bytes(range(80)), np.int64).sum()


def test_a_claim_outlives_the_producer_and_the_ring(ring_name):
    """Writing through an array of it goes nowhere, and does not crash."""
    ring = shmring.create(ring_name, CAPACITY)
    producer = ring.producer()
    claim = producer.try_claim(8)
    array = np.frombuffer(claim.payload, np.uint8)
    producer.close()
    ring.close()
    del ring, producer
    gc.collect()
    array[:] = 7
    with pytest.raises(shmring.RingClosedError):
        claim.commit()


def test_a_record_after_close_is_refused(producer, ring):
    """The bytes are there, but whose they are nobody knows any more."""
    producer.try_push(b"abc")
    consumer = ring.consumer()
    (record,) = consumer.drain(1)
    consumer.close()
    assert record.is_released
    with pytest.raises(ValueError, match="released"):
        bytes(record)


# Ends


def test_after_close_every_call_says_closed(ring):
    """A use after close is a bug to be shown, not a hang or a crash."""
    producer, consumer = ring.producer(), ring.consumer()
    producer.close()
    producer.close()
    consumer.close()
    consumer.close()
    for use in (
        lambda: producer.try_push(b""),
        lambda: producer.push(b""),
        lambda: producer.try_append(b""),
        lambda: producer.try_claim(1),
        lambda: producer.claim(1),
        lambda: producer.wait_until_writable(1),
        producer.publish,
        producer.free_bytes,
        producer.peer_state,
        producer.statistics,
        lambda: shmring.wait_any([], producers=[(producer, 1)]),
        consumer.try_pop,
        consumer.pop,
        lambda: consumer.drain(1),
        lambda: consumer.drain_wait(1),
        consumer.release,
        consumer.is_readable,
        consumer.wait_until_readable,
        consumer.backlog_bytes,
        consumer.snapshot_tail,
        consumer.peer_state,
        consumer.statistics,
        lambda: shmring.wait_any([consumer]),
    ):
        with pytest.raises(shmring.RingClosedError, match="closed"):
            use()
    producer.discard()
    consumer.rewind()
    assert not producer.is_open
    assert not consumer.is_open


def test_an_end_is_held_by_one_only(ring, producer):
    """Two producers on one ring overwrite each other."""
    with pytest.raises(shmring.RoleTakenError, match="holder_pid") as caught:
        ring.producer()
    assert caught.value.role == "producer"
    with pytest.raises(shmring.RoleTakenError):
        shmring.Producer.attach(ring.name)
    with ring.consumer(), pytest.raises(shmring.RoleTakenError) as caught:
        shmring.Consumer.attach(ring.name)
    assert caught.value.role == "consumer"
    assert producer.try_push(b"unharmed")


def test_a_producer_learns_of_the_consumers_end_when_it_is_full(ring, producer):
    """Filling a ring that nobody empties must end in a sentence, not in a wait."""
    with ring.consumer():
        pass
    with pytest.raises(shmring.EndOfRing):
        testing.fill(producer)
    with pytest.raises(shmring.EndOfRing):
        producer.push(b"x" * 57)
    with pytest.raises(shmring.EndOfRing):
        producer.claim(57)
    with pytest.raises(shmring.EndOfRing):
        producer.wait_until_writable(57)
    assert shmring.wait_any([], producers=[(producer, 57)]) == [producer]


def test_an_end_dropped_without_close_counts_as_lost(ring, producer):
    """A thread that died with its consumer is a death to the other side, not a good end."""
    consumer = ring.consumer()
    assert producer.peer_state() is shmring.PeerState.ATTACHED
    del consumer
    gc.collect()
    assert producer.peer_state() is shmring.PeerState.LOST
    with pytest.raises(shmring.PeerLostError) as caught:
        testing.fill(producer)
    assert caught.value.pid != 0
    assert isinstance(caught.value, ConnectionError)


def test_the_state_of_the_peer_follows_its_life(ring, producer):
    """Health checks ask this."""
    assert producer.peer_state() is shmring.PeerState.NEVER
    consumer = ring.consumer()
    assert producer.peer_state() is shmring.PeerState.ATTACHED
    assert consumer.peer_state() is shmring.PeerState.ATTACHED
    consumer.close()
    assert producer.peer_state() is shmring.PeerState.FINISHED
    with ring.consumer() as second:
        assert producer.peer_state() is shmring.PeerState.ATTACHED
        assert second.try_pop() is None


def test_the_next_consumer_gets_what_was_not_released(ring, producer):
    """Its predecessor died in the middle of its work; the work is not done."""
    for n in range(4):
        producer.try_push(bytes([n]))
    first = ring.consumer()
    assert first.try_pop() == b"\0"
    first.drain(2)
    first.close()
    with ring.consumer() as second:
        assert take_all(second) == [b"\1", b"\2", b"\3"]


def test_the_next_producer_goes_on_where_the_last_one_published(ring, consumer):
    """What its predecessor had not published was never there."""
    first = ring.producer()
    first.try_push(b"a")
    first.try_append(b"unpublished")
    first.try_claim(40).payload[:] = b"x" * 40
    first.close()
    with ring.producer() as second:
        second.try_push(b"b")
        assert take_all(consumer) == [b"a", b"b"]


def test_an_end_that_expects_a_successor_is_not_told_of_an_end(ring, producer):
    """While a worker is restarted its rings stay as they are."""
    with ring.consumer(takeover=True) as consumer:
        producer.close()
        assert consumer.try_pop() is None
        assert not consumer.wait_until_readable(timeout_s=0)
        with ring.producer(takeover=True) as second:
            second.try_push(b"x")
            assert consumer.try_pop() == b"x"
        ring.close()
        with pytest.raises(shmring.EndOfRing):
            consumer.try_pop()


def test_nobody_will_come_once_the_name_is_gone(ring_name):
    """A wait for a peer that can no longer find the ring would be for ever."""
    ring = shmring.create(ring_name, CAPACITY)
    with ring.consumer() as consumer, ring.producer() as producer:
        consumer.close()
        producer.close()
    with ring.consumer() as consumer:
        ring.close()
        with pytest.raises(shmring.EndOfRing):
            consumer.pop()


# Damage


@pytest.mark.parametrize("length", [0, 1, 7, 25, 4097, 2**31, 2**32 - 1])
def test_a_record_length_that_cannot_be_is_an_error_with_its_position(length, ring, producer, consumer):
    """Believing it would read beyond what was written, or beyond the mapping."""
    producer.try_push(b"good")
    producer.try_push(b"0123456789")
    testing.damage(ring, 4096 + 16, length.to_bytes(4, "little"))
    assert [bytes(r) for r in consumer.drain(9)] == [b"good"]
    consumer.release()
    for _ in range(2):
        with pytest.raises(shmring.CorruptRingError) as caught:
            consumer.drain(9)
        assert (caught.value.position, caught.value.found) == (16, length)


@pytest.mark.parametrize("tail", [8, 0, 17, 24 + 4096, 2**63, 2**64 - 8])
def test_a_tail_that_cannot_be_is_an_error_everywhere(tail, ring, producer, consumer):
    """The consumer has released 24 bytes: a tail before that, unaligned or too far on is a lie."""
    producer.try_push(b"0123456789")
    assert consumer.try_pop() == b"0123456789"
    testing.damage(ring, 0x100, tail.to_bytes(8, "little"))
    uses = (
        consumer.try_pop,
        lambda: consumer.drain(1),
        consumer.is_readable,
        consumer.backlog_bytes,
        consumer.snapshot_tail,
        consumer.pop,
        consumer.wait_until_readable,
        lambda: shmring.wait_any([consumer]),
    )
    for use in uses:
        if tail == 24 + 4096:
            continue  # exactly full: it could be
        with pytest.raises(shmring.CorruptRingError) as caught:
            use()
        assert (caught.value.position, caught.value.found) == (24, tail)


@pytest.mark.parametrize("head", [8, 3, 1 << 20, 2**63, 2**64 - 8])
def test_a_head_that_cannot_be_is_an_error_everywhere(head, ring, producer, consumer):
    """The producer would write over what is being read."""
    for _ in range(3):
        producer.try_push(b"0123456789")
    consumer.try_pop()
    assert producer.free_bytes() == CAPACITY - 48
    testing.damage(ring, 0x280, head.to_bytes(8, "little"))
    uses = (
        lambda: testing.fill(producer),
        producer.free_bytes,
        lambda: producer.push(b"x" * 4000),
        lambda: producer.wait_until_writable(4088),
        lambda: shmring.wait_any([], producers=[(producer, 4088)]),
    )
    for use in uses:
        with pytest.raises(shmring.CorruptRingError) as caught:
            use()
        assert caught.value.found == head


# Positions near the ends of their range


@pytest.mark.parametrize("start", [2**32 - 8, 2**32, 2**63 - 8, 2**64 - 8, 2**64 - 4096, 2**64 - 48])
def test_positions_may_pass_every_power_of_two(start, ring_name):
    """A server that runs for years must not fail on the day its counter wraps."""
    with testing.ring_at(ring_name, CAPACITY, start) as ring, ring.producer() as producer:
        with ring.consumer() as consumer:
            sent: list[bytes] = []
            for n in range(400):
                payload = bytes([n % 256]) * (n % 40)
                assert producer.try_push(payload)
                sent.append(payload)
                assert consumer.backlog_bytes() == sum((len(p) + 15) & ~7 for p in sent)
                if len(sent) > 3:
                    assert consumer.try_pop() == sent.pop(0)
            assert take_all(consumer) == sent
            assert testing.fill(producer) == CAPACITY // 72
            assert ring.statistics().used_bytes == CAPACITY // 72 * 72
        with ring.consumer() as consumer:
            assert len(take_all(consumer)) == CAPACITY // 72


@pytest.mark.parametrize("start", [-8, 4, 2**64])
def test_a_start_position_is_one_that_could_be(start, ring_name):
    """The test tool refuses what would make a ring that cannot be."""
    with pytest.raises(ValueError, match="start_position"):
        testing.ring_at(ring_name, CAPACITY, start)


def test_closing_takes_the_payload_of_an_open_claim_away(ring_name):
    """Its bytes are the next producer's: a late write would change that one's record."""
    with shmring.create(ring_name, 4096) as ring:
        first = ring.producer()
        claim = first.claim(8)
        first.close()
        with ring.producer() as second, ring.consumer(takeover=True) as consumer:
            second.push(b"AAAAAAAA")
            with pytest.raises(ValueError, match="released"):
                claim.payload[:] = b"ZZZZZZZZ"
            assert consumer.pop(5) == b"AAAAAAAA"


def test_discarding_takes_the_payload_of_an_open_claim_away(ring_name):
    """Its bytes are the next record's, and the consumer may be reading them."""
    with shmring.create(ring_name, 4096) as ring, ring.producer() as producer, ring.consumer() as consumer:
        claim = producer.claim(8)
        producer.discard()
        producer.push(b"AAAAAAAA")
        with pytest.raises(ValueError, match="released"):
            claim.payload[:] = b"ZZZZZZZZ"
        assert consumer.pop(5) == b"AAAAAAAA"


def test_a_ring_is_attached_by_name_and_gives_both_ends(ring_name):
    """Whoever knows the name only would have to know which end to ask for first."""
    with shmring.create(ring_name, CAPACITY), shmring.attach(ring_name) as attached:
        assert (attached.name, attached.capacity_bytes) == (ring_name, CAPACITY)
        with attached.producer() as producer, attached.consumer() as consumer:
            producer.push(b"through")
            attached.close()  # the ends go on
            assert consumer.pop(5) == b"through"


def test_an_attached_ring_stays_the_one_that_it_was_attached_to(ring_name):
    """Two rings of one name in turn: half of the processes would talk to nobody, without a word."""
    old = shmring.create(ring_name, CAPACITY)
    with shmring.attach(ring_name) as attached, old.producer() as producer:
        assert not attached.is_retired
        old.close()
        with shmring.create(ring_name, 2 * CAPACITY) as new:
            assert attached.is_retired
            assert producer.is_retired
            assert attached.capacity_bytes == CAPACITY
            assert not new.is_retired
            with attached.consumer() as consumer:
                assert consumer.is_retired
                producer.push(b"old")
                assert consumer.pop(5) == b"old"


def test_attaching_to_what_is_no_ring_is_refused(ring_name):
    """A blob has no ends, and its bytes are not positions."""
    blob = shmring.publish_blob(ring_name, b"abc")
    try:
        with pytest.raises(shmring.LayoutMismatchError, match="no ring"):
            shmring.attach(ring_name)
        with pytest.raises(shmring.SegmentNotFoundError):
            shmring.attach(f"{ring_name}-other")
    finally:
        blob.close()


def test_an_interrupted_look_for_room_leaves_no_claim_open(ring_name):
    """Ctrl-C during it, at whichever call: a producer that goes on afterwards is not barred by itself."""

    with shmring.create(ring_name, 4096) as ring, ring.producer() as producer, ring.consumer():
        for moment in itertools.count(1):
            events = itertools.count(1)

            def interrupt(frame, *_, moment=moment, events=events):
                if frame.f_globals["__name__"].startswith("shmring.") and next(events) == moment:
                    raise KeyboardInterrupt

            sys.setprofile(interrupt)
            try:
                producer.wait_until_writable(8, 0)
            except KeyboardInterrupt:
                assert producer.try_push(b"x")
                continue
            finally:
                sys.setprofile(None)
            break
        assert moment > 5


@pytest.mark.parametrize("end", ["producer", "consumer"])
def test_a_policy_that_is_none_is_named_and_the_end_stays_free(ring_name, end):
    with shmring.create(ring_name, 4096) as ring:
        with pytest.raises(TypeError, match="policy is none: type=int"):
            getattr(ring, end)(policy=3)
        getattr(ring, end)().close()
