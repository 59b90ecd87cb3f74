"""Many records in one call, records looked at in place, and copies that let other threads run."""

from __future__ import annotations

import threading

import pytest

import shmring


@pytest.fixture
def ring(ring_name):
    with shmring.create(ring_name, 4096) as ring:
        yield ring


@pytest.fixture
def producer(ring):
    with ring.producer() as producer:
        yield producer


@pytest.fixture
def consumer(ring):
    with ring.consumer() as consumer:
        yield consumer


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("kind", [list, tuple])
def test_many_go_in_and_come_out_in_order(count, kind, producer, consumer):
    """A batch is its records, not some of them."""
    payloads = [bytes([i % 251]) * (i % 7) for i in range(count)]
    assert producer.push_many(kind(payloads), 5, 6) == count
    records = consumer.drain(200)
    assert [(bytes(r), r.type, r.flags) for r in records] == [(p, 5, 6) for p in payloads]
    consumer.rewind()
    assert consumer.pop_many(200) == payloads
    assert consumer.pop_many(1) == []
    assert producer.free_bytes() == 4096


def test_a_batch_is_one_publication(ring, producer):
    """That is what makes a record of it cheap."""
    producer.push_many([b"a", b"b", b"c"])
    seen = ring.statistics().producer
    assert (seen.records, seen.batches) == (3, 1)


def test_as_many_as_fit_go_in_and_the_caller_is_told_how_many(producer, consumer):
    """The rest is the caller's to keep: nothing is dropped."""
    payloads = [bytes([i]) * 57 for i in range(100)]
    first = producer.push_many(payloads)
    assert first == 4096 // 72
    assert producer.push_many(payloads[first:]) == 0
    assert consumer.pop_many(1000) == payloads[:first]
    assert producer.push_many(payloads[first:]) == 100 - first
    assert consumer.pop_many(1000) == payloads[first:]


def test_a_batch_may_hold_any_blocks_of_bytes(producer, consumer):
    """As a single record may."""
    assert producer.push_many([b"a", bytearray(b"bb"), memoryview(b"xccc")[1:]]) == 3
    assert consumer.pop_many(9) == [b"a", b"bb", b"ccc"]


@pytest.mark.parametrize("bad", [None, "text", memoryview(b"abcd")[::2], b"x" * 5000])
def test_a_batch_with_one_that_cannot_be_is_refused_whole(bad, producer, consumer):
    """Half a batch would have to be found and taken back by the caller."""
    producer.try_append(b"before")
    with pytest.raises((TypeError, ValueError, BufferError)):
        producer.push_many([b"a", bad, b"b"])
    producer.publish()
    assert consumer.pop_many(9) == [b"before"]


@pytest.mark.parametrize("argument", [None, 5, object()])
def test_a_batch_is_a_sequence(argument, producer):
    """An error at once, not a record for every byte of a number."""
    with pytest.raises(TypeError):
        producer.push_many(argument)


@pytest.mark.parametrize("count", [0, -1, True])
def test_pop_many_takes_a_count(count, consumer):
    """Nought records asked for is a mistake that would loop for ever."""
    with pytest.raises(ValueError, match="count of records"):
        consumer.pop_many(count)


def test_pop_many_is_refused_while_records_are_in_hand(producer, consumer):
    """It would release bytes that are being read."""
    producer.push_many([b"a", b"b"])
    consumer.drain(1)
    with pytest.raises(shmring.ClaimError, match="release"):
        consumer.pop_many(1)


def test_pop_many_takes_what_is_there_before_the_end(ring, consumer):
    """The end is said when nothing is left."""
    with ring.producer() as producer:
        producer.push_many([b"a", b"b"])
    assert consumer.pop_many(9) == [b"a", b"b"]
    with pytest.raises(shmring.EndOfRing):
        consumer.pop_many(9)


def test_a_record_can_be_looked_at_in_place(producer, consumer):
    """A first byte that says what to do does not cost a view."""
    producer.push(b"0123456789")
    (record,) = consumer.drain(1)
    assert (record[0], record[-1], record[-10]) == (ord("0"), ord("9"), ord("0"))
    assert bytes(record[2:4]) == b"23"
    for outside in (10, -11, 2**70):
        with pytest.raises(IndexError):
            record[outside]
    with pytest.raises(TypeError):
        record["0"]
    consumer.release()
    for key in (0, slice(1, 2)):
        with pytest.raises(ValueError, match="was released"):
            record[key]


def test_records_that_were_used_again_are_told_apart(producer, consumer):
    """A record kept from the last drain must not turn into one of this drain."""
    producer.push_many([b"a", b"b"])
    first = consumer.drain(2)
    kept = first[0]
    consumer.release()
    del first
    producer.push_many([b"c", b"d", b"e"])
    second = consumer.drain(3)
    assert [bytes(r) for r in second] == [b"c", b"d", b"e"]
    assert kept.is_released


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p, c: p.push(), "takes a payload"),
        (lambda p, c: p.push(b"", 1, 2, 3, 4), "at most 4"),
        (lambda p, c: p.push(b"", wrong=1), "unexpected argument 'wrong'"),
        (lambda p, c: p.push(b"", 1.0, timeout_s=2.0), "unexpected argument 'timeout_s'"),
        (lambda p, c: c.pop(0, 0), "at most 1"),
        (lambda p, c: c.pop(timeout=0), "unexpected argument 'timeout'"),
        (lambda p, c: c.drain_wait(), "takes a count"),
        (lambda p, c: c.drain_wait(timeout_s=0), "takes a count"),
        (lambda p, c: c.wait_until_readable(0, 0), "at most 1"),
    ],
)
def test_a_call_with_wrong_arguments_is_a_type_error(call, text, producer, consumer):
    """As in every function of Python."""
    with pytest.raises(TypeError, match=text):
        call(producer, consumer)


def test_arguments_may_be_named(producer, consumer):
    """Whoever reads the call sees what the number is."""
    assert producer.push(payload=b"a", timeout_s=0, flags=2, type=1)
    (record,) = consumer.drain_wait(timeout_s=0, max_records=1)
    assert (record.type, record.flags) == (1, 2)
    consumer.release()
    assert consumer.pop(timeout_s=0) is None
    assert consumer.wait_until_readable(timeout_s=0) is False


BIG = 8 << 20


def test_nobody_else_uses_an_end_while_it_copies(ring_name):
    """A long copy lets other threads run; one that closes or pops meanwhile would free its bytes."""
    with (
        shmring.create(ring_name, 2 * BIG) as ring,
        ring.producer() as producer,
        ring.consumer() as consumer,
    ):
        payload = bytes(range(256)) * (BIG // 256)
        wrong: list[BaseException] = []
        done = threading.Event()

        def meddle():
            while not done.is_set():
                for call in (producer.discard, consumer.rewind):
                    try:
                        call()
                    except shmring.ClaimError as error:
                        assert "another thread is copying" in str(error)  # noqa: PT017
                    except BaseException as error:  # noqa: BLE001 -- told below
                        wrong.append(error)

        thread = threading.Thread(target=meddle)
        thread.start()
        try:
            for _ in range(20):
                assert producer.push(payload)
                assert consumer.pop() == payload
        finally:
            done.set()
            thread.join()
        assert wrong == []
