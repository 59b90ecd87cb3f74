"""One thread on each side of a ring, in one process."""

from __future__ import annotations

import threading

import pytest

import shmring

COUNT = 1_000_000


def record(number: int) -> bytes:
    return number.to_bytes(8, "little") * (number % 4 + 1)


@pytest.mark.parametrize("policy", [shmring.WaitPolicy.BALANCED, shmring.WaitPolicy.THRIFTY])
def test_a_million_records_between_two_threads_arrive_once_and_in_order(ring_name, policy):
    """A ring is the plainest queue between two threads too, with or without the interpreter's lock."""
    with shmring.create(ring_name, 1 << 16) as ring, ring.consumer(policy=policy) as consumer:
        producer = ring.producer(policy=policy)

        def send() -> None:
            with producer:
                for number in range(COUNT):
                    producer.push(record(number))

        thread = threading.Thread(target=send)
        thread.start()
        number = 0
        for payload in consumer:
            assert payload == record(number)
            number += 1
        thread.join()
        assert number == COUNT
