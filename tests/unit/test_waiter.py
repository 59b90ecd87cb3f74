"""Waiting: what ends a wait, and what does not."""

from __future__ import annotations

import math
import threading

import pytest

import shmring
from shmring import testing
from shmring.waiter import WAIT_MAX, Bell, Deadline, WaitPolicy, WaitSet, wait_any


@pytest.fixture
def ring(ring_name):
    with shmring.create(ring_name, 4096) as ring:
        yield ring


@pytest.fixture
def producer(ring):
    with ring.producer() as producer:
        yield producer


@pytest.fixture
def consumer(ring):
    with ring.consumer() as consumer:
        yield consumer


def later(act, delay_s: float = 0.03) -> threading.Timer:
    timer = threading.Timer(delay_s, act)
    timer.start()
    return timer


def test_an_end_that_expects_a_successor_waits_on_through_a_death(ring):
    """While a worker is restarted, its peers just wait."""
    producer = ring.producer()
    with ring.consumer(takeover=True) as consumer:
        producer._attachment.close()
        assert not consumer.wait_until_readable(0.3)
        assert consumer.pop(0.3) is None
        assert not wait_any([consumer], 0.3)
        assert consumer.peer_state() is shmring.PeerState.LOST
        with ring.producer() as second:
            timer = later(lambda: second.try_push(b"x"))
            assert consumer.pop(60) == b"x"
            timer.join()


def test_a_wait_for_room_waits_for_enough_of_it(producer, consumer):
    """Woken too early it would spin; woken too late it would hang."""
    for _ in range(4):
        producer.try_push(b"x" * 1000)
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(producer.push(b"y" * 3000)))
    thread.start()
    for left in (3, 2, 1, 0):
        assert len(consumer.try_pop()) == 1000
        if left >= 2:
            assert not done
    thread.join()
    assert done == [True]
    assert consumer.try_pop() == b"y" * 3000


def test_ping_pong_over_two_rings_never_misses_a_wake(ring_name):
    """One miss is a request that hangs until the next one comes."""
    with shmring.create(f"{ring_name}.a", 4096) as there, shmring.create(f"{ring_name}.b", 4096) as back:
        rounds = 3000

        def echo():
            with there.consumer(policy=WaitPolicy.THRIFTY) as c, back.producer() as p:
                for _ in range(rounds):
                    p.push(c.pop())

        thread = threading.Thread(target=echo)
        thread.start()
        with there.producer() as p, back.consumer(policy=WaitPolicy.THRIFTY) as c:
            for n in range(rounds):
                p.push(n.to_bytes(4, "little"))
                assert c.pop(60) == n.to_bytes(4, "little")
        thread.join()


# Several at once


@pytest.fixture
def many(ring_name):
    rings = [shmring.create(f"{ring_name}.{n}", 4096) for n in range(5)]
    producers, consumers = [r.producer() for r in rings], [r.consumer() for r in rings]
    yield rings, producers, consumers
    for thing in (*producers, *consumers, *rings):
        thing.close()


@pytest.mark.parametrize("which", range(5))
def test_any_one_of_several_rings_ends_the_wait(which, many):
    """A worker serves several rings, and sleeps while all are quiet."""
    _, producers, consumers = many
    assert not wait_any(consumers, 0.01)
    timer = later(lambda: producers[which].try_push(b"x"))
    assert wait_any(consumers, 60)
    timer.join()
    assert [c.is_readable() for c in consumers] == [n == which for n in range(5)]


def test_room_and_records_are_awaited_together(many):
    """A stage that has something to send and something to take sleeps once, on both."""
    _, producers, consumers = many
    testing.fill(producers[0])
    need = [(producers[0], 57)]
    assert not wait_any(consumers[1:], 0.01, producers=need)
    timer = later(lambda: (consumers[0].drain(1), consumers[0].release()))
    assert wait_any(consumers[1:], 60, producers=need)
    timer.join()
    testing.fill(producers[0])
    timer = later(lambda: producers[3].try_push(b"x"))
    assert wait_any(consumers[1:], 60, producers=need)
    timer.join()


def test_the_death_of_one_peer_of_several_ends_the_wait(many):
    """Otherwise a quiet deployment would never hear of its dead worker."""
    _, producers, consumers = many
    producers[2]._attachment.close()
    assert wait_any(consumers)
    with pytest.raises(shmring.PeerLostError):
        consumers[2].drain(1)
    assert consumers[1].drain(1) == []


def test_a_bell_ends_a_wait_from_another_thread(many):
    """A shutdown, or a new ring to be awaited too."""
    _, _, consumers = many
    bell = Bell()
    timer = later(bell.ring)
    assert wait_any(consumers, bell=bell)
    timer.join()
    assert bell.answer() is True
    assert bell.answer() is False
    assert not wait_any(consumers, 0.01, bell=bell)


def test_a_bell_rung_before_the_wait_is_not_missed():
    """The shutdown came between the look and the sleep."""
    bell = Bell()
    bell.ring()
    bell.ring()
    assert wait_any([], bell=bell)
    assert bell.answer() is True
    assert not wait_any([], 0.01, bell=bell)


def test_waiting_for_nothing_at_all_is_refused():
    """It could only be for ever, or a busy loop."""
    with pytest.raises(ValueError, match="nothing to wait for"):
        wait_any([], 1)


def test_the_same_ring_twice_in_one_wait_is_no_harm(many):
    """A list built from two sources."""
    _, producers, consumers = many
    assert not wait_any([consumers[0]] * 3, 0.01)
    timer = later(lambda: producers[0].try_push(b"x"))
    assert wait_any([consumers[0]] * 3, 60)
    timer.join()


def test_as_many_rings_as_the_kernel_takes_and_one_more(consumer, producer):
    """futex_waitv has a limit; ours is one below it, for the bell."""
    bell = Bell()
    assert not wait_any([consumer] * WAIT_MAX, 0.01, bell=bell)
    timer = later(lambda: producer.try_push(b"x"))
    assert wait_any([consumer] * WAIT_MAX, 60, bell=bell)
    timer.join()
    with pytest.raises(ValueError, match=f"rings={WAIT_MAX + 1}, max={WAIT_MAX}"):
        WaitSet([consumer] * (WAIT_MAX + 1))


def test_a_room_that_cannot_be_is_refused_before_the_wait(producer):
    """A negative need would be an enormous one in C."""
    for need, kind in ((-1, ValueError), (4089, shmring.RecordTooLargeError), (True, TypeError)):
        with pytest.raises(kind):
            wait_any([], 0, producers=[(producer, need)])


def test_a_deadline_is_a_point_in_time_or_never():
    """Computed once, so that many short waits do not add up to a longer one."""
    assert Deadline(None).is_over is False
    assert Deadline(math.inf).is_over is False
    assert Deadline(None).left_s() > 0
    assert Deadline(0).is_over is True
    assert Deadline(0).left_s() == 0
    assert 59 < Deadline(60).left_s() <= 60


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"consumers": [1]}, "consumers holds what is none: type=int"),
        ({"consumers": [], "producers": [1]}, "producers holds what is no pair"),
        ({"consumers": [], "producers": [(1, 2)]}, "producers holds what is no pair"),
        ({"consumers": [], "bell": 5}, "bell is none: type=int"),
        ({"consumers": [], "bell": shmring.Bell(), "policy": 5}, "policy is none: type=int"),
    ],
)
def test_what_cannot_be_waited_for_is_told_by_its_type(arguments, text):
    """An error of the inside of the ring says nothing to who called it."""
    with pytest.raises(TypeError, match=text):
        shmring.wait_any(**arguments, timeout_s=0)
