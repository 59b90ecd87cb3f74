"""What waiting costs: processor time while nothing comes, and asyncio beside a blocking wait."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import time
from typing import Any

import shmring
from shmring import AsyncWaiter, WaitPolicy

CONTEXT = multiprocessing.get_context("spawn")


def _name() -> str:
    return f"bench-waits-{os.getpid()}"


def _idle_consumer(name: str, seconds: float, policy: WaitPolicy, out: Any) -> None:
    with shmring.Consumer.attach(name, policy=policy) as consumer:
        cpu = time.process_time()
        consumer.pop(timeout_s=seconds)
        out.send(time.process_time() - cpu)


def idle_cpu_s(seconds: float, policy: WaitPolicy) -> float:
    """Processor seconds of a consumer that waits for `seconds` for nothing."""
    ours, theirs = CONTEXT.Pipe()
    with shmring.create(_name(), 4096), shmring.Producer.attach(_name()):
        process = CONTEXT.Process(target=_idle_consumer, args=(_name(), seconds, policy, theirs))
        process.start()
        found: float = ours.recv()
        process.join()
    return found


def _echo(name: str, count: int) -> None:
    os.sched_setaffinity(0, {1 % (os.cpu_count() or 1)})
    with (
        shmring.Consumer.attach(name + ".there") as consumer,
        shmring.Producer.attach(name + ".back") as back,
    ):
        for _ in range(count):
            consumer.pop()
            time.sleep(0.001)  # long enough that the other side sleeps
            back.push(time.perf_counter_ns().to_bytes(8, "little"))


def wake_up_us(*, with_asyncio: bool, count: int) -> float:
    """Median from the push until a sleeping consumer's Python goes on."""
    name = _name()
    with (
        shmring.create(name + ".there", 4096) as there,
        shmring.create(name + ".back", 4096) as back,
        there.producer() as producer,
        back.consumer(policy=WaitPolicy.THRIFTY) as consumer,
    ):
        process = CONTEXT.Process(target=_echo, args=(name, count))
        process.start()
        took: list[int] = []

        def note(payload: bytes | None) -> None:
            took.append(time.perf_counter_ns() - int.from_bytes(payload or b"", "little"))

        async def in_asyncio() -> None:
            waiter = AsyncWaiter()
            for _ in range(count):
                producer.push(b"go")
                await waiter.wait_until_readable(consumer)
                note(consumer.try_pop())
            waiter.close()

        if with_asyncio:
            asyncio.run(in_asyncio())
        else:
            for _ in range(count):
                producer.push(b"go")
                note(consumer.pop())
        process.join()
    return statistics.median(took) / 1e3
