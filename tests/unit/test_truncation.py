"""A segment that is cut short under those who have it mapped: an error, and not the end of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shmring
from shmring import testing

ROOT = Path(__file__).parents[2]


def _cut(name: str, length: int = 0) -> None:
    os.truncate(f"/dev/shm/shmring.{name}", length)


def _pop_all(consumer):
    while True:
        consumer.try_pop()


def _push_on(producer):
    testing.fill(producer)
    producer.push(b"x" * 100, timeout_s=5)


@pytest.fixture
def ring(ring_name):
    with shmring.create(ring_name, 4096) as ring:
        yield ring


@pytest.mark.parametrize("length", [0, 100, 4096, 5000])
def test_a_consumer_of_a_truncated_ring_is_told(ring, length):
    """Whoever empties /dev/shm by hand must not take every attached process down with SIGBUS."""
    with ring.producer() as producer, ring.consumer() as consumer:
        while producer.try_push(b"record" * 50):
            pass
        assert consumer.try_pop() == b"record" * 50
        _cut(ring.name, length)
        with pytest.raises(shmring.CorruptRingError):
            _pop_all(consumer)


@pytest.mark.parametrize("length", [0, 4096])
def test_a_producer_of_a_truncated_ring_is_told_at_the_latest_when_it_is_full(ring, length):
    """What it pushes until then is lost, but it does not push into nothing for ever."""
    with ring.producer() as producer, ring.consumer():
        producer.push(b"before")
        _cut(ring.name, length)
        with pytest.raises(shmring.CorruptRingError) as told:
            _push_on(producer)
        assert "position=" in str(told.value)


def test_a_wait_for_a_truncated_ring_ends_with_an_error(ring):
    """Waiting for ever for a record that nobody can send would look like an idle system."""
    with ring.producer(), ring.consumer() as consumer:
        _cut(ring.name)
        with pytest.raises(shmring.CorruptRingError):
            consumer.pop(timeout_s=60)


def test_views_of_a_truncated_ring_read_zeros(ring):
    """numpy would be killed in the middle of a sum."""
    with ring.producer() as producer, ring.consumer() as consumer:
        producer.push(np.arange(100, dtype=np.uint8))
        view = np.frombuffer(consumer.drain(1)[0].payload, np.uint8)
        assert int(view.sum()) == 4950
        _cut(ring.name)
        assert int(view.sum()) == 0


def test_looking_at_a_truncated_ring_from_outside_is_refused(ring):
    """The operator's tools must survive what they are to diagnose."""
    _cut(ring.name, 5000)
    with pytest.raises(shmring.LayoutMismatchError):
        shmring.read_statistics(ring.name)
    assert ring.statistics().used_bytes == 0
    (info,) = [info for info in shmring.list_rings() if info.name == ring.name]
    assert info.kind == "damaged"


PROGRAM = """
import mmap, os, signal, sys
import shmring
how = sys.argv[1]
with shmring.create(sys.argv[2], 4096) as ring:
    ring.close()
    if how == "sent":
        os.kill(os.getpid(), signal.SIGBUS)
    fd = os.memfd_create("other")
    os.ftruncate(fd, 4096)
    other = mmap.mmap(fd, 4096)
    os.ftruncate(fd, 0)
    other[0]
"""


@pytest.mark.parametrize("how", ["touched", "sent"])
def test_a_bus_error_that_is_not_ours_stays_what_it_was(ring_name, how):
    """A library must not hide the faults of the program that uses it."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how, ring_name],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGBUS
