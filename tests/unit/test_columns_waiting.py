"""Frames pushed with a timeout: they wait for room, with the GIL given up, and lose nothing."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import shmring
from shmring import Column, Schema, Shape

WORDS = Schema("words", 3, [Column("words", np.uint64)])


@pytest.fixture
def ends(ring_name):
    with (
        shmring.create(ring_name, 4096) as ring,
        ring.producer() as producer,
        ring.consumer() as consumer,
    ):
        yield producer, consumer


def frame(number: int) -> np.ndarray:
    return np.full(100, number, np.uint64)


def fill(producer) -> int:
    count = 0
    while WORDS.push(producer, 100, frame(count)):
        count += 1
    assert count > 1
    return count


@pytest.mark.parametrize("timeout_s", [0, 0.0])
def test_without_time_a_full_ring_is_an_answer(timeout_s, ends):
    producer, _ = ends
    fill(producer)
    start = time.monotonic()
    assert WORDS.push(producer, 100, frame(0), timeout_s=timeout_s) is False
    assert time.monotonic() - start < 0.5


def test_a_timeout_passes_and_nothing_was_written(ends):
    producer, consumer = ends
    count = fill(producer)
    start = time.monotonic()
    assert WORDS.push(producer, 100, frame(99), timeout_s=0.05) is False
    assert time.monotonic() - start >= 0.05
    assert len(consumer.drain(1000)) == count


@pytest.mark.parametrize("timeout_s", [None, 30])
def test_a_push_that_waits_goes_on_when_there_is_room(timeout_s, ends):
    producer, consumer = ends
    sent, got = 500, []

    def read():
        while len(got) < sent:
            records = consumer.drain_wait(3, timeout_s=10)
            got.extend(int(WORDS.read(record)["words"][-1]) for record in records)
            consumer.release()

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(sent):
        assert WORDS.push(producer, 100, frame(number), timeout_s=timeout_s) is True
    reader.join(30)
    assert got == list(range(sent))


def test_the_columns_are_those_of_the_moment_of_writing(ends):
    """The wait lets other threads run: no column is half changed, no freed memory read."""
    producer, consumer = ends
    count = fill(producer)
    column = frame(7)
    entered = threading.Event()

    def change_and_make_room():
        entered.wait()
        time.sleep(0.05)
        column[:] = 8
        consumer.drain(1)
        consumer.release()

    helper = threading.Thread(target=change_and_make_room)
    helper.start()
    entered.set()
    assert WORDS.push(producer, 100, column, timeout_s=30)
    helper.join()
    last = consumer.drain(1000)[count - 1]
    assert WORDS.read(last)["words"].tolist() == [8] * 100


def test_a_column_made_shorter_meanwhile_is_an_error_and_no_frame(ends):
    producer, consumer = ends
    count = fill(producer)
    column = bytearray(800)
    view = memoryview(column).cast("Q")

    def shorten_and_make_room():
        time.sleep(0.05)
        view.release()
        del column[400:]
        consumer.drain(1)
        consumer.release()

    helper = threading.Thread(target=shorten_and_make_room)
    helper.start()
    with pytest.raises((shmring.ColumnError, ValueError)):
        WORDS.push(producer, 100, view, timeout_s=30)
    helper.join()
    assert len(consumer.drain(1000)) == count - 1


def test_unpublished_frames_that_leave_no_room_are_told_and_not_waited_for(ends):
    producer, _ = ends
    while WORDS.push(producer, 100, frame(1), publish=False):
        pass
    with pytest.raises(shmring.ClaimError, match="unpublished"):
        WORDS.push(producer, 100, frame(1), publish=False, timeout_s=None)


def test_a_consumer_that_is_finished_ends_the_wait(ends):
    producer, consumer = ends
    fill(producer)
    closer = threading.Timer(0.05, consumer.close)
    closer.start()
    with pytest.raises(shmring.EndOfRing):
        WORDS.push(producer, 100, frame(1), timeout_s=None)
    closer.join()


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), "1", True])
def test_a_bad_timeout_is_named(timeout_s, ends):
    producer, _ = ends
    with pytest.raises((TypeError, ValueError), match="timeout_s"):
        WORDS.push(producer, 100, frame(1), timeout_s=timeout_s)


def test_push_frame_waits_too(ends):
    producer, _ = ends
    fill(producer)
    assert producer.push_frame(WORDS, 100, (frame(1),), True, 0, 0.01) is False
    with pytest.raises(TypeError, match="timeout_s"):
        producer.push_frame(WORDS, 100, (frame(1),), True, 0, 0.01, 1)


def test_a_column_that_grows_past_what_can_come_ends_the_wait(ends):
    """The consumer frees what it can see; of what is unpublished nothing will ever be freed."""
    producer, consumer = ends
    assert WORDS.push(producer, 100, frame(0), publish=False)
    producer.publish()
    assert WORDS.push(producer, 100, frame(1), publish=False)
    free = producer.free_bytes()
    schema = Schema("bytes", 4, [Column("bytes", np.uint8, Shape.FREE)])
    column = bytearray(free)

    def grow():
        time.sleep(0.05)
        column.extend(bytes(4000 - len(column)))

    helper = threading.Thread(target=grow)
    helper.start()
    with pytest.raises(shmring.ClaimError, match="unpublished"):
        schema.push(producer, 0, column, publish=False, timeout_s=None)
    helper.join()
    assert len(consumer.drain(10)) == 1
