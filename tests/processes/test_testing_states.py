"""The states that `shmring.testing` makes are what they are called."""

from __future__ import annotations

import os

import pytest

import shmring
from shmring import testing


@pytest.fixture
def ring(ring_name):
    with shmring.create(ring_name, 4096) as ring:
        yield ring


def test_a_lost_producer_leaves_what_it_published_and_nothing_else(ring):
    """Who tests his consumer against a death needs one with records before it."""
    with ring.consumer() as consumer:
        testing.lose_producer(ring.name, [b"one", b"two"], unpublished=[b"never"])
        assert [consumer.pop(timeout_s=5), consumer.pop(timeout_s=5)] == [b"one", b"two"]
        with pytest.raises(shmring.PeerLostError):
            consumer.pop(timeout_s=5)


def test_a_lost_consumer_leaves_what_it_had_in_hand(ring):
    """The next consumer gets that again, and who tests his own needs the case."""
    with ring.producer() as producer:
        for number in range(5):
            producer.push(bytes([number]))
        testing.lose_consumer(ring.name, released=2, drained=2)
        assert producer.peer_state() is shmring.PeerState.LOST
        with ring.consumer() as consumer:
            assert [consumer.try_pop() for _ in range(4)] == [b"\x02", b"\x03", b"\x04", None]


def test_a_stuck_consumer_is_alive_and_reads_nothing(ring):
    """Slow and dead are told apart by whoever waits, so a test needs both."""
    with ring.producer() as producer, testing.stuck_consumer(ring.name) as pid:
        assert testing.fill(producer)
        assert not producer.push(b"x" * 57, timeout_s=0.3)
        assert producer.peer_state() is shmring.PeerState.ATTACHED
        assert ring.statistics().consumer.pid == pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_that_cannot_do_its_part_says_why(ring):
    """A state that was not made must not look like one."""
    with ring.consumer(), pytest.raises(RuntimeError, match="RoleTakenError"):
        testing.lose_consumer(ring.name)
