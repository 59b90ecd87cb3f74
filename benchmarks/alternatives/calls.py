"""One 64-byte record in and out: a C extension that keeps the GIL, and cffi that gives it up.

    python benchmarks/alternatives/calls.py

With and without another thread that runs Python all the time. The cffi calls are of the same C
library and only ask for the time.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import shmring
from shmring._native import lib

COUNT = 20_000


def measure(name: str, call) -> None:
    took = []
    for _ in range(COUNT):
        start = time.perf_counter_ns()
        call()
        took.append(time.perf_counter_ns() - start)
    took.sort()
    p50, p999 = took[COUNT // 2], took[COUNT * 999 // 1000]
    print(f"{name:44s} p50 {p50:7d} ns   p99.9 {p999:9d} ns   longest {took[-1] / 1e6:7.3f} ms")


def both(producer: shmring.Producer, consumer: shmring.Consumer, where: str) -> None:
    payload = bytes(64)

    def extension() -> None:
        producer.try_push(payload)
        consumer.try_pop()

    def by_cffi() -> None:
        lib.shr_now_ns()
        lib.shr_now_ns()

    measure(f"extension, push and pop, {where}", extension)
    measure(f"cffi, two looks at the clock, {where}", by_cffi)


def main() -> None:
    with (
        shmring.create("bench-calls", 1 << 16) as ring,
        ring.producer() as producer,
        ring.consumer() as consumer,
    ):
        both(producer, consumer, "alone")
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                sum(range(100))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            both(producer, consumer, "beside a busy thread")
        finally:
            stop.set()
            thread.join()


if __name__ == "__main__":
    main()
