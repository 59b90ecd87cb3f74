"""The ends of a ring in asyncio: `async for`, pop_async, drain_async, push_async."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading

import pytest

import shmring
from shmring import testing

WATCHDOG_S = 100


@pytest.fixture
def ring(ring_name):
    with shmring.create(ring_name, 1 << 16) as ring:
        yield ring


@pytest.fixture
def ends(ring):
    with ring.producer() as producer, ring.consumer() as consumer:
        yield producer, consumer


def run(scene) -> None:
    async def watched() -> None:
        await asyncio.wait_for(scene, WATCHDOG_S)

    asyncio.run(watched())


def waiting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shmring-waiter"]


def record(number: int) -> bytes:
    return number.to_bytes(4, "little") * (number % 7 + 1)


def test_a_hundred_thousand_records_in_bursts_while_the_loop_goes_on(ends):
    """One missed wake is a stream that stands still; a loop that stands still is every stream."""
    producer, consumer = ends
    count, ticks = 100_000, 0
    dice = random.Random(1)
    bursts = [dice.randint(1, 400) for _ in range(count)]

    def send() -> None:
        sent = 0
        with producer:
            for burst in bursts:
                for number in range(sent, min(sent + burst, count)):
                    producer.try_append(record(number)) or producer.push(record(number))
                producer.publish()
                sent += burst

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    async def scene() -> None:
        ticker = asyncio.create_task(tick())
        number = 0
        async for payload in consumer:
            assert payload == record(number)
            number += 1
            if number % 5000 == 0:
                await asyncio.sleep(0)  # as a handler would that writes to its client
        assert number == count
        ticker.cancel()

    thread = threading.Thread(target=send)
    thread.start()
    run(scene())
    thread.join()
    assert ticks > 0


def test_a_full_ring_does_not_keep_the_loop_to_itself(ends):
    """A producer that is always ahead would stop every other task of the server."""
    producer, consumer = ends
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def scene() -> None:
        sent = testing.fill(producer, b"")
        producer.close()
        task = asyncio.create_task(other())
        assert sum([1 async for _ in consumer]) == sent
        assert turns >= sent // 100
        task.cancel()

    run(scene())


def test_a_thousand_cancelled_pops_lose_nothing(ends):
    """A client that goes away while we wait for its token must not take somebody else's along."""
    producer, consumer = ends
    count, cancels = 3000, 1000
    got: list[bytes] = []

    def send() -> None:
        for number in range(count):
            producer.push(record(number))

    async def pop() -> None:
        payload = await consumer.pop_async()
        assert payload is not None
        got.append(payload)

    async def scene() -> None:
        dice = random.Random(2)
        for _ in range(cancels):
            task = asyncio.create_task(pop())
            for _ in range(dice.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        while len(got) < count:
            await pop()

    thread = threading.Thread(target=send)
    thread.start()
    run(scene())
    thread.join()
    assert got == [record(number) for number in range(count)]


def test_drains_in_place_while_the_loop_goes_on(ends):
    """A scheduler in asyncio wants its whole backlog at once, and no copies."""
    producer, consumer = ends

    async def scene() -> None:
        waiting = asyncio.create_task(consumer.drain_async(10))
        await asyncio.sleep(0.01)
        for number in range(3):
            producer.try_append(record(number))
        producer.publish()
        assert [bytes(r.payload) for r in await waiting] == [record(n) for n in range(3)]
        consumer.release()
        assert await consumer.drain_async(10, timeout_s=0.01) == []
        assert await consumer.drain_async(10, timeout_s=0) == []

    run(scene())


def test_a_push_waits_for_room_while_the_loop_goes_on(ends):
    """A full ring must slow down one task and not the server."""
    producer, consumer = ends

    async def scene() -> None:
        filled = testing.fill(producer)
        assert not await producer.push_async(b"l" * 100, timeout_s=0)
        assert not await producer.push_async(b"l" * 100, timeout_s=0.01)
        waiting = asyncio.create_task(producer.push_async(b"l" * 500, type=3, flags=4))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        for _ in range(filled - 1):
            assert consumer.try_pop() is not None
        assert await waiting
        assert consumer.try_pop() is not None
        (last,) = consumer.drain(5)
        assert (bytes(last.payload), last.type, last.flags) == (b"l" * 500, 3, 4)

    run(scene())


def test_a_cancelled_push_has_pushed_nothing(ends):
    """Its caller will try again, and a request must not run twice."""
    producer, consumer = ends

    async def scene() -> None:
        filled = testing.fill(producer)
        for _ in range(50):
            waiting = asyncio.create_task(producer.push_async(b"never" * 20))
            await asyncio.sleep(0.001)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        for _ in range(filled):
            assert consumer.try_pop() == b"x" * 57
        assert consumer.try_pop() is None

    run(scene())


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), True, "1"])
def test_a_bad_timeout_is_refused_without_waiting(ends, timeout_s):
    """As in every other wait: a mistake must not become a wait for ever."""
    producer, consumer = ends

    async def scene() -> None:
        for call in (
            consumer.pop_async(timeout_s),
            consumer.drain_async(1, timeout_s),
            producer.push_async(b"", timeout_s),
        ):
            with pytest.raises((ValueError, TypeError)):
                await call
        assert consumer.try_pop() is None, "nothing was pushed on the way"

    run(scene())


def test_ends_and_deaths_are_told_in_asyncio_too(ring):
    """A task that awaits the dead holds its client for ever."""

    async def scene() -> None:
        with ring.consumer() as consumer:
            producer = ring.producer()
            waiting = asyncio.create_task(consumer.pop_async())
            await asyncio.sleep(0.01)
            producer._attachment.close()  # what the kernel does to a killed process
            with pytest.raises(shmring.PeerLostError):
                await waiting
            with ring.producer() as successor:
                successor.push(b"again")
                assert await consumer.pop_async() == b"again"
            with pytest.raises(shmring.EndOfRing):
                await consumer.pop_async()
            assert [payload async for payload in consumer] == []

    run(scene())


def test_a_producer_that_is_awaited_is_told_of_the_consumers_end(ring):
    """Room that will never come is no reason to wait."""

    async def scene() -> None:
        with ring.producer() as producer:
            consumer = ring.consumer()
            testing.fill(producer)
            waiting = asyncio.create_task(producer.push_async(b"x" * 500))
            await asyncio.sleep(0.01)
            consumer.close()
            with pytest.raises(shmring.EndOfRing):
                await waiting

    run(scene())


def test_what_can_never_fit_is_refused_at_once(ends):
    """Waiting for room for it would be waiting for ever."""
    producer, _ = ends

    async def scene() -> None:
        with pytest.raises(shmring.RecordTooLargeError):
            await producer.push_async(b"x" * (1 << 16))
        producer.try_append(b"y" * 60_000)
        with pytest.raises(shmring.ClaimError):
            await producer.push_async(b"x" * 60_000)
        producer.discard()

    run(scene())


def test_one_thread_waits_for_all_rings_of_a_loop_and_ends_with_it(ring_name):
    """A server with a thousand rings must not have a thousand threads, nor keep one for every loop."""
    before = len(waiting_threads())

    async def scene(rings: list[shmring.Ring]) -> None:
        with contextlib.ExitStack() as stack:
            ends = [(stack.enter_context(r.producer()), stack.enter_context(r.consumer())) for r in rings]
            waiting = [asyncio.create_task(consumer.pop_async()) for _, consumer in ends]
            await asyncio.sleep(0.02)
            assert len(waiting_threads()) == before + 1
            for number, (producer, _) in enumerate(ends):
                producer.push(record(number))
            assert await asyncio.gather(*waiting) == [record(n) for n in range(len(rings))]

    with contextlib.ExitStack() as stack:
        rings = [stack.enter_context(shmring.create(f"{ring_name}.{i}", 4096)) for i in range(20)]
        for _ in range(3):
            run(scene(rings))
            assert len(waiting_threads()) == before


def test_a_loop_that_is_closed_without_a_word_leaves_no_thread(ring):
    """Not everybody uses asyncio.run."""
    before = set(waiting_threads())
    with ring.consumer() as consumer:
        loop = asyncio.new_event_loop()
        assert loop.run_until_complete(consumer.pop_async(timeout_s=0.01)) is None
        (thread,) = set(waiting_threads()) - before
        loop.close()
        del loop
        gc.collect()
        thread.join(WATCHDOG_S)
        assert not thread.is_alive()


def test_an_end_is_awaited_by_one_task_at_a_time(ends):
    """Two tasks on one consumer would share its records by chance."""
    _, consumer = ends

    async def scene() -> None:
        first = asyncio.create_task(consumer.pop_async())
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="awaited already"):
            await consumer.pop_async()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await consumer.pop_async(timeout_s=0.01) is None

    run(scene())


def test_closing_an_end_tells_the_task_that_awaits_it(ends):
    """A server that shuts down closes its rings while handlers wait."""
    _, consumer = ends

    async def scene() -> None:
        waiting = asyncio.create_task(consumer.pop_async())
        await asyncio.sleep(0.01)
        consumer.close()
        with pytest.raises(shmring.RingClosedError):
            await waiting

    run(scene())


def test_wait_any_says_which_ends_are_ready(ring_name):
    """With a hundred rings nobody wants to try each."""
    with contextlib.ExitStack() as stack:
        rings = [stack.enter_context(shmring.create(f"{ring_name}.{i}", 4096)) for i in range(3)]
        producers = [stack.enter_context(r.producer()) for r in rings]
        consumers = [stack.enter_context(r.consumer()) for r in rings[:2]]
        full = testing.fill(producers[2])
        assert full
        bell = shmring.Bell()
        needs = [(producers[2], 57)]
        assert shmring.wait_any(consumers, 0, producers=needs, bell=bell) == []
        producers[1].push(b"x")
        assert shmring.wait_any(consumers, 60, producers=needs, bell=bell) == [consumers[1]]
        producers[0].close()
        consumer = stack.enter_context(rings[2].consumer())
        consumer.try_pop()
        bell.ring()
        ready = shmring.wait_any(consumers, 60, producers=needs, bell=bell)
        assert ready == [*consumers, producers[2], bell]
        assert bell.answer()
        assert shmring.wait_any([consumers[1]] * 3, 60, bell=bell) == [consumers[1]]
