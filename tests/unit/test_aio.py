"""Waiting in asyncio: the loop goes on, a cancelled wait loses nothing, and every end is told."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest

import shmring


@pytest.fixture
def ends(ring_name):
    with (
        shmring.create(ring_name, 4096) as ring,
        ring.producer() as producer,
        ring.consumer() as consumer,
    ):
        yield producer, consumer


def run(scene) -> None:
    """Run `scene(waiter)` in a loop of its own, with a watchdog."""

    async def whole() -> None:
        waiter = shmring.AsyncWaiter()
        try:
            await asyncio.wait_for(scene(waiter), 60)
        finally:
            waiter.close()
            waiter.close()

    asyncio.run(whole())


def test_every_record_of_many_bursts_arrives_once_and_in_order(ends):
    """One missed wake is a stream that stands still until somebody else speaks."""
    producer, consumer = ends
    count = 20_000

    def send() -> None:
        for n in range(count):
            producer.push(n.to_bytes(4, "little") * (n % 3 + 1))

    async def scene(waiter: shmring.AsyncWaiter) -> None:
        got = 0
        while got < count:
            assert await waiter.wait_until_readable(consumer)
            for record in consumer.drain(50):
                assert bytes(record) == got.to_bytes(4, "little") * (got % 3 + 1)
                got += 1
            consumer.release()

    thread = threading.Thread(target=send)
    thread.start()
    run(scene)
    thread.join()


def test_the_loop_serves_others_while_it_waits(ends):
    """One quiet ring must not stop a server."""
    producer, consumer = ends

    async def scene(waiter: shmring.AsyncWaiter) -> None:
        waiting = asyncio.create_task(waiter.wait_until_readable(consumer))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()
        producer.try_push(b"x")
        assert await waiting
        assert consumer.try_pop() == b"x"

    run(scene)


def test_a_wait_that_is_cancelled_a_thousand_times_loses_nothing(ends):
    """Clients go away at any moment, also at that of the wake."""
    producer, consumer = ends

    async def scene(waiter: shmring.AsyncWaiter) -> None:
        got = []
        for n in range(1000):
            task = asyncio.create_task(waiter.wait_until_readable(consumer))
            for _ in range(n % 4):
                await asyncio.sleep(0)
            producer.push(n.to_bytes(2, "little"))
            if n % 3 == 0:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            while (record := consumer.try_pop()) is not None:
                got.append(int.from_bytes(record, "little"))
        assert got == list(range(1000))

    run(scene)


def test_a_timeout_is_an_answer_and_the_next_wait_works(ends):
    """As with every other wait."""
    producer, consumer = ends

    async def scene(waiter: shmring.AsyncWaiter) -> None:
        assert not await waiter.wait_until_readable(consumer, 0.01)
        assert not await waiter.wait_until_readable(consumer, 0)
        producer.try_push(b"x")
        assert await waiter.wait_until_readable(consumer, 0)

    run(scene)


@pytest.mark.parametrize(("timeout", "kind"), [(-1, ValueError), (math.nan, ValueError), ("1", TypeError)])
def test_a_bad_timeout_is_refused(timeout, kind, ends):
    """A deadline that was computed wrong must not look like a quiet ring."""

    async def scene(waiter: shmring.AsyncWaiter) -> None:
        with pytest.raises(kind, match="timeout_s"):
            await waiter.wait_until_readable(ends[1], timeout)

    run(scene)


@pytest.mark.parametrize("dies", [False, True])
def test_the_peers_end_and_its_death_end_the_wait(dies, ends):
    """A server that waits for a dead engine says 200 for ten minutes."""
    producer, consumer = ends

    async def scene(waiter: shmring.AsyncWaiter) -> None:
        task = asyncio.create_task(waiter.wait_until_readable(consumer))
        await asyncio.sleep(0.01)
        if dies:
            producer._attachment.close()  # as the kernel does for a killed process
        else:
            producer.close()
        assert await task
        with pytest.raises(shmring.PeerLostError if dies else shmring.EndOfRing):
            consumer.drain(1)

    run(scene)


def test_several_rings_are_awaited_by_one_thread(ring_name):
    """Thirteen rings are no thirteen threads."""

    async def scene(waiter: shmring.AsyncWaiter) -> None:
        rings = [shmring.create(f"{ring_name}.{n}", 4096) for n in range(6)]
        producers, consumers = [r.producer() for r in rings], [r.consumer() for r in rings]
        before = threading.active_count()
        tasks = [asyncio.create_task(waiter.wait_until_readable(c)) for c in consumers]
        await asyncio.sleep(0.01)
        assert threading.active_count() == before
        for n in (3, 0, 5):
            producers[n].try_push(b"x")
            assert await tasks[n]
        assert [t.done() for t in tasks] == [True, False, False, True, False, True]
        for n in (1, 2, 4):
            producers[n].try_push(b"x")
        assert all(await asyncio.gather(*tasks))
        for thing in (*producers, *consumers, *rings):
            thing.close()

    run(scene)


def test_one_bad_ring_does_not_stop_the_others(ring_name, ends):
    """Closed, or damaged: its own waiter hears of it, the neighbours do not."""
    producer, consumer = ends

    async def scene(waiter: shmring.AsyncWaiter) -> None:
        with shmring.create(f"{ring_name}.bad", 4096) as ring:
            bad = ring.consumer()
            first = asyncio.create_task(waiter.wait_until_readable(bad))
            second = asyncio.create_task(waiter.wait_until_readable(consumer))
            await asyncio.sleep(0.01)
            bad.close()
            with pytest.raises(shmring.RingClosedError):
                await first
            assert not second.done()
            producer.try_push(b"x")
            assert await second

    run(scene)


def test_closing_the_waiter_cancels_its_waits(ends):
    """A shutdown must not hang on a quiet ring."""

    async def scene(waiter: shmring.AsyncWaiter) -> None:
        task = asyncio.create_task(waiter.wait_until_readable(ends[1]))
        await asyncio.sleep(0.01)
        waiter.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(RuntimeError, match="closed"):
            await waiter.wait_until_readable(ends[1])

    run(scene)


def test_a_consumer_is_awaited_once_at_a_time(ends):
    """Two that drain one ring would share its records by chance."""

    async def scene(waiter: shmring.AsyncWaiter) -> None:
        task = asyncio.create_task(waiter.wait_until_readable(ends[1]))
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="awaited already"):
            await waiter.wait_until_readable(ends[1])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not await waiter.wait_until_readable(ends[1], 0.01)

    run(scene)
