"""One decode step of 256 requests, to another process, three ways. Takes about half a minute.

    python examples/ring_against_pipe.py

The step is five numpy columns. Both ends look at it: the consumer reads a value of each step. Given
are microseconds a step until all have arrived, and of the producer's own CPU time.
"""

import multiprocessing as mp
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

import shmring
from shmring import Column, Shape

ROWS = 256
STEPS = 20_000
WARM_UP_S = 1.0
CONTEXT = mp.get_context("spawn")
NAME = "ring-against-pipe"
STEP = shmring.Schema(
    "step",
    1,
    [
        Column("request_ids", np.uint64),
        Column("token_counts", np.uint32),
        Column("token_ids", np.int32, Shape.RAGGED, "token_counts"),
        Column("finish_codes", np.uint8),
        Column("finish_values", np.int64),
    ],
)
COLUMNS = (
    np.arange(ROWS, dtype=np.uint64),
    np.ones(ROWS, np.uint32),
    np.arange(ROWS, dtype=np.int32),
    np.zeros(ROWS, np.uint8),
    np.zeros(ROWS, np.int64),
)


def take_from_ring(steps: int) -> None:
    with shmring.Consumer.attach(NAME) as consumer:
        for _ in range(steps):
            (record,) = consumer.drain_wait(1)
            assert STEP.read(record)["token_ids"][-1] == ROWS - 1
            consumer.release()  # at once: what was written last is still in the cache


def take_with(receive: Callable[[], Any], steps: int) -> None:
    for _ in range(steps):
        assert receive()[2][-1] == ROWS - 1


def take_from_pipe(pipe: Connection, steps: int) -> None:
    take_with(pipe.recv, steps)


def take_from_queue(queue: "mp.Queue[Any]", steps: int) -> None:
    take_with(queue.get, steps)


def measure(send: Callable[[], object], consumer: BaseProcess) -> str:
    """Send all steps, wait until all were taken."""
    started_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        send()
    cpu_s = time.process_time() - cpu_s
    consumer.join()
    elapsed_s = time.perf_counter() - started_s
    return f"{elapsed_s / STEPS * 1e6:6.1f} us a step, {cpu_s / STEPS * 1e6:6.1f} us CPU of the producer"


def ring() -> str:
    with shmring.create(NAME, 1 << 22) as made, made.producer() as producer:
        consumer = CONTEXT.Process(target=take_from_ring, args=(STEPS,))
        consumer.start()
        while producer.peer_state() is not shmring.PeerState.ATTACHED:
            time.sleep(0.01)

        def send() -> None:
            STEP.push(producer, ROWS, *COLUMNS, timeout_s=None)

        return measure(send, consumer)


def pipe() -> str:
    ours, theirs = CONTEXT.Pipe()
    consumer = CONTEXT.Process(target=take_from_pipe, args=(theirs, STEPS + 1))
    consumer.start()
    ours.send(COLUMNS)  # one more, so that both sides are warm
    time.sleep(WARM_UP_S)
    return measure(lambda: ours.send(COLUMNS), consumer)


def queue() -> str:
    made = CONTEXT.Queue(64)
    consumer = CONTEXT.Process(target=take_from_queue, args=(made, STEPS + 1))
    consumer.start()
    made.put(COLUMNS)
    time.sleep(WARM_UP_S)
    return measure(lambda: made.put(COLUMNS), consumer)


def main() -> None:
    print(f"Python {sys.version.split()[0]}, numpy {np.__version__}, {ROWS} rows, {STEPS} steps")
    for turn in range(3):
        for way in (ring, pipe, queue):
            print(f"{turn}  {way.__name__:6} {way()}", flush=True)


if __name__ == "__main__":
    main()
