"""Every hot call many times in one process, to be run under callgrind. Not a test itself."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

import shmring
from manager import messages
from manager.scheduler_port import SchedulerPort

CALLS = int(sys.argv[1])
ROWS = 256
SHARDS = 4
PAYLOAD = b"x" * 64


def one_record_a_call(producer: shmring.Producer, consumer: shmring.Consumer) -> None:
    for _ in range(CALLS):
        producer.try_push(PAYLOAD)
        consumer.try_pop()
        producer.push(PAYLOAD)
        consumer.pop()
        producer.try_append(PAYLOAD)
        producer.publish()
        consumer.drain(1)
        consumer.release()


def many_records_a_call(producer: shmring.Producer, consumer: shmring.Consumer) -> None:
    batch = [PAYLOAD] * 64
    for _ in range(CALLS):
        producer.push_many(batch)
        consumer.pop_many(64)


def frames(producer: shmring.Producer, consumer: shmring.Consumer) -> None:
    columns = (
        np.arange(ROWS, dtype=np.uint64),
        np.ones(ROWS, np.uint32),
        np.arange(ROWS, dtype=np.int32),
        np.zeros(ROWS, np.uint8),
        np.zeros(ROWS, np.int64),
        None,
        None,
    )
    for _ in range(CALLS):
        messages.BATCH.push(producer, ROWS, *columns)
        (record,) = consumer.drain(1)
        messages.BATCH.read(record).columns()
        consumer.release()


def steps(port: SchedulerPort, consumers: list[shmring.Consumer]) -> None:
    ids = np.arange(1, ROWS + 1, dtype=np.uint64)
    counts, tokens = np.ones(ROWS, np.uint32), np.arange(ROWS, dtype=np.int32)
    running = port.running_batch()
    running.extend(ids)
    for _ in range(CALLS):
        port.push_batch(ids, counts, tokens)
        running.step(tokens)
        for consumer in consumers:
            consumer.drain(2)
            consumer.release()


def main() -> None:
    name = f"instructions-{os.getpid()}"
    rings = [shmring.create(f"{name}.{i}", 1 << 20) for i in range(SHARDS + 1)]
    consumers = [ring.consumer() for ring in rings]
    producers = [ring.producer(takeover=True) for ring in rings]
    one_record_a_call(producers[0], consumers[0])
    many_records_a_call(producers[0], consumers[0])
    frames(producers[0], consumers[0])
    # a deployment without a manager: the port needs its facts and its rings
    facts: Any = SimpleNamespace(
        name=name, shards=SHARDS, vocab_size=1000, context_length=100, eos_token_ids=(0,)
    )
    steps(SchedulerPort(facts, consumers[0], producers[1:]), consumers[1:])
    for end in (*producers, *consumers, *rings):
        end.close()


if __name__ == "__main__":
    main()
