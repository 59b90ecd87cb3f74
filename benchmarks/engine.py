"""What a decode step costs the scheduler's thread: the running batch and push_batch, over four shards.

Back to back, the workers' ends are emptied between two steps, outside the clock. Paced, four processes
sleep until their share of a step comes, and the engine is busy for 4 ms between two steps.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

import shmring
from manager import FinishCode, Finished, messages
from manager.scheduler_port import SchedulerPort

if TYPE_CHECKING:
    from collections.abc import Callable

SHARDS = 4
PACE_S = 0.004
CONTEXT = multiprocessing.get_context("spawn")


class Engine:
    def __init__(self, rows: int, *, has_workers: bool = True) -> None:
        name = f"bench-engine-{os.getpid()}"
        self.rings = [shmring.create(f"{name}.{i}", 1 << 21) for i in range(SHARDS + 1)]
        self.workers = [ring.consumer() for ring in self.rings[1:]] if has_workers else []
        # a deployment without a manager: the port needs its facts and its rings
        facts: Any = SimpleNamespace(
            name=name, shards=SHARDS, vocab_size=32000, context_length=4096, eos_token_ids=(0,)
        )
        self.port = SchedulerPort(
            facts, self.rings[0].consumer(), [ring.producer(takeover=True) for ring in self.rings[1:]]
        )
        self.ids = np.arange(1, rows + 1, dtype=np.uint64)
        self.ones = np.ones(rows, np.uint32)
        self.tokens = np.arange(rows, dtype=np.int32)
        self.next_id = rows
        self.running = self.port.running_batch()
        self.running.extend(self.ids)

    def turn_over(self) -> None:
        """One request ends and another comes."""
        self.running.step(self.tokens, [Finished(7, FinishCode.STOP)])
        self.next_id += 1
        self.running.add(self.next_id)

    def empty(self) -> None:
        for worker in self.workers:
            worker.drain(64)
            worker.release()

    def close(self) -> None:
        self.port.close()
        for end in (*self.workers, *self.rings):
            end.close()


def time_us(engine: Engine, step: Callable[[], object], count: int) -> float:
    """Median of the steps."""
    took = []
    for _ in range(count):
        start = time.perf_counter_ns()
        step()
        took.append(time.perf_counter_ns() - start)
        engine.empty()
    return statistics.median(took) / 1e3


def measure_engine(rows: int, count: int = 2000) -> dict[str, float]:
    engine = Engine(rows)
    port, running, tokens, wide = engine.port, engine.running, engine.tokens, engine.tokens.astype(np.int64)
    plain, ids, ones = tokens.tolist(), engine.ids, engine.ones
    id_list, one_list = ids.tolist(), ones.tolist()
    ways: dict[str, Callable[[], object]] = {
        "running batch, int32 array": lambda: running.step(tokens),
        "running batch, int64 array": lambda: running.step(wide),
        "running batch, list": lambda: running.step(plain),
        "running batch, one ends and one comes": engine.turn_over,
        "push_batch, arrays": lambda: port.push_batch(ids, ones, tokens),
        "push_batch, lists": lambda: port.push_batch(id_list, one_list, plain),
    }
    try:
        return {name: time_us(engine, step, count) for name, step in ways.items()}
    finally:
        engine.close()


def _worker(name: str, count: int, *, is_first: bool, ready: Any) -> None:
    """Sleeps until a share of a step comes, and looks at it."""
    os.sched_setaffinity(0, {1 % (os.cpu_count() or 1)})
    if is_first:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    with shmring.Consumer.attach(name) as consumer:
        ready.send(True)
        for _ in range(count):
            (record,) = consumer.drain_wait(1)
            frame = messages.BATCH.read(record)
            if frame["token_ids"][-1] < 0:
                raise RuntimeError("wrong step")
            consumer.release()


def measure_paced(rows: int, count: int = 300, *, is_first: bool) -> dict[str, float]:
    engine = Engine(rows, has_workers=False)
    ours, theirs = CONTEXT.Pipe()
    workers = []
    affinity, policy = os.sched_getaffinity(0), os.sched_getscheduler(0)
    parameters = os.sched_getparam(0)
    try:
        for ring in engine.rings[1:]:
            worker = CONTEXT.Process(
                target=_worker, args=(ring.name, count), kwargs={"is_first": is_first, "ready": theirs}
            )
            worker.start()
            workers.append(worker)
        for _ in workers:
            ours.recv()
        os.sched_setaffinity(0, {0})
        if is_first:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
        wall, spent = [], []
        clock, cpu, step, tokens = (
            time.perf_counter_ns,
            time.thread_time_ns,
            engine.running.step,
            engine.tokens,
        )
        at = clock() + 10_000_000
        for _ in range(count):
            while clock() < at:
                pass
            before, start = cpu(), clock()
            step(tokens)
            end, after = clock(), cpu()
            wall.append(end - start)
            spent.append(after - before)
            at = start + int(PACE_S * 1e9)
        for worker in workers:
            worker.join(10)
    finally:
        os.sched_setscheduler(0, policy, parameters)
        os.sched_setaffinity(0, affinity)
        for worker in workers:
            worker.kill()
            worker.join()
        engine.close()
    return {
        "running batch, time in the call, median": statistics.median(wall) / 1e3,
        "running batch, processor time, mean": statistics.fmean(spent) / 1e3,
    }
