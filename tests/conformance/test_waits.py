"""What every call that waits promises, under every policy, with and without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import shmring
from shmring import AsyncWaiter, WaitPolicy, testing, wait_any

if TYPE_CHECKING:
    from collections.abc import Callable

#: A payload that does not fit any more where `testing.fill` has been.
PAYLOAD = b"x" * 57

Wait = "Callable[[shmring.Producer, shmring.Consumer, Any, WaitPolicy], Any]"


async def _readable_async(consumer: shmring.Consumer, timeout: Any, policy: WaitPolicy) -> bool:
    with contextlib.closing(AsyncWaiter(policy)) as waiter:
        return await waiter.wait_until_readable(consumer, timeout)


async def _writable_async(producer: shmring.Producer, timeout: Any, policy: WaitPolicy) -> bool:
    with contextlib.closing(AsyncWaiter(policy)) as waiter:
        return await waiter.wait_until_writable(producer, len(PAYLOAD), timeout)


#: Waits for records. The policy is that of the ends, and of those that wait without one of them.
FOR_RECORDS: dict[str, Wait] = {
    "pop": lambda p, c, t, _: c.pop(t),
    "drain_wait": lambda p, c, t, _: c.drain_wait(1, t),
    "wait_until_readable": lambda p, c, t, _: c.wait_until_readable(t),
    "wait_any": lambda p, c, t, policy: wait_any([c], t, policy=policy),
    "pop_async": lambda p, c, t, _: asyncio.run(c.pop_async(t)),
    "drain_async": lambda p, c, t, _: asyncio.run(c.drain_async(1, t)),
    "AsyncWaiter": lambda p, c, t, policy: asyncio.run(_readable_async(c, t, policy)),
}
#: Waits for room.
FOR_ROOM: dict[str, Wait] = {
    "push": lambda p, c, t, _: p.push(PAYLOAD, t),
    "claim": lambda p, c, t, _: p.claim(len(PAYLOAD), t),
    "wait_until_writable": lambda p, c, t, _: p.wait_until_writable(len(PAYLOAD), t),
    "wait_any for room": lambda p, c, t, policy: wait_any(
        [], t, producers=[(p, len(PAYLOAD))], policy=policy
    ),
    "push_async": lambda p, c, t, _: asyncio.run(p.push_async(PAYLOAD, t)),
    "AsyncWaiter for room": lambda p, c, t, policy: asyncio.run(_writable_async(p, t, policy)),
}
WAITS = FOR_RECORDS | FOR_ROOM


@dataclass
class Place:
    """A ring on which a call has to wait."""

    ring: shmring.Ring
    producer: shmring.Producer
    consumer: shmring.Consumer
    is_for_room: bool
    act: Callable[[Any], Any]
    """The call, with a timeout."""
    end: Callable[[], Any]
    """What ends the wait."""

    @property
    def peer(self) -> shmring.Producer | shmring.Consumer:
        """Whoever is waited for."""
        return self.consumer if self.is_for_room else self.producer


@pytest.fixture(params=WaitPolicy, ids=lambda policy: policy.name.lower())
def policy(request):
    return request.param


@pytest.fixture(params=WAITS)
def place(ring_name, request, policy):
    call = WAITS[request.param]
    is_for_room = request.param in FOR_ROOM
    with shmring.create(ring_name, 4096) as ring:
        producer, consumer = ring.producer(policy=policy), ring.consumer(policy=policy)
        if is_for_room:
            testing.fill(producer)
            consumer.drain(1)
        yield Place(
            ring,
            producer,
            consumer,
            is_for_room,
            act=lambda t: call(producer, consumer, t, policy),
            end=consumer.release if is_for_room else lambda: producer.try_push(b"x"),
        )
        producer.close()
        consumer.close()


@pytest.fixture
def wait(place):
    return place.act, place.end


def later(act, delay_s: float = 0.03) -> threading.Timer:
    timer = threading.Timer(delay_s, act)
    timer.start()
    return timer


@pytest.mark.parametrize("timeout", [-1, -1e-9, math.nan, -math.inf])
def test_a_bad_timeout_is_refused_whether_or_not_there_is_a_wait(timeout, wait):
    """Seen only when the ring is full, it would be found in production."""
    act, end = wait
    with pytest.raises(ValueError, match="timeout_s"):
        act(timeout)
    end()
    with pytest.raises(ValueError, match="timeout_s"):
        act(timeout)


@pytest.mark.parametrize("timeout", [True, "1", [], 1j])
def test_a_timeout_is_a_number(timeout, wait):
    """`pop(True)` was meant as something else."""
    with pytest.raises(TypeError, match="timeout_s"):
        wait[0](timeout)


def test_a_timeout_of_zero_does_not_wait_and_says_not_now(wait):
    """A poll is a wait of no time."""
    act, end = wait
    assert not act(0)
    assert not act(0.0)
    end()
    assert act(0)


def test_a_timeout_that_passes_says_not_now_and_loses_nothing(wait):
    """A timed-out caller comes back; the record must still be there."""
    act, end = wait
    start = time.monotonic()
    assert not act(0.02)
    assert time.monotonic() - start >= 0.02
    end()
    assert act(60)


@pytest.mark.parametrize("timeout", [None, math.inf, 60, 1e300])
def test_a_wait_ends_when_what_it_waits_for_comes(timeout, wait):
    """The whole point of it."""
    act, end = wait
    timer = later(end)
    assert act(timeout)
    timer.join()


def test_closing_the_ends_from_another_thread_ends_the_wait(place):
    """A shutdown must not wait for a peer that sends nothing any more."""
    timer = later(lambda: (place.producer.close(), place.consumer.close()))

    def wait_until_it_is_told() -> None:
        while place.act(None):  # a finished peer is something to see; the next try says it
            place.producer.try_push(PAYLOAD)
            place.consumer.drain(1)

    with pytest.raises((shmring.RingClosedError, shmring.EndOfRing)):
        wait_until_it_is_told()
    timer.join()


def test_the_peers_end_ends_the_wait(place):
    """Told by the wake of its close, not by a poll."""
    timer = later(place.peer.close)
    with contextlib.suppress(shmring.EndOfRing):
        assert place.act(None), "the waits that do not take anything say: look"
    timer.join()


def test_an_end_that_was_there_before_the_wait_is_seen_at_once(place):
    """The peer finished between the last look and the wait: nobody will wake us."""
    place.peer.close()
    with contextlib.suppress(shmring.EndOfRing):
        assert place.act(None)


def test_the_peers_death_ends_the_wait(place):
    """Every wait, with or without a timeout: nobody else would ever end it."""
    place.peer._attachment.close()  # what the kernel does to a killed process
    try:
        assert place.act(None)
    except shmring.PeerLostError:
        return
    with pytest.raises(shmring.PeerLostError):
        place.producer.try_push(PAYLOAD) if place.is_for_room else place.consumer.drain(1)


def test_a_timed_out_wait_leaves_no_trace_in_the_statistics(place):
    """An operator is told who waits; one that gave up must not be shown for ever."""
    assert not place.act(0.002)
    statistics = place.ring.statistics()
    assert statistics.producer.waiting_ns is None
    assert statistics.consumer.waiting_ns is None


def test_a_stream_through_a_ring_that_is_full_and_empty_in_turn(ring_name, policy):
    """Policies differ in cost, not in what they promise: every record, once, in order."""
    with (
        shmring.create(ring_name, 4096) as ring,
        ring.producer(policy=policy) as producer,
        ring.consumer(policy=policy) as consumer,
    ):
        assert consumer.pop(0.001) is None
        count = 300

        def send():
            for n in range(count):
                assert producer.push(bytes([n % 256]) * 1900)

        thread = threading.Thread(target=send)
        thread.start()
        assert [consumer.pop()[:1] for _ in range(count)] == [bytes([n % 256]) for n in range(count)]
        thread.join()
