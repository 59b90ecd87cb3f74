"""A segment that is cut short under its mappings, whichever of its pages the ends touch or do not."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import shmring

pytestmark = pytest.mark.timeout(60)

CAPACITY = 1 << 16
PAYLOAD = bytes(1000)
SIZES = [0, 100, 4096, 8192, 4096 + CAPACITY - 1]


def cut(name: str, size: int) -> None:
    os.truncate(Path("/dev/shm") / f"shmring.{name}", size)


@pytest.mark.parametrize("size", SIZES)
def test_a_consumer_is_told_and_does_not_wait_for_what_cannot_come(ring_name: str, size: int):
    """It would sleep beside a ring that is gone, and look healthy."""
    with (
        shmring.create(ring_name, CAPACITY) as ring,
        ring.producer() as producer,
        ring.consumer() as consumer,
    ):
        for _ in range(10):
            producer.push(PAYLOAD)
        cut(ring_name, size)
        taken = 0
        with pytest.raises(shmring.CorruptRingError):  # noqa: PT012 - how many come before it is not said
            while taken <= 10:
                record = consumer.pop(20)
                assert record is not None, "waited in vain"
                taken += 1
        assert not ring.is_whole


@pytest.mark.parametrize("size", SIZES)
def test_a_producer_is_told_when_the_ring_is_full_at_the_latest(ring_name: str, size: int):
    """It would wait for ever for a consumer that cannot see what it writes."""
    with shmring.create(ring_name, CAPACITY) as ring, ring.producer() as producer, ring.consumer():
        cut(ring_name, size)
        pushed = 0
        with pytest.raises(shmring.CorruptRingError):  # noqa: PT012 - as above
            while pushed <= CAPACITY // len(PAYLOAD):
                assert producer.push(PAYLOAD, 20), "waited in vain"
                pushed += 1


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2000, reason="each segment takes a file descriptor"
)
def test_a_process_with_more_than_a_thousand_segments_is_told_of_each(ring_name: str):
    """The last of them is as well guarded as the first; a manager of 64 workers has some hundreds."""
    owner = f"""
import os, resource, shmring
resource.setrlimit(resource.RLIMIT_NOFILE, (2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
rings = [shmring.create(f"{ring_name}-{{i}}", 4096) for i in range(600)]
producers = [ring.producer() for ring in rings]
for producer in (producers[0], producers[-1]):
    os.truncate("/dev/shm/shmring." + producer.name, 0)
    try:
        for _ in range(100):
            producer.push(bytes(100), 5)
    except shmring.CorruptRingError:
        print("told", flush=True)
for end in (*producers, *rings):
    end.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", owner], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "told\ntold\n"), done.stderr
